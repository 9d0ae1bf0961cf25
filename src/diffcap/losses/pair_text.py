"""The contrast of image pairs and sentences (CLIP4IDC, section 3.2)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from diffcap.losses.gather import gather_rows


def pair_text_similarity(text: Tensor, pair: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, int]:
    """Scaled cosines of this rank's rows with every rank's, both ways.

    Args:
        text, pair: (B, E) of this rank, row by row together. scale: what cosines are multiplied by.

    Returns:
        Texts by all pairs and pairs by all texts, (B, all B) each, float32, and where this rank's rows begin among all.
    """
    text, pair = F.normalize(text.float(), dim=-1), F.normalize(pair.float(), dim=-1)
    texts, first = gather_rows(text)
    pairs, _ = gather_rows(pair)
    with torch.autocast(text.device.type, enabled=False):
        return scale.float() * (text @ pairs.T), scale.float() * (pair @ texts.T), first


def pair_text_contrast(text: Tensor, pair: Tensor, scale: Tensor) -> Tensor:
    """Half the cross-entropy of finding the pair of a sentence, plus half that of finding the sentence of a pair.

    Over the global batch; the paper adds the two up without halving, and without a temperature (authors' code: both). The
    same sentence or pair standing twice in a batch counts as a negative (authors' code).

    Args:
        text, pair: (B, E) of this rank, row by row together. scale: see `pair_text_similarity`.

    Returns:
        (B,) losses in nats.
    """
    by_text, by_pair, first = pair_text_similarity(text, pair, scale)
    own = torch.arange(len(text), device=text.device) + first
    return (F.cross_entropy(by_text, own, reduction="none") + F.cross_entropy(by_pair, own, reduction="none")) / 2
