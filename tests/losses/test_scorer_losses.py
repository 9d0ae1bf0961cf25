"""Token-wise matching in blocks against naive loops and the dense form, and cross-view contrast against a naive loop."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from diffcap.methods.scorer.losses import MAX_BLOCK, MIN_BLOCK, _block_size, cross_view_nce, token_matching

SIZES = [(3, 4, 3, 4), (2, 5, 4, 3), (4, 2, 3, 7), (1, 1, 1, 1), (5, 3, 1, 2)]  # A, N, B, M
BLOCKS = [1, 7, 13, 40, 100, MIN_BLOCK]  # an image pair has up to 15 similarities: the first ones are smaller than it


def naive(query: Tensor, key: Tensor) -> Tensor:
    """SCORER, eq. 2 and 3, one pair of tokens at a time."""
    table = torch.zeros(len(query), len(key), dtype=torch.float64)
    for a, one in enumerate(query):
        for b, other in enumerate(key):
            forward = sum(max(float(q @ k) for k in other) for q in one) / len(one)
            backward = sum(max(float(q @ k) for q in one) for k in other) / len(other)
            table[a, b] = (forward + backward) / 2
    return table


def dense(query: Tensor, key: Tensor) -> Tensor:
    """All B x B x N x N similarities at once, as the authors have them."""
    similarity = torch.einsum("and,bmd->abnm", query, key)
    return (similarity.amax(3).mean(2) + similarity.amax(2).mean(2)) / 2


def draw(a: int, n: int, b: int, m: int, width: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(a + 10 * n)
    query, key = torch.randn(a, n, width, generator=draws), torch.randn(b, m, width, generator=draws)
    return query, key, torch.randn(a, b, generator=draws)


def gradients(match, query: Tensor, key: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The scores, and the gradients of their sum weighted by `upstream`."""
    query, key = query.clone().requires_grad_(), key.clone().requires_grad_()
    score = match(query, key)
    score.backward(upstream.to(score.dtype))
    assert query.grad is not None and key.grad is not None
    return score.detach(), query.grad, key.grad


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_scores_and_gradients_are_the_dense_forms(sizes: tuple[int, int, int, int], block: int) -> None:
    query, key, upstream = draw(*sizes)
    torch.testing.assert_close(dense(query.double(), key.double()), naive(query.double(), key.double()))
    got = gradients(lambda q, k: token_matching(q, k, block), query, key, upstream)
    expected = gradients(dense, query.double(), key.double(), upstream)
    assert got[0].dtype == torch.float32
    for ours, theirs in zip(got, expected):
        torch.testing.assert_close(ours.double(), theirs, atol=2e-6, rtol=2e-6)


def test_bfloat16_autocast_rounds_tokens_and_similarities_and_no_mean_or_gradient() -> None:
    query, key, upstream = draw(3, 40, 3, 50)
    with torch.autocast("cpu", torch.bfloat16):
        score, to_query, to_key = gradients(token_matching, query, key, upstream)
    assert {part.dtype for part in (score, to_query, to_key)} == {torch.float32}
    similarity = torch.einsum("and,bmd->abnm", query.bfloat16().float(), key.bfloat16().float()).bfloat16().float()
    means = similarity.amax(3).mean(2), similarity.amax(2).mean(2)
    torch.testing.assert_close(score, (means[0] + means[1]) / 2, atol=1e-4, rtol=0)  # a rounding may fall otherwise
    by_query, by_key = similarity.argmax(3), similarity.argmax(2)  # gradients: the winners' own values, unrounded
    half = upstream / 2
    expected = torch.zeros_like(query)
    for a in range(3):
        for b in range(3):
            expected[a] += half[a, b] / 40 * key[b, by_query[a, b]]
            expected[a].index_add_(0, by_key[a, b], half[a, b] / 50 * key[b])
    agree = (to_query - expected).abs().amax(2) < 1e-6
    assert agree.float().mean() > 0.9  # equals, after rounding, may be won by another token


class Largest(TorchDispatchMode):
    """The largest tensor that any operation gave."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for part in out if isinstance(out, tuple | list) else (out,):
            if isinstance(part, Tensor):
                self.size = max(self.size, part.numel())
        return out


@pytest.mark.parametrize(("block", "held"), [(800, 800), (1600, 1600), (14_400, 14_400), (10**6, 14_400)])
def test_no_more_similarities_than_a_block_are_held(block: int, held: int) -> None:
    query, key, upstream = draw(6, 20, 6, 20, width=2)
    with Largest() as largest:
        gradients(lambda q, k: token_matching(q, k, block), query, key, upstream)
    assert held == largest.size


def test_the_block_is_an_eighth_of_a_gpus_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gigabyte, gpu = 1 << 30, torch.device("cuda", 1)
    free = {"total": 0, "cached": 0}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free["total"], 80 * gigabyte))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: free["cached"] + gigabyte)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: gigabyte)
    for total, cached, expected in (
        (16 * gigabyte, 0, gigabyte // 2),  # 2 GB of similarities, 4 bytes each
        (9 * gigabyte, 7 * gigabyte, gigabyte // 2),
        (15 * gigabyte, 0, gigabyte // 4),  # rounded down to a power of two
        (0, 0, MIN_BLOCK),
        (80 * gigabyte, 0, MAX_BLOCK),
    ):
        free.update(total=total, cached=cached)
        assert _block_size(gpu) == expected
    assert _block_size(torch.device("cpu")) == MIN_BLOCK
    assert 128**2 * 196**2 / _block_size(gpu) < 10  # SCORER's batch: few tiles


def naive_contrast(similarity: list[list[float]]) -> list[float]:
    """SCORER, eq. 4, one row at a time."""
    return [-math.log(math.exp(row[own]) / sum(map(math.exp, row))) for own, row in enumerate(similarity)]


@pytest.mark.parametrize("columns", [5, 8])
def test_the_loss_is_the_naive_loops(columns: int) -> None:
    similarity = 4 * torch.randn(5, columns, generator=torch.Generator().manual_seed(0))
    losses = cross_view_nce(similarity)
    assert losses.shape == (5,)
    torch.testing.assert_close(losses, torch.tensor(naive_contrast(similarity.tolist())), atol=1e-5, rtol=1e-5)
