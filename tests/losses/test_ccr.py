"""Cross-modal contrastive regularisation, both forms, against naive loops."""

import math

import pytest
import torch
from torch import Tensor

from diffcap.methods.dirl import Form, cross_modal_contrastive_loss


def contrast(table: list[list[float]]) -> list[float]:
    """Cross-entropy of each row at its own column."""
    return [-math.log(math.exp(row[own]) / sum(map(math.exp, row))) for own, row in enumerate(table)]


def naive(text: Tensor, vision: Tensor, temperature: float, form: Form) -> list[float]:
    pairs = range(len(text))
    g = [[sum(x * y for x, y in zip(t, v)) / temperature for v in vision.tolist()] for t in text.tolist()]
    if form == "symmetrised":
        return contrast([[(g[i][j] + g[j][i]) / 2 for j in pairs] for i in pairs])
    there, back = contrast(g), contrast([[g[j][i] for j in pairs] for i in pairs])
    return [(one + other) / 2 for one, other in zip(there, back)]


def draw() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    return torch.randn(5, 3, generator=draws), torch.randn(5, 3, generator=draws)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("form", ["symmetrised", "two_way"])
def test_the_loss_is_the_naive_loops(form: Form, temperature: float) -> None:
    text, vision = draw()
    expected = torch.tensor(naive(text, vision, temperature, form))
    torch.testing.assert_close(
        cross_modal_contrastive_loss(text, vision, temperature, form), expected, atol=1e-5, rtol=1e-5
    )


def test_the_forms_differ_and_the_authors_is_the_default() -> None:
    text, vision = draw()
    forms = [cross_modal_contrastive_loss(text, vision, 0.5, form) for form in ("symmetrised", "two_way")]
    assert not torch.allclose(*forms, atol=0.05)
    assert torch.equal(cross_modal_contrastive_loss(text, vision), forms[0])


def test_gradients_reach_both_sides() -> None:
    text, vision = (part.requires_grad_() for part in draw())
    cross_modal_contrastive_loss(text, vision).sum().backward()
    logits = (text @ vision.T + vision @ text.T).detach()  # the mean of G and its transpose, temperature 0.5
    away = logits.softmax(1) - torch.eye(5)
    torch.testing.assert_close(text.grad, (away + away.T) @ vision.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(vision.grad, (away + away.T) @ text.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", ["symmetrised", "two_way"])
def test_one_pair_has_nothing_to_contrast_with(form: Form) -> None:
    assert cross_modal_contrastive_loss(
        torch.tensor([[3.0, 1.0]]), torch.tensor([[-2.0, 5.0]]), form=form
    ).tolist() == [0.0]


@pytest.mark.parametrize("form", ["symmetrised", "two_way"])
def test_products_of_hundreds_do_not_overflow(form: Form) -> None:
    text, vision = (20 * part for part in draw())
    g = 2 * text.double() @ vision.double().T
    rows = [(g + g.T) / 2] if form == "symmetrised" else [g, g.T]
    expected = sum(row.logsumexp(1) - row.diagonal() for row in rows) / len(rows)
    losses = cross_modal_contrastive_loss(text, vision, form=form)
    assert losses.max() > 100 and losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), expected, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("form", ["symmetrised", "two_way"])
def test_mixed_precision_does_not_round_the_products(form: Form) -> None:
    text, vision = (20 * part for part in draw())
    expected = cross_modal_contrastive_loss(text, vision, form=form)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(cross_modal_contrastive_loss(text, vision, form=form), expected)
