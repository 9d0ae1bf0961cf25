"""Cross-view contrastive alignment (SCORER, section 3.2)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from diffcap.losses.gather import first_row


def cross_view_nce(similarity: Tensor) -> Tensor:
    """Contrast the similarity of each pair's two images with that of images of different pairs (SCORER, eq. 4, one direction).

    Args:
        similarity: (B, all B) scaled similarities of this rank's images (rows) with every rank's (columns, in rank order). The
            true pairs are on the diagonal that begins at this rank's first column.

    Returns:
        (B,) losses in nats: -log softmax over the row at the true pair. 0 where there is only one column.

    Raises:
        ValueError: there are fewer columns than rows.

    Example:
        >>> similarity = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
        >>> cross_view_nce(similarity)
        tensor([0.1269, 0.3133])
    """
    rows, columns = similarity.shape
    if columns < rows:
        raise ValueError(f"similarity must have at least as many columns as rows, got {tuple(similarity.shape)}")
    target = torch.arange(rows, device=similarity.device) + first_row(similarity)
    return F.cross_entropy(similarity.float(), target, reduction="none")
