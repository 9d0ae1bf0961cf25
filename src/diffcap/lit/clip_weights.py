"""CLIP's own weights into the parts of CLIP4IDC, before anything has been adapted."""

import math
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from diffcap.errors import DiffcapError
from diffcap.features.weights import pretrained_clip, read_state_dict
from diffcap.models.clip import networks_folder, pretrained_grid
from diffcap.models.clip4idc import CLIP4IDC, CLIP4IDCAdaptation
from diffcap.text.bpe import ClipVocabulary
from diffcap.text.vocabularies import AnyVocabulary

_POSITIONS = "visual.positional_embedding"
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
    tokens are taken; a file may have a part of CLIP's only, with their tokens in `token_ids`.

    Args:
        weights: "default" (the package's own for its networks, open_clip's download for others), "random" (nothing is
            done), or a file of an open_clip state dict. vocabulary: of the captions.

    Raises:
        DiffcapError: they cannot be had, or do not fit; the first names are given.
    """
    if weights == "random":
        return
    network = module.hyperparameters["network"]
    shipped = networks_folder() / f"{network if isinstance(network, str) else ''}.safetensors"
    if weights == "default" and shipped.is_file():
        state = read_state_dict(shipped)
    elif weights == "default":
        if not isinstance(network, str):
            raise DiffcapError("model.clip_weights=default needs a network by name; give a file, or random.")
        official = pretrained_clip(network, "--model.clip_weights")
        _same_activation(official.visual, module.images.visual, network)
        state = dict(official.state_dict())
    else:
        state = read_state_dict(weights, "--model.clip_weights")
    token_ids = state.pop("token_ids", None)
    state = {name: value.float() for name, value in state.items()}
    if _POSITIONS in state:
        state[_POSITIONS] = _interpolated(state[_POSITIONS], pretrained_grid(network), module.images.grid, weights)
    own = module.state_dict()
    ours = {name: value for name, value in _renamed(state, module).items() if name in own}
    table = "words.token_embedding.weight"
    if table in ours and isinstance(vocabulary, ClipVocabulary):
        if token_ids is None and len(ours[table]) == vocabulary.clip_size:
            token_ids = torch.arange(vocabulary.clip_size)
        if token_ids is not None:
            ours[table] = _of_tokens(ours[table], token_ids, vocabulary.clip_ids, own[table])
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
    module.load_state_dict(
        {name: value for name, value in ours.items() if not module.images.keeps_initial_value(name)}, strict=False
    )


def _interpolated(positions: Tensor, own: tuple[int, int], wanted: tuple[int, int], weights: str) -> Tensor:
    """Positions (1 + rows * columns, W) of the network's own grid, or of a square one, as those of another grid (bicubic)."""
    count = len(positions) - 1
    if count != own[0] * own[1]:
        own = (math.isqrt(count), math.isqrt(count))
    if count != own[0] * own[1]:
        raise DiffcapError(
            f"{weights}: {count} positions of patches are neither the network's own grid nor a square; give the file of this "
            "network."
        )
    if own == wanted:
        return positions
    grid = positions[1:].T.reshape(1, -1, *own)
    grid = F.interpolate(grid, wanted, mode="bicubic", antialias=True, align_corners=False)  # as open_clip does
    return torch.cat([positions[:1], grid.flatten(2)[0].T])


def _of_tokens(vectors: Tensor, token_ids: Tensor, wanted: list[int], drawn: Tensor) -> Tensor:
    """The vectors of the wanted tokens; of those that the file lacks, the ones that were drawn for them."""
    rows = {number: row for row, number in enumerate(token_ids.tolist())}
    known = torch.tensor([number in rows for number in wanted])
    table = drawn.clone()
    table[known] = vectors[torch.tensor([rows[number] for number in wanted if number in rows], dtype=torch.int64)]
    return table


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
