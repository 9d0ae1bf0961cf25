"""The embedded backbone for `DATASET=blocks`: which objects stand where, for each cell of a coarse grid.

One 128 x 96 image becomes 107 channels on 4 x 6 cells of 24 x 24 pixels (the outer columns reach 8 pixels out of the
picture). Channels are probabilities, not embeddings, so that viewpoint and light, which move an embedding, hardly move
them, and a single Linear (IDC-PCL's) reads the scene off them. The network finds each object in the cell that holds the
middle of its visible pixels; then the object is shared out over the cells round that place (`BlocksNetwork.values`).

| channels | a cell's value, times the object's share of the cell |
|---|---|
| 8 x 8 | for each color: an object of it is here; it is of this shape (3), material (2), size (2) |
| 8 + 8 | how far right, and how far down, of the cell's middle the color's object stands, in cells |
| 7 + 12 | an object of this shape, material, size is here; of this combination of the three |
| 8 | share of the cell's pixels that show an object of this color |

Every channel is scaled to zero mean and unit variance over scenes and cells. `stages/backbone.py` trains it.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from diffcap.features.preprocessing import ResizeNormalize

SHIPPED = Path(__file__).with_name("blocks_backbone.safetensors")
WIDTH, HEIGHT = 128, 96
ROWS, COLUMNS, CELL = 4, 6, 24
MARGIN = (COLUMNS * CELL - WIDTH) // 2  # pixels that the grid reaches out on either side

# Number of values of each attribute, in the order of `datasets.blocks`.
COLORS, SHAPES, MATERIALS, SIZES = 8, 3, 2, 2
GROUPS = {
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
PROBABILITIES = sum(GROUPS.values())
HEAD = PROBABILITIES + 2 * COLORS  # outputs of the network, before they are shared out over the cells
CHANNELS = COLORS * (1 + SHAPES + MATERIALS + SIZES) + 2 * COLORS + SHAPES + MATERIALS + SIZES + 12 + COLORS


def blocks_preprocessing() -> ResizeNormalize:
    """RGB to about -2...2; a picture that is not 128 x 96 is resized to it."""
    return ResizeNormalize((HEIGHT, WIDTH), (0.5, 0.5, 0.5), (0.25, 0.25, 0.25), antialias=True)


def cell_middles() -> tuple[Tensor, Tensor]:
    """x (COLUMNS,) and y (ROWS,) of the cells' middles in the picture, -1...1 from edge to edge."""
    x = (torch.arange(COLUMNS) + 0.5) * CELL - MARGIN
    y = (torch.arange(ROWS) + 0.5) * CELL
    return x / WIDTH * 2 - 1, y / HEIGHT * 2 - 1


def _conv(
    inputs: int, outputs: int, kernel: int, stride: int, padding: int | tuple[int, int], norm: bool
) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs) if norm else nn.Identity(), nn.ReLU(inplace=True))


class BlocksNetwork(nn.Module):
    """(B, 3, 96, 128) images to (B, 107, 4, 6) features.

    Args:
        norm: with batch norm, for training; `fused()` gives the same network without, as it is shipped.
    """

    mean: Tensor
    scale: Tensor
    middles: Tensor

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _conv(3, 24, 4, 2, 1, norm),  # (B, 24, 48, 64)
            _conv(24, 40, 4, 2, 1, norm),  # (B, 40, 24, 32)
            _conv(40, 64, 4, 2, 1, norm),  # (B, 64, 12, 16)
        )
        self.body = nn.Sequential(_conv(64, 64, 3, 1, 1, norm), _conv(64, 64, 3, 1, 1, norm))
        # 3 x 3 blocks of 8 pixels make a cell; each cell sees one block further on every side.
        self.cells = _conv(64, 128, 5, 3, (1, 2), norm)  # (B, 128, 4, 6)
        self.head = nn.Conv2d(128, HEAD, 1)
        x, y = cell_middles()
        middles = torch.stack([x.expand(ROWS, COLUMNS), y[:, None].expand(ROWS, COLUMNS)])  # (2, 4, 6)
        self.register_buffer("middles", middles.repeat_interleave(COLORS, 0), persistent=False)
        self.register_buffer("mean", torch.zeros(CHANNELS))
        self.register_buffer("scale", torch.ones(CHANNELS))

    def blocks(self, images: Tensor) -> Tensor:
        """(B, 64, 12, 16): what the network knows of each 8 x 8 pixels."""
        inner = self.stem(images.contiguous(memory_format=torch.channels_last))  # twice as fast on a CPU
        return inner + self.body(inner)

    def raw(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, 100, 4, 6), and the place of each color's object in the picture (B, 16, 4, 6), -1...1."""
        out = self.head(self.cells(blocks))
        logits, offsets = out.split([PROBABILITIES, 2 * COLORS], dim=1)
        return logits, self.middles + offsets * 0.25  # a cell is 0.375 wide and 0.5 high

    def values(self, logits: Tensor, places: Tensor) -> Tensor:
        """The channels before scaling, (B, 107, 4, 6): each object shared out over the cells round its place.

        The share of a cell falls linearly with the distance of its middle, from 1 to 0 over one cell's width and height,
        so that a small shift of the camera changes the features a little, wherever the edges of the cells are.
        """
        parts = dict(zip(GROUPS, logits.sigmoid().split(list(GROUPS.values()), dim=1)))
        color = parts["color"]  # (B, 8, 4, 6)
        by_color = torch.stack(
            [
                color,
                *parts["color_shape"].unflatten(1, (COLORS, SHAPES)).unbind(2),
                *parts["color_material"].unflatten(1, (COLORS, MATERIALS)).unbind(2),
                *parts["color_size"].unflatten(1, (COLORS, SIZES)).unbind(2),
            ],
            2,
        )  # (B, 8, 8, 4, 6)
        x, y = places.unflatten(1, (2, COLORS)).unbind(1)  # (B, 8, 4, 6)
        share, right, down = self._shares(x, y)  # (B, 8, 24, 24): from cell, to cell
        spread = torch.einsum("bcgi,bcij->bcgj", by_color.flatten(3), share)
        offsets = [torch.einsum("bci,bcij->bcj", color.flatten(2), share * way) for way in (right, down)]
        # Groups that name no color go with the mean place of the cell's objects.
        weight = color / color.sum(1, keepdim=True).clamp(min=1e-6)
        share, _, _ = self._shares((weight * x).sum(1, keepdim=True), (weight * y).sum(1, keepdim=True))
        plain = torch.cat([parts[name] for name in ("shape", "material", "size", "solid")], 1).flatten(2)  # (B, 19, 24)
        plain = torch.einsum("bgi,bij->bgj", plain, share[:, 0])
        values = torch.cat([spread.flatten(1, 2), *offsets, plain, parts["share"].flatten(2)], 1)
        return values.unflatten(2, (ROWS, COLUMNS))

    def _shares(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where objects at (x, y), (B, n, 4, 6), go: shares (B, n, 24, 24), and how far right and down of each cell."""
        middle_x, middle_y = (self.middles[index].flatten() for index in (0, COLORS))  # (24,) each
        right = (x.flatten(2)[..., None] - middle_x) / (2 * CELL / WIDTH)  # in cells
        down = (y.flatten(2)[..., None] - middle_y) / (2 * CELL / HEIGHT)
        return (1 - right.abs()).clamp(min=0) * (1 - down.abs()).clamp(min=0), right, down

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, 96, 128) to (B, 107, 4, 6), zero mean and unit variance a channel."""
        values = self.values(*self.raw(self.blocks(images)))
        return (values - self.mean.view(-1, 1, 1)) / self.scale.view(-1, 1, 1)

    def fused(self) -> "BlocksNetwork":
        """The network of inference: every batch norm folded into the convolution before it."""
        plain = BlocksNetwork(norm=False)
        state = {}
        norms = {name: module for name, module in self.named_modules() if isinstance(module, nn.BatchNorm2d)}
        for name, value in self.state_dict().items():
            if name.rsplit(".", 1)[0] not in norms:
                state[name] = value.clone()
        for name, norm in norms.items():
            stem = name.rsplit(".", 1)[0]
            assert norm.running_var is not None and norm.running_mean is not None
            factor = norm.weight / (norm.running_var + norm.eps).sqrt()
            state[f"{stem}.0.weight"] = state[f"{stem}.0.weight"] * factor.view(-1, 1, 1, 1)
            state[f"{stem}.0.bias"] = (state[f"{stem}.0.bias"] - norm.running_mean) * factor + norm.bias
        plain.load_state_dict(state)
        return plain.eval()
