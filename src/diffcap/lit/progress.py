"""Print the progress of a stage: speed and validation scores of a training and, if stderr is not a terminal, a line every minute."""

import sys
import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from diffcap.evaluation.tables import validation_line
from diffcap.utils.progress import ProgressLog, duration


class LogProgress(Callback):
    """Print the speed of a training after its first 20 steps, the time of its other steps, and the scores of each validation.

    If stderr is not a terminal, also print a line every minute with the step or batch. In a prediction or test, it starts with `title`.
    """

    def __init__(self, title: str = "extraction") -> None:
        self.title = title
        self._start_time: float | None = None  # end of the first step; None outside of the measured steps

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Store the first step, which is not 0 if the run is resumed."""
        self._first_step = trainer.global_step
        self._train_log = ProgressLog("training, steps", trainer.global_step)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Measure the first steps, and print a line once a minute."""
        step = trainer.global_step
        last_step = trainer.max_steps
        num_measured = step - self._first_step - 1  # the first step does not count
        if num_measured == 0 and self._start_time is None:
            self._start_time = synchronized_time(trainer)
        if num_measured == 19 and self._start_time is not None:
            rate = num_measured / (synchronized_time(trainer) - self._start_time)
            self._start_time = None
            if trainer.is_global_zero and step < last_step:
                left = duration((last_step - step) / rate)
                print(
                    f"step {step}: {rate:.3g} steps per second, about {left} to step {last_step:,}, plus validations",
                    flush=True,
                )
        if self._prints_lines(trainer):
            self._train_log.update(step, last_step if last_step > 0 else None)

    def on_validation_start(self, *_: Any) -> None:
        """Begin the lines about the progress of a validation, which is counted in batches."""
        self._batch_log = ProgressLog("validation, batches")

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Print the step and the validation metrics, without "val/" before their names."""
        logged = trainer.callback_metrics.items()
        values = {name[4:]: float(value) for name, value in logged if name.startswith("val/")}
        if values and trainer.is_global_zero and not trainer.sanity_checking:
            print(f"step {trainer.global_step} of {trainer.max_steps}  val: {validation_line(values)}", flush=True)

    def on_predict_start(self, *_: Any) -> None:
        """Begin the lines about the progress of a prediction or test, which is counted in batches."""
        self._batch_log = ProgressLog(f"{self.title}, batches")

    on_test_start = on_predict_start  # type: ignore[assignment]

    def on_predict_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        """Print a line once a minute."""
        if self._prints_lines(trainer):
            kind = "predict" if trainer.predicting else "test" if trainer.testing else "val"
            # The number of batches of the first data loader; it is infinite if the loader's length is unknown.
            count = getattr(trainer, f"num_{kind}_batches")[0]
            self._batch_log.update(arguments[3] + 1, count if isinstance(count, int) else None)

    on_test_batch_end = on_predict_batch_end  # type: ignore[assignment]
    on_validation_batch_end = on_predict_batch_end  # type: ignore[assignment]

    @staticmethod
    def _prints_lines(trainer: pl.Trainer) -> bool:
        return trainer.is_global_zero and not sys.stderr.isatty()


def synchronized_time(trainer: pl.Trainer) -> float:
    """Wait until the GPU has ended all steps, and return the time."""
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize()
    return time.monotonic()
