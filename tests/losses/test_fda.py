"""Difference aligning against a naive loop."""

import math

import pytest
import torch

from diffcap.methods.pcl.losses import difference_aligning_loss


@pytest.mark.parametrize("temperature", [1.0, 0.1])
def test_the_loss_is_the_naive_loops(temperature: float) -> None:
    similarity = torch.rand(6, 7, generator=torch.Generator().manual_seed(0)) * 2 - 1
    expected = []
    for row in similarity.double().tolist():
        terms = [math.exp(value / temperature) for value in row]
        expected.append(-math.log(terms[0] / sum(terms)))
    torch.testing.assert_close(difference_aligning_loss(similarity, temperature), torch.tensor(expected))


@pytest.mark.parametrize("shape", [(4,), (4, 1), (2, 3, 4)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\(pairs, 1 \+ negatives\)"):
        difference_aligning_loss(torch.zeros(shape))
