"""Feature maps to tokens: the front of SCORER and DIRL.

Letters: B images, C feature channels, N places of a map, D width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from diffcap.models.attention import is_plain


class GridEmbedding(nn.Module):
    """A linear layer at every place, and a learned position of a column and a row half each.

    Args:
        channels: C. grid: rows and columns. width: D.
        coordinates: two more channels before the layer, x `2 j / columns - 1` and y `2 i / rows - 1` (methods of the
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
        places = torch.cat(
            [self.columns.weight.expand(rows, -1, -1), self.rows.weight[:, None].expand(-1, columns, -1)], -1
        ).flatten(0, 1)  # (N, D)
        weight = self.projection.weight
        if weight.shape[1] > self.channels:  # the same at that place in every image: no need to append them to the maps
            places = places + F.linear(self.coordinate_channels, weight[:, self.channels :])
        places, weight = places + self.projection.bias, weight[:, : self.channels]
        if is_plain(maps) and is_plain(weight):
            return _MapsToTokens.apply(maps.flatten(2), weight, places)
        # A linear layer as a convolution: the maps need not be copied channels last, nor the copy kept for the gradient.
        tokens = F.conv2d(maps, weight[..., None, None])  # (B, D, rows, columns)
        return places + tokens.flatten(2).transpose(1, 2)  # in this order the sum is laid out as `places`


class _MapsToTokens(torch.autograd.Function):
    """`places + maps[b]^T weight^T` image by image: neither pass makes anything of all maps' size but the tokens."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, weight: Tensor, places: Tensor) -> Tensor:
        tokens = maps.new_empty(len(maps), *places.shape)
        for image, out in zip(maps, tokens):
            torch.addmm(places, image.T, weight.T, out=out)
        ctx.save_for_backward(maps, weight)
        return tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, tokens: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        maps, weight = ctx.saved_tensors
        to_maps = torch.empty_like(maps) if ctx.needs_input_grad[0] else None
        to_weight = torch.zeros(weight.shape) if ctx.needs_input_grad[1] else None
        for number, (image, token) in enumerate(zip(maps, tokens)):
            if to_weight is not None:
                to_weight.addmm_(token.T, image.T)
            if to_maps is not None:
                torch.mm(weight.T, token.T, out=to_maps[number])
        return to_maps, to_weight, tokens.sum(0)
