"""What the parity tests of RSICCformer and Chg2Cap share."""

import json
from collections.abc import Callable, Iterable
from typing import Any

import torch
from tests.parity.loading import Fixture
from torch import Tensor, nn

from diffcap.models.captioner import Captioner

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
FromOfficial = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def weights(official: Fixture) -> dict[str, Tensor]:
    """The official parameters, with batch norm's statistics at their initial values."""
    state = official.weights()
    for name, value in official.weights().items():
        layer, _, last = name.rpartition(".")
        if last == "weight" and layer.rpartition(".")[0].endswith(".left") and value.ndim == 1:
            state |= {f"{layer}.running_mean": torch.zeros_like(value), f"{layer}.running_var": torch.ones_like(value)}
    return state


def unused(official: Fixture) -> list[str]:
    return json.loads(official.path.read_text())["unused"]


def subsampled(official: Fixture, name: str, tokens: Tensor) -> Tensor:
    """The part of tokens (B, N, D) that the fixture holds."""
    steps = json.loads(official.path.read_text())["subsampled"][name]
    return tokens[:, :: steps["token_step"], :: steps["channel_step"]]


def batch_of(official: Fixture) -> dict[str, Tensor]:
    return {name: official.arrays[name] for name in ("before", "after", "tokens")}


def all_logits(model: Captioner, official: Fixture) -> Tensor:
    """Logits after every token that the fixture has logits for: (B, T, V)."""
    batch = batch_of(official)
    length = official.arrays["logits"].shape[1]
    tokens = torch.cat([batch["tokens"], batch["tokens"][:, :1]], 1)[:, : length + 1]  # the last one is not used
    return model.teacher_forced_logits(tokens, model.encode(batch["before"], batch["after"]))


def check_gradients(model: Captioner, official: Fixture, from_official: FromOfficial) -> None:
    model.loss(batch_of(official))["loss"].backward()
    state, parameters = official.weights(), dict(model.named_parameters())
    names = json.loads(official.path.read_text())["gradient_parameters"]
    ours = [next(iter(from_official({name: state[name]}))) for name in names]
    found = torch.stack([parameters[name].grad.norm() for name in ours])
    torch.testing.assert_close(found, official.arrays["gradient_norms"], **TOLERANCE)


def check_batch_statistics(model: Any, block: nn.Module, official: Fixture) -> None:
    """Training mode without dropout: the loss, and the statistics of the first batch norm after one pass."""
    model.train()
    for name, loss in model.loss(batch_of(official)).items():
        torch.testing.assert_close(
            loss.detach(), official.arrays["caption_loss_batch_statistics"], **TOLERANCE, msg=name
        )
    norm: Any = block.get_submodule("branch.1")
    torch.testing.assert_close(norm.running_mean, official.arrays["running_mean"], **TOLERANCE)
    torch.testing.assert_close(norm.running_var, official.arrays["running_var"], **TOLERANCE)


def captions(model: Captioner, rows: Iterable[Tensor]) -> list[list[int]]:
    """Ids up to and including the end, without what follows."""
    found = [row.tolist() for row in rows]
    return [row[: row.index(model.eos_id) + 1] if model.eos_id in row else row for row in found]


def check_captions(model: Captioner, found: Tensor, expected: Tensor) -> None:
    """The same words; a row of zeros is a pair that the authors' program drops because no caption ended."""
    for ours, theirs in zip(captions(model, found), captions(model, expected)):
        if any(theirs):
            assert ours == theirs
        else:
            assert model.eos_id not in ours
