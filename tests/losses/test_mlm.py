"""Which words are hidden: the rules of IDC-PCL, one by one, and the shares over many draws."""

from typing import Any

import pytest
import torch
from torch import Tensor

from diffcap.losses.pcl import IGNORED, mask_words

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


def test_shares_of_hidden_words_and_of_what_stands_in_their_place() -> None:
    text = captions(40_000)
    hidden, labels = hide(text)
    chosen = labels != IGNORED
    words = torch.zeros(LENGTH, dtype=torch.bool)
    words[2:10] = True  # the first word is apart: it stands in where nothing was chosen
    assert chosen[:, words].float().mean().item() == pytest.approx(0.15, abs=0.003)
    original, shown = text[:, words][chosen[:, words]], hidden[:, words][chosen[:, words]]
    assert (shown == MASK).float().mean().item() == pytest.approx(0.8, abs=0.005)
    assert (shown == original).float().mean().item() == pytest.approx(0.1, abs=0.005)
    replaced = shown[(shown != MASK) & (shown != original)]
    assert len(replaced) / len(shown) == pytest.approx(0.1, abs=0.005)
    assert replaced.min() == 0 and replaced.max() == WORDS - 1  # the whole vocabulary, specials included
    nothing_else = 0.85**9  # no word was drawn: then the first word is hidden
    assert chosen[:, 1].float().mean().item() == pytest.approx(0.15 + nothing_else, abs=0.01)


def test_labels_hold_the_original_and_only_there() -> None:
    text = captions(500)
    hidden, labels = hide(text)
    chosen = labels != IGNORED
    assert torch.equal(labels[chosen], text[chosen]) and torch.equal(hidden[~chosen], text[~chosen])


def test_begin_and_padding_are_never_hidden_and_every_caption_has_a_hidden_place() -> None:
    text = captions(3000, words=2)
    for ratio in (0.0, 0.15, 1.0):
        hidden, labels = hide(text, ratio)
        assert (labels[:, 0] == IGNORED).all() and (labels[:, 4:] == IGNORED).all()
        assert (hidden[:, 0] == BOS).all() and (hidden[:, 4:] == PAD).all()
        assert (labels != IGNORED).any(1).all()
    assert (labels[:, 1:4] == text[:, 1:4]).all()  # at ratio 1 everything else is


def test_the_end_is_hidden_as_often_as_a_word_and_always_by_mask() -> None:
    hidden, labels = hide(captions(40_000))
    end = labels[:, 10] != IGNORED
    assert end.float().mean().item() == pytest.approx(0.15, abs=0.005)
    assert (labels[end, 10] == EOS).all() and (hidden[end, 10] == MASK).all()


def test_where_nothing_is_drawn_the_first_word_becomes_mask() -> None:
    text = captions(2000)
    hidden, labels = hide(text, ratio=0.0)
    assert (hidden[:, 1] == MASK).all() and torch.equal(labels[:, 1], text[:, 1])
    assert ((labels != IGNORED).sum(1) == 1).all()


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


@pytest.mark.parametrize("words", [1, 2, 6])
def test_words_are_chosen_before_the_end_as_in_a_loop(words: int) -> None:
    text, draws = captions(4000, words), torch.Generator().manual_seed(3)
    selection, replacement = torch.rand(text.shape, generator=draws), torch.rand(text.shape, generator=draws)
    random_ids = torch.randint(WORDS, text.shape, generator=draws)
    hidden, labels = hide(text, seed=3)
    expected = naive(text, selection, replacement, random_ids, 0.15)
    assert (hidden.tolist(), labels.tolist()) == expected
    is_word = torch.zeros_like(text, dtype=torch.bool)
    is_word[:, 1 : words + 1] = True
    assert ((labels != IGNORED) & is_word).any(1).all()  # every caption trains a word


def test_a_caption_without_a_word_has_its_end_hidden() -> None:
    text = torch.tensor([[BOS, EOS, PAD, PAD], [BOS, 9, EOS, PAD]])
    hidden, labels = hide(text, ratio=0.0)
    assert hidden.tolist() == [[BOS, MASK, PAD, PAD], [BOS, MASK, EOS, PAD]]
    assert labels.tolist() == [[-1, EOS, -1, -1], [-1, 9, -1, -1]]


def test_unknown_words_count_as_words() -> None:
    text = torch.tensor([[BOS, 3, 3, EOS]])
    assert (hide(text, ratio=1.0)[1] == torch.tensor([[-1, 3, 3, EOS]])).all()


def test_draws_come_from_the_generator_alone() -> None:
    text = captions(50)
    first = hide(text, seed=3)
    torch.manual_seed(99)
    second, other = hide(text, seed=3), hide(text, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert not torch.equal(first[1], other[1])
