"""Masked visual contrastive learning, MVCL (IDC-PCL, section 3.3)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from diffcap.losses.gather import gather_rows
from diffcap.utils.linear import linear


def masked_visual_nce(predicted: Tensor, target: Tensor, negatives: Tensor, temperature: float = 1.0) -> Tensor:
    """Contrast the prediction of each masked feature with its original feature against all others (IDC-PCL, eq. 3).

    All vectors are L2-normalised. A prediction is compared with the original features at all masked positions of the global
    batch (the one at its own position is correct) and with the negatives of all ranks.

    Args:
        predicted: (n, C) predicted features at this rank's masked positions.
        target: (n, C) original features there.
        negatives: (m, C) features at unmasked positions: predicted (authors' code) or original (paper).
        temperature: tau_1 (paper and authors' code: 1).

    Returns:
        (n,) losses in nats, one per masked feature.

    Raises:
        ValueError: `predicted` and `target` have different shapes.

    Example:
        >>> predicted = target = torch.eye(2)
        >>> masked_visual_nce(predicted, target, negatives=torch.tensor([[1.0, 1.0]]))
        tensor([0.7486, 0.7486])
    """
    if predicted.shape != target.shape:
        raise ValueError(
            f"predicted and target must have the same shape, got {tuple(predicted.shape)} and {tuple(target.shape)}"
        )
    predicted, target, negatives = (F.normalize(rows, dim=-1) for rows in (predicted, target, negatives))
    targets, first = gather_rows(target)
    all_negatives, _ = gather_rows(negatives)
    logits = linear(predicted, torch.cat([targets, all_negatives])) / temperature  # (n, all targets + all negatives)
    return F.cross_entropy(logits, torch.arange(len(predicted), device=logits.device) + first, reduction="none")


def mask_patches(
    pairs: int, patches: int, ratio: float = 0.15, generator: torch.Generator | None = None, images: int = 2
) -> Tensor:
    """Choose the patches that MVCL masks: in one image of each pair, which is random, each with probability `ratio`.

    At least one patch per pair is masked (authors' code).

    Args:
        pairs: B. patches: N, of one image. ratio: probability (paper: 0.15). generator: of the random numbers.
        images: 2, or 1 for single images.

    Returns:
        Boolean (B, images * N): the first image's patches, then the second's.

    Example:
        >>> masked = mask_patches(pairs=4, patches=9, ratio=0.0)
        >>> masked.shape, masked.sum(1).tolist()
        (torch.Size([4, 18]), [1, 1, 1, 1])
    """
    masked = torch.rand(pairs, patches, generator=generator) < ratio
    fallback = torch.randint(patches, (pairs, 1), generator=generator)
    masked |= torch.zeros_like(masked).scatter_(1, fallback, True) & ~masked.any(1, keepdim=True)
    if images == 1:
        return masked
    in_second = torch.rand(pairs, 1, generator=generator) < 0.5
    return torch.cat([masked & ~in_second, masked & in_second], 1)
