"""Losses of fine-grained visual classification, FGVC, on pairs of images (IDC-PCL, section 3.4, after TransFG, AAAI 2022).

Classes are image categories such as bird species. Letters: K classes, B pairs, n images of this process (2 B: all first images,
then all second images), M images of all processes, D width of a feature vector.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from diffcap.losses.gather import gather_rows

MARGIN = 0.4  # TransFG, and the authors' code of IDC-PCL


def classification_loss(logits: Tensor, classes: Tensor) -> Tensor:
    """Cross-entropy of the class of each image.

    Args:
        logits: (n, K).
        classes: (n,) in 0 ... K - 1.

    Returns:
        (n,) losses in nats.

    Example:
        >>> classification_loss(torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([0]))
        tensor([0.2395])
    """
    return F.cross_entropy(logits, classes, reduction="none")


def same_class_loss(logits: Tensor, is_same: Tensor) -> Tensor:
    """Cross-entropy of whether the two images of each pair have the same class.

    Args:
        logits: (B, 2) of "different classes" and "same class".
        is_same: (B,) boolean.

    Returns:
        (B,) losses in nats.

    Example:
        >>> same_class_loss(torch.tensor([[0.0, 1.0]]), torch.tensor([True]))
        tensor([0.3133])
    """
    return F.cross_entropy(logits, is_same.long(), reduction="none")


def class_contrastive_loss(features: Tensor, classes: Tensor, margin: float = MARGIN) -> Tensor:
    """Contrastive loss between images of the same class and of different classes (TransFG, eq. 9).

    Each image is compared with all M images of the global batch, itself included. The loss of a comparison is
    1 - cosine similarity where the classes are equal, and max(cosine similarity - margin, 0) where they differ.

    Args:
        features: (n, D) feature vectors of this process's images.
        classes: (n,) their classes.
        margin: cosine similarity above which two images of different classes have a loss.

    Returns:
        (n,) losses: for each image the mean over its M comparisons.

    Raises:
        ValueError: there are not as many classes as feature vectors.

    Example:
        >>> features = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.8, 0.6]])
        >>> class_contrastive_loss(features, torch.tensor([0, 0, 1]))
        tensor([0.1333, 0.1333, 0.2667])
    """
    if len(features) != len(classes):
        raise ValueError(f"got {len(features)} feature vectors and {len(classes)} classes; give one class per image")
    features = F.normalize(features, dim=-1)
    all_features, _ = gather_rows(features)  # with gradients to all processes; their n may differ
    all_classes, _ = gather_rows(classes)
    cosine = features @ all_features.T  # (n, M)
    return torch.where(classes[:, None] == all_classes, 1 - cosine, (cosine - margin).clamp(min=0)).mean(1)
