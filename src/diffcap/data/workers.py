"""Worker processes of the data loaders."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from torch import Tensor
from torch.utils.data import get_worker_info

from diffcap.features.store import FeatureStore
from diffcap.utils.cores import available_cores
from diffcap.utils.errors import DiffcapError

MAX_WORKERS = 6  # per rank with a GPU; docs/speed.md has the calculation


def worker_options(num_workers: int | None, trainer: Any) -> dict[str, Any]:
    """Return arguments of a `DataLoader`: worker processes, and pinned memory with a GPU.

    `num_workers` is per rank. None means 0 without a GPU. With a GPU, it means the rank's share of the CPU cores, at most 6.
    """
    is_on_cuda = isinstance(getattr(trainer, "accelerator", None), CUDAAccelerator)
    if num_workers is None:
        cores = available_cores() // getattr(trainer, "num_devices", 1)
        num_workers = min(MAX_WORKERS, max(1, cores)) if is_on_cuda else 0
    options: dict[str, Any] = {"num_workers": num_workers, "pin_memory": is_on_cuda}
    if num_workers:
        # "fork" is not the default everywhere. Other start methods would pickle the trainer, which is impossible.
        options |= {"multiprocessing_context": "fork", "persistent_workers": True, "prefetch_factor": 2}
        # Workers leave the process group, so that Ctrl-C does not end them before the training has finished its step.
        options["worker_init_fn"] = lambda worker: os.setpgid(0, 0)
    return options


def read_maps(store: FeatureStore, rows: np.ndarray) -> Tensor:
    """Return the feature maps of n rows of a store, (n, C, h, w), float16 or uint8.

    A worker process reads them directly into shared memory, as torch's default collate function does. Otherwise, the maps would
    be copied into shared memory when they are sent to the training process.
    """
    if get_worker_info() is None:
        return torch.from_numpy(store.read(rows))
    shape = (len(rows), *store.shape)
    empty = torch.from_numpy(np.empty(0, store.dtype))
    num_bytes = int(np.prod(shape)) * store.dtype.itemsize
    maps = empty.set_(torch.UntypedStorage._new_shared(num_bytes)).view(shape)
    store.read(rows, out=maps.numpy())
    return maps


@contextmanager
def explain_lost_workers() -> Iterator[None]:
    """Turn the error that torch raises when a worker process was killed, or had no memory, into a `DiffcapError`."""
    try:
        yield
    except DiffcapError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise DiffcapError(str(error).strip().rpartition("DiffcapError: ")[2]) from error  # without torch's traceback
    except (RuntimeError, MemoryError) as error:
        messages = f"{error} {error.__cause__ or ''}"
        if not re.search(r"DataLoader worker|shared memory", messages):
            raise
        if isinstance(error, MemoryError) or "MemoryError" in messages:
            reason = "a worker process of the data loader had no memory left"
        else:
            signal = re.search(r"killed by signal: (\w[\w ]*\w)", messages)
            reason = f"a worker process of the data loader ended{f' ({signal[1]})' if signal else ''}"
        raise DiffcapError(
            f"{reason}, usually for lack of memory or of shared memory (/dev/shm); run the same command again with fewer "
            "workers, or none: --data.num_workers=0 (with make: ARGS=--data.num_workers=0)."
        ) from error
