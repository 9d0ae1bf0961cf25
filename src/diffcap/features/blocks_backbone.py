"""The backbone for the dataset blocks, which ships with diffcap. It detects objects and their attributes in the cells of a coarse grid.

The features of an image 128 pixels wide and 96 high are 107 channels on a grid of 4 rows and 6 columns of cells. A cell has 24 x 24
pixels; the outer columns extend 8 pixels beyond the image. The channels are probabilities, not embeddings: they hardly depend on
viewpoint and light, and one linear layer (as IDC-PCL has) can read the scene from them. The network detects an object in the cell with
the centre of its visible pixels. Then bilinear weights distribute it over the neighbouring cells (`BlocksNetwork.compute_channels`).

| channels | values of a cell; they are multiplied by the weight of the object in the cell |
|---|---|
| 8 x 8 | for each color: probability of an object, of each shape (3), of each material (2), of each size (2) |
| 8 + 8 | for each color: horizontal and vertical offset of the object from the cell's centre, in cells |
| 7 + 12 | probability of each shape, material and size (7), and of each combination of the three (12) |
| 8 | for each color: fraction of the cell's pixels that show an object of this color |

Every channel is scaled to zero mean and unit variance over scenes and cells. `worlds/training/blocks.py` trains the network.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from diffcap.features.preprocessing import ResizeNormalize
from diffcap.features.weights import conv_block, load_shipped_or_file

SHIPPED_FILE = Path(__file__).with_name("blocks_backbone.safetensors")
WIDTH, HEIGHT = 128, 96  # of an input image in pixels
ROWS, COLUMNS, CELL = 4, 6, 24  # number of rows and columns of cells; width and height of a cell in pixels
MARGIN = (COLUMNS * CELL - WIDTH) // 2  # pixels by which the grid extends beyond the image on the left and on the right

COLORS, SHAPES, MATERIALS, SIZES = 8, 3, 2, 2  # number of values of each attribute
# Group of probabilities that the network predicts for a cell -> their number. "solid": each combination of shape, material and size.
# "ninth": which of the cell's 3 x 3 parts has the object's centre (for training only). "share": fraction of the pixels of each color.
GROUP_SIZES = {
    "color": COLORS,
    "shape": SHAPES,
    "material": MATERIALS,
    "size": SIZES,
    "color_shape": COLORS * SHAPES,
    "color_material": COLORS * MATERIALS,
    "color_size": COLORS * SIZES,
    "solid": SHAPES * MATERIALS * SIZES,
    "ninth": 9,
    "share": COLORS,
}
NUM_PROBABILITIES = sum(GROUP_SIZES.values())
HEAD_CHANNELS = NUM_PROBABILITIES + 2 * COLORS  # output channels of the last convolution: probabilities and offsets
NUM_CHANNELS = COLORS * (4 + SHAPES + MATERIALS + SIZES) + SHAPES + MATERIALS + SIZES + GROUP_SIZES["solid"]
# The 4 in `NUM_CHANNELS` (107) counts four values of each color: a probability, two offsets and a fraction of pixels.
PREPROCESSING = ResizeNormalize((HEIGHT, WIDTH), (0.5, 0.5, 0.5), (0.25, 0.25, 0.25), antialias=True)


class BlocksNetwork(nn.Module):
    """Turns images (B, 3, 96, 128) into features (B, 107, 4, 6). `norm` adds batch norm for training; `fuse_batch_norms` removes it."""

    mean: Tensor  # (107,) mean of each channel over scenes and cells, from the training
    scale: Tensor  # (107,) standard deviation of each channel
    centers: Tensor  # (16, 4, 6) the cells' centres, -1 to 1: 8 times x, then 8 times y, as in the output of `predict`

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            conv_block(3, 24, 4, 2, 1, norm),  # channels in, out, kernel, stride, padding; gives (B, 24, 48, 64)
            conv_block(24, 40, 4, 2, 1, norm),  # (B, 40, 24, 32)
            conv_block(40, 64, 4, 2, 1, norm),  # (B, 64, 12, 16)
        )
        self.body = nn.Sequential(conv_block(64, 64, 3, 1, 1, norm), conv_block(64, 64, 3, 1, 1, norm))
        # A cell has 3 x 3 squares of 8 x 8 pixels; the kernel covers 5 x 5 squares, one more than the cell on every side.
        self.cells = conv_block(64, 128, 5, 3, (1, 2), norm)  # (B, 128, 4, 6)
        self.head = nn.Conv2d(128, HEAD_CHANNELS, 1)
        x = ((torch.arange(COLUMNS) + 0.5) * CELL - MARGIN) / WIDTH * 2 - 1
        y = (torch.arange(ROWS) + 0.5) * CELL / HEIGHT * 2 - 1
        centers = torch.stack([x.expand(ROWS, COLUMNS), y[:, None].expand(ROWS, COLUMNS)])  # (2, 4, 6)
        self.register_buffer("centers", centers.repeat_interleave(COLORS, 0), persistent=False)
        self.register_buffer("mean", torch.zeros(NUM_CHANNELS))
        self.register_buffer("scale", torch.ones(NUM_CHANNELS))

    def hidden_features(self, images: Tensor) -> Tensor:
        """Turn images (B, 3, 96, 128) into hidden features of each square of 8 x 8 pixels, (B, 64, 12, 16)."""
        stem_output = self.stem(images.contiguous(memory_format=torch.channels_last))  # twice as fast on a CPU
        return stem_output + self.body(stem_output)

    def predict(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits of all groups (B, 100, 4, 6), and positions from -1 to 1 (B, 16, 4, 6): x of each color's object, then y."""
        logits, offsets = self.head(self.cells(hidden)).split([NUM_PROBABILITIES, 2 * COLORS], dim=1)
        return logits, self.centers + offsets * 0.25  # in these units, a cell is 0.375 wide and 0.5 high

    def compute_channels(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Compute the channels before scaling, (B, 107, 4, 6), from the outputs of `predict`.

        Each object is distributed over the cells around its position. The weight of a cell decreases linearly with the
        distance of its centre, from 1 to 0 over one cell's width and height. So a small movement of the camera changes the
        features only a little, also if an object crosses the border of a cell.
        """
        groups = dict(zip(GROUP_SIZES, logits.sigmoid().split(list(GROUP_SIZES.values()), dim=1)))
        color = groups["color"]  # (B, 8, 4, 6)
        by_color = [color[:, :, None]]
        by_color += [
            groups[name].unflatten(1, (COLORS, -1)) for name in ("color_shape", "color_material", "color_size")
        ]
        x, y = positions.unflatten(1, (2, COLORS)).unbind(1)  # (B, 8, 4, 6)
        weights, dx, dy = self._bilinear_weights(x, y)  # (B, 8, 24, 24): from the object's cell to each cell
        color_values = torch.einsum("bcgi,bcij->bcgj", torch.cat(by_color, 2).flatten(3), weights)
        offsets = [torch.einsum("bci,bcij->bcj", color.flatten(2), weights * distance) for distance in (dx, dy)]
        # The groups without color use the mean position of the cell's objects, weighted by the probabilities of the colors.
        color_shares = color / color.sum(1, keepdim=True).clamp(1e-6)
        mean_x, mean_y = ((color_shares * position).sum(1, keepdim=True) for position in (x, y))
        mean_weights, _, _ = self._bilinear_weights(mean_x, mean_y)
        colorless = torch.cat([groups[name] for name in ("shape", "material", "size", "solid")], 1)  # (B, 19, 4, 6)
        colorless = torch.einsum("bgi,bij->bgj", colorless.flatten(2), mean_weights[:, 0])
        values = torch.cat([color_values.flatten(1, 2), *offsets, colorless, groups["share"].flatten(2)], 1)
        return values.unflatten(2, (ROWS, COLUMNS))

    def _bilinear_weights(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights of all 24 cells for objects at x and y (B, n, 4, 6), and distances dx and dy in cells: (B, n, 24, 24) each."""
        # `centers` has x and then y of each cell, each repeated for the 8 colors.
        center_x, center_y = (self.centers[index].flatten() for index in (0, COLORS))  # (24,) each
        dx = (x.flatten(2)[..., None] - center_x) / (2 * CELL / WIDTH)
        dy = (y.flatten(2)[..., None] - center_y) / (2 * CELL / HEIGHT)
        return (1 - dx.abs()).clamp(0) * (1 - dy.abs()).clamp(0), dx, dy

    def forward(self, images: Tensor) -> Tensor:
        """Turn images (B, 3, 96, 128) into features (B, 107, 4, 6), of which each channel has zero mean and unit variance."""
        channels = self.compute_channels(*self.predict(self.hidden_features(images)))
        return (channels - self.mean[:, None, None]) / self.scale[:, None, None]


def build(weights: str) -> tuple[BlocksNetwork, ResizeNormalize]:
    """Return the network and its preprocessing; `weights` is "default", "random" or a file."""
    return load_shipped_or_file(BlocksNetwork(), weights, SHIPPED_FILE), PREPROCESSING
