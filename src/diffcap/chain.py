"""Many runs of the project's own make targets, side by side: what the demo and the ablations are made of."""

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from diffcap.errors import DiffcapError
from diffcap.run_folder import PRETRAIN


@dataclass(frozen=True)
class Road:
    """One model's way to its test captions.

    Attributes:
        title: of messages. folder: of its run. method, seed: of it. finetune, pretrain: steps; null: as the settings have
            them; 0 pre-training steps: none at all.
        options: more make variables, such as ABLATION=rr.
        begins_with: folder of the run whose pre-training it takes over, instead of one of its own.
    """

    title: str
    folder: Path
    method: str
    seed: int
    finetune: int | None = None
    pretrain: int | None = 0
    options: tuple[str, ...] = ()
    begins_with: Path | None = None


def call(command: Sequence[str], title: str) -> None:
    """Run a command with one thread a process: models this small lose with more.

    Raises:
        DiffcapError: it failed.
    """
    begin = time.perf_counter()
    print(f"== {title}: {' '.join(command[:3])}", flush=True)
    # What make itself was given is not for the targets below it.
    kept = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS")}
    if subprocess.run(command, env={**kept, "OMP_NUM_THREADS": "1"}, check=False).returncode:
        raise DiffcapError(f"{title} failed, see above; fix it and run the same command again: it goes on there.")
    print(f"== {title}: done after {time.perf_counter() - begin:.0f} s", flush=True)


class Make:
    """`make TARGET` with some variables fixed."""

    def __init__(self, *variables: str) -> None:
        self.variables = variables

    def __call__(self, title: str, target: str, *variables: str) -> None:
        """Run one target."""
        call(["make", "--no-print-directory", target, *self.variables, *variables], title)

    def along(self, road: Road) -> None:
        """Pre-train (0 steps: not at all), fine-tune and evaluate."""
        fixed = (f"RUN={road.folder}", f"METHOD={road.method}", f"SEED={road.seed}", *road.options)
        fixed = (*fixed, f"PRETRAIN={'no' if road.pretrain == 0 else 'yes'}")
        if road.begins_with:
            fixed = (*fixed, f"PRETRAINING={road.begins_with / PRETRAIN}")
        elif road.pretrain != 0:
            self(f"{road.title}, pre-training", "pretrain", *fixed, *_steps(road.pretrain))
        self(f"{road.title}, captioning", "finetune", *fixed, *_steps(road.finetune))
        self(f"{road.title}, test captions", "eval", *fixed)


def seeds_of(text: str) -> list[int]:
    """Seeds out of a command line: "1,2,3".

    Raises:
        DiffcapError: one is not a whole number, or is negative, or is duplicated.
    """
    try:
        numbers = [int(seed) for seed in text.split(",")]
    except ValueError:
        raise DiffcapError(f"--seeds {text}: not whole numbers separated by commas; write them as in 1,2,3.") from None
    if min(numbers) < 0:
        raise DiffcapError(f"--seeds {text}: {min(numbers)} is negative; give seeds from 0 on.")
    if len(set(numbers)) < len(numbers):
        raise DiffcapError(f"--seeds {text}: a seed stands twice; give different ones.")
    return numbers


def side_by_side(make: Make, lanes: Sequence[Sequence[Road]]) -> None:
    """Travel the roads of a lane one after the other, and the lanes at the same time, one core each.

    Lanes wait for a core in their order; the first failure is raised once those under way are done.
    """

    def travel(lane: Sequence[Road]) -> None:
        for road in lane:
            make.along(road)

    with ThreadPoolExecutor(cores()) as pool:
        for done in [pool.submit(travel, lane) for lane in lanes]:
            done.result()


def cores() -> int:
    """Processes to run at once."""
    return min(2, os.cpu_count() or 1)


def compare(folder: Path, features: str, rows: Mapping[str, Sequence[Road]], out: Path, *options: str) -> None:
    """Put runs into one table, with pictures: rows by name, each with a road for every seed."""
    runs = json.dumps({name: [str(road.folder) for road in roads] for name, roads in rows.items()})
    command = ["--folder", folder, "--features", features, "--runs", runs, "--out", out, *options]
    call([".venv/bin/python", "stages/report.py", *map(str, command)], "the report")


def _steps(steps: int | None) -> tuple[str, ...]:
    """Overrides for a run of so many steps that validates four times."""
    return (f"ARGS=--trainer.max_steps={steps} --trainer.val_check_interval={max(1, steps // 4)}",) if steps else ()
