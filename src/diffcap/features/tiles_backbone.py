"""The backbone for the dataset tiles, which ships with diffcap. It predicts the land cover of an overhead image and finds its houses.

The features of a 256 x 256 image are 72 channels on a grid of 8 x 8 cells of 32 x 32 pixels: 18 values for each quarter of a cell
(16 x 16 pixels, upper left, upper right, lower left, lower right). These are the fractions of the 17 classes of land cover and the
number of houses whose centre lies in the quarter. Therefore the features hardly depend on season, light and haze. Every channel has
zero mean and unit variance over images and cells. `worlds/training/tiles.py` trains the network.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffcap.features.preprocessing import ResizeNormalize
from diffcap.features.weights import conv_block, load_shipped_or_file

SHIPPED_FILE = Path(__file__).with_name("tiles_backbone.safetensors")
IMAGE_SIZE = 256  # width and height of the input in pixels
STRIDE = 4  # pixels between two predictions of the land cover
# Classes of land cover: those in COVERS, and one for each color of the roofs in the dataset tiles.
COVERS = (
    *("grass", "field", "forest", "water", "shore", "paved road"),
    *("dirt road", "parking lot", "bare ground", "mud", "tree"),
)
ROOFS = ("red roof", "brown roof", "gray roof", "dark roof", "blue roof", "white roof")
CLASSES = len(COVERS) + len(ROOFS)  # number of classes
# Outputs of the head for a square of 8 x 8 pixels: a prediction of the land cover for each quarter, and one of a house's centre.
HEAD_CHANNELS = 4 * CLASSES + 1
NUM_CHANNELS = 4 * (CLASSES + 1)  # of the features: classes and number of houses for each quarter of a cell
PREPROCESSING = ResizeNormalize((IMAGE_SIZE, IMAGE_SIZE), (0.5, 0.5, 0.5), (0.25, 0.25, 0.25), antialias=True)


class TilesNetwork(nn.Module):
    """Turns images (B, 3, 256, 256) into features (B, 72, 8, 8). `norm` adds batch norm for training; `fuse_batch_norms` removes it."""

    mean: Tensor  # (72,) mean of each channel over images and cells, from the training
    scale: Tensor  # (72,) standard deviation of each channel

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            conv_block(3, 24, 4, 2, 1, norm),  # channels in, out, kernel, stride, padding; gives (B, 24, 128, 128)
            conv_block(24, 40, 4, 2, 1, norm),  # (B, 40, 64, 64)
        )
        self.down = conv_block(40, 64, 4, 2, 1, norm)  # (B, 64, 32, 32)
        self.body = nn.Sequential(*(conv_block(64, 64, 3, 1, size, norm, dilation=size) for size in (1, 2, 4, 1)))
        self.head = nn.Conv2d(64, HEAD_CHANNELS, 1)
        self.detail = nn.Conv2d(40, CLASSES, 1)
        self.register_buffer("mean", torch.zeros(NUM_CHANNELS))
        self.register_buffer("scale", torch.ones(NUM_CHANNELS))

    def predict(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits of the land cover per 4 x 4 pixels (B, 17, 64, 64), and of a house's centre per 8 x 8 pixels (B, 32, 32)."""
        fine = self.stem(images.contiguous(memory_format=torch.channels_last))
        coarse = self.down(fine)
        predictions = self.head(coarse + self.body(coarse))
        covers = F.pixel_shuffle(predictions[:, : 4 * CLASSES], 2) + self.detail(fine)
        return covers, predictions[:, 4 * CLASSES]

    def compute_channels(self, covers: Tensor, houses: Tensor) -> Tensor:
        """Compute the channels before scaling, (B, 72, 8, 8), from the outputs of `predict`."""
        fractions = F.avg_pool2d(covers.softmax(1), 4)  # (B, 17, 16, 16)
        counts = 4 * F.avg_pool2d(houses.sigmoid()[:, None], 2)  # (B, 1, 16, 16), sums over four squares
        return F.pixel_unshuffle(torch.cat([fractions, counts], 1), 2)

    def forward(self, images: Tensor) -> Tensor:
        """Turn images (B, 3, 256, 256) into features (B, 72, 8, 8), of which each channel has zero mean and unit variance."""
        return (self.compute_channels(*self.predict(images)) - self.mean[:, None, None]) / self.scale[:, None, None]


def build(weights: str) -> tuple[TilesNetwork, ResizeNormalize]:
    """Return the network and its preprocessing; `weights` is "default", "random" or a file."""
    return load_shipped_or_file(TilesNetwork(), weights, SHIPPED_FILE), PREPROCESSING
