"""The embedded backbone for `DATASET=blocks`: which objects stand where, for each cell of a coarse grid.

One 128 x 96 image becomes 116 channels on 4 x 6 cells of 24 x 24 pixels (the outer columns reach 8 pixels out of the
picture). Channels are probabilities, not embeddings, so that viewpoint and light, which move an embedding, hardly move
them, and a single Linear (IDC-PCL's) reads the scene off them. An object belongs to the cell that holds the middle of its
visible pixels.

| channels | a cell's value |
|---|---|
| 15 | is an object of this color (8), shape (3), material (2), size (2) here |
| 24, 16, 16 | ... of this color and shape, color and material, color and size (keeps two objects in a cell apart) |
| 12 | ... of this shape, material and size |
| 9 | is an object's middle in this ninth of the cell |
| 8 | share of the cell's pixels that show an object of this color, wherever its middle is |
| 16 | x of the color's object in the picture, times its probability; the same for y |

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
CHANNELS = PROBABILITIES + 2 * COLORS


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
    """(B, 3, 96, 128) images to (B, 116, 4, 6) features.

    Args:
        norm: with batch norm, for training; `fused()` gives the same network without, as it is shipped.
    """

    mean: Tensor
    scale: Tensor

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
        self.head = nn.Conv2d(128, CHANNELS, 1)
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
        """The channels before scaling, (B, 116, 4, 6)."""
        probabilities = logits.sigmoid()
        return torch.cat([probabilities, probabilities[:, :COLORS].repeat(1, 2, 1, 1) * places], 1)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, 96, 128) to (B, 116, 4, 6), zero mean and unit variance a channel."""
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
