"""Cross-modal contrastive regularisation, CCR (DIRL, section 3.4)."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from diffcap.losses.gather import gather_rows

Form = Literal["symmetrised", "two_way"]


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
