"""The worker processes of the data loaders: how many there are, that they change no batch, and what is said when one is lost."""

import os
import signal
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from tests.toy import write_toy
from torch.utils.data import DataLoader, Dataset

from diffcap.data.datamodules import CaptionData, FeatureData
from diffcap.data.workers import explain_lost_workers, read_maps, worker_options
from diffcap.methods.pcl.data import PretrainData
from diffcap.utils.errors import DiffcapError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"))


def batches(kind: type[FeatureData], folder: Path, workers: int) -> list[dict[str, Any]]:
    data = kind(str(folder), "toy", batch_size=8, eval_batch_size=3, max_length=20, swap=True, num_workers=workers)
    data.trainer = SimpleNamespace(
        global_step=3, global_rank=0, world_size=1, accumulate_grad_batches=1, accelerator=CPUAccelerator()
    )
    data.setup("fit")
    return [*islice(data.train_dataloader(), 7), *data.val_dataloader()]


@pytest.mark.parametrize("kind", [CaptionData, PretrainData])
def test_the_batches_do_not_depend_on_the_number_of_workers(folder: Path, kind: type[FeatureData]) -> None:
    alone, together = (batches(kind, folder, workers) for workers in (0, 2))
    assert len(alone) == len(together) > 8
    for ours, theirs in zip(alone, together):
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            same = torch.equal(value, theirs[key]) if isinstance(value, torch.Tensor) else value == theirs[key]
            assert same, key


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


class Failing(Dataset):
    def __init__(self, fail: Callable[[], None]) -> None:
        self.fail = fail

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        self.fail()
        return index


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _run_out_of_memory() -> None:
    raise MemoryError


def _refuse() -> None:
    raise DiffcapError("features.bin is 3 bytes short; extract the features again.")


@pytest.mark.parametrize(
    ("fail", "sentence"),
    [
        (_die, r"^a worker process of the data loader ended \(Killed\).*--data.num_workers=0 \(with make: .*\)\.$"),
        (_run_out_of_memory, r"^a worker process of the data loader had no memory left.*--data.num_workers=0.*\.$"),
        (_refuse, r"^features.bin is 3 bytes short; extract the features again\.$"),
    ],
)
def test_a_lost_worker_is_one_sentence(fail: Callable[[], None], sentence: str) -> None:
    loader = DataLoader(Failing(fail), batch_size=None, **worker_options(1, None))
    with pytest.raises(DiffcapError, match=sentence), explain_lost_workers():
        list(loader)
    with pytest.raises(ZeroDivisionError), explain_lost_workers():
        _ = 1 // 0
