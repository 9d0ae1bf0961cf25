"""TRAINER=probe measures a hundred steps, and estimates the hours, memory and disk space of the whole training."""

import resource
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from diffcap.lit.progress import time_after_steps
from diffcap.lit.schedules import in_steps
from diffcap.records import write_json
from diffcap.run_folder import BEST

WARM_UP = 10  # steps that do not count
PROBE = "probe.json"


class Probe(Callback):
    """Measure the steps and the validation of a training, and write the needs of the whole training to probe.json.

    Args:
        max_steps: steps of the whole training, or epochs ("12ep").
        val_check_interval: steps between two of its validations, or epochs.
    """

    def __init__(self, max_steps: int | str, val_check_interval: int | float | str) -> None:
        self.lengths = {"max_steps": max_steps, "val_check_interval": val_check_interval}
        self.steps = 0
        self.step_seconds = 0.0
        self.started = 0.0
        self.validated_pairs = 0
        self.all_pairs = 0  # of the validation split
        self.validation_seconds = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Start the time after the warm-up."""
        if not self.started and trainer.global_step >= min(WARM_UP, trainer.max_steps // 2):
            self.started = time_after_steps(trainer)
            self.steps = -trainer.global_step

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """End the time of the steps, and start that of the validation."""
        now = time_after_steps(trainer)
        if self.steps <= 0:
            self.steps = self.steps + trainer.global_step
            self.step_seconds = now - self.started
        self.started = now

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Count the pairs."""
        self.validated_pairs += len(batch["number"]) * trainer.world_size
        table = trainer.datamodule.val_table  # type: ignore[attr-defined]
        is_retrieval = "is_change" not in batch  # it validates on the change pairs only
        self.all_pairs = int(table.is_change.sum()) if is_retrieval else len(table.ids)

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Add the time of the validation, metrics included."""
        self.validation_seconds += time_after_steps(trainer) - self.started

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print and write the result."""
        if not trainer.is_global_zero or not self.steps:
            return
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        steps, interval = (
            round(in_steps(length, lambda: data.batches_per_epoch, f"trainer.{name}"))
            for name, length in self.lengths.items()
        )
        step = self.step_seconds / self.steps
        validation = self.validation_seconds / max(1, self.validated_pairs) * self.all_pairs
        validations = steps * trainer.accumulate_grad_batches // max(1, interval)
        is_gpu = trainer.strategy.root_device.type == "cuda"
        memory = (
            torch.cuda.max_memory_allocated() if is_gpu else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        )
        folder = Path(trainer.default_root_dir)
        states = [optimizer.state_dict() for optimizer in trainer.optimizers]
        disk = _bytes([pl_module.state_dict(), states]) * (1 + (folder / BEST).is_file())
        result = {
            "seconds_per_step": step,
            "seconds_per_validation": validation,
            "hours": (steps * step + validations * validation) / 3600,
            "memory_bytes": memory,
            "disk_bytes": disk,
        }
        write_json(
            folder / PROBE, {**result, "steps": steps, "validations": validations, "device": "gpu" if is_gpu else "cpu"}
        )
        print(
            f"probe: {step:.3g} s per step, {validation:.3g} s per validation of {self.all_pairs:,} pairs. All {steps:,} steps and "
            f"{validations:,} validations take {result['hours']:.3g} hours here, {memory / 1e9:.2f} GB of "
            f"{'GPU ' if is_gpu else ''}memory and {disk / 1e9:.2f} GB of disk space.",
            flush=True,
        )


def _bytes(state: Any) -> int:
    """Size of the tensors in nested dictionaries and lists."""
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size()
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list) else []
    return sum(map(_bytes, values))
