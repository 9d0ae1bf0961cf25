"""Masked language modelling: which words are hidden, and the loss on them."""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -1  # authors' code


def mask_words(
    tokens: Tensor,
    *,
    eos: int,
    mask: int,
    vocabulary_size: int,
    ratio: float = 0.15,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Hide words as IDC-PCL does (authors' code).

    Each word is chosen with probability `ratio`: 80 % of the chosen become [MASK], 10 % a random id of the whole
    vocabulary (specials included), 10 % stay. EOS becomes [MASK] with the same probability. BOS and padding never. Where
    nothing was chosen in a caption its first word is masked (its EOS, if it has no word).

    Args:
        tokens: (B, T), [BOS] words [EOS] padding.
        eos, mask: ids.
        vocabulary_size: V. ratio: probability (paper: 0.15). generator: of the random draws.

    Returns:
        The text with words hidden, (B, T), and the labels, (B, T): the original id where hidden, -1 elsewhere.
    """
    is_eos = tokens == eos
    inside = is_eos.cumsum(1) == 0  # position 0 is BOS; what stands between it and EOS is a word, unknown ones included
    inside[:, 0] = False
    draw = torch.rand(tokens.shape, generator=generator)
    how = torch.rand(tokens.shape, generator=generator)
    random_ids = torch.randint(vocabulary_size, tokens.shape, generator=generator)
    chosen = (inside | is_eos) & (draw < ratio)
    fallback = torch.where(inside.any(1), inside.int().argmax(1), is_eos.int().argmax(1))
    forced = torch.zeros_like(chosen).scatter_(1, fallback[:, None], True) & ~chosen.any(1, keepdim=True)
    hidden = torch.where(how < 0.8, mask, torch.where(how < 0.9, random_ids, tokens))
    hidden = torch.where(is_eos | forced, mask, hidden)  # EOS and the forced word are always [MASK]
    chosen = chosen | forced
    return torch.where(chosen, hidden, tokens), torch.where(chosen, tokens, IGNORED)


def masked_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the chosen positions only.

    Args:
        logits: (n, V) at the chosen positions. labels: (n,) their original ids.

    Returns:
        (n,) losses in nats.
    """
    return F.cross_entropy(logits, labels, reduction="none")
