"""Losses of IDC-PCL's pre-training (Yao, Wang and Jin, AAAI 2022), in the order of section 3.3 and 3.4: masked visual
contrastive learning (MVCL), fine-grained difference aligning (FDA), and the contrast of image classes.

Letters: B pairs, n masked patches or images of this process, m unmasked patches of it, M images of all processes, N patches of an
image, K negatives, C feature channels, D width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from diffcap.losses.gather import gather_rows
from diffcap.utils.linear import linear

MARGIN = 0.4  # of `class_contrastive_loss`, in TransFG and in the authors' code of IDC-PCL


def masked_visual_nce(predicted: Tensor, target: Tensor, negatives: Tensor, temperature: float = 1.0) -> Tensor:
    """Contrast the prediction of each masked feature with its original feature against all others (IDC-PCL, eq. 3).

    All vectors are L2-normalised. A prediction is compared with the original features at all masked positions of the global
    batch, of which the feature at the prediction's position is correct, and with the negatives of all ranks.

    Args:
        predicted: (n, C) predicted features at this rank's masked positions.
        target: (n, C) original features at these positions.
        negatives: (m, C) features at unmasked positions: predicted (authors' code) or original (paper).
        temperature: tau_1 (paper and authors' code: 1).

    Returns:
        (n,) losses in nats, one per masked feature.

    Example:
        >>> predicted = target = torch.eye(2)
        >>> masked_visual_nce(predicted, target, negatives=torch.tensor([[1.0, 1.0]]))
        tensor([0.7486, 0.7486])
    """
    predicted, target, negatives = (F.normalize(vectors, dim=-1) for vectors in (predicted, target, negatives))
    all_targets, first_row = gather_rows(target)  # this rank's targets begin at row `first_row`
    all_negatives, _ = gather_rows(negatives)
    logits = linear(predicted, torch.cat([all_targets, all_negatives])) / temperature
    correct_columns = torch.arange(len(predicted), device=logits.device) + first_row
    return F.cross_entropy(logits, correct_columns, reduction="none")


def mask_patches(
    num_pairs: int, num_patches: int, ratio: float = 0.15, generator: torch.Generator | None = None, num_images: int = 2
) -> Tensor:
    """Choose the patches that MVCL masks: in one random image of each pair, each patch with probability `ratio`.

    At least one patch per pair is masked (authors' code).

    Args:
        num_pairs: B. num_patches: N. ratio: 0.15 in the paper. num_images: 2 for pairs, 1 for single images.

    Returns:
        Boolean (B, num_images * N): the first image's patches, then the second's.

    Example:
        >>> is_masked = mask_patches(num_pairs=4, num_patches=9, ratio=0.0)
        >>> is_masked.shape, is_masked.sum(1).tolist()
        (torch.Size([4, 18]), [1, 1, 1, 1])
    """
    is_masked = torch.rand(num_pairs, num_patches, generator=generator) < ratio  # patches of the random image
    random_patch = torch.randint(num_patches, (num_pairs, 1), generator=generator)
    is_random_patch = torch.zeros_like(is_masked).scatter_(1, random_patch, True)
    is_masked |= is_random_patch & ~is_masked.any(1, keepdim=True)
    if num_images == 1:
        return is_masked
    is_second_image = torch.rand(num_pairs, 1, generator=generator) < 0.5
    return torch.cat([is_masked & ~is_second_image, is_masked & is_second_image], 1)


def difference_aligning_loss(similarity: Tensor, temperature: float = 1.0) -> Tensor:
    """Contrast a pair's caption with hard negatives (IDC-PCL, eq. 4).

    Args:
        similarity: (B, 1 + K) cosines of the pair with its caption (column 0) and with K negatives.
        temperature: tau_2 (paper and authors' code: 1).

    Returns:
        (B,) losses in nats.

    Example:
        >>> difference_aligning_loss(torch.tensor([[1.0, 0.0, 0.0]]))
        tensor([0.5514])
    """
    correct_columns = torch.zeros(len(similarity), dtype=torch.long, device=similarity.device)
    return F.cross_entropy(similarity / temperature, correct_columns, reduction="none")


def class_contrastive_loss(features: Tensor, classes: Tensor, margin: float = MARGIN) -> Tensor:
    """Contrastive loss between images of the same class and of different classes (TransFG, eq. 9, which IDC-PCL uses).

    Each image is compared with all M images of the global batch, itself included. The loss of a comparison is
    1 - cosine similarity where the classes are equal, and max(cosine similarity - margin, 0) where they differ.

    Args:
        features: (n, D) feature vectors of this process's images. classes: (n,) their classes.
        margin: cosine similarity above which two images of different classes have a loss.

    Returns:
        (n,) losses: for each image the mean over its M comparisons.

    Example:
        >>> features = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.8, 0.6]])
        >>> class_contrastive_loss(features, torch.tensor([0, 0, 1]))
        tensor([0.1333, 0.1333, 0.2667])
    """
    features = F.normalize(features, dim=-1)
    all_features, _ = gather_rows(features)  # with gradients to all processes; their n may differ
    all_classes, _ = gather_rows(classes)
    cosine = features @ all_features.T  # (n, M)
    is_same_class = classes[:, None] == all_classes
    return torch.where(is_same_class, 1 - cosine, (cosine - margin).clamp(min=0)).mean(1)
