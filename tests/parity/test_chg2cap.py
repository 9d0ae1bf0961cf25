"""Chg2Cap against the authors' implementation: every array of the fixture."""

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

from diffcap.interop.chg2cap import from_official
from diffcap.models.chg2cap import Chg2Cap
from diffcap.models.generation import beam_search, greedy


@pytest.fixture
def official(chg2cap_fixture: Path) -> Fixture:
    return load(chg2cap_fixture)


def captioner(official: Fixture, **options: Any) -> Chg2Cap:
    metadata = official.hyperparameters
    names = ("feature_channels", "grid", "max_length", "attention_width", "width", "heads")
    rows, columns = (
        official.shapes[f"encoder_trans_dict.{side}_embedding.weight"][0] for side in "wh"
    )  # exchanged names
    model = Chg2Cap(
        metadata["vocabulary"],
        ffn=metadata["hidden_width"],
        table=(rows, columns),
        **{name: metadata[name] for name in (*names, "encoder_layers", "decoder_layers")},
        **options,
    )
    model.load_state_dict(from_official(weights(official)))
    return model.eval()


def test_the_ignored_parameters_are_those_without_a_gradient(official: Fixture) -> None:
    state = official.weights()
    assert [name for name in state if not from_official({name: state[name]})] == unused(official)


@torch.no_grad()
def test_encoder(official: Fixture) -> None:
    model, batch = captioner(official), batch_of(official)
    maps = batch["before"], batch["after"]
    for name, tokens in zip(("encoded_before", "encoded_after"), model.encoded(*maps)):
        torch.testing.assert_close(subsampled(official, name, tokens), official.arrays[name], **TOLERANCE)
    memory = subsampled(official, "memory", model.visual_tokens(*maps))
    torch.testing.assert_close(memory, official.arrays["memory"], **TOLERANCE)


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
    check_batch_statistics(model, model.residual, official)


@torch.no_grad()
def test_captions(official: Fixture) -> None:
    """The authors' program feeds as many words as there are positions, so a caption may be one word longer than that."""
    model, batch, expected = captioner(official), batch_of(official), official.arrays["greedy_tokens"]
    for tokens in (
        greedy(model, batch["before"], batch["after"], expected.shape[1]),
        beam_search(model, batch["before"], batch["after"], expected.shape[1], beams=1),
    ):
        check_captions(model, tokens, expected)
