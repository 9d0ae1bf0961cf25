"""Rename the parameters of official IDC-PCL checkpoints.

The official file is a state dict. The parameters named `pooler` depend on the stage: in a fine-tuning checkpoint they are the
distractor head; in a pre-training checkpoint they are the image-text matching head, which is dropped, because no released
configuration uses it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from diffcap.interop.importer import Importer
from diffcap.interop.sizes import Sizes, State, count_layers, resnet_features
from diffcap.utils.errors import DiffcapError

_TRUNK = {
    "word_embedding.weight": "word_embedding.weight",
    "img_project.0.weight": "image_projection.weight",
    "img_project.0.bias": "image_projection.bias",
    "position_encoding.type_pe.weight": "type_embedding.weight",
    "position_encoding.layernorm.a_2": "embedding_norm.weight",
    "position_encoding.layernorm.b_2": "embedding_norm.bias",
    "output_layer.weight": "output_layer.weight",
    "output_layer.bias": "output_layer.bias",
}
_STACKS = {"single_img_encoder": "single_encoder", "double_img_encoder": "pair_encoder", "encoder": "cross_encoder"}
_BLOCK = {
    "attn.out": "attention.out",
    "feed_forward.w_1": "ffn.0",
    "feed_forward.w_2": "ffn.3",
    "sublayer.0.norm": "attention_norm",
    "sublayer.1.norm": "ffn_norm",
}
_PROJECTIONS = ("attn.q_linear", "attn.k_linear", "attn.v_linear")
_SUFFIX = {"a_2": "weight", "b_2": "bias", "weight": "weight", "bias": "bias"}
_REGRESSION = {
    "feat_regress.bias": "regress.bias",
    "feat_regress.net.0.weight": "regress.inner.0.weight",
    "feat_regress.net.0.bias": "regress.inner.0.bias",
    "feat_regress.net.2.a_2": "regress.inner.2.weight",
    "feat_regress.net.2.b_2": "regress.inner.2.bias",
}
_DISTRACTOR = {"pooler.0.weight": "distractor_head.weight", "pooler.0.bias": "distractor_head.bias"}
_FINE_GRAINED = {
    f"{theirs}.0.{suffix}": f"{ours}.{suffix}"
    for theirs, ours in (("classifier", "classifier"), ("aligner", "matcher"))
    for suffix in ("weight", "bias")
}
# `feat_regress.weight` is tied to `img_project.0.weight`; `pooler` is the unused matching head.
_DROPPED_PREFIXES = {"pretrain": ("feat_regress.weight", "pooler."), "finetune": ()}


def _diffcap_name(official: str, stage: str) -> str | None:
    """diffcap's name of an official parameter; None for the query, key and value projections, which are concatenated."""
    heads = {**_REGRESSION, **_FINE_GRAINED} if stage == "pretrain" else _DISTRACTOR
    if official in heads:
        return heads[official]
    if official in _TRUNK:
        return f"trunk.{_TRUNK[official]}"
    stack, _, rest = official.partition(".")
    parts = rest.split(".")
    module, suffix = ".".join(parts[2:-1]), parts[-1]
    if stack in _STACKS and suffix in _SUFFIX:
        if parts[:-1] == ["norm"]:
            return f"trunk.{_STACKS[stack]}.norm.{_SUFFIX[suffix]}"
        if parts[0] == "layers" and module in _BLOCK:
            return f"trunk.{_STACKS[stack]}.layers.{parts[1]}.{_BLOCK[module]}.{_SUFFIX[suffix]}"
        if parts[0] == "layers" and module in _PROJECTIONS and suffix in ("weight", "bias"):
            return None
    raise DiffcapError(
        f"official IDC-PCL checkpoint: parameter {official!r} is unknown; check that the checkpoint belongs to this method."
    )


def from_official(state: dict[str, Tensor], stage: str, fine_grained: bool = False) -> dict[str, Tensor]:
    """Convert an official state dict to one of `PCLPretraining` (stage "pretrain") or `PCL` (stage "finetune").

    `fine_grained`: include the two heads of the tasks on NABirds, for a `PCLPretraining` with `classes` > 0.
    """
    dropped = (*_DROPPED_PREFIXES[stage], *(() if fine_grained or stage == "finetune" else _FINE_GRAINED))
    kept = [official for official in state if not official.startswith(dropped)]
    names = {official: _diffcap_name(official, stage) for official in kept}
    # All names of a complete checkpoint, but for the distractor head, which only the model of CLEVR-Change has.
    required = [*_TRUNK, *(_REGRESSION if stage == "pretrain" else ())]
    for stack in _STACKS:
        required += [f"{stack}.norm.{suffix}" for suffix in ("a_2", "b_2")]
        numbers = {name.split(".")[2] for name in state if name.startswith(f"{stack}.layers.")} or {"0"}
        for number in sorted(numbers):
            for module in (*_BLOCK, *_PROJECTIONS):
                suffixes = ("a_2", "b_2") if module.endswith("norm") else ("weight", "bias")
                required += [f"{stack}.layers.{number}.{module}.{suffix}" for suffix in suffixes]
    required += _FINE_GRAINED if fine_grained else ()
    missing = [official for official in required if official not in state]
    if missing:
        raise DiffcapError(
            f"official IDC-PCL checkpoint: {missing[0]!r} is missing ({len(missing)} missing parameters for the {stage} stage); "
            "download the file again."
        )
    ours = {name: state[official] for official, name in names.items() if name is not None}
    for official, name in names.items():
        if name is None:
            block, suffix = official.split(".attn.")[0], official.rsplit(".", 1)[1]
            stack, _, layer = block.partition(".")
            parts = [state[f"{block}.{projection}.{suffix}"] for projection in _PROJECTIONS]
            ours[f"trunk.{_STACKS[stack]}.{layer}.attention.qkv.{suffix}"] = torch.cat(parts)
    return ours


_NUMBERS_OF_LAYERS = {
    "single_layers": "single_img_encoder",
    "pair_layers": "double_img_encoder",
    "cross_layers": "encoder",
}


def official_sizes(state: State, options: Mapping[str, Any], tables: State) -> Sizes:
    """Hyperparameters of IDC-PCL, for both stages."""
    front = state["img_project.0.weight"]
    grid = options["grid"] or (7, 7)
    max_length = options["max_length"] or 40
    layers = {ours: count_layers(state, rf"{theirs}\.layers\.(\d+)\.") for ours, theirs in _NUMBERS_OF_LAYERS.items()}
    model = {
        "vocabulary_size": len(state["word_embedding.weight"]),
        "feature_channels": front.shape[1],
        "width": len(front),
        "heads": options["heads"],
        "ffn": len(state["encoder.layers.0.feed_forward.w_1.weight"]),
        **layers,
        "distractor_judging": "pooler.0.weight" in state,
    }
    return Sizes(model, max_length, resnet_features("layer4", (front.shape[1], *grid)), ("distractor_judging",))


IMPORTER = Importer(
    official_sizes,
    from_official,
    vocabulary_layout="pcl",
    vocabulary_file="dict.json",
    is_pretraining=lambda state: any(name.startswith("feat_regress.") for name in state),
)
