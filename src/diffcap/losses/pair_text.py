"""Contrastive loss of image pairs and sentences (CLIP4IDC, section 3.2)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from diffcap.losses.gather import gather_rows


def pair_text_contrastive_loss(text: Tensor, pair: Tensor, scale: Tensor) -> Tensor:
    """Return the mean (B,) of two cross-entropies, in nats: finding a sentence's pair, and a pair's sentence, in the global batch.

    The mean and the scale are those of the authors' code; the paper has the sum and no scale. If a sentence or pair occurs twice in
    a batch, each occurrence counts as wrong for the other (authors' code).

    Args:
        text, pair: vectors (B, E) of this rank; sentence i of `text` describes pair i of `pair`. scale: factor of their cosines.

    Example:
        >>> pair_text_contrastive_loss(torch.eye(2), 3 * torch.eye(2), torch.tensor(2.0))
        tensor([0.1269, 0.1269])
    """
    text, pair = F.normalize(text.float(), dim=-1), F.normalize(pair.float(), dim=-1)
    all_text, first_row = gather_rows(text)
    all_pair, _ = gather_rows(pair)
    with torch.autocast(text.device.type, enabled=False):
        text_logits = scale.float() * (text @ all_pair.T)  # (B, sum of the ranks' B)
        pair_logits = scale.float() * (pair @ all_text.T)
    target = torch.arange(len(text), device=text.device) + first_row
    text_losses = F.cross_entropy(text_logits, target, reduction="none")
    return (text_losses + F.cross_entropy(pair_logits, target, reduction="none")) / 2
