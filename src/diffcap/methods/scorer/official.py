"""Rename the parameters of official SCORER checkpoints.

The official file holds the groups `change_detector_state` and `speaker_state`. Released files lack CBR; we expect the prefix
`cbr.`. Only the logit scale of the last encoder layer is used, so the others are dropped.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from diffcap.interop.importer import GROUPS, SHARED, Importer, Rule, rename
from diffcap.interop.sizes import Sizes, State, count_layers, rcc_sizes

_LAYER = r"speaker_state\.core\.layer\.(\d+)\."
_RULES: tuple[Rule, ...] = (
    *SHARED,
    (r"change_detector_state\.scorer\.(\d+)\.attention\.(query|key|value)", r"encoder.\1.attention.qkv:\2"),
    (r"change_detector_state\.scorer\.(\d+)\.attention\.layer_norm", r"encoder.\1.norm"),
    (r"change_detector_state\.embed_fc\.0", "fusion.0"),
    (_LAYER + r"self_attention\.(query|key|value)", r"decoder.blocks.\1.self_attention.qkv:\2"),
    (_LAYER + r"dec_enc_attention\.(query|key|value)", r"decoder.blocks.\1.cross.qkv:\2"),
    (_LAYER + r"hidden_intermediate\.dense", r"decoder.blocks.\1.inner"),
    (_LAYER + r"output\.dense", r"decoder.blocks.\1.outer"),
    (_LAYER + r"output\.LayerNorm", r"decoder.blocks.\1.norm3"),
    (r"cbr\.conv1", "cbr.join"),
    (r"cbr\.conv2\.0", "cbr.out"),
    (r"cbr\.mh_att\.in_proj_weight", "cbr.attention.qkv.weight"),
    (r"cbr\.mh_att\.out_proj", "cbr.attention.out"),
    (r"cbr\.contra\.(query|key)", r"cbr.\1"),
    (r"cbr\.contra\.logit_scale", "cbr.logit_scale"),
)


def from_official(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename an official state dict to that of `SCORER`.

    The model needs `cbr_weight=0` if the file has no CBR.
    """
    start, end = "change_detector_state.scorer.", ".attention.logit_scale"
    scales = sorted(
        (name for name in state if name.startswith(start) and name.endswith(end)),
        key=lambda name: int(name[len(start) : -len(end)]),
    )
    rules: list[Rule] = [(name.replace(".", r"\."), None) for name in scales[:-1]]
    rules += [(name.replace(".", r"\."), "logit_scale") for name in scales[-1:]]
    return rename(state, [*rules, *_RULES], "SCORER")


def official_sizes(state: State, options: Mapping[str, Any], tables: State) -> Sizes:
    """Hyperparameters of SCORER; official checkpoints have no CBR."""
    sizes = rcc_sizes(state, options, tables)
    sizes.model["encoder_layers"] = count_layers(state, r"change_detector_state\.scorer\.(\d+)\.")
    sizes.model["cbr_weight"] = 0.001 if any(name.startswith("cbr.") for name in state) else 0.0
    return sizes


IMPORTER = Importer(
    official_sizes,
    lambda state, stage: from_official(state),
    vocabulary_layout="rcc",
    vocabulary_file="vocab.json",
    groups=GROUPS,
    pickled_classes=("AttrDict",),
)
