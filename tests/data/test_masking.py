"""Which words are hidden: the rules of IDC-PCL against a loop."""

from typing import Any

import pytest
import torch
from torch import Tensor

from diffcap.data.masking import IGNORED, mask_words

PAD, BOS, EOS, MASK, WORDS = 0, 1, 2, 5, 1000
LENGTH = 14


def captions(rows: int, words: int = 9) -> Tensor:
    """(rows, LENGTH): BOS, `words` ids of 6 and above, EOS, padding."""
    text = torch.randint(6, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(words))
    text[:, 0], text[:, words + 1], text[:, words + 2 :] = BOS, EOS, PAD
    return text


def hide(text: Tensor, ratio: float = 0.15, seed: int = 0) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return mask_words(text, eos_id=EOS, mask_id=MASK, vocabulary_size=WORDS, ratio=ratio, generator=draws)


def naive(text: Tensor, selection: Tensor, replacement: Tensor, random_ids: Tensor, ratio: float) -> tuple[Any, Any]:
    """Word by word: first the words, then, if none was selected, the first one, and only then EOS (authors' code)."""
    hidden, labels = text.tolist(), [[IGNORED] * text.shape[1] for _ in text]
    for row, tokens in enumerate(text.tolist()):
        end = tokens.index(EOS)
        for column in range(1, end):
            if selection[row, column] < ratio:
                labels[row][column] = tokens[column]
                if replacement[row, column] < 0.8:
                    hidden[row][column] = MASK
                elif replacement[row, column] < 0.9:
                    hidden[row][column] = int(random_ids[row, column])
        if end > 1 and all(label == IGNORED for label in labels[row]):
            hidden[row][1], labels[row][1] = MASK, tokens[1]
        if selection[row, end] < ratio or end == 1:
            hidden[row][end], labels[row][end] = MASK, EOS
    return hidden, labels


@pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0])
@pytest.mark.parametrize("words", [0, 1, 2, 6])
def test_hidden_words_and_labels_are_those_of_a_loop(words: int, ratio: float) -> None:
    text, draws = captions(4000, words), torch.Generator().manual_seed(3)
    selection, replacement = torch.rand(text.shape, generator=draws), torch.rand(text.shape, generator=draws)
    random_ids = torch.randint(WORDS, text.shape, generator=draws)
    hidden, labels = hide(text, ratio, seed=3)
    assert (hidden.tolist(), labels.tolist()) == naive(text, selection, replacement, random_ids, ratio)
