"""Feature maps to tokens, against a loop over places and against the convolution that other devices run."""

from unittest import mock

import pytest
import torch

from diffcap.models import fast
from diffcap.models.layers import GridEmbedding

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
GRIDS = [(3, 4), (4, 2), (1, 5)]


@torch.no_grad()
@pytest.mark.parametrize("coordinates", [True, False])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_tokens_of_a_grid_are_the_loops(grid: tuple[int, int], coordinates: bool) -> None:
    torch.manual_seed(0)
    (rows, columns), embedding = grid, GridEmbedding(5, grid, 8, coordinates)
    image = torch.randn(2, 5, rows, columns)
    tokens = embedding(image)
    assert tokens.shape == (2, rows * columns, 8) and embedding.projection.in_features == 5 + 2 * coordinates
    for pair in range(2):
        for row in range(rows):
            for column in range(columns):
                features = image[pair, :, row, column].tolist()
                features += [2 * column / columns - 1, 2 * row / rows - 1] if coordinates else []
                place = torch.cat([embedding.columns.weight[column], embedding.rows.weight[row]])
                expected = embedding.projection(torch.tensor(features)) + place
                torch.testing.assert_close(tokens[pair, row * columns + column], expected, **CLOSE)


@pytest.mark.parametrize("coordinates", [True, False])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_both_forms_give_the_same_values_and_gradients(grid: tuple[int, int], coordinates: bool) -> None:
    torch.manual_seed(0)
    embedding = GridEmbedding(5, grid, 8, coordinates)
    maps = torch.randn(3, 5, *grid, requires_grad=True)
    weights = [maps, *embedding.parameters()]
    upstream, found = torch.randn(3, grid[0] * grid[1], 8), []
    for form in (True, False):
        with mock.patch.object(fast, "is_float32_on_cpu", lambda _, form=form: form):
            tokens = embedding(maps)
        assert ("MapsToTokens" in type(tokens.grad_fn).__name__) == form
        found.append([tokens, *torch.autograd.grad(tokens, weights, upstream)])
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_half_precision_takes_the_convolution() -> None:
    embedding, maps = GridEmbedding(5, (2, 3), 8, True), torch.randn(2, 5, 2, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tokens = embedding(maps)
    assert "MapsToTokens" not in type(tokens.grad_fn).__name__
    torch.testing.assert_close(tokens.float(), embedding(maps), atol=0.05, rtol=0.05)
