"""How likely captions are, against the table that they come from; and all hypotheses of a beam search."""

import torch
from tests.models.test_generation import Table, numbers

from diffcap.models.generation import beam_hypotheses, beam_search
from diffcap.models.scoring import token_log_probabilities


def test_scores_are_those_of_the_table_and_end_with_the_sentence() -> None:
    model = Table(words=4, positions=5, pairs=3, seed=1)
    tokens = torch.tensor([[0, 2, 3, 1, 1], [0, 1, 1, 1, 1], [0, 3, 3, 2, 2]])
    found = token_log_probabilities(model, torch.arange(3), tokens)
    for pair, sentence in enumerate(([2, 3, 1], [1], [3, 3, 2, 2])):
        assert torch.isclose(found[pair].sum(), torch.tensor(model.likelihood(pair, sentence)), atol=1e-5)
    assert not found[0, 3:].any() and not found[1, 1:].any()
    assert token_log_probabilities(model, torch.arange(3), tokens[:, :1]).shape == (3, 0)


def test_hypotheses_are_ranked_and_the_first_is_the_search_s() -> None:
    model = Table(words=4, positions=5, pairs=3, seed=2)
    every = beam_hypotheses(model, numbers(3), numbers(3), 6, beams=5)
    assert every.shape[:2] == (3, 5)
    assert torch.equal(every[:, 0], beam_search(model, numbers(3), numbers(3), 6, beams=5))
    scores = token_log_probabilities(model, torch.arange(3).repeat_interleave(5), every.flatten(0, 1)).sum(1)
    assert (scores.view(3, 5).diff() <= 1e-5).all()
    assert len({tuple(row) for row in every[0].tolist()}) == 5
