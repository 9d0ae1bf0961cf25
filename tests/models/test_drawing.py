"""Drawing by chance, and ensembles."""

import pytest
import torch
from tests.models.test_contract import LENGTH, LENGTHS, PAIRS, case
from tests.models.test_decoder import WORDS, build, captions, maps
from torch.utils._pytree import tree_map

from diffcap.methods.dirl import DIRL
from diffcap.methods.scorer.model import SCORER
from diffcap.models.ensemble import Ensemble
from diffcap.models.generation import beam_search, greedy, greedy_from, sample_from


@pytest.mark.parametrize("name", ["pcl", "scorer", "dirl", "clip4idc, released", "clip4idc, ft1", "chg2cap"])
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
