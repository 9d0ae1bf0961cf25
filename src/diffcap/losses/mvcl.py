"""Masked visual contrastive learning (IDC-PCL, section 3.3)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from diffcap.losses.gather import gather_rows


def masked_visual_nce(predicted: Tensor, target: Tensor, negatives: Tensor, temperature: float = 1.0) -> Tensor:
    """Tell each masked feature's own original from all the others (IDC-PCL, eq. 3).

    Everything is L2-normalised. A prediction is compared with the originals at all masked positions of the global batch
    (its own is the true one) and with `negatives`.

    Args:
        predicted: (n, C) regressed features at this rank's masked positions.
        target: (n, C) original features there.
        negatives: (m, C); authors' code gives the regressed features of the unmasked positions, the paper the original
            ones. Detached or not as the caller wants.
        temperature: tau_1 (paper and authors' code: 1).

    Returns:
        (n,) losses in nats, one a masked feature.
    """
    if predicted.shape != target.shape:
        raise ValueError(f"predicted {tuple(predicted.shape)} and target {tuple(target.shape)} differ")
    predicted, target, negatives = (F.normalize(rows, dim=-1) for rows in (predicted, target, negatives))
    targets, first = gather_rows(target)
    others, _ = gather_rows(negatives)
    logits = predicted @ torch.cat([targets, others]).T / temperature  # (n, all targets + all negatives)
    return F.cross_entropy(logits, torch.arange(len(predicted), device=logits.device) + first, reduction="none")


def mask_patches(
    pairs: int, patches: int, ratio: float = 0.15, generator: torch.Generator | None = None, images: int = 2
) -> Tensor:
    """Which patches MVCL hides: of one image of each pair, chosen by a fair coin, each with probability `ratio`.

    At least one a pair (authors' code). With `images=1` of the only one.

    Returns:
        Boolean (pairs, images * patches): the first image's patches, then the second's.
    """
    hide = torch.rand(pairs, patches, generator=generator) < ratio
    spare = torch.randint(patches, (pairs, 1), generator=generator)
    hide |= torch.zeros_like(hide).scatter_(1, spare, True) & ~hide.any(1, keepdim=True)
    if images == 1:
        return hide
    second = torch.rand(pairs, 1, generator=generator) < 0.5
    return torch.cat([hide & ~second, hide & second], 1)
