"""Fine-grained difference aligning (IDC-PCL, section 3.3)."""

import torch.nn.functional as F
from torch import Tensor


def difference_aligning(similarity: Tensor, temperature: float = 1.0) -> Tensor:
    """Tell a pair's own caption from hard negatives (IDC-PCL, eq. 4).

    Args:
        similarity: (B, 1 + K) cosines of the pair with its caption (column 0) and with K negatives.
        temperature: tau_2 (paper and authors' code: 1).

    Returns:
        (B,) losses in nats.
    """
    if similarity.ndim != 2 or similarity.shape[1] < 2:
        raise ValueError(f"similarity must be (pairs, 1 + negatives), got {tuple(similarity.shape)}")
    return F.cross_entropy(similarity / temperature, similarity.new_zeros(len(similarity)).long(), reduction="none")
