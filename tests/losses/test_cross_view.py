"""Cross-view contrast against a naive loop."""

import math

import pytest
import torch

from diffcap.methods.scorer.losses import cross_view_nce


def naive(similarity: list[list[float]]) -> list[float]:
    """SCORER, eq. 4, one row at a time."""
    return [-math.log(math.exp(row[own]) / sum(map(math.exp, row))) for own, row in enumerate(similarity)]


@pytest.mark.parametrize("columns", [5, 8])
def test_the_loss_is_the_naive_loops(columns: int) -> None:
    similarity = 4 * torch.randn(5, columns, generator=torch.Generator().manual_seed(0))
    losses = cross_view_nce(similarity)
    assert losses.shape == (5,)
    torch.testing.assert_close(losses, torch.tensor(naive(similarity.tolist())), atol=1e-5, rtol=1e-5)


def test_rows_alone_are_contrasted() -> None:
    similarity = torch.tensor([[2.0, 0.0], [9.0, 1.0]])
    assert cross_view_nce(similarity).tolist() == pytest.approx([math.log1p(math.exp(-2)), math.log1p(math.exp(8))])


def test_one_pair_has_nothing_to_contrast_with() -> None:
    assert cross_view_nce(torch.tensor([[-7.5]])).tolist() == [0.0]


def test_half_precision_is_contrasted_in_single() -> None:
    similarity = (100 * torch.randn(4, 4, generator=torch.Generator().manual_seed(0))).bfloat16()
    losses = cross_view_nce(similarity)
    assert losses.dtype == torch.float32
    assert torch.equal(losses, cross_view_nce(similarity.float()))


def test_a_row_without_a_column_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least as many columns as rows, got \(3, 2\)"):
        cross_view_nce(torch.zeros(3, 2))
