"""Channel decorrelation against naive loops."""

import math

import pytest
import torch
from torch import Tensor

from diffcap.methods.dirl import cross_correlation, decorrelation_terms


def naive(before: Tensor, after: Tensor) -> list[list[float]]:
    """DIRL, eq. 3, in the authors' form: one channel with one other at a time, over all rows."""

    def standardised(column: list[float]) -> list[float]:
        mean = sum(column) / len(column)
        std = math.sqrt(sum((value - mean) ** 2 for value in column) / (len(column) - 1))
        return [(value - mean) / std for value in column]

    first, second = ([standardised(column) for column in part.T.tolist()] for part in (before, after))
    return [[sum(x * y for x, y in zip(one, other)) / len(before) for other in second] for one in first]


def draw(rows: int = 7, channels: int = 4) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    before = 3 * torch.randn(rows, channels, generator=draws) + 5
    return before, before.flip(1) + torch.randn(rows, channels, generator=draws)


def test_the_correlation_is_the_naive_loops() -> None:
    before, after = draw()
    correlation = cross_correlation(before, after)
    torch.testing.assert_close(correlation, torch.tensor(naive(before, after)), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(correlation, correlation.T, atol=0.1)  # rows are before's channels


def test_both_sums_are_the_naive_loops() -> None:
    correlation = cross_correlation(*draw())
    table = correlation.tolist()
    diagonal = sum((table[i][i] - 1) ** 2 for i in range(4))
    off_diagonal = sum(table[i][j] ** 2 for i in range(4) for j in range(4) if i != j)
    assert [part.item() for part in decorrelation_terms(correlation)] == pytest.approx(
        [diagonal, off_diagonal], rel=1e-5
    )


def test_gradients_are_those_of_the_plain_form() -> None:
    grads = []
    for form, kind in ((cross_correlation, torch.float32), (plain, torch.float64)):
        views = [part.to(kind).requires_grad_() for part in draw()]
        diagonal, off_diagonal = decorrelation_terms(form(*views))
        (diagonal + 0.3 * off_diagonal).backward()
        grads.append([view.grad.double() for view in views])
    for ours, theirs in zip(*grads):
        assert theirs.abs().max() > 0.01
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def plain(before: Tensor, after: Tensor) -> Tensor:
    first, second = ((part - part.mean(0)) / part.std(0) for part in (before, after))
    return first.T @ second / len(before)


def test_equal_views_correlate_as_the_unbiased_deviation_lets_them() -> None:
    before, _ = draw()
    assert cross_correlation(before, before).diagonal().tolist() == pytest.approx([6 / 7] * 4, rel=1e-5)
    torch.testing.assert_close(cross_correlation(before, -20 * before + 3), -cross_correlation(before, before))


def test_a_constant_channel_is_not_a_number() -> None:
    before, after = draw()
    before[:, 1], after[:, 2] = 2.0, -1.0
    unknown = cross_correlation(before, after).isnan()
    assert unknown.tolist() == [[row == 1 or column == 2 for column in range(4)] for row in range(4)]


def test_mixed_precision_does_not_round_the_correlation() -> None:
    before, after = draw(rows=50)
    expected = plain(before, after)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(cross_correlation(before, after), expected, atol=1e-5, rtol=1e-5)


def test_views_that_differ_in_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must have the same shape, got \(5, 4\) and \(6, 4\)"):
        cross_correlation(torch.zeros(5, 4), torch.zeros(6, 4))
