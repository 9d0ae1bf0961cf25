"""CLIP's weights for the first training stage, and the image tower of a checkpoint as a backbone of single images."""

import math
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffcap.checkpoints.reading import read_checkpoint, weights_of
from diffcap.features.preprocessing import ResizeOnly
from diffcap.features.weights import load_pretrained_clip, read_state_dict
from diffcap.models.clip import NETWORKS_FOLDER, PairTower, build_clip, pretrained_grid
from diffcap.text.vocabularies import AnyVocabulary, ClipVocabulary
from diffcap.utils.errors import DiffcapError, wrap_errors

_PATCH_POSITIONS = "visual.positional_embedding"
# From names in a block of CLIP's text tower to names in a `TextBlock`, the decoder block that is made from it.
_TEXT_BLOCK_NAMES = {
    "attn.in_proj_": "self_attention.qkv.",
    "attn.out_proj": "self_attention.out",
    "ln_1": "norm1",
    "ln_2": "norm2",
    "mlp.c_fc": "inner",
    "mlp.c_proj": "outer",
}


def load_clip(module: Any, weights: str | None, vocabulary: AnyVocabulary) -> None:
    """Load CLIP's weights into a `CLIP4IDC` or a `CLIP4IDCAdaptation`; parameters that CLIP does not have keep their initial values.

    The position embedding of the patches is interpolated to the module's grid (bicubic). Only the vocabulary's rows of the token
    embedding are used. A file with only some of CLIP's tokens has their ids in the tensor `token_ids`.
    `weights`: "default" (the package's file if it has one for the network, else open_clip's download), "random" or None, or a file.
    """
    if weights is None or weights == "random":
        return
    network = module.hyperparameters["network"]
    shipped = NETWORKS_FOLDER / f"{network if isinstance(network, str) else ''}.safetensors"
    if weights == "default" and shipped.is_file():
        state = read_state_dict(shipped)
    elif weights == "default":
        if not isinstance(network, str):
            raise DiffcapError("model.initial_weights is default, but the network has no name; give a file, or random.")
        official = load_pretrained_clip(network)
        visuals = official.visual, module.images.visual
        trained_with, built_with = (type(visual.transformer.resblocks[0].mlp.gelu).__name__ for visual in visuals)
        if trained_with != built_with:
            raise DiffcapError(
                f"the weights of {network} were trained with {trained_with}, and the network is built with {built_with}; set "
                f"model.captioner.init_args.network to {network}-quickgelu in both stages."
            )
        state = dict(official.state_dict())
    else:
        state = read_state_dict(weights)
    token_ids = state.pop("token_ids", None)
    state = {name: value.float() for name, value in state.items()}
    if _PATCH_POSITIONS in state:
        grid = pretrained_grid(network)
        state[_PATCH_POSITIONS] = _interpolate_positions(state[_PATCH_POSITIONS], grid, module.images.grid, weights)
    own_state = module.state_dict()
    loaded = {name: value for name, value in _rename(state, module).items() if name in own_state}
    embedding = "words.token_embedding.weight"
    if embedding in loaded and isinstance(vocabulary, ClipVocabulary):
        if token_ids is None and len(loaded[embedding]) == vocabulary.clip_size:
            token_ids = torch.arange(vocabulary.clip_size)
        if token_ids is not None:
            # Take the vectors of the needed tokens. Tokens that the file lacks keep their initial vectors.
            row_of_token = {token_id: row for row, token_id in enumerate(token_ids.tolist())}
            is_known = torch.tensor([token_id in row_of_token for token_id in vocabulary.clip_ids])
            known_rows = [row_of_token[token_id] for token_id in vocabulary.clip_ids if token_id in row_of_token]
            selected = own_state[embedding].clone()
            selected[is_known] = loaded[embedding][torch.tensor(known_rows, dtype=torch.int64)]
            loaded[embedding] = selected
    clip_names = [name for name in own_state if name.startswith(("images.visual.", "words."))]
    mismatches = [name for name in clip_names if name not in loaded]
    mismatches += [
        f"{name} {tuple(value.shape)} for {tuple(own_state[name].shape)}"
        for name, value in loaded.items()
        if value.shape != own_state[name].shape
    ]
    if mismatches:
        expected = network if isinstance(network, str) else "this network"
        listed = ", ".join(mismatches[:3]) + (", ..." if len(mismatches) > 3 else "")
        raise DiffcapError(
            f"{weights}: {len(mismatches)} of CLIP's parameters are missing or of another shape ({listed}); give the file of "
            f"{expected}."
        )
    # With `pair_init: difference` some parameters of the image tower keep their initial values.
    replacing = {name: value for name, value in loaded.items() if not module.images.keeps_initial_value(name)}
    module.load_state_dict(replacing, strict=False)


def _interpolate_positions(positions: Tensor, grid: tuple[int, int], target: tuple[int, int], weights: str) -> Tensor:
    """Interpolate a position embedding (1 + patches, width) from `grid` to `target` (bicubic); its first row is the class token's.

    If `grid` has another number of patches, the embedding's grid is taken as square. `weights`: name of the file, for the message.
    """
    num_patches = len(positions) - 1
    if num_patches != grid[0] * grid[1]:
        grid = (math.isqrt(num_patches), math.isqrt(num_patches))
    if num_patches != grid[0] * grid[1]:
        raise DiffcapError(
            f"{weights}: {num_patches} patch positions are neither the network's grid nor a square; give the file of this network."
        )
    if grid == target:
        return positions
    maps = positions[1:].T.reshape(1, -1, *grid)
    maps = F.interpolate(maps, target, mode="bicubic", antialias=True, align_corners=False)  # as open_clip does
    return torch.cat([positions[:1], maps.flatten(2)[0].T])


def _rename(state: dict[str, Tensor], module: Any) -> dict[str, Tensor]:
    """Rename open_clip's parameters to those of `module`, without the prefix "text." of some open_clip models."""
    ours: dict[str, Tensor] = {}
    has_text_decoder = module.hyperparameters.get("decoder") == "clip_text"
    for official, value in state.items():
        name = official.removeprefix("text.")
        if name.startswith("visual."):
            ours[f"images.{name}"] = value
        elif name == "logit_scale":
            ours[name] = value
        else:
            ours[f"words.{name}"] = value
        block = re.fullmatch(r"transformer\.resblocks\.(\d+)\.(.+)", name)
        if block and has_text_decoder:
            block_number, inner_name = block.groups()
            prefix = next((prefix for prefix in _TEXT_BLOCK_NAMES if inner_name.startswith(prefix)), "")
            ours[f"decoder.{block_number}.{inner_name.replace(prefix, _TEXT_BLOCK_NAMES.get(prefix, ''))}"] = value
        elif name.startswith("ln_final.") and has_text_decoder:
            ours[name.replace("ln_final", "head_norm")] = value
    return ours


class SingleImageEncoder(nn.Module):
    """The layers of a `PairTower` that encode each image separately, and the norm after them, as a backbone of single images."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower: Any = tower

    def forward(self, images: Tensor) -> Tensor:
        """Encode pixels from 0 to 255, (B, 3, height, width), as feature maps (B, channels, rows, columns)."""
        tokens = self.tower.ln_mid(self.tower.encode_single(self.tower.normalize(images)))
        patches = tokens[:, 1:]  # without the class token
        return patches.transpose(1, 2).unflatten(2, self.tower.grid)


def build_backbone(weights: str) -> tuple[SingleImageEncoder, ResizeOnly]:
    """Return the image tower of a checkpoint as a backbone of single images, and its preprocessing."""
    if weights in ("default", "random"):
        raise DiffcapError(
            "WEIGHTS is missing: give the checkpoint of an adaptation, for example "
            "runs/blocks/clip4idc/pretrain/best.ckpt."
        )
    content = read_checkpoint(weights)
    metadata = content["diffcap"]
    if metadata.get("method") != "clip4idc" or "hyperparameters" not in metadata:
        raise DiffcapError(
            f"{weights}: not a checkpoint of CLIP4IDC; give one of its pre-training or captioning stage."
        )
    hyperparameters = metadata["hyperparameters"]
    if hyperparameters.get("images", "together") != "together":
        raise DiffcapError(
            f"{weights}: its encoder processes the two images separately (FT1, FT2); give the checkpoint of an adaptation."
        )
    advice = f"use diffcap {metadata['version']:.40}, which wrote it"
    with wrap_errors(weights, "its image tower cannot be built", advice):
        clip = build_clip(hyperparameters["network"], hyperparameters["image_size"])
        tower = PairTower(clip, hyperparameters["intra_layers"])
        tower.load_state_dict(weights_of(content, "captioner.images."))
    return SingleImageEncoder(tower), ResizeOnly(tower.image_size)
