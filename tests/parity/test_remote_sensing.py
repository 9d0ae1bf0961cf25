"""RSICCformer and Chg2Cap against the authors' implementations: every array of the fixtures."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity.loading import Fixture, assert_close, load, with_statistics
from torch import Tensor

from diffcap.methods.remote_sensing import chg2cap, rsiccformer
from diffcap.methods.remote_sensing.chg2cap import Chg2Cap
from diffcap.methods.remote_sensing.rsiccformer import RSICCformer
from diffcap.models.generation import beam_search, greedy

IMPORTERS = {"rsiccformer": rsiccformer.IMPORTER, "chg2cap": chg2cap.IMPORTER}


@pytest.fixture
def official(remote_sensing_fixture: Path) -> Fixture:
    return load(remote_sensing_fixture)


def captioner(official: Fixture, **options: Any) -> Any:
    metadata = official.hyperparameters
    names = ("feature_channels", "grid", "max_length", "width", "heads", "encoder_layers", "decoder_layers")
    sizes = {name: metadata[name] for name in names}
    if official.method == "rsiccformer":
        model: Any = RSICCformer(metadata["vocabulary"], **sizes, **options)
    else:
        embeddings = [official.shapes[f"encoder_trans_dict.{side}_embedding.weight"] for side in "wh"]
        sizes |= {"table": tuple(shape[0] for shape in embeddings), "ffn": metadata["hidden_width"]}  # exchanged names
        sizes["attention_width"] = metadata["attention_width"]
        model = Chg2Cap(metadata["vocabulary"], **sizes, **options)
    model.load_state_dict(IMPORTERS[official.method].rename(with_statistics(official), "finetune"))
    return model.eval()


def batch_of(official: Fixture) -> dict[str, Tensor]:
    return {name: official.arrays[name] for name in ("before", "after", "tokens")}


def described(official: Fixture, key: str) -> Any:
    return json.loads(official.path.read_text())[key]


def compare_part(official: Fixture, name: str, tokens: Tensor) -> None:
    """Compare the part of tokens (B, N, D) that the fixture holds."""
    steps = described(official, "subsampled")[name]
    part = tokens[:, :: steps["token_step"], :: steps["channel_step"]]
    assert_close(part, official.arrays[name])


def compare_captions(model: Any, found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """The same words up to the end; a row of zeros is a pair that the authors' program drops because no caption ended."""
    for ours, theirs in zip(found, expected):
        ours, theirs = (
            row[: row.index(model.eos_id) + 1] if model.eos_id in row else row
            for row in (ours.tolist(), theirs.tolist())
        )
        assert ours == theirs if any(theirs) else model.eos_id not in ours


def test_the_ignored_parameters_are_those_without_a_gradient(official: Fixture) -> None:
    state, rename = official.weights(), IMPORTERS[official.method].rename
    assert [name for name in state if not rename({name: state[name]}, "finetune")] == described(official, "unused")


@torch.no_grad()
def test_visual_tokens(official: Fixture) -> None:
    model, batch = captioner(official), batch_of(official)
    compare_part(official, "memory", model.encode_tokens(batch["before"], batch["after"]))
    if official.method == "chg2cap":
        for name, tokens in zip(("before", "after"), model.encode_images(batch["before"], batch["after"])):
            compare_part(official, f"encoded_{name}", tokens)
    else:
        assert (model.bos_id, model.eos_id) == tuple(
            official.hyperparameters["special"][key] for key in ("start", "end")
        )


@torch.no_grad()
def test_words(official: Fixture) -> None:
    model, batch = captioner(official), batch_of(official)
    length = official.arrays["logits"].shape[1]
    tokens = torch.cat([batch["tokens"], batch["tokens"][:, :1]], 1)[:, : length + 1]  # the last one is not used
    logits = model.teacher_forced_logits(tokens, model.encode(batch["before"], batch["after"]))
    assert_close(logits, official.arrays["logits"])
    losses = model.validation_losses(batch)["caption_loss"]
    assert len(losses) == (official.arrays["lengths"] - 1).sum()
    assert_close(losses.mean(), official.arrays["caption_loss"])


def test_loss_and_gradients(official: Fixture) -> None:
    model, state = captioner(official), official.weights()
    loss = model.loss(batch_of(official))["loss"]
    assert_close(loss.detach(), official.arrays["caption_loss"])
    loss.backward()
    parameters, rename = dict(model.named_parameters()), IMPORTERS[official.method].rename
    ours = [next(iter(rename({name: state[name]}, "finetune"))) for name in described(official, "gradient_parameters")]
    found = torch.stack([parameters[name].grad.norm() for name in ours])
    assert_close(found, official.arrays["gradient_norms"])


def test_batch_statistics(official: Fixture) -> None:
    """Training mode without dropout: the loss, and the statistics of the first batch norm after one pass."""
    model = captioner(official, dropout=0.0, word_dropout=0.0).train()
    for name, loss in model.loss(batch_of(official)).items():
        expected = official.arrays["caption_loss_batch_statistics"]
        assert_close(loss.detach(), expected, msg=name)
    block = model.merge[0].residual if official.method == "rsiccformer" else model.residual
    norm = block.get_submodule("branch.1")
    assert_close(norm.running_mean, official.arrays["running_mean"])
    assert_close(norm.running_var, official.arrays["running_var"])


@torch.no_grad()
def test_greedy_captions(official: Fixture) -> None:
    """Chg2Cap's program feeds as many words as there are positions, so a caption may be one word longer than that."""
    model, batch, expected = captioner(official), batch_of(official), official.arrays["greedy_tokens"]
    maps, length = (batch["before"], batch["after"]), expected.shape[1]
    compare_captions(model, greedy(model, model.encode(*maps), length), expected)


@torch.no_grad()
def test_beams_of_rsiccformer(rsiccformer_fixture: Path) -> None:
    official = load(rsiccformer_fixture)
    model, batch, metadata = captioner(official), batch_of(official), official.hyperparameters
    maps = batch["before"], batch["after"]
    tokens = beam_search(model, model.encode(*maps), metadata["max_length"], metadata["beams"])[:, 0]
    compare_captions(model, tokens, official.arrays["beam_tokens"])
    logits = model.teacher_forced_logits(tokens, model.encode(*maps)).log_softmax(-1)
    words = logits.gather(2, tokens[:, 1:, None])[..., 0] * model.caption_mask(tokens)
    ended = official.arrays["beam_tokens"].any(1)
    assert_close(words.sum(1)[ended], official.arrays["beam_scores"][ended])
