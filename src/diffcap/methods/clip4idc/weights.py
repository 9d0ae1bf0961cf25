"""Loading of CLIP's weights into CLIP4IDC, for the first training stage."""

import math
import re
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from diffcap.features.weights import pretrained_clip, read_state_dict
from diffcap.models.clip import networks_folder, pretrained_grid
from diffcap.text.bpe import ClipVocabulary
from diffcap.text.vocabularies import AnyVocabulary
from diffcap.utils.errors import DiffcapError

if TYPE_CHECKING:
    from diffcap.methods.clip4idc.model import CLIP4IDC, CLIP4IDCAdaptation

_POSITIONS = "visual.positional_embedding"
# Parameter names of a block of CLIP's text tower, and of FT1's decoder block.
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


def load_clip(module: "CLIP4IDC | CLIP4IDCAdaptation", weights: str, vocabulary: AnyVocabulary) -> None:
    """Load CLIP's weights into a module; parameters that CLIP does not have keep their initial values.

    The position embedding of the patches is interpolated to the module's grid (bicubic). Of the token embedding, the rows of
    the vocabulary's tokens are used; a file may have only some of CLIP's tokens and lists them in `token_ids`.

    Args:
        weights: "default" (the package's own for its networks, open_clip's download for others), "random" (the initial values
            are kept), or a file of an open_clip state dict.
    """
    if weights == "random":
        return
    network = module.hyperparameters["network"]
    shipped = networks_folder() / f"{network if isinstance(network, str) else ''}.safetensors"
    if weights == "default" and shipped.is_file():
        state = read_state_dict(shipped)
    elif weights == "default":
        if not isinstance(network, str):
            raise DiffcapError("model.clip_weights is default, but the network has no name; give a file, or random.")
        official = pretrained_clip(network)
        _check_activation(official.visual, module.images.visual, network)
        state = dict(official.state_dict())
    else:
        state = read_state_dict(weights)
    token_ids = state.pop("token_ids", None)
    state = {name: value.float() for name, value in state.items()}
    if _POSITIONS in state:
        state[_POSITIONS] = _interpolate_positions(
            state[_POSITIONS], pretrained_grid(network), module.images.grid, weights
        )
    initial = module.state_dict()
    loaded = {name: value for name, value in _rename(state, module).items() if name in initial}
    embedding = "words.token_embedding.weight"
    if embedding in loaded and isinstance(vocabulary, ClipVocabulary):
        if token_ids is None and len(loaded[embedding]) == vocabulary.clip_size:
            token_ids = torch.arange(vocabulary.clip_size)
        if token_ids is not None:
            loaded[embedding] = _select_tokens(loaded[embedding], token_ids, vocabulary.clip_ids, initial[embedding])
    needed = [name for name in initial if name.startswith(("images.visual.", "words."))]
    mismatches = [name for name in needed if name not in loaded]
    mismatches += [
        f"{name} {tuple(value.shape)} for {tuple(initial[name].shape)}"
        for name, value in loaded.items()
        if value.shape != initial[name].shape
    ]
    if mismatches:
        expected = network if isinstance(network, str) else "this network"
        listed = ", ".join(mismatches[:3]) + (", ..." if len(mismatches) > 3 else "")
        raise DiffcapError(
            f"{weights}: {len(mismatches)} of CLIP's parameters are missing or of another shape ({listed}); give the file of "
            f"{expected}."
        )
    module.load_state_dict(
        {name: value for name, value in loaded.items() if not module.images.keeps_initial_value(name)}, strict=False
    )


def _interpolate_positions(positions: Tensor, grid: tuple[int, int], target: tuple[int, int], weights: str) -> Tensor:
    """Interpolate a position embedding (1 + patches, W), the class token first, from the network's grid to another (bicubic).

    A square grid is used if the number of patches differs from the network's `grid`. `weights` is the file name for the message.
    """
    count = len(positions) - 1
    if count != grid[0] * grid[1]:
        grid = (math.isqrt(count), math.isqrt(count))
    if count != grid[0] * grid[1]:
        raise DiffcapError(
            f"{weights}: {count} patch positions are neither the network's grid nor a square; give the file of this network."
        )
    if grid == target:
        return positions
    maps = positions[1:].T.reshape(1, -1, *grid)
    maps = F.interpolate(maps, target, mode="bicubic", antialias=True, align_corners=False)  # as open_clip does
    return torch.cat([positions[:1], maps.flatten(2)[0].T])


def _select_tokens(vectors: Tensor, token_ids: Tensor, needed_ids: list[int], initial: Tensor) -> Tensor:
    """The vectors of the needed tokens; tokens that the file lacks keep their initial vectors."""
    rows = {token_id: row for row, token_id in enumerate(token_ids.tolist())}
    is_known = torch.tensor([token_id in rows for token_id in needed_ids])
    selected = initial.clone()
    selected[is_known] = vectors[torch.tensor([rows[i] for i in needed_ids if i in rows], dtype=torch.int64)]
    return selected


def _check_activation(official: Any, ours: Any, network: str) -> None:
    """Check the form of GELU: with pretrained weights open_clip chooses theirs, even where the network's name has another."""
    trained, built = (type(visual.transformer.resblocks[0].mlp.gelu).__name__ for visual in (official, ours))
    if trained != built:
        raise DiffcapError(
            f"the weights of {network} were trained with {trained}, and the network is built with {built}; set "
            f"model.captioner.init_args.network to {network}-quickgelu in both stages."
        )


def _rename(state: dict[str, Tensor], module: "CLIP4IDC | CLIP4IDCAdaptation") -> dict[str, Tensor]:
    """open_clip's parameter names to ours; the prefix "text." of some open_clip models is removed."""
    ours: dict[str, Tensor] = {}
    text_decoder = module.hyperparameters.get("decoder") == "clip_text"
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
