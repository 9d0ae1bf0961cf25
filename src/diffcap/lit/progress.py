"""How long a stage takes: estimates in the log of a training, and a line a minute where stderr is not a terminal."""

import sys
import time
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from diffcap.utils.progress import ProgressLog, duration

MEASURED = 20  # steps until the first estimate; the first of them does not count


class LogProgress(Callback):
    """Print how long the training takes after its first 20 steps, and again after its first validation.

    Where stderr is not a terminal, also print a line a minute: the steps of a training, or the batches of another loop.

    Args:
        what: name of what the trainer predicts or tests.
    """

    def __init__(self, what: str = "extraction") -> None:
        self.what = what
        self.validation_seconds: float | None = None  # of the latest validation
        self._pause = 0.0  # validations between the measured steps
        self._seconds_per_step = 0.0
        self._start: float | None = None  # the end of the first step

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Count the steps from here."""
        self._first_step = trainer.global_step
        self._train_log = ProgressLog("training, steps", trainer.global_step)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Measure the steps; print the first estimate."""
        steps = trainer.global_step - self._first_step
        if steps == 1 and self._start is None:
            self._start = time_after_steps(trainer)
        if steps >= MEASURED and not self._seconds_per_step and self._start is not None:
            self._seconds_per_step = (time_after_steps(trainer) - self._start - self._pause) / (steps - 1)
            self._print_estimate(trainer, f"{1 / self._seconds_per_step:.3g} steps per second, ")
        if self._is_log(trainer):
            self._train_log.update(trainer.global_step, trainer.max_steps if trainer.max_steps > 0 else None)

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Start the time of a validation."""
        self._validation_start = time_after_steps(trainer)
        self._batch_log = ProgressLog("validation, batches")

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Print a second estimate after the first validation, unless the first estimate follows."""
        seconds, is_first = time_after_steps(trainer) - self._validation_start, self.validation_seconds is None
        self.validation_seconds = seconds
        self._pause += seconds
        if is_first and self._seconds_per_step:
            self._print_estimate(trainer)

    def _print_estimate(self, trainer: pl.Trainer, speed: str = "") -> None:
        step, last = trainer.global_step, trainer.max_steps
        if not trainer.is_global_zero or 0 < last <= step:
            return
        interval = getattr(trainer, "val_check_batch", 0)  # in batches
        every = interval / trainer.accumulate_grad_batches if isinstance(interval, int) else 0
        validations = int(last // every - step // every) if every else 0
        seconds, more = (last - step) * self._seconds_per_step, ""
        if validations and self.validation_seconds is None:
            more = f", and {validations} validation{'s' if validations > 1 else ''}"
        elif validations:
            seconds += validations * (self.validation_seconds or 0)
            more = f", with {validations} more validation{'s' if validations > 1 else ''} of {duration(self.validation_seconds or 0)}"
        left = f"about {duration(seconds)} to step {last:,}{more}" if last > 0 else "no last step"
        print(f"step {step}: {speed}{left}", flush=True)

    def on_predict_start(self, *_: Any) -> None:
        """Start the lines about batches."""
        self._batch_log = ProgressLog(f"{self.what}, batches")

    on_test_start = on_predict_start  # type: ignore[assignment]

    def on_predict_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        """Print a line, if it is time."""
        self._log_batch(trainer, trainer.num_predict_batches, arguments[3])

    def on_test_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        """Print a line, if it is time."""
        self._log_batch(trainer, trainer.num_test_batches, arguments[3])

    def on_validation_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        """Print a line, if it is time."""
        self._log_batch(trainer, trainer.num_val_batches, arguments[3])

    def _log_batch(self, trainer: pl.Trainer, totals: Sequence[int | float], number: int) -> None:
        if self._is_log(trainer):
            self._batch_log.update(number + 1, totals[0] if totals and isinstance(totals[0], int) else None)

    @staticmethod
    def _is_log(trainer: pl.Trainer) -> bool:
        return trainer.is_global_zero and not sys.stderr.isatty()


def time_after_steps(trainer: pl.Trainer) -> float:
    """The time at which all steps so far have ended."""
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize()
    return time.monotonic()
