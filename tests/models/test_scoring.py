"""How likely captions are, against the table that they come from and one step after another; all hypotheses of a beam search."""

from typing import Any

import pytest
import torch
from tests.models.test_contract import LENGTH, PAIRS, case, closing
from tests.models.test_generation import Table, cut, numbers
from torch.utils._pytree import tree_map

from diffcap.losses.self_critical import self_critical_loss
from diffcap.models.captioner import Captioner
from diffcap.models.generation import beam_hypotheses, beam_search, greedy, sample_from, token_log_probabilities
from diffcap.text.bpe import ClipVocabulary
from diffcap.text.vocabularies import vocabulary_of


def test_scores_are_those_of_the_table_and_end_with_the_sentence() -> None:
    model = Table(words=4, positions=5, pairs=3, seed=1)
    tokens = torch.tensor([[0, 2, 3, 1, 1], [0, 1, 1, 1, 1], [0, 3, 3, 2, 2]])
    found = token_log_probabilities(model, torch.arange(3), tokens)
    for pair, sentence in enumerate(([2, 3, 1], [1], [3, 3, 2, 2])):
        assert torch.isclose(found[pair].sum(), torch.tensor(model.likelihood(pair, sentence)), atol=1e-5)
    assert not found[0, 3:].any() and not found[1, 1:].any()
    assert token_log_probabilities(model, torch.arange(3), tokens[:, :1]).shape == (3, 0)


@pytest.mark.parametrize("extra_eos_id", [None, 3])
def test_hypotheses_are_ranked_and_the_first_is_the_search_s(extra_eos_id: int | None) -> None:
    model = Table(words=4, positions=5, pairs=3, seed=2, extra_eos_id=extra_eos_id)
    every = beam_hypotheses(model, numbers(3), numbers(3), 6, beams=5)
    assert every.shape[:2] == (3, 5)
    assert torch.equal(every[:, 0], beam_search(model, numbers(3), numbers(3), 6, beams=5))
    scores = token_log_probabilities(model, torch.arange(3).repeat_interleave(5), every.flatten(0, 1)).sum(1)
    assert (scores.view(3, 5).diff() <= 1e-5).all()
    assert len({tuple(row) for row in every[0].tolist()}) == 5


def test_what_closes_a_caption_belongs_to_it_and_nothing_behind_it() -> None:
    model = Table(words=7, positions=1, pairs=1, seed=0)
    tokens = torch.tensor([[2, 5, 1, 1, 1], [2, 5, 0, 4, 1], [2, 3, 4, 5, 6], [2, 1, 1, 1, 1]])
    assert model.caption_mask(tokens).long().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0]]
    model.extra_eos_id = 0
    assert model.caption_mask(tokens).long().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]


NAMES = ["pcl", "scorer", "dirl", "clip4idc, released", "clip4idc, padding"]


def one_by_one(model: Captioner, memory: Any, row: int, words: list[int]) -> float:
    """The log-probability of words by the cached steps of a pair alone."""
    alone, cache, total = tree_map(lambda leaf: leaf[row : row + 1], memory), None, 0.0
    for before, word in zip([model.bos_id, *words], words):
        logits, cache = model.step(torch.tensor([before]), alone, cache)
        total += logits[0].log_softmax(-1)[word].item()
    return total


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_captions_of_every_method_are_as_likely_as_their_steps(name: str) -> None:
    """Drawn, greedy and all of a beam, in a batch."""
    model, pair, _ = case(name)
    closing(model, pair, name.partition(",")[0])
    memory, end, pad = model.encode(*pair), model.eos_id, model.extra_eos_id
    each = 40
    many = tree_map(lambda leaf: leaf.repeat_interleave(each, 0), memory)
    draws = torch.rand(PAIRS * each, LENGTH - 1, generator=torch.Generator().manual_seed(5))
    found = {
        "drawn": (sample_from(model, many, draws), each),
        "greedy": (greedy(model, *pair, LENGTH), 1),
        "beams": (beam_hypotheses(model, *pair, LENGTH, 4, length_penalty=0.7).flatten(0, 1), 4),
    }
    closed = set()
    advantage = torch.linspace(-1, 1, PAIRS * each)
    for kind, (tokens, times) in found.items():
        of_each = many if kind == "drawn" else tree_map(lambda leaf: leaf.repeat_interleave(times, 0), memory)  # noqa: B023
        scores = token_log_probabilities(model, of_each, tokens)
        if kind == "drawn":  # as the self-critical stage has it
            losses = self_critical_loss(
                model.teacher_forced_logits(tokens, of_each), tokens, model.caption_mask(tokens), advantage
            )
            torch.testing.assert_close(losses, -advantage * scores.sum(1))
        for row, (ids, parts) in enumerate(zip(tokens, scores)):
            words = cut(ids, end, pad)
            expected = one_by_one(model, memory, row // times, words)
            assert parts.sum().item() == pytest.approx(expected, abs=2e-4), (kind, row)
            assert not parts[len(words) :].any() and (ids[1 + len(words) :] == end).all()
            closed.add((len(words), words[-1]))
    lengths = {length for length, last in closed if last in (end, pad)}
    assert len(lengths) > 3, closed
    assert {last for _, last in closed} >= ({end} if pad is None else {end, pad})  # or the test is idle
    ranked = found["beams"][0].view(PAIRS, 4, -1)
    for row, hypotheses in enumerate(ranked):
        sentences = [cut(ids, end, pad) for ids in hypotheses]
        normalised = [one_by_one(model, memory, row, words) / len(words) ** 0.7 for words in sentences]
        assert normalised == sorted(normalised, reverse=True) or pytest.approx(sorted(normalised)[::-1]) == normalised
        assert len({tuple(words) for words in sentences}) == 4


@pytest.mark.parametrize("name", NAMES)
def test_a_caption_ends_for_the_search_where_it_ends_for_the_vocabulary(name: str) -> None:
    model = case(name).model
    if name.startswith("clip4idc"):
        vocabulary: Any = ClipVocabulary((), "clip_released" if "padding" in name else "clip")
        model.bos_id, model.eos_id = vocabulary.bos, vocabulary.eos  # of CLIP's own size
        word = 320
    else:
        vocabulary = vocabulary_of([f"w{number}" for number in range(10)], model.vocabulary_layout)  # type: ignore[arg-type]
        word = len(vocabulary) - 1
    one, two = (vocabulary.decode([model.bos_id, *[word] * count]) for count in (1, 2))
    assert one != two
    for number in range(4):
        ends = vocabulary.decode([model.bos_id, word, number, word]) == one
        assert ends == bool(model.is_eos(torch.tensor(number))), number
    assert vocabulary.decode([model.bos_id, word, model.eos_id, word]) == one
