"""Masked language modelling (MLM): mask words, which a model then predicts from the other words."""

import torch
from torch import Tensor

IGNORED = -1  # label of a position that is not selected (as in the authors' code)


def mask_words(
    tokens: Tensor,
    *,
    eos_id: int,
    mask_id: int,
    vocabulary_size: int,
    ratio: float = 0.15,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Mask words as IDC-PCL does (authors' code).

    Each word is selected with probability `ratio` (paper: 0.15): 80 % of the selected words become [MASK], 10 % a random id of the
    whole vocabulary (special tokens included), 10 % are not changed. If no word of a caption is selected, its first word becomes
    [MASK]. EOS becomes [MASK] with probability `ratio`, and always in a caption without words. BOS and padding are never selected.

    Args:
        tokens: (B, T) ids of captions: BOS, words, EOS, padding.
        vocabulary_size: number of ids, special tokens included.

    Returns:
        The masked text, (B, T), and the labels, (B, T): the original id at the selected positions, -1 elsewhere.

    Example:
        >>> tokens = torch.tensor([[1, 7, 8, 9, 2, 0]])  # BOS 1, EOS 2
        >>> masked, labels = mask_words(tokens, eos_id=2, mask_id=5, vocabulary_size=10, ratio=0.0)
        >>> masked.tolist(), labels.tolist()  # no word was selected, so the first word is masked
        ([[1, 5, 8, 9, 2, 0]], [[-1, 7, -1, -1, -1, -1]])
    """
    is_eos = tokens == eos_id
    is_word = is_eos.cumsum(1) == 0  # everything between BOS and EOS, unknown words included
    is_word[:, 0] = False
    selection_draws = torch.rand(tokens.shape, generator=generator)
    replacement_draws = torch.rand(tokens.shape, generator=generator)
    random_ids = torch.randint(vocabulary_size, tokens.shape, generator=generator)
    is_selected = (is_word | is_eos) & (selection_draws < ratio)
    forced_position = torch.where(is_word.any(1), is_word.int().argmax(1), is_eos.int().argmax(1))
    has_selected_word = (is_selected & (is_word | ~is_word.any(1, keepdim=True))).any(1, keepdim=True)
    is_forced = torch.zeros_like(is_selected).scatter_(1, forced_position[:, None], True) & ~has_selected_word
    is_mask = (replacement_draws < 0.8) | is_eos | is_forced  # EOS and the forced word always become [MASK]
    other_ids = torch.where(replacement_draws < 0.9, random_ids, tokens)
    is_selected = is_selected | is_forced
    masked_tokens = torch.where(is_selected, torch.where(is_mask, mask_id, other_ids), tokens)
    return masked_tokens, torch.where(is_selected, tokens, IGNORED)
