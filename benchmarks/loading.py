"""Speed of the loader of training batches: worker processes, cold and warm stores, at the papers' sizes and batch sizes.

Command: .venv/bin/python benchmarks/loading.py --out benchmarks/loading.json
"""

import gc
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
from common import machine, write_results

from diffcap.utils.console import run

# Seconds of a training step on a GPU: assumptions, not measurements. The loader should be three times as fast.
GPU_STEP_SECONDS = {"pcl": 0.05, "scorer": 0.15, "dirl": 0.15}
FEATURES = {"pcl": (2048, 7, 7), "scorer": (1024, 14, 14), "dirl": (1024, 14, 14)}  # of the papers, float16
SMALL = (8, 2, 2)
CAPTION = "the small brown metal cube that is behind the big cylinder has changed its location"


def loading(
    out: str,
    methods: list[str] | None = None,
    workers: list[int] | None = None,
    batches: int = 8,
    small: bool = False,
) -> None:
    """Time the batches of the fine-tuning on CLEVR-Change, without a training, and write the numbers and a table.

    The loader is the stage's own, with its settings. Cold: the first epoch of a store whose pages were dropped; each map is compared
    with its checksum. Warm: the next epoch, with the store in the page cache. Beside a step: once more, while a training does nothing
    for the assumed time of a GPU step between two batches, as a process does that waits for its GPU.

    Args:
        out: the JSON file. The table has the same name with the suffix .md.
        methods: which; by default pcl and scorer, whose loader dirl has, too.
        workers: numbers of worker processes; by default 0, 1, 2 and 4.
        batches: of an epoch, which is also the size of the temporary store: 154 MB each for SCORER and DIRL.
        small: tiny features, to see that everything runs.
    """
    info = machine()
    chosen, rows = methods or ["pcl", "scorer"], []
    for method in chosen:
        with TemporaryDirectory(prefix="diffcap-loading-") as store:
            batch_size = write_store(method, Path(store), batches, small)
            for number in workers or [0, 1, 2, 4]:
                for measured in epochs(method, Path(store), number, batches):
                    row = {"method": method, "batch_size": batch_size, "workers": number, "cores": info["cores"]}
                    rows.append({**row, **measured, "assumed_gpu_step_seconds": GPU_STEP_SECONDS[method]})
                    print(line(rows[-1]), flush=True)
    settings = {"methods": chosen, "batches": batches, "small": small}
    write_results(out, info, table(rows, small), settings, cases=rows)


def settings_of(method: str) -> dict[str, Any]:
    """The settings `data` of a method's fine-tuning on CLEVR-Change on which its loader depends."""
    from diffcap.experiment import Experiment

    experiment = Experiment(dataset="clevr_change", method=method)
    names = ("samples", "batch_size", "vocabulary_layout", "max_length", "swap", "trim")
    found = {name: experiment.setting("finetune", "data", name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def write_store(method: str, folder: Path, batches: int, small: bool) -> int:
    """Write a dataset of CLEVR-Change's form, an epoch of `batches` batches, and its feature store; returns the batch size."""
    from diffcap.features.writer import StoreWriter
    from diffcap.records import ChangePair, write_dataset

    settings = settings_of(method)
    size, by_scene = settings["batch_size"], settings.get("samples") == "scenes"
    scenes = size * batches if by_scene else size * batches // 2  # IDC-PCL: a sample is a caption of one of two pairs
    pairs = [
        ChangePair(f"{n}{end}", f"{n}.png", f"{n}{end}.png", [CAPTION], split, is_distractor=end == "n")
        for split, numbers in (("train", range(scenes)), ("val", range(scenes, scenes + 1)))
        for n in numbers
        for end in "sn"
    ]
    write_dataset(folder, "loading", folder, pairs, {})
    paths = list(dict.fromkeys(path for pair in pairs for path in pair.images))
    store = StoreWriter(folder / "features/loading", paths, SMALL if small else FEATURES[method], {})
    maps = np.random.default_rng(0).standard_normal((64, *store.shape), dtype=np.float32).astype(np.float16)
    maps[maps < 0] = 0  # as after a ReLU
    for start in range(0, len(paths), len(maps)):
        rows = np.arange(start, min(start + len(maps), len(paths)))
        store.write(rows, maps[: len(rows)])
    store.finish()
    return int(size)


def epochs(method: str, folder: Path, workers: int, batches: int) -> Iterator[dict[str, Any]]:
    """Time a cold and a warm epoch of a training's loader. The cold one includes the start of the workers.

    Yields "core_s_per_batch", the processor time of all processes, which depends little on what else the machine does, and of the warm
    epoch "wait_s", the mean time that a training waits for a batch beside assumed GPU steps.
    """
    from diffcap.data.datamodules import CaptionData

    data = CaptionData(str(folder), "loading", num_workers=workers, **settings_of(method))
    data.trainer = SimpleNamespace(world_size=1, global_rank=0, global_step=0, accumulate_grad_batches=1)  # type: ignore[assignment]
    data.setup("fit")
    (file,) = data.store.folder.glob("features.*")
    with file.open("rb") as opened:  # remove it from the page cache
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    loader = iter(data.train_dataloader())
    for store in ("cold", "warm"):
        start, start_cores = time.perf_counter(), processor_seconds()
        for _ in range(batches):
            batch = next(loader)
        seconds, used = time.perf_counter() - start, processor_seconds() - start_cores
        size = sum(batch[name].nbytes for name in ("before", "after"))
        speed = {"batches_per_s": batches / seconds, "gb_per_s": batches * size / seconds / 1e9, "bytes": size}
        speed["core_s_per_batch"] = used / batches
        if store == "warm":
            speed["wait_s"] = waiting(loader, batches, GPU_STEP_SECONDS[method])
        yield {"store": store, **speed}
        for _ in range(3 * workers):  # begun while the store was being read from the disk
            next(loader)
    del loader, data, batch  # ends the workers and removes the mapping, without which pages cannot be dropped
    gc.collect()


def waiting(loader: Iterator[Any], batches: int, step_seconds: float) -> float:
    """Mean seconds that a training waits for its next batch; a step uses no processor, as on a GPU."""
    seconds = 0.0
    for number in range(-batches, 5 * batches):  # the first ones were ordered before; they do not count
        time.sleep(step_seconds)
        start = time.perf_counter()
        batch = next(loader)
        seconds += (time.perf_counter() - start) * (number >= 0)
        del batch  # releasing its memory is not a part of the waiting
    return seconds / (5 * batches)


def processor_seconds() -> float:
    """Processor time so far of this process and its worker processes, which needs Linux."""
    ticks = 0
    for worker in multiprocessing.active_children():
        fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # user and system time
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def line(row: dict[str, Any]) -> str:
    """A row of the table, as Markdown."""
    from diffcap.registry import get_method

    step = row["assumed_gpu_step_seconds"]
    wait = f"{row['wait_s']:.3f}" if "wait_s" in row else "-"
    return (
        f"| {get_method(row['method']).title}, batch {row['batch_size']} | {row['store']} | {row['workers']} | {row['cores']} |"
        f" {row['batches_per_s']:.1f} | {row['gb_per_s']:.2f} | {row['core_s_per_batch']:.3f} | {1 / step:.1f} |"
        f" {row['batches_per_s'] * step:.2f} x | {3 * row['core_s_per_batch'] / step:.1f} | {wait} |"
    )


def table(rows: list[dict[str, Any]], small: bool) -> list[str]:
    """The rates in Markdown."""
    note = ", **tiny features: the numbers mean nothing**" if small else ""
    return [
        "# Speed of the loader",
        "",
        f"`python benchmarks/loading.py`: training batches of the fine-tuning on CLEVR-Change, without a training{note}. Measured:"
        " batches and bytes of float16 feature maps per second, and the processor time of all processes per batch. Assumed: the GPU's"
        " steps per second (0.05 s each for IDC-PCL, 0.15 s for SCORER and DIRL). Calculated from these: the two columns after them; cores"
        " for 3 x are those that load three times as fast as the GPU steps. Measured: how long a training waits for each batch beside"
        " steps of that time, which use no processor (*wait*).",
        "",
        "| case | store | workers | cores | batches/s | GB/s | core s/batch | GPU steps/s, assumed | loader / GPU | cores for 3 x |"
        " wait, s |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        *(line(row) for row in rows),
    ]


if __name__ == "__main__":
    run(loading)
