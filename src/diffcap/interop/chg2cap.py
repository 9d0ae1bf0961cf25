"""Rename the parameters of official Chg2Cap checkpoints."""

from collections.abc import Mapping

from torch import Tensor

from diffcap.interop.importer import Importer, Rule, rename
from diffcap.interop.remote_sensing import backbone_rules, complete, decoder_rules, residual_rules
from diffcap.interop.sizes import chg2cap_sizes


def _block_rules(number: int, ours: str) -> tuple[Rule, ...]:
    block, new = rf"encoder_trans_dict\.selftrans\.(\d+)\.{number}\.", rf"encoder.\1.{ours}."
    return (
        (block + r"att\.to_q", new + "attention.query"),
        (block + r"att\.to_k", new + "attention.key"),
        (block + r"att\.to_v", None),  # stored, not used: the values are the keys
        (block + r"att\.to_out\.0", new + "attention.out"),
        (block + r"feedforward\.net\.([03])", new + r"ffn.\2"),
        (block + "norm([12])", new + r"norm\2"),
    )


_RULES: tuple[Rule, ...] = (
    (r"encoder_trans_dict\.h_embedding", "columns"),  # the authors' names are exchanged
    (r"encoder_trans_dict\.w_embedding", "rows"),
    *_block_rules(0, "single"),
    *_block_rules(1, "pair"),
    (r"decoder_dict\.Conv1", "fusion"),
    *residual_rules(r"decoder_dict\.LN", "residual"),
    *decoder_rules("decoder_dict", "multihead_attn"),
    *backbone_rules(r"encoder_dict\.cnn"),
)


def from_official(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename an official state dict to that of `Chg2Cap`.

    The names have the prefix of their group: `encoder_trans_dict.`, `decoder_dict.` and, for a model with `backbone`, `encoder_dict.`. The
    result lacks the parameters that the authors' program does not use.
    """
    return complete(rename(state, _RULES, "Chg2Cap"))


IMPORTER = Importer(
    chg2cap_sizes,
    lambda state, stage: from_official(state),
    vocabulary_layout="chg2cap",
    vocabulary_file="vocab.json",
    groups=("encoder_dict", "encoder_trans_dict", "decoder_dict"),
)
