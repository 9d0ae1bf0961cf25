"""Feature maps to tokens: the input layer of SCORER and DIRL.

Letters: B images, C feature channels, N positions of a map, D width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffcap.models.fast import maps_to_tokens


class GridEmbedding(nn.Module):
    """A linear layer at every position, plus a learned position embedding: half of it for the column, half for the row.

    Args:
        channels: C. grid: rows and columns. width: D.
        coordinates: append two channels to the features, x `2 j / columns - 1` and y `2 i / rows - 1` (methods of the
            RobustChangeCaptioning code base).
    """

    coordinate_channels: Tensor

    def __init__(self, channels: int, grid: tuple[int, int], width: int, coordinates: bool) -> None:
        super().__init__()
        rows, columns = grid
        self.grid, self.channels = (rows, columns), channels
        self.projection = nn.Linear(channels + 2 * coordinates, width)
        self.columns, self.rows = nn.Embedding(columns, width // 2), nn.Embedding(rows, width // 2)
        y, x = torch.meshgrid(2 * torch.arange(rows) / rows - 1, 2 * torch.arange(columns) / columns - 1, indexing="ij")
        self.register_buffer("coordinate_channels", torch.stack([x, y], -1).view(-1, 2), persistent=False)

    def forward(self, maps: Tensor) -> Tensor:
        """(B, C, rows, columns) to (B, rows * columns, D), row by row."""
        if tuple(maps.shape[1:]) != (self.channels, *self.grid):
            raise ValueError(
                f"features are {tuple(maps.shape[1:])}, the model was built for {(self.channels, *self.grid)}"
            )
        rows, columns = self.grid
        position = torch.cat(
            [self.columns.weight.expand(rows, -1, -1), self.rows.weight[:, None].expand(-1, columns, -1)], -1
        ).flatten(0, 1)  # (N, D)
        weight = self.projection.weight
        if weight.shape[1] > self.channels:  # coordinates are the same in every image: projected once, not appended
            position = position + F.linear(self.coordinate_channels, weight[:, self.channels :])
        return maps_to_tokens(maps, weight[:, : self.channels], position + self.projection.bias)
