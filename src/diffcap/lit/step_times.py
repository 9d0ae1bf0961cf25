"""A Lightning callback that measures training steps, validations and extraction, for `make rehearsal`."""

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from diffcap.data.sampler import TaskSchedule, TasksInTurn
from diffcap.records import write_json
from diffcap.rehearsal import WARM_UP
from diffcap.utils.errors import DiffcapError
from diffcap.utils.linear import flop_counter


class StepTimes(Callback):
    """Write the times of a trainer's steps to a JSON file. On the CPU, also count floating-point operations.

    A stage with several tasks trains them in turn, so that few steps measure each.

    A step's time is from the start of its batch to the start of the next one: with loading, optimizer and logging. On a GPU, steps
    are asynchronous, and only the mean of many is exact.

    The file has "device"; "steps" (task, seconds, FLOPs and image maps read, one row each); "validation" (seconds, FLOPs, pairs, and
    the number of pairs without `data.val_limit`); "predict" (seconds, FLOPs, images); "batches_per_epoch" (null if the stage has no
    epochs); "row_bytes" (that are read for an image); "gpu_bytes" (peak of the allocated memory, null on the CPU). FLOPs are null on a
    GPU. One multiplication with its addition is two operations.

    Args:
        path: of the file.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.steps: list[dict[str, Any]] = []
        self.validation: dict[str, Any] = {"seconds": 0.0, "flops": None, "pairs": 0, "all_pairs": 0}
        self.predict: dict[str, Any] = {"seconds": 0.0, "flops": None, "images": 0}
        self._counter: FlopCounterMode | None = None
        self._start = 0.0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Replace the random choice of tasks, before the first batch is made."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(schedule := getattr(data, "schedule", None), TaskSchedule):
            data.schedule = TasksInTurn(schedule.tasks)

    def _count(self, pl_module: pl.LightningModule) -> None:
        if pl_module.device.type == "cpu":
            self._counter = flop_counter()
            self._counter.__enter__()

    def _counted(self) -> int | None:
        if self._counter is None:
            return None
        self._counter.__exit__(None, None, None)
        counter, self._counter = self._counter, None
        return counter.get_total_flops()

    def _time(self) -> float:
        if torch.cuda.is_available() and len(self.steps) in (0, WARM_UP):
            torch.cuda.synchronize()
        return time.perf_counter()

    def _end_step(self) -> None:
        """Note the time of the latest step, unless it has been noted."""
        if self.steps and "seconds" not in self.steps[-1]:
            self.steps[-1]["seconds"] = self._time() - self._start

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """End the previous step and start the next one."""
        self._end_step()
        maps = sum(len(batch[name]) for name in ("before", "after") if isinstance(batch.get(name), Tensor))
        self.steps.append({"task": batch.get("task", ""), "maps": maps})
        self._start = self._time()
        self._count(pl_module)

    def on_train_batch_end(self, *_: Any) -> None:
        """Stop counting; a step's time ends with the start of the next one, or of the validation."""
        self.steps[-1]["flops"] = self._counted()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End the latest step."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._end_step()
        self._start = time.perf_counter()

    def on_validation_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Start counting."""
        self._count(pl_module)

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Stop counting."""
        _add(self.validation, flops=self._counted(), pairs=len(batch["number"]))
        table = trainer.datamodule.val_table  # type: ignore[attr-defined]
        # Retrieval (CLIP4IDC's adaptation) has the change pairs only.
        self.validation["all_pairs"] = len(table.ids) if "is_change" in batch else int(table.is_change.sum())

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note the time, with that of the metrics."""
        _add(self.validation, seconds=time.perf_counter() - self._start)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the file."""
        self._end_step()
        data = trainer.datamodule  # type: ignore[attr-defined]
        try:
            batches_per_epoch = data.batches_per_epoch
        except DiffcapError:  # IDC-PCL's pre-training
            batches_per_epoch = None
        self._write(trainer, pl_module, batches_per_epoch=batches_per_epoch, row_bytes=data.store.row_bytes)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the extraction's time."""
        self._start = time.perf_counter()

    def on_predict_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Start counting."""
        self._count(pl_module)

    def on_predict_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Stop counting."""
        _add(self.predict, flops=self._counted(), images=len(batch.rows))

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the file."""
        self.predict["seconds"] = time.perf_counter() - self._start
        self._write(trainer, pl_module)

    def _write(self, trainer: pl.Trainer, pl_module: pl.LightningModule, **entries: Any) -> None:
        if not trainer.is_global_zero:
            return
        device = trainer.strategy.root_device.type
        gpu_bytes = torch.cuda.max_memory_allocated() if device == "cuda" else None
        values = {"steps": self.steps, "validation": self.validation, "predict": self.predict, "gpu_bytes": gpu_bytes}
        write_json(self.path, {"device": device, **values, **entries})


def _add(sums: dict[str, Any], **values: float | None) -> None:
    """Add values to sums; None stays None."""
    for name, value in values.items():
        if value is not None:
            sums[name] = (sums[name] or 0) + value
