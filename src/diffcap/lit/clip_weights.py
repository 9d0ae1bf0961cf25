"""CLIP's own weights into the parts of CLIP4IDC, before anything has been adapted."""

import re
from typing import Any

import torch
from torch import Tensor

from diffcap.errors import DiffcapError
from diffcap.features.weights import pretrained_clip, read_state_dict
from diffcap.models.clip4idc import CLIP4IDC, CLIP4IDCAdaptation
from diffcap.text.bpe import ClipVocabulary
from diffcap.text.layouts import AnyVocabulary

# A text block of CLIP's as FT1 has it in its decoder.
_TEXT_BLOCK = {
    "attn.in_proj_weight": "self_attention.qkv.weight",
    "attn.in_proj_bias": "self_attention.qkv.bias",
    "attn.out_proj.weight": "self_attention.out.weight",
    "attn.out_proj.bias": "self_attention.out.bias",
    "ln_1.weight": "norm1.weight",
    "ln_1.bias": "norm1.bias",
    "ln_2.weight": "norm2.weight",
    "ln_2.bias": "norm2.bias",
    "mlp.c_fc.weight": "inner.weight",
    "mlp.c_fc.bias": "inner.bias",
    "mlp.c_proj.weight": "outer.weight",
    "mlp.c_proj.bias": "outer.bias",
}


def load_clip(module: CLIP4IDC | CLIP4IDCAdaptation, weights: str, vocabulary: AnyVocabulary) -> None:
    """Fill what a module has of CLIP; what the pair adds to it stays as it was drawn.

    Positions of patches are interpolated to the module's grid (bicubic). Of the word vectors, those of the vocabulary's
    tokens are taken.

    Args:
        weights: "default" (open_clip's download for the module's network), "random" (nothing is done), or a file of an
            open_clip state dict. vocabulary: of the captions.

    Raises:
        DiffcapError: they cannot be had, or do not fit; the first names are given.
    """
    if weights == "random":
        return
    from open_clip.model import resize_pos_embed  # brings timm and torchvision: not for a stage's --help

    network = module.hyperparameters["network"]
    if weights == "default":
        if not isinstance(network, str):
            raise DiffcapError("model.clip_weights=default needs a network by name; give a file, or random.")
        official = pretrained_clip(network, "--model.clip_weights")
        _same_activation(official.visual, module.images.visual, network)
        state = dict(official.state_dict())
    else:
        state = read_state_dict(weights, "--model.clip_weights")
    state = {name: value.float() for name, value in state.items()}
    resize_pos_embed(state, module.images)  # type: ignore[arg-type]
    own = module.state_dict()
    ours = {name: value for name, value in _renamed(state, module).items() if name in own}
    table = "words.token_embedding.weight"
    if table in ours and isinstance(vocabulary, ClipVocabulary) and len(ours[table]) == vocabulary.clip_size:
        ours[table] = ours[table][torch.tensor(vocabulary.clip_ids)]
    wanted = [name for name in own if name.startswith(("images.visual.", "words."))]
    wrong = [name for name in wanted if name not in ours]
    wrong += [
        f"{name} {tuple(value.shape)} for {tuple(own[name].shape)}"
        for name, value in ours.items()
        if value.shape != own[name].shape
    ]
    if wrong:
        called = network if isinstance(network, str) else "this network"
        raise DiffcapError(
            f"{weights}: {len(wrong)} of CLIP's parameters are missing or of another shape ({', '.join(wrong[:3])}"
            f"{', ...' if len(wrong) > 3 else ''}); give the file of {called}."
        )
    module.load_state_dict(ours, strict=False)


def _same_activation(official: Any, ours: Any, network: str) -> None:
    """open_clip builds a network with the form of GELU that its weights were trained with, whatever its name says."""
    theirs, built = (type(visual.transformer.resblocks[0].mlp.gelu).__name__ for visual in (official, ours))
    if theirs != built:
        raise DiffcapError(
            f"the weights of {network} were trained with {theirs}, and the network is built with {built}; set "
            f"model.captioner.init_args.network to {network}-quickgelu in both stages."
        )


def _renamed(state: dict[str, Tensor], module: CLIP4IDC | CLIP4IDCAdaptation) -> dict[str, Tensor]:
    """open_clip's names, with the text tower apart or not, to ours."""
    ours: dict[str, Tensor] = {}
    text_decoder = isinstance(module, CLIP4IDC) and module.hyperparameters["decoder"] == "clip_text"
    for official, value in state.items():
        name = official.removeprefix("text.")
        if name.startswith("visual."):
            ours[f"images.{name}"] = value
        elif name == "logit_scale":
            ours[name] = value
        else:
            ours[f"words.{name}"] = value
        block = re.fullmatch(r"transformer\.resblocks\.(\d+)\.(.+)", name)
        if block and text_decoder:
            ours[f"decoder.{block[1]}.{_TEXT_BLOCK.get(block[2], block[2])}"] = value
        elif name.startswith("ln_final.") and text_decoder:
            ours[name.replace("ln_final", "head_norm")] = value
    return ours
