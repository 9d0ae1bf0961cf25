"""Losses of fine-grained visual classification, FGVC, on pairs of images (IDC-PCL, section 3.4, after TransFG, AAAI 2022)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from diffcap.losses.gather import gather_rows

MARGIN = 0.4  # TransFG and authors' code


def classification_loss(logits: Tensor, classes: Tensor) -> Tensor:
    """Classify each image.

    Args:
        logits: (n, K). classes: (n,) in 0 ... K - 1.

    Returns:
        (n,) losses in nats.

    Example:
        >>> classification_loss(torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([0]))
        tensor([0.2395])
    """
    return F.cross_entropy(logits, classes, reduction="none")


def same_class_loss(logits: Tensor, is_same: Tensor) -> Tensor:
    """Classify whether the two images of a pair have the same class.

    Args:
        logits: (B, 2) of "different classes" and "same class". is_same: (B,) boolean.

    Returns:
        (B,) losses in nats.

    Example:
        >>> same_class_loss(torch.tensor([[0.0, 1.0]]), torch.tensor([True]))
        tensor([0.3133])
    """
    return F.cross_entropy(logits, is_same.long(), reduction="none")


def class_contrastive_loss(images: Tensor, classes: Tensor, margin: float = MARGIN) -> Tensor:
    """Increase the cosine of images of the same class, and lower that of different classes to `margin` (TransFG, eq. 9).

    Each image is compared with all M images of the global batch, itself included: the loss is 1 - cosine where the classes are
    equal and max(cosine - margin, 0) where they differ.

    Args:
        images: (n, D) vectors of this rank. classes: (n,) their classes. margin: TransFG: 0.4.

    Returns:
        (n,) losses: for each image the mean over its M comparisons.

    Raises:
        ValueError: there are not as many classes as images.

    Example:
        >>> images = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.8, 0.6]])
        >>> class_contrastive_loss(images, torch.tensor([0, 0, 1]))
        tensor([0.1333, 0.1333, 0.2667])
    """
    if len(images) != len(classes):
        raise ValueError(f"got {len(images)} images and {len(classes)} classes; give one class per image")
    images = F.normalize(images, dim=-1)
    all_images, _ = gather_rows(images)
    all_classes, _ = gather_rows(classes)
    cosine = images @ all_images.T  # (n, M)
    return torch.where(classes[:, None] == all_classes, 1 - cosine, (cosine - margin).clamp(min=0)).mean(1)
