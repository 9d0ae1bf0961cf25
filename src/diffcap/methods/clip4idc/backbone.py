"""CLIP4IDC's image tower as a backbone of single images, from a checkpoint of its adaptation."""

from typing import Any

from torch import Tensor, nn

from diffcap.checkpoints.reading import read_checkpoint, weights_of
from diffcap.features.preprocessing import ResizeOnly
from diffcap.utils.errors import DiffcapError, wrap_errors


class SingleImageEncoder(nn.Module):
    """The feature map of a `PairTower`'s layers for single images, after the LayerNorm before its layers for pairs.

    The map has no class token, and no embeddings that distinguish the two images of a pair.
    """

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower: Any = tower

    def forward(self, images: Tensor) -> Tensor:
        """Pixels from 0 to 255, (B, 3, height, width), to features (B, W, rows, columns)."""
        pair_ln_pre = self.tower.ln_mid  # its name in the checkpoints of the authors' code
        tokens = pair_ln_pre(self.tower.encode_single(self.tower.normalize(images)))[:, 1:]
        return tokens.transpose(1, 2).unflatten(2, self.tower.grid)


def build(weights: str) -> tuple[SingleImageEncoder, ResizeOnly]:
    """The network and its preprocessing, see `Backbone`."""
    if weights in ("default", "random"):
        raise DiffcapError(
            "WEIGHTS is missing: give the checkpoint of an adaptation, for example "
            "runs/blocks/clip4idc/pretrain/best.ckpt."
        )
    from diffcap.models.clip import PairTower, build_clip  # imports open_clip, which is too slow for --help

    state = read_checkpoint(weights)
    metadata = state["diffcap"]
    if metadata.get("method") != "clip4idc" or "hyperparameters" not in metadata:
        raise DiffcapError(
            f"{weights}: not a checkpoint of CLIP4IDC; give one of its pre-training or captioning stage."
        )
    hyperparameters = metadata["hyperparameters"]
    if hyperparameters.get("images", "together") != "together":
        raise DiffcapError(
            f"{weights}: its encoder processes the two images separately (FT1, FT2); give the checkpoint of an adaptation."
        )
    with wrap_errors(
        weights, "its image tower cannot be built", f"use diffcap {metadata['version']:.40}, which wrote it"
    ):
        clip = build_clip(hyperparameters["network"], hyperparameters["image_size"])
        tower = PairTower(clip, hyperparameters["intra_layers"])
        tower.load_state_dict(weights_of(state, "captioner.images."))
    return SingleImageEncoder(tower), ResizeOnly(tower.image_size)
