"""Channel decorrelation and cross-modal contrastive regularisation against naive loops."""

import math

import pytest
import torch
from tests.losses.test_scorer_losses import naive_contrast
from torch import Tensor

from diffcap.methods.dirl import CCRForm, cross_correlation, cross_modal_contrastive_loss, decorrelation_terms


def naive_correlation(before: Tensor, after: Tensor) -> list[list[float]]:
    """DIRL, eq. 3, in the authors' form: one channel with one other at a time, over all rows."""

    def standardised(column: list[float]) -> list[float]:
        mean = sum(column) / len(column)
        std = math.sqrt(sum((value - mean) ** 2 for value in column) / (len(column) - 1))
        return [(value - mean) / std for value in column]

    first, second = ([standardised(column) for column in part.T.tolist()] for part in (before, after))
    return [[sum(x * y for x, y in zip(one, other)) / len(before) for other in second] for one in first]


def draw_views(rows: int = 7, channels: int = 4) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    before = 3 * torch.randn(rows, channels, generator=draws) + 5
    return before, before.flip(1) + torch.randn(rows, channels, generator=draws)


def test_the_correlation_is_the_naive_loops() -> None:
    before, after = draw_views()
    correlation = cross_correlation(before, after)
    torch.testing.assert_close(correlation, torch.tensor(naive_correlation(before, after)), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(correlation, correlation.T, atol=0.1)  # rows are before's channels


def test_both_sums_are_the_naive_loops() -> None:
    correlation = cross_correlation(*draw_views())
    table = correlation.tolist()
    diagonal = sum((table[i][i] - 1) ** 2 for i in range(4))
    off_diagonal = sum(table[i][j] ** 2 for i in range(4) for j in range(4) if i != j)
    terms = [term.item() for term in decorrelation_terms(correlation)]
    assert terms == pytest.approx([diagonal, off_diagonal], rel=1e-5)


def test_gradients_are_those_of_the_plain_form() -> None:
    grads = []
    for form, kind in ((cross_correlation, torch.float32), (plain, torch.float64)):
        views = [part.to(kind).requires_grad_() for part in draw_views()]
        diagonal, off_diagonal = decorrelation_terms(form(*views))
        (diagonal + 0.3 * off_diagonal).backward()
        grads.append([view.grad.double() for view in views])
    for ours, theirs in zip(*grads):
        assert theirs.abs().max() > 0.01
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def plain(before: Tensor, after: Tensor) -> Tensor:
    first, second = ((part - part.mean(0)) / part.std(0) for part in (before, after))
    return first.T @ second / len(before)


def test_a_constant_channel_is_not_a_number() -> None:
    before, after = draw_views()
    before[:, 1], after[:, 2] = 2.0, -1.0
    unknown = cross_correlation(before, after).isnan()
    assert unknown.tolist() == [[row == 1 or column == 2 for column in range(4)] for row in range(4)]


def test_mixed_precision_does_not_round_the_correlation() -> None:
    before, after = draw_views(rows=50)
    expected = plain(before, after)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(cross_correlation(before, after), expected, atol=1e-5, rtol=1e-5)


def naive(text: Tensor, vision: Tensor, temperature: float, form: CCRForm) -> list[float]:
    pairs = range(len(text))
    g = [[sum(x * y for x, y in zip(t, v)) / temperature for v in vision.tolist()] for t in text.tolist()]
    if form == "symmetrised":
        return naive_contrast([[(g[i][j] + g[j][i]) / 2 for j in pairs] for i in pairs])
    there, back = naive_contrast(g), naive_contrast([[g[j][i] for j in pairs] for i in pairs])
    return [(one + other) / 2 for one, other in zip(there, back)]


def draw() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    return torch.randn(5, 3, generator=draws), torch.randn(5, 3, generator=draws)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("form", ["symmetrised", "two_way"])
def test_the_loss_is_the_naive_loops(form: CCRForm, temperature: float) -> None:
    text, vision = draw()
    expected = torch.tensor(naive(text, vision, temperature, form))
    losses = cross_modal_contrastive_loss(text, vision, temperature, form)
    torch.testing.assert_close(losses, expected, atol=1e-5, rtol=1e-5)


def test_gradients_reach_both_sides() -> None:
    text, vision = (part.requires_grad_() for part in draw())
    cross_modal_contrastive_loss(text, vision).sum().backward()
    logits = (text @ vision.T + vision @ text.T).detach()  # the mean of G and its transpose, temperature 0.5
    away = logits.softmax(1) - torch.eye(5)
    torch.testing.assert_close(text.grad, (away + away.T) @ vision.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(vision.grad, (away + away.T) @ text.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", ["symmetrised", "two_way"])
def test_products_of_hundreds_neither_overflow_nor_are_rounded(form: CCRForm) -> None:
    text, vision = (20 * part for part in draw())
    g = 2 * text.double() @ vision.double().T
    rows = [(g + g.T) / 2] if form == "symmetrised" else [g, g.T]
    expected = sum(row.logsumexp(1) - row.diagonal() for row in rows) / len(rows)
    losses = cross_modal_contrastive_loss(text, vision, form=form)
    assert losses.max() > 100 and losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), expected, atol=1e-3, rtol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(cross_modal_contrastive_loss(text, vision, form=form), losses)
