"""Losses of fine-grained visual classification on pairs of images (IDC-PCL, section 3.4, after TransFG, AAAI 2022)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from diffcap.losses.gather import gather_rows

MARGIN = 0.4  # TransFG and authors' code


def classification(logits: Tensor, classes: Tensor) -> Tensor:
    """Tell the class of each image.

    Args:
        logits: (n, K). classes: (n,) in 0 ... K - 1.

    Returns:
        (n,) losses in nats.
    """
    return F.cross_entropy(logits, classes, reduction="none")


def matching(logits: Tensor, same: Tensor) -> Tensor:
    """Tell whether the two images of a pair are of one class.

    Args:
        logits: (B, 2) scores of "two classes" and "one class". same: (B,) true for one class.

    Returns:
        (B,) losses in nats.
    """
    return F.cross_entropy(logits, same.long(), reduction="none")


def class_contrast(images: Tensor, classes: Tensor, margin: float = MARGIN) -> Tensor:
    """Draw images of one class together, and push those of two apart until their cosine is `margin` (TransFG, eq. 9).

    Every image of the global batch, M in all, is compared with every one, itself included: 1 - cosine where the classes
    are equal, max(cosine - margin, 0) where they differ.

    Args:
        images: (n, D) this rank's. classes: (n,) theirs. margin: TransFG: 0.4.

    Returns:
        (n,) losses: of each image the mean over its M comparisons, so that their mean is the sum over all / M ** 2.
    """
    if len(images) != len(classes):
        raise ValueError(f"{len(images)} images have {len(classes)} classes")
    images = F.normalize(images, dim=-1)
    others, _ = gather_rows(images)
    theirs, _ = gather_rows(classes)
    cosine = images @ others.T  # (n, M)
    return torch.where(classes[:, None] == theirs, 1 - cosine, (cosine - margin).clamp(min=0)).mean(1)
