"""Measure the stages of an experiment on a dataset of official size, and calculate what the real run needs (`make rehearsal`).

`stages/rehearsal.py` has the stages in order. Data and negatives run completely. The others run on a sample: a dataset with all
pairs and captions whose images are the few distinct ones, so that tables and captions have their real size and features need little
space.
"""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from diffcap.experiment import Experiment
from diffcap.lit.schedules import in_steps
from diffcap.records import read_dataset, read_json, write_dataset, write_json
from diffcap.run_folder import PRETRAIN
from diffcap.utils.errors import DiffcapError
from diffcap.utils.settings import get_config_value

# Dataset -> import path of a module with `write(folder, scenes, rendered)` and `rendered_image(path, rendered)`.
SOURCES = {"clevr_change": "diffcap.worlds.blocks.official_size"}
WARM_UP = 2  # training steps that do not count, beside the first step of each task
STEPS_OF_TASK = 3  # least number of training steps of each task
FREE_GB = 8  # disk space at the official size: checkpoints of two stages 4 GB, manifests, negatives, sampled features
_POLL_SECONDS, _POLL_SHARE = (
    0.2,
    0.05,
)  # least time between two samples of the memory, and largest share of the time for taking them

Record = dict[str, Any]


def measure(
    path: Path, settings: Mapping[str, Any], outputs: Sequence[Path], run: Callable[[], Mapping[str, Any] | None]
) -> Record:
    """Run a stage, unless it was measured before with the same settings.

    Args:
        path: JSON file of the measurement. settings: of the stage, JSON values.
        outputs: files and folders of an earlier or interrupted run of the stage, which are deleted before it runs.
        run: runs the stage in new processes; it may return more values for the record.

    Returns:
        "seconds" of wall time, "peak_bytes" of memory of all processes of the stage together, "settings", and what `run` returned.
    """
    try:
        found = read_json(path)
    except DiffcapError:
        found = None
    if isinstance(found, dict) and found.get("settings") == dict(settings):
        print(f"{path}: measured already", flush=True)
        return found
    for output in outputs:
        if output.is_dir():
            shutil.rmtree(output)
        else:
            output.unlink(missing_ok=True)
    start = time.perf_counter()
    with peak_memory() as peak:
        more = run() or {}
    seconds = time.perf_counter() - start
    record = {"seconds": seconds, "peak_bytes": peak[0], "settings": dict(settings), **more}
    write_json(path, record)
    return record


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Measure the memory of the processes that this process starts, all together, while the block runs.

    Shared memory is counted once (proportional set size). The value is sampled up to five times a second, less often where a
    sample takes long (the kernel goes through all pages). It needs Linux.

    Yields:
        A list whose only element is the peak so far in bytes; 0 where it cannot be measured.
    """
    peak, stop = [0], threading.Event()

    def poll() -> None:
        pause = _POLL_SECONDS
        while not stop.wait(pause):
            start = time.perf_counter()
            peak[0] = max(peak[0], sum(map(_memory, _descendants(os.getpid()))))
            pause = max(_POLL_SECONDS, (time.perf_counter() - start) / _POLL_SHARE)

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


def _descendants(parent: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()  # after the name, which may contain blanks
        except OSError:  # the process has ended
            continue
        children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, waiting = [], children.get(parent, [])
    while waiting:
        found.append(waiting.pop())
        waiting += children.get(found[-1], [])
    return found


def _memory(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def disk_bytes(paths: Sequence[Path]) -> int:
    """Disk space of files, and of the files in folders."""
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
    return sum(file.stat().st_size for file in files)


def check_disk(folder: Path, needed_gb: float = FREE_GB) -> None:
    """Check, before anything is written, that the disk of a folder has space.

    Raises:
        DiffcapError: it has not.
    """
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free / 1e9
    if free < needed_gb:
        raise DiffcapError(
            f"{folder}: the rehearsal needs {needed_gb:g} GB of disk space, {free:.1f} GB are free; delete files, or give a folder on "
            "another disk: FOLDER=<folder>."
        )


def write_sample(whole: Path, sample: Path, rendered_image: Callable[[str], str]) -> None:
    """Write a dataset with all pairs and captions of another one, whose images are only the rendered ones.

    Args:
        whole: folder of the dataset. sample: folder of the new one.
        rendered_image: from the path of an image to that of the rendered image which it is a link to.
    """
    dataset = read_dataset(whole)
    pairs = [
        replace(pair, before=rendered_image(pair.before), after=pair.after and rendered_image(pair.after))
        for pair in dataset.pairs
    ]
    counted = {"pairs", "images", "captions", "captions_per_pair", "splits"}
    own = {"name", "root", "manifest_sha256"}
    notes = {key: value for key, value in dataset.info.items() if key not in counted | own}
    write_dataset(sample, dataset.name, dataset.root, pairs, notes)


def read_rate(files: Sequence[Path]) -> float:
    """Bytes per second at which files are read from the disk, after removing each from the memory of the operating system."""
    seconds, size = 0.0, 0
    for file in files:
        with file.open("rb", buffering=0) as opened:
            if hasattr(os, "posix_fadvise"):
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            while part := opened.read(1 << 20):
                size += len(part)
            seconds += time.perf_counter() - start
    return size / max(seconds, 1e-9)


def mean_of_tasks(steps: Sequence[Mapping[str, Any]], key: str = "seconds") -> dict[str, float]:
    """The mean of a value over the steps of each task; a stage without tasks has the task "".

    Args:
        steps: see `StepTimes`. The first `WARM_UP` and the first of each task do not count, unless the task has no other.
        key: of the value in each step.
    """
    values: dict[str, list[tuple[int, float]]] = {}
    for number, step in enumerate(steps):
        values.setdefault(step["task"], []).append((number, step[key]))
    return {
        task: fmean([value for number, value in found[1:] if number >= WARM_UP] or [found[-1][1]])
        for task, found in values.items()
    }


def mean_of_steps(steps: Sequence[Mapping[str, Any]], shares: Mapping[str, float], key: str = "seconds") -> float:
    """`mean_of_tasks`, weighted by the tasks' shares.

    Args:
        steps, key: see there. shares: relative frequency of each task; empty for stages without tasks.
    """
    means = mean_of_tasks(steps, key)
    weights = {task: shares.get(task, 1.0) for task in means}
    return sum(weights[task] * mean for task, mean in means.items()) / sum(weights.values())


def task_shares(experiment: Experiment, stage: str) -> dict[str, float]:
    """The shares of the tasks of a training stage; empty for a stage without tasks."""
    files = experiment.config_files(stage)
    without = get_config_value(files, "data", "without") or []
    shares = get_config_value(files, "data", "tasks") or {} if stage == PRETRAIN else {}
    return {task: share for task, share in shares.items() if share > 0 and task not in without}


def least_steps(experiment: Experiment, stage: str) -> int:
    """Number of steps in which each task of a training stage is measured at least twice; 1 for a stage without tasks."""
    return max(1, STEPS_OF_TASK * len(task_shares(experiment, stage)))


def recomputes(experiment: Experiment, stage: str) -> bool:
    """Whether the rehearsal of a training stage computes activations again in the backward pass: on a CPU, if its model can."""
    import torch

    value = get_config_value(experiment.config_files(stage), "model", "captioner", "init_args", "checkpointing")
    return value is False and not torch.cuda.is_available()


def training_row(
    experiment: Experiment, stage: str, record: Record, times: Record, rate: float, tflops: float
) -> Record:
    """What a training stage with the steps and validations of its settings needs.

    Args:
        experiment: of the rehearsal. stage: pretrain or finetune.
        record: of `measure`. times: file of `StepTimes`.
        rate: bytes per second from the disk. tflops: assumed speed of a GPU, 10^12 operations per second.

    Returns:
        The entries of table.json.
    """
    files = experiment.config_files(stage)

    def length(key: str) -> int:
        value = get_config_value(files, "trainer", key)
        return max(1, round(in_steps(value, lambda: times["batches_per_epoch"], f"trainer.{key}")))

    steps, shares, validation = length("max_steps"), task_shares(experiment, stage), times["validation"]
    validations, step_seconds = steps // length("val_check_interval"), mean_of_steps(times["steps"], shares)
    factor = validations * validation["all_pairs"] / max(1, validation["pairs"])
    seconds = steps * step_seconds + factor * validation["seconds"]
    read_bytes = mean_of_steps(times["steps"], shares, "maps") * times["row_bytes"]
    flops = None
    if times["device"] == "cpu":
        flops = steps * mean_of_steps(times["steps"], shares, "flops") + factor * (validation["flops"] or 0)
    batch, in_turn = get_config_value(files, "data", "batch_size"), ", tasks in turn" if shares else ""
    return {
        "stage": stage,
        "here": f"{len(times['steps'])} steps of batch {batch}{in_turn}, a validation of {validation['pairs']:,} pairs",
        "real": f"{steps:,} steps, {validations:,} validations of {validation['all_pairs']:,} pairs",
        "minutes": record["seconds"] / 60,
        "hours": seconds / 3600,
        "peak_bytes": record["peak_bytes"],
        "steps": steps,
        "seconds_per_step": step_seconds,
        "validations": validations,
        "seconds_per_validation": validation["seconds"] * validation["all_pairs"] / max(1, validation["pairs"]),
        "read_bytes_per_step": read_bytes,
        "checkpointing": recomputes(experiment, stage),
        "hours_of_cold_reading": steps * read_bytes / rate / 3600,
        "seconds_per_step_of_task": mean_of_tasks(times["steps"]) if shares else {},
        **gpu(times, seconds, flops, tflops),
    }


def gpu(times: Mapping[str, Any], seconds: float, flops: float | None, tflops: float) -> Record:
    """GPU hours: those measured, or calculated from the number of operations if the stage ran on the CPU.

    Args:
        times: file of `StepTimes`. seconds: of the real stage. flops: operations of the real stage. tflops: see `training_row`.
    """
    measured = times["device"] != "cpu"
    return {
        "device": times["device"],
        "gpu_hours": seconds / 3600 if measured else (flops or 0) / (tflops * 1e12) / 3600,
        "gpu_hours_are": "measured" if measured else "calculated",
        "flops": flops,
        "gpu_bytes": times["gpu_bytes"],
    }


def table(rows: Sequence[Record]) -> list[list[str]]:
    """The cells of the table, the header first."""
    gpu_memory = any(row.get("gpu_bytes") for row in rows)
    header = ["stage", "run here", "minutes", "real run", "hours", "disk, GB", "memory, GB", "GPU hours"]
    cells = [header + (["GPU memory, GB"] if gpu_memory else [])]
    for row in rows:
        hours = "-" if "gpu_hours" not in row else f"{row['gpu_hours']:.2f}"
        cells.append(
            [
                row["stage"],
                row["here"],
                f"{row['minutes']:.1f}",
                row["real"],
                f"{row['hours']:.2f}",
                f"{row['disk_bytes'] / 1e9:.2f}",
                f"{row['peak_bytes'] / 1e9:.2f}",
                hours,
                *([f"{(row.get('gpu_bytes') or 0) / 1e9:.2f}"] if gpu_memory else []),
            ]
        )
    total = ["total", "", f"{sum(row['minutes'] for row in rows):.1f}", "", f"{sum(row['hours'] for row in rows):.2f}"]
    total += [
        f"{sum(row['disk_bytes'] for row in rows) / 1e9:.2f}",
        f"{max(row['peak_bytes'] for row in rows) / 1e9:.2f}",
    ]
    total += [f"{sum(row.get('gpu_hours', 0) for row in rows):.2f}"]
    return [*cells, total + ([""] if gpu_memory else [])]


def markdown(rows: Sequence[Record], remarks: Sequence[str]) -> str:
    """table.md: the table, then the remarks."""
    header, *body = table(rows)
    numbers = {"minutes", "hours", "disk, GB", "memory, GB", "GPU hours", "GPU memory, GB"}
    rule = ["---:" if name in numbers else "---" for name in header]
    lines = [f"| {' | '.join(cells)} |" for cells in (header, rule, *body)]
    return "\n".join([*lines, "", *(f"* {remark}" for remark in remarks)]) + "\n"


def show(rows: Sequence[Record], remarks: Sequence[str], title: str) -> None:
    """Print the table and the remarks."""
    from diffcap.evaluation.tables import print_table
    from diffcap.utils.table import Cell, Table

    header, *body = table(rows)
    lines = [([row[0], row[1], row[3]], [Cell(number) for number in (row[2], *row[4:])]) for row in body]
    print_table(Table([header[2], *header[4:]], lines, [header[0], header[1], header[3]], title))
    print("\n".join(remarks))


def notes(rows: Sequence[Record], experiment: Experiment, tflops: float, machine: Record) -> list[str]:
    """What a reader of the table must know, a sentence or two each.

    Args:
        machine: "cores", "load" (processes that wanted a core in the last minute), "date" and "commit".
    """
    trained = [row for row in rows if "steps" in row]
    on_cpu = all(row["device"] == "cpu" for row in trained)
    lines = [
        "`minutes` are those of the rehearsal, `hours` those of the real run on this machine. Data and negatives ran completely; the "
        "other stages are calculated from the rehearsal's time per image, step or pair. Trainings may stop earlier (`run.patience`). "
        "`memory` is the peak of all processes of a stage, measured with all captions. The last row has the sums, and the largest "
        "memory. The dataset's own files are not in `disk`.",
    ]
    if experiment.weights == "random":
        lines.append("The weights of the networks are random, so the scores mean nothing.")
    if on_cpu:
        lines.append(
            f"GPU hours are calculated: floating-point operations, counted on the CPU, at {tflops:g} x 10^12 per second "
            "(`--gpu_tflops`). Decoding word by word, metrics, loading and decoding of images take longer than this; the same command "
            "on a machine with a GPU measures them."
        )
    for row in trained:
        lines.append(
            f"{row['stage']}: {row['seconds_per_step']:.3g} s per step, {row['seconds_per_validation']:.3g} s per validation. A step reads "
            f"{row['read_bytes_per_step'] / 1e6:.0f} MB of features, here from memory; from this disk, with nothing in memory, the "
            f"reading alone would take {row['hours_of_cold_reading']:.2f} hours."
        )
        if row["checkpointing"]:
            lines.append(
                f"{row['stage']}: measured with `checkpointing: true`, which computes activations a second time. Without it, as in the "
                "settings of the real run, `hours` and `GPU hours` are lower and `memory` is higher."
            )
        if by_task := row["seconds_per_step_of_task"]:
            each = ", ".join(f"{task} {seconds:.3g} s" for task, seconds in by_task.items())
            lines.append(
                f"{row['stage']}: the time per step is the mean of the tasks' ({each}), weighted by their shares."
            )
    load = f"load {machine['load']:.1f} at the end (above the number of cores, the times are too long)"
    lines.append(f"{machine['cores']} cores, {load}, {machine['date']}, commit {machine['commit']}.")
    return lines
