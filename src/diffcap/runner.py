"""Run several experiments on one machine, for `make demo`, `make accuracy` and `diffcap benchmark`."""

import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from queue import SimpleQueue

from diffcap.experiment import Experiment
from diffcap.run_folder import FINETUNE, PRETRAIN, PRETRAIN_EXTRA
from diffcap.stages import needed_by
from diffcap.utils.cores import available_cores
from diffcap.utils.errors import DiffcapError

Variables = Mapping[str, str]  # variables of an experiment, such as {"dataset": "blocks", "seed": "7"}


@dataclass(frozen=True)
class Job:
    """One training with its evaluation."""

    title: str  # name in messages
    variables: Variables
    finetune: int | None = None  # steps of the fine-tuning; with None, the settings determine the number
    pretrain: int | None = 0  # steps of the pre-training, or None as for `finetune`; 0 skips the pre-training

    @cached_property
    def experiment(self) -> Experiment:
        """The experiment of the variables."""
        return Experiment(**self.variables)

    @property
    def run(self) -> Path:
        """Folder of the run."""
        return Path(self.experiment.run)


# `_thread_values.devices`: CUDA_VISIBLE_DEVICES of the processes that this thread starts; None leaves the variable unchanged.
_thread_values = threading.local()


def call(words: Sequence[str], title: str) -> None:
    """Run `diffcap <words>` with one CPU thread per process, which is faster for the small models of these experiments."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "diffcap", *words]
    devices = getattr(_thread_values, "devices", None)
    print(f"== {title}" + (f" (GPU {devices})" if devices else ""), flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({"CUDA_VISIBLE_DEVICES": devices} if devices else {})}
    if subprocess.run(command, env=environment, check=False).returncode:
        raise DiffcapError(
            f"{title} failed, see above: `{shlex.join(command)}`; fix it and run the same command again, which continues there."
        )
    print(f"== {title}: done after {time.perf_counter() - start:.0f} s", flush=True)


def make(title: str, goals: str, variables: Variables, *first_options: str, **stage_options: Sequence[str]) -> None:
    """Run the goals, and before them the needed stages that have options (`stage_options`). `first_options` are for the first goal."""
    experiment, names = Experiment(**variables), goals.split()
    for stage, owner in needed_by(experiment, names):
        section = PRETRAIN if stage == PRETRAIN_EXTRA else stage
        options = [*stage_options.get(section, ()), *(first_options if stage == names[0] else ())]
        if owner is experiment and (stage in names or options):  # stages of other datasets have another owner
            words = [stage, *experiment.words(), "--goals", goals]
            call([*words, "--", *options] if options else words, f"{title}: {stage}")


def run_job(job: Job, **stage_options: Sequence[str]) -> None:
    """Pre-train (unless `job.pretrain` is 0), fine-tune and evaluate."""
    variables = {**job.variables, "run": str(job.run), "pretrain": "no" if job.pretrain == 0 else "yes"}
    goals = "finetune eval" if job.pretrain == 0 else "pretrain finetune eval"
    steps = {PRETRAIN: job.pretrain, FINETUNE: job.finetune}
    options = {stage: steps_options(number) for stage, number in steps.items()}
    make(job.title, goals, variables, **{**options, **stage_options})


def run_queues(queues: Sequence[Sequence[Job]]) -> None:
    """Run the jobs of each queue in order; queues run in parallel, each on its own GPUs or CPU core."""

    def run_queue(queue: Sequence[Job]) -> None:
        for job in queue:
            run_job(job)

    devices = max((int(job.variables.get("devices", 1)) for queue in queues for job in queue), default=1)
    in_parallel([partial(run_queue, queue) for queue in queues], devices)


def in_parallel(tasks: Sequence[Callable[[], None]], devices: int = 1) -> None:
    """Call functions in parallel threads. Each has a group of `devices` GPUs; the processes that it starts by `call` see only these."""
    free_groups: SimpleQueue[str | None] = SimpleQueue()
    for group in (groups := device_groups(devices)):
        free_groups.put(group)

    def take_group() -> None:
        _thread_values.devices = free_groups.get()

    with ThreadPoolExecutor(len(groups), initializer=take_group) as pool:
        for future in [pool.submit(task) for task in tasks]:
            future.result()


def device_groups(devices: int = 1) -> list[str | None]:
    """Return the value of CUDA_VISIBLE_DEVICES for each process that runs in parallel; None leaves the variable unchanged.

    There is one process per group of `devices` GPUs. With fewer than two groups, one process uses all GPUs. Without a GPU, there is one
    process per available CPU core, but at most 2.
    """
    import torch

    if not torch.cuda.is_available():
        return [None] * min(2, available_cores())
    num_gpus, visible = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",")[:num_gpus] if visible else [str(index) for index in range(num_gpus)]
    first_indices = range(0, num_gpus - devices + 1, devices)
    groups: list[str | None] = [",".join(names[first : first + devices]) for first in first_indices]
    return groups if len(groups) > 1 else [None]


def steps_options(steps: int | None) -> tuple[str, ...]:
    """Return options for a training of `steps` steps with four validations; no options if `steps` is None or 0."""
    if not steps:
        return ()
    return f"--trainer.max_steps={steps}", f"--trainer.val_check_interval={max(1, steps // 4)}"


def parse_seeds(text: str) -> list[int]:
    """Return the seeds in a text such as "1,2,3"."""
    parts = text.split(",")
    seeds = [int(part) for part in parts if part.strip().isdecimal()]
    if len(set(seeds)) < len(parts):
        raise DiffcapError(f"--seeds {text}: not different whole numbers from 0; separate them by commas: 1,2,3.")
    return seeds


def write_report(folder: str, features: str, rows: Mapping[str, Sequence[Job]], out: Path, *options: str) -> None:
    """Write the report of evaluated jobs, by `diffcap report` with more `options`. `rows`: row of the table -> its jobs, one per seed."""
    runs = json.dumps({name: [str(job.run) for job in jobs] for name, jobs in rows.items()})
    words = ["--folder", folder, "--features", features, "--runs", runs, "--out", str(out), *options]
    call(["report", *words], "the report")
