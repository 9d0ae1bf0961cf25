"""Rename the parameters of official CLIP4IDC checkpoints of both stages.

An official file is a state dict with `clip.*` in half precision and, for stage 2, `decoder.*`. The result is float32.
"""

from collections.abc import Mapping

from torch import Tensor

from diffcap.interop.importer import Importer, Rule, rename
from diffcap.interop.sizes import clip4idc_sizes

_VISUAL: tuple[Rule, ...] = (
    (r"clip\.visual\.bef_embedding", "images.before_mark"),
    (r"clip\.visual\.aft_embedding", "images.after_mark"),
    (r"clip\.visual\.joint_positional_embedding", "images.joint_positions"),
    (r"clip\.visual\.ln_mid", "images.ln_mid"),
    (r"clip\.visual\.([\w.]+)", r"images.visual.\1"),
    (r"clip\.token_embedding", "words.token_embedding"),
    (r"clip\.positional_embedding", "words.positional_embedding"),
)
_TEXT: tuple[Rule, ...] = (
    (r"clip\.(transformer\.[\w.]+)", r"words.\1"),
    (r"clip\.(ln_final|text_projection)", r"words.\1"),
    (r"clip\.logit_scale", "logit_scale"),
)
_NO_TEXT: tuple[Rule, ...] = tuple((pattern, None) for pattern, _ in _TEXT)
_LAYER = r"decoder\.(encoder|decoder)\.layer\.(\d+)\."
_CAPTIONER: tuple[Rule, ...] = (
    (r"decoder\.embeddings\.(?:word|position)_embeddings", None),  # copies of CLIP's
    (r"decoder\.embeddings\.LayerNorm", "words_norm"),
    (r"decoder\.encoder\.layer\.(\d+)\.slf_attn\.att\.(query|key|value)", r"encoder.\1.attention.qkv:\2"),
    (r"decoder\.encoder\.layer\.(\d+)\.slf_attn\.output\.dense", r"encoder.\1.attention.out"),
    (r"decoder\.encoder\.layer\.(\d+)\.output\.LayerNorm", r"encoder.\1.norm2"),
    (r"decoder\.decoder\.layer\.(\d+)\.slf_attn\.att\.(query|key|value)", r"decoder.\1.self_attention.qkv:\2"),
    (r"decoder\.decoder\.layer\.(\d+)\.slf_attn\.output\.dense", r"decoder.\1.self_attention.out"),
    (r"decoder\.decoder\.layer\.(\d+)\.enc_attn\.att\.(query|key|value)", r"decoder.\1.cross.qkv:\2"),
    (r"decoder\.decoder\.layer\.(\d+)\.enc_attn\.output\.dense", r"decoder.\1.cross.out"),
    (r"decoder\.decoder\.layer\.(\d+)\.enc_attn\.output\.LayerNorm", r"decoder.\1.norm2"),
    (r"decoder\.decoder\.layer\.(\d+)\.output\.LayerNorm", r"decoder.\1.norm3"),
    (_LAYER + r"slf_attn\.output\.LayerNorm", r"\1.\2.norm1"),
    (_LAYER + r"intermediate\.dense", r"\1.\2.inner"),
    (_LAYER + r"output\.dense", r"\1.\2.outer"),
    (r"decoder\.classifier\.cls\.predictions\.bias", "word_bias"),
    (r"decoder\.classifier\.cls\.predictions\.transform\.dense", "head.0"),
    (r"decoder\.classifier\.cls\.predictions\.transform\.LayerNorm", "head_norm"),
    (r"decoder\.classifier\.cls\.predictions\.decoder", None),  # a copy of CLIP's word vectors
)


def from_official(state: Mapping[str, Tensor], stage: str) -> dict[str, Tensor]:
    """Rename an official state dict of any type to that of `CLIP4IDCAdaptation` ("pretrain") or `CLIP4IDC`, in float32."""
    rules = (*_VISUAL, *_TEXT) if stage == "pretrain" else (*_VISUAL, *_NO_TEXT, *_CAPTIONER)
    return {name: value.float() for name, value in rename(state, rules, "CLIP4IDC").items()}


IMPORTER = Importer(
    clip4idc_sizes,
    from_official,
    vocabulary_layout="clip_released",
    vocabulary_file=None,
    is_pretraining=lambda state: not any(name.startswith("decoder.") for name in state),
)
