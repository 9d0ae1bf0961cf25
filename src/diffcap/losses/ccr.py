"""Cross-modal contrastive regularisation (DIRL, section 3.4): a sentence against what its words saw."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from diffcap.losses.gather import gather_rows

Form = Literal["symmetrised", "two_way"]


def cross_modal_contrast(text: Tensor, vision: Tensor, temperature: float = 0.5, form: Form = "symmetrised") -> Tensor:
    """Contrast each caption's text with its own visual summary against those of all other captions.

    With `G = text vision^T / temperature`, over the global batch: "symmetrised" is the cross-entropy of the rows of
    `(G + G^T) / 2` (authors' code), "two_way" the mean of those of G and of G^T (DIRL, eq. 12 to 14). Nothing is normalised;
    computed in float32, as the products run to hundreds.

    Args:
        text, vision: (B, D) of this rank.

    Returns:
        (B,) losses in nats.
    """
    text, vision = text.float(), vision.float()
    texts, first = gather_rows(text)
    visions, _ = gather_rows(vision)
    with torch.autocast(text.device.type, enabled=False):
        asked, answered = text @ visions.T / temperature, vision @ texts.T / temperature  # rows of G, and of G^T
    own = torch.arange(len(text), device=text.device) + first
    if form == "symmetrised":
        return F.cross_entropy((asked + answered) / 2, own, reduction="none")
    return (F.cross_entropy(asked, own, reduction="none") + F.cross_entropy(answered, own, reduction="none")) / 2
