"""Rename the parameters of official CLIP4IDC checkpoints, which the authors' code writes in the adaptation and in the captioning stage.

An official file is a state dict with parameters `clip.*` in half precision and, for captioning, `decoder.*`. The result is float32.
"""

import math
from typing import Any

from torch import Tensor

from diffcap.checkpoints.importing import Importer, ImportOptions, Sizes, State, count_layers, pixel_features, rename

# Rules to rename parameters: a regular expression of official names, and diffcap's name; None leaves the parameter out. The first match
# counts; a final .weight or .bias is kept; name:query is the part of the queries in `name`.
_VISUAL_RULES = (
    (r"clip\.visual\.bef_embedding", "images.before_mark"),
    (r"clip\.visual\.aft_embedding", "images.after_mark"),
    (r"clip\.visual\.joint_positional_embedding", "images.joint_positions"),
    (r"clip\.visual\.ln_mid", "images.ln_mid"),
    (r"clip\.visual\.([\w.]+)", r"images.visual.\1"),
    (r"clip\.(token_embedding|positional_embedding)", r"words.\1"),
)
_TEXT_RULES = (
    (r"clip\.(transformer\.[\w.]+|ln_final|text_projection)", r"words.\1"),
    (r"clip\.logit_scale", "logit_scale"),
)
_BLOCK = r"decoder\.(encoder|decoder)\.layer\.(\d+)\."
_CAPTIONER_RULES = (
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
    (_BLOCK + r"slf_attn\.output\.LayerNorm", r"\1.\2.norm1"),
    (_BLOCK + r"intermediate\.dense", r"\1.\2.inner"),
    (_BLOCK + r"output\.dense", r"\1.\2.outer"),
    (r"decoder\.classifier\.cls\.predictions\.bias", "word_bias"),
    (r"decoder\.classifier\.cls\.predictions\.transform\.dense", "head.0"),
    (r"decoder\.classifier\.cls\.predictions\.transform\.LayerNorm", "head_norm"),
    (r"decoder\.classifier\.cls\.predictions\.decoder", None),  # a copy of CLIP's word vectors
)


def from_official(state: State, stage: str) -> dict[str, Tensor]:
    """Convert an official state dict to one of `CLIP4IDCAdaptation` (stage "pretrain") or `CLIP4IDC`, in float32."""
    left_out = [(pattern, None) for pattern, _ in _TEXT_RULES]
    rules = [*_VISUAL_RULES, *(_TEXT_RULES if stage == "pretrain" else (*left_out, *_CAPTIONER_RULES))]
    return {name: value.float() for name, value in rename(state, rules, "CLIP4IDC").items()}


def official_sizes(state: State, options: ImportOptions, intra_layers: int | None = None) -> Sizes:
    """Return the model's hyperparameters, from the authors' state dict and the user's options.

    `intra_layers`: layers of the image tower that encode each image separately. None: three quarters of them (authors' code: 9 of 12).
    """
    import open_clip  # imports timm and torchvision, too slow for --help

    vision_width, _, patch_side, _ = state["clip.visual.conv1.weight"].shape
    vision_layers = count_layers(state, r"clip\.visual\.transformer\.resblocks\.(\d+)\.")
    grid_side = math.isqrt(len(state["clip.visual.positional_embedding"]) - 1)
    context_length, text_width = state["clip.positional_embedding"].shape
    vocabulary_size = len(state["clip.token_embedding.weight"])
    text_layers = count_layers(state, r"clip\.transformer\.resblocks\.(\d+)\.")
    network: Any = {
        "embed_dim": state["clip.visual.proj"].shape[1],
        "quick_gelu": True,
        "vision_cfg": {
            "image_size": patch_side * grid_side,
            "patch_size": patch_side,
            "width": vision_width,  # heads have 64 channels in both towers, as in CLIP
            "layers": vision_layers,
        },
        "text_cfg": {
            "context_length": context_length,
            "vocab_size": vocabulary_size,
            "width": text_width,
            "heads": text_width // 64,
            "layers": max(1, text_layers),
        },
    }
    if network == open_clip.get_model_config("ViT-B-32-quickgelu"):
        network = "ViT-B-32-quickgelu"  # as the method's settings name it
    ffn_weight = state.get("decoder.decoder.layer.0.intermediate.dense.weight")  # None in stage 1
    # Authors' code: 32 text positions. In stage 2, a caption has one more token, because its END is not an input of the decoder.
    default_length = min(32, context_length) if ffn_weight is None else min(33, context_length + 1)
    max_length = options.max_length or default_length
    model: dict[str, Any] = {
        "vocabulary_size": vocabulary_size,
        "network": network,
        "intra_layers": intra_layers or vision_layers * 3 // 4,
        "max_length": max_length,
    }
    if ffn_weight is not None:
        model |= {
            "width": ffn_weight.shape[1],
            "heads": options.heads,
            "ffn": len(ffn_weight),
            "encoder_layers": count_layers(state, r"decoder\.encoder\.layer\.(\d+)\."),
            "decoder_layers": count_layers(state, r"decoder\.decoder\.layer\.(\d+)\."),
            "padding": "released",  # the id of padding is that of the authors' code
        }
    return Sizes(model, max_length, pixel_features((patch_side * grid_side, patch_side * grid_side)))


IMPORTER = Importer(
    official_sizes,
    from_official,
    vocabulary_layout="clip_released",
    vocabulary_file=None,
    is_pretraining=lambda state: not any(name.startswith("decoder.") for name in state),
)
