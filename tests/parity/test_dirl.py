"""DIRL with CCR against the authors' implementation, both decoder variants: every array of the fixtures."""

from pathlib import Path

import pytest
import torch
from tests.parity.loading import Fixture, load, view_sizes
from tests.parity.test_scorer import words

from diffcap.interop.dirl import from_official
from diffcap.losses.dirl import cross_modal_contrastive_loss
from diffcap.models.decoder import next_word_losses
from diffcap.models.dirl import DIRL
from diffcap.models.generation import beam_search, greedy

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
DECODERS = {"clevr_dc": "ln_xavier", "clevr_change": "plain"}


@pytest.fixture
def official(dirl_fixture: Path) -> Fixture:
    return load(dirl_fixture)


def captioner(official: Fixture, **options) -> DIRL:
    metadata = official.hyperparameters
    shapes = official.shapes
    model = DIRL(
        **view_sizes(official),
        ffn=shapes["speaker_state.core.layer.0.linear1.weight"][0],
        projector_width=shapes["change_detector_state.mlp.0.weight"][0],
        decoder_variant=DECODERS[metadata["variant"]],
        **options,
    )
    model.load_state_dict(from_official(official.weights()))
    return model.eval()


@torch.no_grad()
def test_difference(official: Fixture) -> None:
    model = captioner(official)
    maps = [model.embedding(official.arrays[name]) for name in ("before", "after")]
    for name, difference in zip(("before", "after"), model.differences(*maps)):
        torch.testing.assert_close(difference[:, ::7, ::8], official.arrays[f"difference_{name}"], **TOLERANCE)


@torch.no_grad()
def test_decorrelation(official: Fixture) -> None:
    model = captioner(official)
    assert model.projector is not None
    tokens = [model.projector(model.embedding(official.arrays[name])) for name in ("before", "after")]
    diagonal, off_diagonal = model.decorrelation_terms(*tokens)
    torch.testing.assert_close(diagonal + 0.003 * off_diagonal, official.arrays["dirl_loss"], **TOLERANCE)


@torch.no_grad()
def test_words_and_regularisation(official: Fixture) -> None:
    model, arrays = captioner(official), official.arrays
    output = model.decoder(arrays["tokens"], model.encode(arrays["before"], arrays["after"])).last
    logits = model.decoder.logit(output.hidden)
    torch.testing.assert_close(logits, arrays["logits"], **TOLERANCE)
    torch.testing.assert_close(next_word_losses(logits, arrays["tokens"]).mean(), arrays["caption_loss"], **TOLERANCE)
    printed, seen = model.text_and_vision(output, arrays["tokens"])
    torch.testing.assert_close(cross_modal_contrastive_loss(printed, seen).mean(), arrays["ccr_loss"], **TOLERANCE)


@torch.no_grad()
def test_attention(official: Fixture) -> None:
    model, arrays = captioner(official), official.arrays
    attended = model.decoder.attention(arrays["tokens"], model.encode(arrays["before"], arrays["after"]))
    torch.testing.assert_close(attended, arrays["attention"], **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("times", [1, 2])
def test_loss(official: Fixture, times: int) -> None:
    """The weighted sum; the same pairs as both streams change nothing."""
    model, arrays = captioner(official, decorrelation_weight=0.03, ccr_weight=0.05), official.arrays
    batch = {"before": arrays["before"]} | {name: torch.cat([arrays[name]] * times) for name in ("after", "tokens")}
    total = arrays["caption_loss"] + 0.03 * arrays["dirl_loss"] + 0.05 * arrays["ccr_loss"]
    torch.testing.assert_close(model.loss(batch)["loss"], total, **TOLERANCE)


@torch.no_grad()
def test_greedy_words(official: Fixture) -> None:
    model, expected = captioner(official), official.arrays["greedy_tokens"]
    maps = official.arrays["before"], official.arrays["after"]
    tokens = greedy(model, *maps, official.hyperparameters["max_length"])
    assert [words(row) for row in tokens] == [words(row) for row in expected]
    assert torch.equal(beam_search(model, *maps, official.hyperparameters["max_length"], beams=1), tokens)
