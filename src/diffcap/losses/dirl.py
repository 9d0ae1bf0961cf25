"""Losses of DIRL (Tu et al., ECCV 2024): channel decorrelation of two images (section 3.2), which is a Barlow Twins loss over all
positions of all image pairs, and cross-modal contrastive regularisation, CCR (section 3.4).
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from diffcap.losses.gather import gather_rows, sum_over_ranks

Form = Literal["symmetrised", "two_way"]


def cross_correlation(before: Tensor, after: Tensor) -> Tensor:
    """Correlation of the channels of both images over the rows of the global batch (DIRL, eq. 3; authors' code).

    Each channel is standardised by its mean and its unbiased standard deviation, without an epsilon; a constant channel gives
    NaN, as in the authors' code. The paper's eq. 3 does not subtract the mean.

    Args:
        before, after: (n, D) each; rows with the same index belong together. n may differ between ranks.

    Returns:
        (D, D): entry (i, j) is the mean over the rows of channel i of before times channel j of after.

    Raises:
        ValueError: `before` and `after` have different shapes.

    Example:
        >>> before = torch.tensor([[0.0, 1.0], [1.0, 3.0], [2.0, -1.0]])
        >>> cross_correlation(before, 2 * before)  # n - 1 in the variance: 2 / 3 on the diagonal
        tensor([[ 0.6667, -0.3333],
                [-0.3333,  0.6667]])
    """
    if before.shape != after.shape:
        raise ValueError(
            f"before and after must have the same shape, got {tuple(before.shape)} and {tuple(after.shape)}"
        )
    before, after = before.float(), after.float()
    rows = sum_over_ranks(torch.tensor(float(len(before)), device=before.device))
    means = sum_over_ranks(torch.stack([before.sum(0), after.sum(0)])) / rows
    first, second = before - means[0], after - means[1]
    squares = torch.stack([torch.linalg.vector_norm(part, dim=0) for part in (first, second)]).square()
    std = (sum_over_ranks(squares) / (rows - 1)).sqrt()
    with torch.autocast(before.device.type, enabled=False):
        # Dividing the (D, D) products by both standard deviations is less work than dividing all rows.
        return sum_over_ranks(first.T @ second) / rows / std[0, :, None] / std[1]


def decorrelation_terms(correlation: Tensor) -> tuple[Tensor, Tensor]:
    """The two terms of DIRL's eq. 4: the sum of `(C_ii - 1)^2`, and the sum of `C_ij^2` over i != j.

    Args:
        correlation: (D, D).

    Returns:
        Two scalars: the diagonal term and the off-diagonal term (the authors' weight of the latter is 0.003).

    Example:
        >>> [round(term.item(), 4) for term in decorrelation_terms(torch.tensor([[1.0, 0.5], [0.0, 0.5]]))]
        [0.25, 0.25]
    """
    diagonal = correlation.diagonal()
    return ((diagonal - 1) ** 2).sum(), (correlation**2).sum() - (diagonal**2).sum()


def cross_modal_contrastive_loss(
    text: Tensor, vision: Tensor, temperature: float = 0.5, form: Form = "symmetrised"
) -> Tensor:
    """Contrast each caption's text vector with its own visual vector against those of all other captions.

    With `G = text vision^T / temperature` over the global batch, "symmetrised" is the cross-entropy of the rows of
    `(G + G^T) / 2` (authors' code); "two_way" is the mean of the cross-entropies of the rows of G and of G^T (DIRL, eq. 12 to
    14). The vectors are not normalised. Computed in float32, because the products reach several hundred.

    Args:
        text, vision: (B, D) of this rank; rows with the same index belong together.
        temperature: the paper's tau (0.5). form: see above.

    Returns:
        (B,) losses in nats.

    Example:
        >>> text, vision = torch.eye(3), torch.eye(3)
        >>> cross_modal_contrastive_loss(text, vision)
        tensor([0.2395, 0.2395, 0.2395])
    """
    text, vision = text.float(), vision.float()
    texts, first = gather_rows(text)
    visions, _ = gather_rows(vision)
    with torch.autocast(text.device.type, enabled=False):
        by_text, by_vision = text @ visions.T / temperature, vision @ texts.T / temperature  # rows of G and of G^T
    target = torch.arange(len(text), device=text.device) + first
    if form == "symmetrised":
        return F.cross_entropy((by_text + by_vision) / 2, target, reduction="none")
    losses = F.cross_entropy(by_text, target, reduction="none") + F.cross_entropy(by_vision, target, reduction="none")
    return losses / 2
