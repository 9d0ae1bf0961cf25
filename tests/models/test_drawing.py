"""One pass over a caption gives what decoding gives step by step; drawing by chance; beams and ensembles in any batch."""

from typing import Any

import pytest
import torch
from tests.models.test_clip4idc import build as build_clip4idc
from tests.models.test_clip4idc import captions as clip_captions
from tests.models.test_clip4idc import pixels
from tests.models.test_decoder import WORDS, build, captions, maps
from tests.models.tiny import captioner as build_pcl
from tests.models.tiny import captions as pcl_captions
from torch import Tensor
from torch.utils._pytree import tree_map

from diffcap.models.captioner import Captioner
from diffcap.models.dirl import DIRL
from diffcap.models.ensemble import Ensemble
from diffcap.models.generation import beam_search, greedy, greedy_from, sample_from
from diffcap.models.scorer import SCORER

PAIRS, LENGTH = 5, 9
LENGTHS = [2, 7, 4, 5, 3]


def images(pairs: int = PAIRS) -> tuple[Tensor, Tensor]:
    return maps(pairs)


def case(name: str) -> tuple[Captioner, tuple[Tensor, Tensor], Tensor]:
    """A small captioner, pairs for it, and captions of several lengths."""
    if name.startswith("clip4idc"):
        options: dict[str, Any] = {"images": "apart", "decoder": "clip_text"} if "ft1" in name else {}
        model = build_clip4idc(**options)
        return model, (pixels(PAIRS), pixels(PAIRS, seed=1)), clip_captions([2, 4, 3, 4, 1], 6, model.pad)
    if name == "pcl":
        return build_pcl(), images(), pcl_captions(LENGTHS, LENGTH)
    return build({"scorer": SCORER, "dirl": DIRL}[name]), images(), captions(LENGTHS, LENGTH)


NAMES = ["pcl", "scorer", "dirl", "clip4idc", "clip4idc ft1"]


@pytest.mark.parametrize("name", NAMES)
def test_one_pass_gives_what_every_step_gives(name: str) -> None:
    model, pair, tokens = case(name)
    memory = model.encode(*pair)
    whole = model.teacher_forced_logits(tokens, memory)
    assert whole.shape[:2] == (PAIRS, tokens.shape[1] - 1) and whole.requires_grad
    cache, closed = None, torch.zeros(PAIRS, dtype=torch.bool)
    for position in range(tokens.shape[1] - 1):
        with torch.no_grad():
            logits, cache = model.step(tokens[:, position], memory, cache)
        torch.testing.assert_close(whole[~closed, position], logits[~closed], atol=2e-5, rtol=1e-4)
        closed = closed | (tokens[:, position + 1] == model.eos_id)
    assert closed.all()


@pytest.mark.parametrize("name", NAMES)
def test_two_pairs_of_a_scene_may_share_their_first_image(name: str) -> None:
    model, (before, after), _ = case(name)
    first = before[:2]
    with torch.no_grad():
        shared = model.encode(first, torch.cat([after[:2], after[2:4]]))
        apart = model.encode(torch.cat([first, first]), torch.cat([after[:2], after[2:4]]))
    tree_map(lambda one, other: torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4), shared, apart)


@pytest.mark.parametrize("name", NAMES)
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
    # A draw of its own decides each caption, not the batch around it.
    rows = torch.tensor([7, each + 1, 3 * each])
    few = sample_from(model, tree_map(lambda leaf: leaf[rows], of_each), draws[rows])
    assert torch.equal(few, tokens[rows, : few.shape[1]])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_beams_say_the_same_in_any_batch(name: str, penalty: float) -> None:
    model, pair, _ = case(name)
    words = beam_search(model, *pair, 6, beams=3, length_penalty=penalty)
    for row in range(PAIRS):
        alone = beam_search(model, *(image[row : row + 1] for image in pair), 6, beams=3, length_penalty=penalty)[0]
        assert torch.equal(alone, words[row, : len(alone)]) and (words[row, len(alone) :] == model.eos_id).all()


def test_an_ensemble_says_what_the_mean_probability_says() -> None:
    members = [build(SCORER), build(DIRL), build(SCORER, decoder_layers=1)]
    one, other = maps(PAIRS), maps(PAIRS, seed=8)
    model = Ensemble(members).eval()
    lists = [one[0], other[0], one[0]], [one[1], other[1], one[1]]
    output, tokens = greedy(model, *lists, LENGTH), captions(LENGTHS, LENGTH)
    with torch.no_grad():
        single = [
            member.teacher_forced_logits(tokens, member.encode(*pair)).softmax(-1)
            for member, pair in zip(members, zip(*lists))
        ]
        together = model.teacher_forced_logits(tokens, model.encode(*lists))
    torch.testing.assert_close(together.exp(), sum(single) / 3, atol=1e-6, rtol=1e-4)
    alone = [greedy(member, *pair, LENGTH) for member, pair in zip(members, zip(*lists))]
    assert not any(part.shape == output.shape and torch.equal(part, output) for part in alone)
    for row in range(PAIRS):
        few = greedy(model, *([image[row : row + 1] for image in side] for side in lists), LENGTH)[0]
        assert torch.equal(few, output[row, : len(few)])
    torch.testing.assert_close(beam_search(model, *lists, LENGTH, beams=1), output)
    same = Ensemble([members[0]] * 2).eval()
    assert torch.equal(greedy(same, [one[0]] * 2, [one[1]] * 2, LENGTH), greedy(members[0], *one, LENGTH))


def test_what_one_member_never_says_the_others_may() -> None:
    members = [build(SCORER), build(DIRL)]
    lists = [maps(2)[0]] * 2, [maps(2)[1]] * 2
    model = Ensemble(members).eval()
    logits, _ = model.step(torch.full((2,), model.bos_id), model.encode(*lists), None)
    assert torch.isfinite(logits).sum(1).tolist() == [WORDS - 1] * 2  # none says an unknown word
    with pytest.raises(NotImplementedError):
        model.loss({})
    assert greedy_from(model, model.encode(*lists), 3).shape[1] <= 3
