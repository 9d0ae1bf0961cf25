"""Measure a hundred steps (`make` with TRAINER=probe), and estimate hours, memory and disk space of the whole training."""

import resource
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils._pytree import tree_leaves

from diffcap.lit.progress import synchronized_time
from diffcap.lit.schedules import in_steps
from diffcap.records import write_json
from diffcap.run_folder import BEST


class Probe(Callback):
    """Measure the steps and the validation of a training, and write the needs of the whole training to probe.json.

    Args:
        max_steps: steps of the whole training, or epochs ("12ep").
        val_check_interval: training batches between two validations of the whole training, or epochs.
    """

    def __init__(self, max_steps: int | str, val_check_interval: int | float | str) -> None:
        self.full_lengths = {"max_steps": max_steps, "val_check_interval": val_check_interval}
        self.first_step = self.num_steps = 0  # the first measured step, and the number of measured steps
        self.steps_seconds = 0.0
        self.start_time = 0.0  # when the measured steps began; later, when the validation began
        self.num_validated_pairs = 0
        self.validation_seconds = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Start the clock after the warm-up steps."""
        if not self.start_time and trainer.global_step >= min(10, trainer.max_steps // 2):
            self.start_time = synchronized_time(trainer)
            self.first_step = trainer.global_step

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Stop the clock of the steps, and start the clock of the validation."""
        now = synchronized_time(trainer)
        if self.num_steps <= 0:  # this is the first validation
            self.num_steps = trainer.global_step - self.first_step
            self.steps_seconds = now - self.start_time
        self.start_time = now

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Count the validated pairs of all ranks."""
        self.num_validated_pairs += len(batch["number"]) * trainer.world_size

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Add the time of the validation, which includes its metrics."""
        self.validation_seconds += synchronized_time(trainer) - self.start_time

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Estimate the needs of the whole training, print them, and write them to probe.json."""
        if not trainer.is_global_zero or not self.num_steps:
            return
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        num_steps, interval = (
            round(in_steps(length, lambda: data.batches_per_epoch, f"trainer.{name}"))
            for name, length in self.full_lengths.items()
        )
        step_seconds = self.steps_seconds / self.num_steps
        num_pairs = len(trainer.val_dataloaders.dataset)  # type: ignore[union-attr]
        validation_seconds = self.validation_seconds / max(1, self.num_validated_pairs) * num_pairs
        num_validations = num_steps * trainer.accumulate_grad_batches // max(1, interval)
        is_gpu = trainer.strategy.root_device.type == "cuda"
        # `ru_maxrss` is in units of 1024 bytes.
        memory_bytes = (
            torch.cuda.max_memory_allocated() if is_gpu else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        )
        folder = Path(trainer.default_root_dir)
        state = tree_leaves([pl_module.state_dict(), [optimizer.state_dict() for optimizer in trainer.optimizers]])
        checkpoint_bytes = sum(leaf.nbytes for leaf in state if isinstance(leaf, torch.Tensor))
        disk_bytes = checkpoint_bytes * (1 + (folder / BEST).is_file())  # last.ckpt, and best.ckpt if there is one
        result = {
            "seconds_per_step": step_seconds,
            "seconds_per_validation": validation_seconds,
            "hours": (num_steps * step_seconds + num_validations * validation_seconds) / 3600,
            "memory_bytes": memory_bytes,
            "disk_bytes": disk_bytes,
            "steps": num_steps,
            "validations": num_validations,
            "device": "gpu" if is_gpu else "cpu",
        }
        write_json(folder / "probe.json", result)
        print(
            f"probe: {step_seconds:.3g} s per step, {validation_seconds:.3g} s per validation of {num_pairs:,} pairs. All "
            f"{num_steps:,} steps and {num_validations:,} validations take {result['hours']:.3g} hours here, "
            f"{memory_bytes / 1e9:.2f} GB of {'GPU ' if is_gpu else ''}memory and {disk_bytes / 1e9:.2f} GB of disk space.",
            flush=True,
        )
