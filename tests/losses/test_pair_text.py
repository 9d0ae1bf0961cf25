"""The contrast of pairs and sentences against a naive loop; test_gather.py has two ranks."""

import math

import pytest
import torch
from torch import Tensor

from diffcap.losses.pair_text import pair_text_contrastive_loss


def draw(rows: int = 5, width: int = 3) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    return 2 * torch.randn(rows, width, generator=draws), 3 * torch.randn(rows, width, generator=draws)


def naive(text: Tensor, pair: Tensor, scale: float) -> list[float]:
    def cosine(one: list[float], other: list[float]) -> float:
        product = sum(x * y for x, y in zip(one, other))
        return product / math.sqrt(sum(x * x for x in one)) / math.sqrt(sum(y * y for y in other))

    texts, pairs = text.tolist(), pair.tolist()
    losses = []
    for own, (sentence, images) in enumerate(zip(texts, pairs)):
        row = [scale * cosine(sentence, other) for other in pairs]
        column = [scale * cosine(other, images) for other in texts]
        each = [-math.log(math.exp(part[own]) / sum(map(math.exp, part))) for part in (row, column)]
        losses.append(sum(each) / 2)
    return losses


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_the_loss_is_the_naive_loops(scale: float) -> None:
    text, pair = draw()
    found = pair_text_contrastive_loss(text, pair, torch.tensor(scale))
    torch.testing.assert_close(found, torch.tensor(naive(text, pair, scale)), atol=1e-5, rtol=1e-5)
