"""Estimates in the log of a training, and a line a minute, with a clock that the steps move."""

import sys

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from diffcap.lit.decoding import evaluation_trainer
from diffcap.lit.progress import LogProgress


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in ("diffcap.lit.progress", "diffcap.utils.progress"):
        monkeypatch.setattr(f"{module}.time", clock)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    return clock


class Slow(pl.LightningModule):
    """The first step takes 100 seconds and each other one 2; a batch of another loop takes 25."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.layer = clock, torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.clock.now += 2 if self.clock.now else 100
        return self.layer(batch).sum()

    def predict_step(self, batch: torch.Tensor) -> None:
        self.clock.now += 25

    validation_step = predict_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def loader(size: int) -> DataLoader:
    return DataLoader(torch.zeros(size, 1))  # type: ignore[arg-type]


def test_the_log_of_a_training(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, callbacks=[LogProgress()], max_steps=100, val_check_interval=30, check_val_every_n_epoch=None,
    )  # fmt: skip
    trainer.fit(Slow(clock), loader(1000), loader(3))
    output = capsys.readouterr()
    assert output.out == "step 20: 0.5 steps per second, about 3 min to step 100, plus validations\n"
    lines = [line for line in output.err.splitlines() if line.startswith("training")]
    assert lines == [
        "training, steps: 1 of 100, about 2 h 45 min left",
        "training, steps: 31 of 100, about 9 min left",
        "training, steps: 61 of 100, about 4 min left",
        "training, steps: 91 of 100, about 50 s left",
    ]
    assert output.err.count("validation, batches: 3 of 3") == 3


@pytest.mark.parametrize("terminal", [False, True])
def test_a_line_a_minute_where_stderr_is_no_terminal(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    evaluation_trainer(1, "cpu").predict(Slow(clock), loader(7), return_predictions=False)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("decoding")]
    expected = ["decoding, batches: 3 of 7, about 2 min left", "decoding, batches: 6 of 7, about 25 s left"]
    assert lines == ([] if terminal else expected)
