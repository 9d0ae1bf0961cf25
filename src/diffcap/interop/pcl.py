"""Official IDC-PCL checkpoints: their parameter names onto ours.

The official file is a plain state dict. `pooler` is the image-text matching head in a pre-training checkpoint (no
released recipe uses it, so it is left out) and the distractor head in a fine-tuning one.
"""

import torch
from torch import Tensor

from diffcap.errors import DiffcapError

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
_NORM = {"a_2": "weight", "b_2": "bias", "weight": "weight", "bias": "bias"}
_REGRESSION = {
    "feat_regress.bias": "regress.bias",
    "feat_regress.net.0.weight": "regress.inner.0.weight",
    "feat_regress.net.0.bias": "regress.inner.0.bias",
    "feat_regress.net.2.a_2": "regress.inner.2.weight",
    "feat_regress.net.2.b_2": "regress.inner.2.bias",
}
_DISTRACTOR = {"pooler.0.weight": "distractor_head.weight", "pooler.0.bias": "distractor_head.bias"}
# The tied copy of the image projection, the unused matching head, and NABirds' heads, which come with that dataset.
_LEFT_OUT = {
    "pretrain": ("feat_regress.weight", "pooler.", "classifier.", "aligner."),
    "finetune": (),
}


def _name(official: str, stage: str) -> str | None:
    """Our name of an official parameter; None when it has no single counterpart (a query, key or value projection)."""
    heads = _REGRESSION if stage == "pretrain" else _DISTRACTOR
    if official in heads:
        return heads[official]
    if official in _TRUNK:
        return f"trunk.{_TRUNK[official]}"
    stack, _, rest = official.partition(".")
    if stack in _STACKS:
        parts = rest.split(".")
        if parts[0] == "norm":
            return f"trunk.{_STACKS[stack]}.norm.{_NORM[parts[1]]}"
        inner, last = ".".join(parts[2:-1]), parts[-1]
        if parts[0] == "layers" and inner in _BLOCK:
            return f"trunk.{_STACKS[stack]}.layers.{parts[1]}.{_BLOCK[inner]}.{_NORM[last]}"
        if inner in ("attn.q_linear", "attn.k_linear", "attn.v_linear"):
            return None
    raise DiffcapError(f"official IDC-PCL checkpoint: parameter {official!r} is unknown; is it of another system?")


def from_official(state: dict[str, Tensor], stage: str) -> dict[str, Tensor]:
    """Rename an official state dict onto `PCLPretraining` ("pretrain") or `PCL` ("finetune").

    Args:
        state: the official parameters by name. stage: "pretrain" or "finetune".

    Returns:
        A state dict to load strictly.

    Raises:
        DiffcapError: a parameter is unknown or missing.
    """
    ours: dict[str, Tensor] = {}
    for official, value in state.items():
        if official.startswith(_LEFT_OUT[stage]):
            continue
        name = _name(official, stage)
        if name is not None:
            ours[name] = value
            continue
        base, kind = official.split(".attn.")[0], official.rsplit(".", 1)[1]
        stack, _, layer = base.partition(".")
        parts = [f"{base}.attn.{letter}_linear.{kind}" for letter in "qkv"]
        missing = [part for part in parts if part not in state]
        if missing:
            raise DiffcapError(f"official IDC-PCL checkpoint: {missing[0]!r} is missing; fetch the file again.")
        ours[f"trunk.{_STACKS[stack]}.{layer}.attention.qkv.{kind}"] = torch.cat([state[part] for part in parts])
    return ours
