"""RSICCformer against the authors' implementation: every array of the fixture."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity.loading import Fixture, load
from tests.parity.remote_sensing import (
    TOLERANCE,
    all_logits,
    batch_of,
    check_batch_statistics,
    check_captions,
    check_gradients,
    subsampled,
    unused,
    weights,
)

from diffcap.interop.rsiccformer import from_official
from diffcap.models.generation import beam_search, greedy
from diffcap.models.rsiccformer import RSICCformer


@pytest.fixture
def official(rsiccformer_fixture: Path) -> Fixture:
    return load(rsiccformer_fixture)


def captioner(official: Fixture, **options: Any) -> RSICCformer:
    metadata = official.hyperparameters
    names = ("feature_channels", "grid", "max_length", "width", "heads", "encoder_layers", "decoder_layers")
    model = RSICCformer(metadata["vocabulary"], **{name: metadata[name] for name in names}, **options)
    model.load_state_dict(from_official(weights(official)))
    return model.eval()


def test_the_special_ids_are_the_last(official: Fixture) -> None:
    model, special = captioner(official), official.hyperparameters["special"]
    assert (model.bos_id, model.eos_id) == (special["start"], special["end"])


def test_the_ignored_parameters_are_those_without_a_gradient(official: Fixture) -> None:
    state = official.weights()
    assert [name for name in state if not from_official({name: state[name]})] == unused(official)


@torch.no_grad()
def test_memory(official: Fixture) -> None:
    batch = batch_of(official)
    memory = captioner(official).visual_tokens(batch["before"], batch["after"])
    torch.testing.assert_close(subsampled(official, "memory", memory), official.arrays["memory"], **TOLERANCE)


@torch.no_grad()
def test_words(official: Fixture) -> None:
    model = captioner(official)
    torch.testing.assert_close(all_logits(model, official), official.arrays["logits"], **TOLERANCE)
    losses = model.validation_losses(batch_of(official))["caption_loss"]
    assert len(losses) == (official.arrays["lengths"] - 1).sum()
    torch.testing.assert_close(losses.mean(), official.arrays["caption_loss"], **TOLERANCE)


def test_loss_and_gradients(official: Fixture) -> None:
    model = captioner(official)
    with torch.no_grad():
        torch.testing.assert_close(model.loss(batch_of(official))["loss"], official.arrays["caption_loss"], **TOLERANCE)
    check_gradients(model, official, from_official)


def test_batch_statistics(official: Fixture) -> None:
    model = captioner(official, dropout=0.0, word_dropout=0.0)
    check_batch_statistics(model, model.merge[0].residual, official)


@torch.no_grad()
def test_captions(official: Fixture) -> None:
    model, batch, metadata = captioner(official), batch_of(official), official.hyperparameters
    maps, length, beams = (batch["before"], batch["after"]), metadata["max_length"], metadata["beams"]
    check_captions(model, greedy(model, *maps, length), official.arrays["greedy_tokens"])
    tokens = beam_search(model, *maps, length, beams)
    check_captions(model, tokens, official.arrays["beam_tokens"])
    logits = model.teacher_forced_logits(tokens, model.encode(*maps)).log_softmax(-1)
    words = logits.gather(2, tokens[:, 1:, None])[..., 0] * model.caption_mask(tokens)
    ended = official.arrays["beam_tokens"].any(1)
    torch.testing.assert_close(words.sum(1)[ended], official.arrays["beam_scores"][ended], **TOLERANCE)
