"""The layers against their formulas."""

import math
from unittest import mock

import pytest
import torch

from diffcap.models import fast
from diffcap.models.layers import Attention, GridEmbedding, PreNormStack, UnbiasedLayerNorm, sinusoidal_positions


@pytest.mark.parametrize("eps", [1e-6, 1e-12])
def test_layer_norm_is_the_annotated_transformers(eps: float) -> None:
    torch.manual_seed(0)
    norm = UnbiasedLayerNorm(6, eps)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    x = 3 * torch.randn(4, 5, 6) + 1
    for row, got in zip(x.view(-1, 6).double(), norm(x).view(-1, 6)):
        mean = sum(row) / 6
        std = math.sqrt(sum((value - mean) ** 2 for value in row) / 5)  # D - 1 below the line
        expected = norm.weight * ((row - mean) / (std + eps)).float() + norm.bias
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("has_frequency_per_channel", [False, True])
@pytest.mark.parametrize("width", [16, 7])
def test_positions_are_the_loops(width: int, has_frequency_per_channel: bool) -> None:
    table = sinusoidal_positions(40, width, has_frequency_per_channel)
    assert table.shape == (40, width) and table.dtype == torch.float32
    for position in range(40):
        for channel in range(width):
            exponent = 2 * channel / width if has_frequency_per_channel else (channel - channel % 2) / width
            angle = position * math.exp(-exponent * math.log(10000))
            expected = math.sin(angle) if channel % 2 == 0 else math.cos(angle)
            assert table[position, channel].item() == pytest.approx(expected, abs=1e-6)


def test_attention_is_the_loops() -> None:
    torch.manual_seed(0)
    attention, width, heads, length = Attention(8, 2).eval(), 8, 2, 3
    x = torch.randn(2, length, width)
    mask = torch.tensor([[True, False, False], [True, True, False], [True, True, True]])
    got, (keys, values) = attention(x, mask)
    assert keys.shape == values.shape == (2, heads, length, width // heads)
    for pair in range(2):
        query, key, value = (part.view(length, heads, 4) for part in attention.qkv(x[pair]).split(width, 1))
        for position in range(length):
            mixed = []
            for head in range(heads):
                seen = [other for other in range(length) if mask[position, other]]
                scores = torch.stack([query[position, head] @ key[other, head] / 2 for other in seen]).softmax(0)
                mixed.append(sum(score * value[other, head] for score, other in zip(scores, seen)))
            torch.testing.assert_close(got[pair, position], attention.out(torch.cat(mixed)), atol=1e-5, rtol=1e-5)


def test_a_stack_normalises_its_input_and_not_its_output() -> None:
    torch.manual_seed(0)
    stack = PreNormStack(2, 8, 2, 16, 0.0).eval()
    x = 5 * torch.randn(2, 4, 8)
    y = stack.norm(x)
    for block in stack.layers:
        y = y + block.attention(block.attention_norm(y))[0]
        y = y + block.ffn[3](block.ffn[0](block.ffn_norm(y)).relu())
    torch.testing.assert_close(stack(x)[0], y)
    assert torch.equal(PreNormStack(0, 8, 2, 16, 0.0)(x)[0], x)


@torch.no_grad()
@pytest.mark.parametrize("parts", [(), (5,), (5, 1), (3, 2, 4)])
@pytest.mark.parametrize("rows", [slice(None), slice(1, 3), slice(0)])
@pytest.mark.parametrize("layers", [0, 1, 3])
def test_a_stack_gives_the_wanted_rows_after_a_past_in_any_parts(
    parts: tuple[int, ...], rows: slice, layers: int
) -> None:
    torch.manual_seed(0)
    stack = PreNormStack(layers, 8, 2, 16, 0.0).eval()
    x, past = torch.randn(2, sum(parts) + 4, 8), []
    mask = torch.ones(len(x[0]), len(x[0]), dtype=torch.bool).tril()
    whole, seen = stack(x, mask)
    for key, value in seen:
        places = [*parts, 4]
        past.append(list(zip(key.split(places, 2), value.split(places, 2)))[:-1])
    output, own = stack(x[:, -4:], mask[-4:], past, rows)
    torch.testing.assert_close(output, whole[:, -4:][:, rows])
    for ours, theirs in zip(own, seen, strict=True):
        torch.testing.assert_close(ours[0], theirs[0][:, :, -4:])
        torch.testing.assert_close(ours[1], theirs[1][:, :, -4:])


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
