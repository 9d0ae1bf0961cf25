"""Losses of IDC-PCL against naive loops; test_gather.py has two ranks."""

import math

import pytest
import torch
from torch import Tensor

from diffcap.methods.pcl.losses import class_contrastive_loss, difference_aligning_loss, mask_patches, masked_visual_nce


def naive(predicted: Tensor, target: Tensor, negatives: Tensor, temperature: float) -> list[float]:
    """IDC-PCL, eq. 3, one feature at a time."""

    def cosine(a: Tensor, b: Tensor) -> float:
        return float(a @ b) / (float(a.norm()) * float(b.norm()))

    losses = []
    for number, row in enumerate(predicted):
        own = math.exp(cosine(row, target[number]) / temperature)
        others = [math.exp(cosine(row, t) / temperature) for t in target]
        others += [math.exp(cosine(row, n) / temperature) for n in negatives]
        losses.append(-math.log(own / sum(others)))
    return losses


@pytest.mark.parametrize("temperature", [1.0, 0.07])
@pytest.mark.parametrize("negatives", [0, 13])
def test_the_loss_is_the_naive_loops(temperature: float, negatives: int) -> None:
    draws = torch.Generator().manual_seed(0)
    predicted, target = torch.randn(5, 8, generator=draws), 3 * torch.randn(5, 8, generator=draws)
    others = 0.1 * torch.randn(negatives, 8, generator=draws)
    losses = masked_visual_nce(predicted, target, others, temperature)
    expected = naive(predicted.double(), target.double(), others.double(), temperature)
    torch.testing.assert_close(losses, torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_patches_of_one_image_at_least_one_at_the_ratio() -> None:
    hide = mask_patches(20_000, 49, 0.15, torch.Generator().manual_seed(0))
    assert hide.shape == (20_000, 98) and hide.dtype == torch.bool
    first, second = hide[:, :49].any(1), hide[:, 49:].any(1)
    assert (first ^ second).all()  # never both, never none
    assert second.float().mean().item() == pytest.approx(0.5, abs=0.015)
    assert hide.sum(1).float().mean().item() == pytest.approx(49 * 0.15, abs=0.1)
    per_patch = (hide[:, :49] | hide[:, 49:]).float().mean(0)
    assert per_patch.min() > 0.13 and per_patch.max() < 0.17


def test_patch_draws_come_from_the_generator_alone() -> None:
    a, b, c = (mask_patches(9, 24, 0.2, torch.Generator().manual_seed(seed)) for seed in (5, 5, 6))
    assert torch.equal(a, b) and not torch.equal(a, c)


@pytest.mark.parametrize("temperature", [1.0, 0.1])
def test_difference_aligning_is_the_naive_loops(temperature: float) -> None:
    similarity = torch.rand(6, 7, generator=torch.Generator().manual_seed(0)) * 2 - 1
    expected = []
    for row in similarity.double().tolist():
        terms = [math.exp(value / temperature) for value in row]
        expected.append(-math.log(terms[0] / sum(terms)))
    torch.testing.assert_close(difference_aligning_loss(similarity, temperature), torch.tensor(expected))


@pytest.mark.parametrize("margin", [0.4, 0.1])
def test_class_contrast(margin: float) -> None:
    torch.manual_seed(0)
    images, classes = torch.randn(7, 3), torch.tensor([0, 1, 0, 2, 2, 2, 1])
    expected = torch.zeros(7)
    pushed = 0
    for i in range(7):
        for j in range(7):
            a, b = images[i], images[j]
            cosine = sum(x * y for x, y in zip(a, b)) / (sum(x * x for x in a) * sum(x * x for x in b)).sqrt()
            if classes[i] == classes[j]:
                expected[i] += (1 - cosine) / 7
            elif cosine > margin:
                expected[i] += (cosine - margin) / 7
                pushed += 1
    assert 0 < pushed < 30  # both sides of the margin
    torch.testing.assert_close(class_contrastive_loss(images, classes, margin), expected)


def test_images_alike_by_class_and_opposite_otherwise_cost_nothing() -> None:
    images = torch.tensor([[1.0, 0.0], [2.0, 0.0], [-1.0, 0.0]])
    torch.testing.assert_close(class_contrastive_loss(images, torch.tensor([3, 3, 5])), torch.zeros(3))
    wrong = class_contrastive_loss(images, torch.tensor([3, 5, 3]))
    torch.testing.assert_close(wrong, torch.tensor([0.6 + 2, 0.6, 2.0]) / 3)
