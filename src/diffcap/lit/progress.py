"""The progress of a stage: the speed of a training, and a line a minute if stderr is not a terminal."""

import sys
import time
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from diffcap.utils.progress import ProgressLog, duration

MEASURED_STEPS = 20  # before the speed is printed


class LogProgress(Callback):
    """Print the speed of a training after its first 20 steps, and how long it takes without the validations.

    If stderr is not a terminal, also print a line a minute with the number of steps or batches. `what` names the prediction or test.
    """

    def __init__(self, what: str = "extraction") -> None:
        self.what = what
        self._start: float | None = None  # the end of the first step, until the speed is printed

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Count the steps from here."""
        self._first_step = trainer.global_step
        self._train_log = ProgressLog("training, steps", trainer.global_step)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Measure the first steps, and print a line once a minute."""
        step = trainer.global_step
        last = trainer.max_steps
        measured = step - self._first_step - 1  # the first step does not count
        if measured == 0 and self._start is None:
            self._start = time_after_steps(trainer)
        if measured == MEASURED_STEPS - 1 and self._start is not None:
            rate = measured / (time_after_steps(trainer) - self._start)
            self._start = None
            if trainer.is_global_zero and step < last:
                left = duration((last - step) / rate)
                print(
                    f"step {step}: {rate:.3g} steps per second, about {left} to step {last:,} without validations",
                    flush=True,
                )
        if self._is_log(trainer):
            self._train_log.update(step, last if last > 0 else None)

    def on_validation_start(self, *_: Any) -> None:
        """Start the lines about batches."""
        self._batch_log = ProgressLog("validation, batches")

    def on_predict_start(self, *_: Any) -> None:
        """Start the lines about batches."""
        self._batch_log = ProgressLog(f"{self.what}, batches")

    on_test_start = on_predict_start  # type: ignore[assignment]

    def on_predict_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        """Print a line once a minute."""
        self._log_batch(trainer, trainer.num_predict_batches, arguments[3])

    def on_test_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        """Print a line once a minute."""
        self._log_batch(trainer, trainer.num_test_batches, arguments[3])

    def on_validation_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        """Print a line once a minute."""
        self._log_batch(trainer, trainer.num_val_batches, arguments[3])

    def _log_batch(self, trainer: pl.Trainer, totals: Sequence[int | float], number: int) -> None:
        if self._is_log(trainer):
            self._batch_log.update(number + 1, totals[0] if totals and isinstance(totals[0], int) else None)

    @staticmethod
    def _is_log(trainer: pl.Trainer) -> bool:
        return trainer.is_global_zero and not sys.stderr.isatty()


def time_after_steps(trainer: pl.Trainer) -> float:
    """Wait until the GPU has ended all steps, and return the time."""
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize()
    return time.monotonic()
