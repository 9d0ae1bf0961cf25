"""SCORER with CBR against the authors' implementation: every array of the fixture."""

from pathlib import Path

import pytest
import torch
from tests.parity.loading import Fixture, load, view_sizes
from torch import Tensor

from diffcap.interop.scorer import from_official
from diffcap.models.decoder import END, next_word_losses
from diffcap.models.generation import beam_search, greedy
from diffcap.models.scorer import SCORER, Views, cross_view_loss

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


@pytest.fixture
def official(scorer_fixture: Path) -> Fixture:
    return load(scorer_fixture)


def captioner(official: Fixture, **options) -> SCORER:
    model = SCORER(
        **view_sizes(official),
        **options,
    )
    model.load_state_dict(from_official(official.weights()))
    return model.eval()


def compare(model: SCORER, official: Fixture) -> tuple[Tensor, Tensor, Views]:
    before, after = model.embedding(official.arrays["before"]), model.embedding(official.arrays["after"])
    views = model.compare(before, after)
    assert views is not None
    return before, after, views


@torch.no_grad()
def test_difference(official: Fixture) -> None:
    model = captioner(official)
    fused = model.fuse(*compare(model, official))
    torch.testing.assert_close(fused[:, ::7, ::8], official.arrays["difference"], **TOLERANCE)


@torch.no_grad()
def test_cross_view_contrast(official: Fixture) -> None:
    model = captioner(official)
    similarities = model.similarities(compare(model, official)[2])
    for number, similarity in enumerate(similarities, start=1):
        torch.testing.assert_close(similarity, official.arrays[f"similarity_{number}"], **TOLERANCE)
    torch.testing.assert_close(cross_view_loss(similarities), official.arrays["cross_view_loss"], **TOLERANCE)


@torch.no_grad()
def test_words_and_backward_reasoning(official: Fixture) -> None:
    model, tokens = captioner(official), official.arrays["tokens"]
    before, after, views = compare(model, official)
    hidden = model.decoder(tokens, model.decoder.memory(model.fuse(before, after, views))).last.hidden
    logits = model.decoder.logit(hidden)
    torch.testing.assert_close(logits, official.arrays["logits"], **TOLERANCE)
    torch.testing.assert_close(next_word_losses(logits, tokens).mean(), official.arrays["caption_loss"], **TOLERANCE)
    cbr = cross_view_loss(model.cbr_similarities(*model.predicted_and_real(before, after, hidden, tokens)[0]))
    torch.testing.assert_close(cbr, official.arrays["cbr_loss"], **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("times", [1, 2])
def test_loss(official: Fixture, times: int) -> None:
    """The weighted sum; the same pairs as both streams change nothing."""
    model, arrays = captioner(official, cross_view_weight=0.3, cbr_weight=0.07), official.arrays
    batch = {"before": arrays["before"]} | {name: torch.cat([arrays[name]] * times) for name in ("after", "tokens")}
    total = arrays["caption_loss"] + 0.3 * arrays["cross_view_loss"] + 0.07 * arrays["cbr_loss"]
    torch.testing.assert_close(model.loss(batch)["loss"], total, **TOLERANCE)


def words(row: Tensor) -> list[int]:
    """The authors write a zero for END and after it."""
    ids = row.tolist()
    return ids[: ids.index(END)] if END in ids else [number for number in ids if number]


@torch.no_grad()
def test_greedy_words(official: Fixture) -> None:
    model, expected = captioner(official), official.arrays["greedy_tokens"]
    maps = official.arrays["before"], official.arrays["after"]
    tokens = greedy(model, *maps, official.hyperparameters["max_length"])
    assert [words(row) for row in tokens] == [words(row) for row in expected]
    assert torch.equal(beam_search(model, *maps, official.hyperparameters["max_length"], beams=1), tokens)
