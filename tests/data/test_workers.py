"""The worker processes of the data loaders: how many there are, and what is said when one is lost."""

import os
import signal
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from torch.utils.data import DataLoader

from diffcap.data.workers import explain_lost_workers, read_maps, worker_options
from diffcap.utils.errors import DiffcapError


@pytest.mark.parametrize("kind", ["float16", "uint8"])
def test_a_worker_reads_into_shared_memory(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = np.random.default_rng(0).integers(0, 255, (6, 3, 2, 2)).astype(kind)

    class Store:
        shape, dtype = (3, 2, 2), maps.dtype

        def read(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
            out = np.empty((len(rows), *self.shape), kind) if out is None else out
            out[:] = maps[rows]
            return out

    rows = np.array([4, 0, 4])
    for worker, shared in ((None, False), (object(), True)):
        monkeypatch.setattr("diffcap.data.workers.get_worker_info", lambda worker=worker: worker)
        found = read_maps(Store(), rows)  # type: ignore[arg-type]
        assert found.is_shared() is shared
        np.testing.assert_array_equal(found.numpy(), maps[rows], strict=True)


def test_workers_by_default_only_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cpu = (SimpleNamespace(accelerator=kind(), num_devices=1) for kind in (CUDAAccelerator, CPUAccelerator))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    on_gpu = worker_options(None, gpu)
    assert (on_gpu["num_workers"], on_gpu["pin_memory"], on_gpu["persistent_workers"]) == (6, True, True)
    for trainer in (cpu, None):
        assert worker_options(None, trainer) == {"num_workers": 0, "pin_memory": False}
    gpu.num_devices = 4  # with four cores each
    assert worker_options(None, gpu)["num_workers"] == 4
    assert worker_options(0, gpu)["num_workers"] == 0 and worker_options(7, cpu)["num_workers"] == 7
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(1)))
    assert worker_options(None, gpu)["num_workers"] == 1


def _die(item: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _run_out_of_memory(item: int) -> None:
    raise MemoryError


def _refuse(item: int) -> None:
    raise DiffcapError("features.bin is 3 bytes short; extract the features again.")


@pytest.mark.parametrize(
    ("fail", "sentence"),
    [
        # torch names the signal if its own handler gets it first
        (
            _die,
            r"^a worker process of the data loader ended(?: \(Killed\))?, .*--data.num_workers=0 \(with make: .*\)\.$",
        ),
        (_run_out_of_memory, r"^a worker process of the data loader had no memory left.*--data.num_workers=0.*\.$"),
        (_refuse, r"^features.bin is 3 bytes short; extract the features again\.$"),
    ],
)
def test_a_lost_worker_is_one_sentence(fail: Callable[[int], None], sentence: str) -> None:
    loader = DataLoader(range(4), batch_size=None, collate_fn=fail, **worker_options(1, None))
    with pytest.raises(DiffcapError, match=sentence), explain_lost_workers():
        list(loader)
    with pytest.raises(ZeroDivisionError), explain_lost_workers():
        _ = 1 // 0
