"""Count the operations of training steps for which the host would wait for a GPU, on a CPU, with the real training loop."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import diffcap
from diffcap.lit.training import TrainingModule

SOURCES = str(Path(diffcap.__file__).parent)
# They return a number, or a tensor whose shape depends on values; `lift_fresh` copies a value of the host (`torch.tensor`).
READS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "bincount", "repeat_interleave"}
READS |= {"lift_fresh", "_unique2", "unique_dim", "unique_consecutive"}
_tolist = Tensor.tolist
Step = tuple[str, list[str]]  # a step's task or "", and its waits


class HostWaits(TorchDispatchMode):
    """Collect waits, each as "operation: innermost line of diffcap > innermost line of a library that it called"."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        has_mask = name.startswith("index") and isinstance(args[1], list | tuple) and any(
            index is not None and not index.dtype.is_signed for index in args[1]  # bool and uint8
        )  # fmt: skip
        if name in READS or has_mask:
            self.read(name)
        return func(*args, **(kwargs or {}))

    def read(self, name: str) -> None:
        """Add an operation that reads a value, unless a data loader or an optimizer called it."""
        frames = traceback.extract_stack()
        files = [frame.filename for frame in frames]
        last = max(number for number, file in enumerate(files) if SOURCES in file or "/lightning/" in file)
        # A data loader runs in other processes on a GPU, and an optimizer keeps its step counters on the CPU.
        if not any("torch/utils/data/" in file for file in files) and "torch/optim/" not in str(files[last:]):
            own = max(number for number, file in enumerate(files) if SOURCES in file)
            called = [
                frame for frame in frames[own:] if "/torch/" not in frame.filename and "/tests/" not in frame.filename
            ]
            places = dict.fromkeys(f"{frame.filename}:{frame.lineno}" for frame in (called[0], called[-1]))
            self.found.append(f"{name}: {' > '.join(places)}")


@contextmanager
def counted_steps() -> Iterator[list[Step]]:
    """Collect the waits of each training step of Lightning's loop in this process, and of the losses of each "validation" batch."""
    steps: list[Step] = []
    advance, add_validation_losses = _TrainingEpochLoop.advance, TrainingModule.add_validation_losses

    def counted_validation(*arguments: Any) -> None:
        with HostWaits() as waits:
            add_validation_losses(*arguments)
        steps.append(("validation", waits.found))

    def counted(loop: Any, data_fetcher: Any) -> None:
        connector, waits, tasks = loop.trainer._logger_connector, HostWaits(), []
        on_batch_start = connector.on_batch_start

        def see(batch: Any) -> None:
            tasks.append(batch.get("task", ""))
            on_batch_start(batch)

        def tolist(tensor: Tensor) -> Any:  # on a CPU, no operation shows this read
            waits.read("tolist")
            return _tolist(tensor)

        with mock.patch.object(connector, "on_batch_start", see), mock.patch.object(Tensor, "tolist", tolist), waits:
            advance(loop, data_fetcher)
        steps.append((tasks[0], waits.found))

    validation = mock.patch.object(TrainingModule, "add_validation_losses", counted_validation)
    with mock.patch.object(_TrainingEpochLoop, "advance", counted), validation:
        yield steps
