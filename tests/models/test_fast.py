"""The fast forms against the plain expressions that their docstrings name; `maps_to_tokens` is tested in test_layers."""

import pytest
import torch
import torch.nn.functional as F
from tests.gradients import same_values_and_gradients
from torch import Tensor, nn

from diffcap.models import fast, layers
from diffcap.models.fast import attention_over_segments, attention_with_dropout, dropout, linear_of_concatenation
from diffcap.models.layers import Attention, attention_to_tokens

HEADS, WIDTH = 2, 4
SIZES = [(3, 3, 5, 5), (2, 2, 1, 7), (6, 3, 4, 5), (2, 4, 5, 3), (1, 1, 3, 1)]  # rows of queries, of keys; T, S


def draw(asked: int, seen: int, queries: int, keys: int) -> list[Tensor]:
    """Query, key and value as a projection leaves them: heads beside one another, the three beside one another."""
    draws = torch.Generator().manual_seed(asked + 10 * queries)
    first = torch.randn(asked, queries, 3, HEADS, WIDTH, generator=draws).permute(2, 0, 3, 1, 4)[0]
    second = torch.randn(seen, keys, 3, HEADS, WIDTH, generator=draws).permute(2, 0, 3, 1, 4)[1:]
    return [part.detach().requires_grad_() for part in (first, *second)]


def mask_of(out: Tensor) -> Tensor:
    """Which probabilities a call kept, (B, H, T, S)."""
    return out.grad_fn.saved_tensors[3]  # type: ignore[union-attr]


def plain(query: Tensor, key: Tensor, value: Tensor, kept: Tensor, dropout: float) -> Tensor:
    """As the equation reads, every row repeated."""
    rows = torch.arange(max(len(query), len(key)))
    query, key, value = (part[rows % len(part)].double() for part in (query, key, value))
    probabilities = (query @ key.transpose(-1, -2) / WIDTH**0.5).softmax(-1)
    return (probabilities * kept / (1 - dropout)) @ value


@pytest.mark.parametrize("dropout", [0.0, 0.25, 0.875])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_values_and_gradients_are_the_plain_forms(sizes: tuple[int, int, int, int], dropout: float) -> None:
    torch.manual_seed(0)
    parts = draw(*sizes)
    out = attention_with_dropout(*parts, dropout)
    kept = mask_of(out)
    expected = plain(*parts, kept, dropout)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    upstream = torch.randn(out.shape)
    ours = torch.autograd.grad(out, parts, upstream)
    for part, theirs in zip(ours, torch.autograd.grad(expected, parts, upstream.double())):
        torch.testing.assert_close(part, theirs, atol=1e-5, rtol=1e-5)
    assert out.transpose(1, 2).is_contiguous() and all(part.transpose(1, 2).is_contiguous() for part in ours)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("sizes", [(6, 3, 40, 50), (2, 4, 50, 30)], ids=str)
def test_bfloat16_is_the_plain_form_to_its_precision(sizes: tuple[int, int, int, int], autocast: bool) -> None:
    """Where attention is sharp, too: scores rounded to bfloat16 would be wrong by more than one in a hundred."""
    torch.manual_seed(0)
    sharp = (5, 5, 1)  # of query, key and value
    parts = [(by * part).bfloat16().detach().requires_grad_() for by, part in zip(sharp, draw(*sizes))]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = attention_with_dropout(*parts, 0.25)
    upstream, kept = torch.randn(out.shape).bfloat16(), mask_of(out)
    ours = (out, *torch.autograd.grad(out, parts, upstream))
    exact = [part.detach().double().requires_grad_() for part in parts]
    expected = plain(*exact, kept, 0.25)
    for mine, theirs in zip(ours, (expected, *torch.autograd.grad(expected, exact, upstream.double()))):
        assert mine.dtype == torch.bfloat16
        assert (mine.double() - theirs).norm() < 0.01 * theirs.norm()


@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.5, 0.9])
def test_each_probability_is_dropped_as_often_as_is_said(dropout: float) -> None:
    torch.manual_seed(0)
    parts = draw(4, 4, 150, 150)
    kept = [mask_of(attention_with_dropout(*parts, dropout)).double() for _ in range(2)]
    for mask in kept:
        assert mask.mean().item() == pytest.approx(1 - dropout, abs=0.005)  # 180,000 draws: four deviations or more
        assert (mask.mean((0, 1, 2)) - (1 - dropout)).abs().max() < 0.08  # at every key
    if dropout:
        first, second = (mask.flatten() for mask in kept)
        for one, other in [(first, second), *((first[:-lag], first[lag:]) for lag in (1, 2, 3, 4, 150))]:
            assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1].item()) < 0.012  # neither again nor beside


@pytest.mark.parametrize("rows", [(2, 4), (6, 2), (3, 3)], ids=str)
def test_the_smaller_batch_serves_every_part_of_the_larger_with_and_without_dropout(
    rows: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast, "MIN_PROBABILITIES", 0)
    layer, (query, key, value) = Attention(8, 2, 1e-9), draw(*rows, 3, 5)
    times = torch.arange(max(rows))
    apart = [part[times % len(part)] for part in (query, key, value)]
    expected = layer.eval().attend(apart[0], (apart[1], apart[2]))
    upstream = torch.randn(expected.shape)
    gradients = torch.autograd.grad(expected, (query, key, value), upstream)
    assert layer.train()(torch.zeros(0, 5, 8))[0].shape == (0, 5, 8)  # a rank may have no pairs
    for training in (True, False):
        out = layer.train(training).attend(query, (key, value))
        torch.testing.assert_close(out, expected)
        for ours, theirs in zip(torch.autograd.grad(out, (query, key, value), upstream), gradients):
            torch.testing.assert_close(ours, theirs)


def test_linear_layer_of_a_concatenation() -> None:
    layer = nn.Linear(7, 5)
    first, second = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 3, 3, requires_grad=True)
    inputs = [first, second, *layer.parameters()]
    found = linear_of_concatenation(layer, first, second)
    same_values_and_gradients(found, layer(torch.cat([first, second], -1)), inputs)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("lengths", [(5,), (3, 1, 4)], ids=str)
def test_attention_over_segments_is_that_over_their_concatenation(lengths: tuple[int, ...], masked: bool) -> None:
    count = sum(lengths)
    query, key, value = (torch.randn(2, 3, n, 4, requires_grad=True) for n in (2, count, count))
    mask = torch.ones(2, count, dtype=torch.bool).tril(count - 2) if masked else None
    segments = list(zip(key.split(lengths, 2), value.split(lengths, 2)))
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    same_values_and_gradients(attention_over_segments(query, segments, mask), expected, [query, key, value])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_drops_its_share_scales_the_rest_and_passes_the_same_gradient(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.full((3, fast.MIN_DROPOUT_ELEMENTS), 2.0, dtype=dtype, requires_grad=True)
    for probability in (0.1, 0.5):
        out = dropout(x, probability)
        kept = out != 0
        assert kept.double().mean().item() == pytest.approx(1 - probability, abs=0.005)
        torch.testing.assert_close(out[kept], torch.full_like(out[kept], 2 / (1 - probability)), atol=0.0, rtol=0.01)
        (gradient,) = torch.autograd.grad(out.sum(), x)
        torch.testing.assert_close(gradient, out.detach() / 2)
        assert not torch.equal(kept, dropout(x, probability) != 0)
    assert torch.equal(dropout(x, 0.0), x) and not dropout(x, 1.0).any()
    assert torch.equal(layers.Dropout(0.5).eval()(x), x)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("probability", [0.0, 0.25])
def test_attention_to_tokens_is_attention_to_their_keys_and_values(
    bias: bool, probability: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and all gradients, against the equation with keys, values and the same dropped probabilities, in float64."""
    torch.manual_seed(0)
    pairs, queries, count = 3, 2, 9
    layer = Attention(8, HEADS, probability, bias=bias).double()
    x, tokens = (torch.randn(pairs, size, 8, dtype=torch.double, requires_grad=True) for size in (queries, count))
    factors = (torch.rand(pairs, HEADS, queries, count) >= probability).double() / (1 - probability)
    monkeypatch.setattr(layers, "dropout", lambda x, _: x * factors.view(x.shape))
    ours = attention_to_tokens(layer, layer.project_query(x), tokens)
    query, (key, value) = layer.project_query(x), layer.project_key_value(tokens)
    probabilities = (query @ key.transpose(2, 3) / 4**0.5).softmax(3) * factors
    expected = layer.out(layer.merge_heads(probabilities @ value))
    upstream, inputs = torch.randn_like(expected), [x, tokens, *layer.parameters()]
    torch.testing.assert_close(ours, expected)
    for mine, theirs in zip(
        torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(expected, inputs, upstream)
    ):
        torch.testing.assert_close(mine, theirs)
