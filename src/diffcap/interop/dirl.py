"""Rename the parameters of official DIRL checkpoints, for both decoder variants."""

from collections.abc import Mapping

from torch import Tensor

from diffcap.interop.importer import GROUPS, SHARED, Importer, Rule, rename
from diffcap.interop.sizes import dirl_sizes

_LAYER = r"speaker_state\.core\.layer\.(\d+)\."
_ENCODER = r"change_detector_state\.transformer\.(\d+)\."
_RULES: tuple[Rule, ...] = (
    *SHARED,
    (r"change_detector_state\.mlp\.(\d+)", r"projector.\1"),
    (_ENCODER + r"attention\.in_proj_(weight|bias)", r"encoder.\1.attention.qkv.\2"),
    (_ENCODER + r"attention\.out_proj", r"encoder.\1.attention.out"),
    (_ENCODER + "norm1", r"encoder.\1.norm"),
    (r"speaker_state\.core\.embed_fc\.(\d+)", r"fusion.\1"),
    (_LAYER + r"self_att\.in_proj_(weight|bias)", r"decoder.blocks.\1.self_attention.qkv.\2"),
    (_LAYER + r"self_att\.out_proj", r"decoder.blocks.\1.self_attention.out"),
    (_LAYER + r"cross_att\.in_proj_(weight|bias)", r"decoder.blocks.\1.cross.qkv.\2"),
    (_LAYER + r"cross_att\.out_proj", r"decoder.blocks.\1.cross.out"),
    (_LAYER + "linear1", r"decoder.blocks.\1.ffn.0"),
    (_LAYER + "linear2", r"decoder.blocks.\1.ffn.3"),
)


def from_official(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename an official state dict to that of `DIRL`.

    The model needs `decorrelation_weight=0` if the file has no projector (`mlp`).
    """
    return rename(state, _RULES, "DIRL")


IMPORTER = Importer(
    dirl_sizes,
    lambda state, stage: from_official(state),
    vocabulary_layout="rcc",
    vocabulary_file="vocab.json",
    groups=GROUPS,
    pickled_classes=("AttrDict",),
)
