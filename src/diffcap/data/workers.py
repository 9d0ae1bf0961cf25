"""Worker processes of the data loaders."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.accelerators import CUDAAccelerator

from diffcap.utils.cores import available_cores
from diffcap.utils.errors import DiffcapError

WORKERS = 4  # beside a GPU; docs/speed.md has the arithmetic


def worker_options(num_workers: int | None, trainer: Any) -> dict[str, Any]:
    """Arguments of a `DataLoader`: worker processes, and pinned memory beside a GPU.

    Args:
        num_workers: worker processes per rank; None: 4 beside a GPU, at most one per CPU core, otherwise 0.
        trainer: Lightning's trainer, or None.
    """
    on_cuda = isinstance(getattr(trainer, "accelerator", None), CUDAAccelerator)
    if num_workers is None:
        num_workers = min(WORKERS, available_cores()) if on_cuda else 0
    options: dict[str, Any] = {"num_workers": num_workers, "pin_memory": on_cuda}
    if num_workers:
        # "fork" also where it is not the default, because the trainer cannot be pickled.
        options |= {"multiprocessing_context": "fork", "persistent_workers": True, "prefetch_factor": 2}
    return options


@contextmanager
def explain_lost_workers() -> Iterator[None]:
    """Turn the error that torch raises when a worker process was killed, or had no memory, into a `DiffcapError`.

    Raises:
        DiffcapError: the block raised such an error, or a worker process raised a `DiffcapError`.
    """
    try:
        yield
    except DiffcapError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise DiffcapError(str(error).strip().rpartition("DiffcapError: ")[2]) from error  # without torch's traceback
    except (RuntimeError, MemoryError) as error:
        text = f"{error} {error.__cause__ or ''}"
        if not re.search(r"DataLoader worker|shared memory", text):
            raise
        if isinstance(error, MemoryError) or "MemoryError" in text:
            reason = "a worker process of the data loader had no memory left"
        else:
            signal = re.search(r"killed by signal: (\w[\w ]*\w)", text)
            reason = f"a worker process of the data loader ended{f' ({signal[1]})' if signal else ''}"
        raise DiffcapError(
            f"{reason}, usually for lack of memory or of shared memory (/dev/shm); run the same command again with fewer "
            "workers, or none: --data.num_workers=0 (with make: ARGS=--data.num_workers=0)."
        ) from error
