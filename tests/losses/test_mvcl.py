"""Masked visual contrastive learning against naive loops."""

import math

import pytest
import torch
from torch import Tensor

from diffcap.methods.pcl.losses import mask_patches, masked_visual_nce


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


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"same shape, got \(5, 8\) and \(4, 8\)"):
        masked_visual_nce(torch.randn(5, 8), torch.randn(4, 8), torch.randn(2, 8))


def test_patches_of_one_image_at_least_one_at_the_ratio() -> None:
    hide = mask_patches(20_000, 49, 0.15, torch.Generator().manual_seed(0))
    assert hide.shape == (20_000, 98) and hide.dtype == torch.bool
    first, second = hide[:, :49].any(1), hide[:, 49:].any(1)
    assert (first ^ second).all()  # never both, never none
    assert second.float().mean().item() == pytest.approx(0.5, abs=0.015)
    assert hide.sum(1).float().mean().item() == pytest.approx(49 * 0.15, abs=0.1)
    per_patch = (hide[:, :49] | hide[:, 49:]).float().mean(0)
    assert per_patch.min() > 0.13 and per_patch.max() < 0.17


def test_at_ratio_zero_one_patch_of_any_place() -> None:
    hide = mask_patches(4000, 6, 0.0, torch.Generator().manual_seed(0))
    assert (hide.sum(1) == 1).all()
    assert hide.float().mean(0).min() > 0.06  # 1 / 12 each


def test_patch_draws_come_from_the_generator_alone() -> None:
    a, b, c = (mask_patches(9, 24, 0.2, torch.Generator().manual_seed(seed)) for seed in (5, 5, 6))
    assert torch.equal(a, b) and not torch.equal(a, c)
