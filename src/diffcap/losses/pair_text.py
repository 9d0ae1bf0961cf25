"""Contrastive loss of image pairs and sentences (CLIP4IDC, section 3.2)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from diffcap.losses.gather import gather_rows


def pair_text_similarity(text: Tensor, pair: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, int]:
    """Compute the scaled cosines of this rank's texts with all ranks' pairs, and of this rank's pairs with all ranks' texts.

    Args:
        text, pair: vectors (B, E) of this rank; sentence i of `text` describes pair i of `pair`. scale: factor of the cosines.

    Returns:
        Both matrices of similarities, (B, sum of the ranks' B) each, float32, and the index of this rank's first row among the rows of
        all ranks.
    """
    text, pair = F.normalize(text.float(), dim=-1), F.normalize(pair.float(), dim=-1)
    all_text, first_row = gather_rows(text)
    all_pair, _ = gather_rows(pair)
    with torch.autocast(text.device.type, enabled=False):
        return scale.float() * (text @ all_pair.T), scale.float() * (pair @ all_text.T), first_row


def pair_text_contrastive_loss(text: Tensor, pair: Tensor, scale: Tensor) -> Tensor:
    """Return the mean (B,) of two cross-entropies, in nats: finding a sentence's pair, and a pair's sentence, in the global batch.

    The mean and the scale are those of the authors' code; the paper has the sum and no scale. If a sentence or pair occurs twice in
    a batch, each occurrence counts as wrong for the other (authors' code). The arguments are those of `pair_text_similarity`.

    Example:
        >>> pair_text_contrastive_loss(torch.eye(2), 3 * torch.eye(2), torch.tensor(2.0))
        tensor([0.1269, 0.1269])
    """
    text_logits, pair_logits, first_row = pair_text_similarity(text, pair, scale)
    target = torch.arange(len(text), device=text.device) + first_row
    text_losses = F.cross_entropy(text_logits, target, reduction="none")
    return (text_losses + F.cross_entropy(pair_logits, target, reduction="none")) / 2
