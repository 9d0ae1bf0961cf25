"""Cross-view contrast (SCORER, section 3.2): an image pair's own match against those with other pairs' images."""

import torch
import torch.nn.functional as F
from torch import Tensor

from diffcap.losses.gather import first_row


def cross_view_nce(similarity: Tensor) -> Tensor:
    """Contrast each row's own column with all the others (SCORER, eq. 4, one direction).

    Args:
        similarity: (B, all B) scaled scores of this rank's rows with every rank's columns, in rank order; a row's own
            column is the true pair.

    Returns:
        (B,) losses in nats: -log softmax over the row at its own column. 0 where there is one column.

    Raises:
        ValueError: there are fewer columns than rows.
    """
    rows, columns = similarity.shape
    if columns < rows:
        raise ValueError(f"every row needs a column of its own, got {tuple(similarity.shape)}")
    own = torch.arange(rows, device=similarity.device) + first_row(similarity)
    return F.cross_entropy(similarity.float(), own, reduction="none")
