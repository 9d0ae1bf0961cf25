"""Greedy and beam decoding: any batch, no beam but the best, and every sentence tried by hand."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from tests.models.tiny import captioner, maps
from torch import Tensor

from diffcap.methods.pcl.model import EOS
from diffcap.models.captioner import Captioner
from diffcap.models.generation import beam_search, greedy


class Table(Captioner):
    """Scores the next word from the pair and all words so far, which the cache carries: it can be searched whole."""

    bos_id, eos_id = 0, 1

    def __init__(self, words: int, positions: int, pairs: int, seed: int, extra_eos_id: int | None = None) -> None:
        super().__init__()
        self.extra_eos_id = extra_eos_id
        draws = torch.Generator().manual_seed(seed)
        self.words = words
        self.scores = 2 * torch.randn(pairs, words**positions, words, generator=draws)

    def loss(self, batch: dict) -> dict[str, Tensor]:
        raise NotImplementedError

    def encode(self, before: Tensor, after: Tensor) -> Tensor:
        return before[:, 0, 0, 0].long()  # the number of the pair

    def step(self, tokens: Tensor, memory: Tensor, cache: Tensor | None) -> tuple[Tensor, Tensor]:
        past = tokens if cache is None else cache * self.words + tokens  # the opening token is word 0
        return self.scores[memory, past], past

    def teacher_forced_logits(self, tokens: Tensor, memory: Tensor) -> Tensor:
        found, cache = [], None
        for position in range(tokens.shape[1] - 1):
            logits, cache = self.step(tokens[:, position], memory, cache)
            found.append(logits)
        return torch.stack(found, 1) if found else torch.zeros(len(tokens), 0, self.words)

    def likelihood(self, pair: int, sentence: Sequence[int]) -> float:
        past, score = 0, 0.0
        for word in sentence:
            score += self.scores[pair, past].log_softmax(-1)[word].item()
            past = past * self.words + word
        return score


def numbers(pairs: int) -> Tensor:
    return torch.arange(pairs, dtype=torch.float)[:, None, None, None]


def enumerated(model: Table, pair: int, max_length: int, penalty: float) -> list[int]:
    """The best of all sentences of at most `max_length` positions."""
    best: tuple[float, list[int]] = (float("-inf"), [])
    for length in range(1, max_length):
        for sentence in itertools.product(range(model.words), repeat=length):
            closing = [word in (model.eos_id, model.extra_eos_id) for word in sentence]
            if any(closing[:-1]) or (not closing[-1] and length < max_length - 1):
                continue
            best = max(best, (model.likelihood(pair, sentence) / length**penalty, list(sentence)))
    return best[1]


def cut(row: Tensor, end: int, extra_eos_id: int | None = None) -> list[int]:
    words = row.tolist()[1:]
    places = [place for place, word in enumerate(words) if word in (end, extra_eos_id)]
    return words[: places[0] + 1] if places else words


@pytest.mark.parametrize("extra_eos_id", [None, 3])
@pytest.mark.parametrize("penalty", [0.0, 0.7, 2.0])
def test_a_wide_beam_finds_the_best_of_all_sentences(penalty: float, extra_eos_id: int | None) -> None:
    pairs, max_length = 12, 5
    model = Table(words=4, positions=max_length, pairs=pairs, seed=2, extra_eos_id=extra_eos_id)
    found = beam_search(model, numbers(pairs), numbers(pairs), max_length, beams=4**4, length_penalty=penalty)
    expected = [enumerated(model, pair, max_length, penalty) for pair in range(pairs)]
    assert [cut(row, model.eos_id, extra_eos_id) for row in found] == expected
    assert extra_eos_id is None or any(sentence[-1] == extra_eos_id for sentence in expected)
    simple = greedy(model, numbers(pairs), numbers(pairs), max_length)
    assert [cut(row, model.eos_id, extra_eos_id) for row in simple] != expected  # else the search would prove nothing


def test_a_wider_beam_never_finds_a_less_likely_sentence_here() -> None:
    pairs, model = 12, Table(words=4, positions=6, pairs=12, seed=1)

    def likelihoods(beams: int) -> list[float]:
        rows = beam_search(model, numbers(pairs), numbers(pairs), 6, beams)
        return [model.likelihood(pair, cut(row, model.eos_id)) for pair, row in enumerate(rows)]

    one, all_of_them = likelihoods(1), likelihoods(200)
    assert all(a <= b + 1e-6 for a, b in zip(one, all_of_them)) and sum(all_of_them) > sum(one) + 0.1


def test_length_is_bounded_and_every_word_is_the_most_likely() -> None:
    model = captioner(0)
    with torch.no_grad():
        model.trunk.output_layer.bias[EOS] -= 100  # never ends
    before, after = maps(2)
    tokens = greedy(model, before, after, 9)
    assert tokens.shape == (2, 9) and not (tokens == EOS).any()
    with torch.no_grad():
        logits = model.teacher_forced_logits(tokens, model.encode(before, after))
    assert torch.equal(logits.argmax(-1), tokens[:, 1:])
