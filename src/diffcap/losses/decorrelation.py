"""Channel decorrelation of two views (DIRL, section 3.2): a Barlow-Twins loss over all places of all images."""

import torch
from torch import Tensor

from diffcap.losses.gather import sum_over_ranks


def cross_correlation(before: Tensor, after: Tensor) -> Tensor:
    """Correlate the channels of two views over the rows of the global batch (DIRL, eq. 3; authors' code).

    Each channel is standardised with the unbiased standard deviation and nothing added to it; a constant channel gives
    NaN, as there. The paper's eq. 3 takes no mean away.

    Args:
        before, after: (n, D) each, rows that belong together; n may differ between ranks, not between the two.

    Returns:
        (D, D): entry (i, j) is the mean over the rows of channel i before times channel j after.
    """
    if before.shape != after.shape:
        raise ValueError(f"before {tuple(before.shape)} and after {tuple(after.shape)} differ")
    both = torch.stack([before, after]).float()
    rows = sum_over_ranks(torch.tensor(float(len(before)), device=before.device))
    centred = both - sum_over_ranks(both.sum(1, keepdim=True)) / rows
    variance = sum_over_ranks((centred * centred).sum(1, keepdim=True)) / (rows - 1)
    first, second = centred / variance.sqrt()
    with torch.autocast(before.device.type, enabled=False):
        return sum_over_ranks(first.T @ second) / rows


def decorrelation(correlation: Tensor) -> tuple[Tensor, Tensor]:
    """The two sums of DIRL's eq. 4: `(C_ii - 1)^2`, which keeps what both views share, and `C_ij^2` for i != j.

    Args:
        correlation: (D, D).

    Returns:
        Two scalars: the diagonal's sum, the off-diagonal's sum (weighted 0.003 by the authors).
    """
    diagonal = correlation.diagonal()
    return ((diagonal - 1) ** 2).sum(), (correlation**2).sum() - (diagonal**2).sum()
