"""Fine-grained difference aligning, FDA (IDC-PCL, section 3.3)."""

import torch
import torch.nn.functional as F
from torch import Tensor


def difference_aligning_loss(similarity: Tensor, temperature: float = 1.0) -> Tensor:
    """Contrast a pair's caption with hard negatives (IDC-PCL, eq. 4).

    Args:
        similarity: (B, 1 + K) cosines of the pair with its caption (column 0) and with K negatives.
        temperature: tau_2 (paper and authors' code: 1).

    Returns:
        (B,) losses in nats.

    Raises:
        ValueError: `similarity` has fewer than two columns.

    Example:
        >>> difference_aligning_loss(torch.tensor([[1.0, 0.0, 0.0]]))
        tensor([0.5514])
    """
    if similarity.ndim != 2 or similarity.shape[1] < 2:
        raise ValueError(f"similarity must be (pairs, 1 + negatives), got {tuple(similarity.shape)}")
    target = torch.zeros(len(similarity), dtype=torch.long, device=similarity.device)
    return F.cross_entropy(similarity / temperature, target, reduction="none")
