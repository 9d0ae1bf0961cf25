"""Greedy, beam and sampled decoding, the probabilities of captions, and ensembles."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.models.test_contract import LENGTH, LENGTHS, PAIRS, case
from tests.models.test_decoder import build, captions
from tests.models.tiny import maps
from torch import Tensor
from torch.utils._pytree import tree_map

from diffcap.methods.dirl import DIRL
from diffcap.methods.scorer.model import SCORER
from diffcap.models.captioner import Captioner
from diffcap.models.generation import Ensemble, beam_search, greedy, sample_from, token_log_probabilities
from diffcap.text.vocabularies import ClipVocabulary, restore_vocabulary


class Table(Captioner):
    """Scores the next word from the pair and all words so far, which the cache carries: it can be searched whole."""

    bos_id, eos_id = 0, 1

    def __init__(self, words: int, positions: int, pairs: int, seed: int, extra_eos_id: int | None = None) -> None:
        super().__init__()
        self.extra_eos_id = extra_eos_id
        draws = torch.Generator().manual_seed(seed)
        self.words = words
        self.scores = 2 * torch.randn(pairs, words**positions, words, generator=draws)

    def encode(self, before: Tensor, after: Tensor) -> Tensor:
        raise NotImplementedError

    def step(self, tokens: Tensor, memory: Tensor, cache: Tensor | None) -> tuple[Tensor, Tensor]:
        """`memory` has the number of each pair."""
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
    found = beam_search(model, torch.arange(pairs), max_length, beams=4**4, length_penalty=penalty)[:, 0]
    expected = [enumerated(model, pair, max_length, penalty) for pair in range(pairs)]
    assert [cut(row, model.eos_id, extra_eos_id) for row in found] == expected
    assert extra_eos_id is None or any(sentence[-1] == extra_eos_id for sentence in expected)
    simple = greedy(model, torch.arange(pairs), max_length)
    assert [cut(row, model.eos_id, extra_eos_id) for row in simple] != expected  # else the search would prove nothing


def test_scores_are_those_of_the_table_and_end_with_the_sentence() -> None:
    model = Table(words=4, positions=5, pairs=3, seed=1)
    tokens = torch.tensor([[0, 2, 3, 1, 1], [0, 1, 1, 1, 1], [0, 3, 3, 2, 2]])
    found = token_log_probabilities(model, torch.arange(3), tokens)
    for pair, sentence in enumerate(([2, 3, 1], [1], [3, 3, 2, 2])):
        assert torch.isclose(found[pair].sum(), torch.tensor(model.likelihood(pair, sentence)), atol=1e-5)
    assert not found[0, 3:].any() and not found[1, 1:].any()
    assert token_log_probabilities(model, torch.arange(3), tokens[:, :1]).shape == (3, 0)


@pytest.mark.parametrize("extra_eos_id", [None, 3])
def test_the_captions_of_all_beams_are_ranked_and_differ(extra_eos_id: int | None) -> None:
    model = Table(words=4, positions=5, pairs=3, seed=2, extra_eos_id=extra_eos_id)
    every = beam_search(model, torch.arange(3), 6, beams=5)
    assert every.shape[:2] == (3, 5)
    scores = token_log_probabilities(model, torch.arange(3).repeat_interleave(5), every.flatten(0, 1)).sum(1)
    assert (scores.view(3, 5).diff() <= 1e-5).all()
    assert len({tuple(row) for row in every[0].tolist()}) == 5


def test_what_closes_a_caption_belongs_to_it_and_nothing_behind_it() -> None:
    model = Table(words=7, positions=1, pairs=1, seed=0)
    tokens = torch.tensor([[2, 5, 1, 1, 1], [2, 5, 0, 4, 1], [2, 3, 4, 5, 6], [2, 1, 1, 1, 1]])
    assert model.caption_mask(tokens).long().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0]]
    model.extra_eos_id = 0
    assert model.caption_mask(tokens).long().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]


@pytest.mark.parametrize("name", ["pcl", "scorer", "dirl", "clip4idc, released", "clip4idc, padding"])
def test_a_caption_ends_for_the_search_where_it_ends_for_the_vocabulary(name: str) -> None:
    model = case(name).model
    if name.startswith("clip4idc"):
        vocabulary: Any = ClipVocabulary((), "clip_released" if "padding" in name else "clip")
        model.bos_id, model.eos_id = vocabulary.bos, vocabulary.eos  # of CLIP's own size
        word = 320
    else:
        vocabulary = restore_vocabulary([f"w{number}" for number in range(10)], model.vocabulary_layout)  # type: ignore[arg-type]
        word = len(vocabulary) - 1
    one, two = (vocabulary.decode([model.bos_id, *[word] * count]) for count in (1, 2))
    assert one != two
    for number in range(4):
        ends = vocabulary.decode([model.bos_id, word, number, word]) == one
        assert ends == bool(model.is_eos(torch.tensor(number))), number
    assert vocabulary.decode([model.bos_id, word, model.eos_id, word]) == one


@pytest.mark.parametrize("name", ["pcl", "scorer", "chg2cap"])
def test_words_are_drawn_by_their_probabilities(name: str) -> None:
    model, pair, _ = case(name)
    memory = model.encode(*pair)
    each, length = 2000, 4
    draws = torch.rand(PAIRS * each, length - 1, generator=torch.Generator().manual_seed(3))
    of_each = tree_map(lambda leaf: leaf.repeat_interleave(each, 0), memory)
    tokens = sample_from(model, of_each, draws)
    assert torch.equal(tokens, sample_from(model, of_each, draws)) and (tokens[:, 0] == model.bos_id).all()
    output = tokens[:, 1].view(PAIRS, each)
    with torch.no_grad():
        chance = model.step(torch.full((PAIRS,), model.bos_id), memory, None)[0].softmax(-1)
    counted = torch.stack([torch.bincount(row, minlength=chance.shape[1]) for row in output]) / each
    assert (counted - chance).abs().max() < 4.5 * 0.5 / each**0.5
    assert (counted[chance == 0] == 0).all() and not output.eq(output[0, 0]).all()


def test_an_ensemble_says_what_the_mean_probability_says() -> None:
    members = [build(SCORER), build(DIRL), build(SCORER, decoder_layers=1)]
    one, other = maps(PAIRS), maps(PAIRS, seed=8)
    model = Ensemble(members).eval()
    lists = [one[0], other[0], one[0]], [one[1], other[1], one[1]]
    output, tokens = greedy(model, model.encode(*lists), LENGTH), captions(LENGTHS, LENGTH)
    with torch.no_grad():
        single = [
            member.teacher_forced_logits(tokens, member.encode(*pair)).softmax(-1)
            for member, pair in zip(members, zip(*lists))
        ]
        together = model.teacher_forced_logits(tokens, model.encode(*lists))
    torch.testing.assert_close(together.exp(), sum(single) / 3, atol=1e-6, rtol=1e-4)
    alone = [greedy(member, member.encode(*pair), LENGTH) for member, pair in zip(members, zip(*lists))]
    assert not any(part.shape == output.shape and torch.equal(part, output) for part in alone)
    for row in range(PAIRS):
        few = greedy(model, model.encode(*([image[row : row + 1] for image in side] for side in lists)), LENGTH)[0]
        assert torch.equal(few, output[row, : len(few)])
    torch.testing.assert_close(beam_search(model, model.encode(*lists), LENGTH, beams=1)[:, 0], output)
    same, memory = Ensemble([members[0]] * 2).eval(), members[0].encode(*one)
    assert torch.equal(greedy(same, [memory, memory], LENGTH), greedy(members[0], memory, LENGTH))
