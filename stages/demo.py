"""The whole road on the embedded dataset, every stage by its own make target, then a table and pictures."""

import json
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from diffcap.console import run
from diffcap.errors import DiffcapError

# Minutes of a 12-minute demo on two cores that are not training. Steps are fixed numbers, not a clock, so that the same
# command gives the same scores; they grow with the minutes that are left.
OTHER_MINUTES = 3.5
PRETRAIN_STEPS, FINETUNE_STEPS = 720, 6400
# A control without pre-training gets the time of both stages: this many of its steps cost one pre-training step.
STEPS_PER_PRETRAIN_STEP = 1.1


def demo(minutes: float = 12.0, seeds: str = "1234", pairs: int = 24_000, jitter: float = 0.3) -> None:
    """Render, extract, build negatives, pre-train, fine-tune, evaluate and report, with a control without pre-training.

    Args:
        minutes: aimed-at time on two cores for one seed; more minutes train longer.
        seeds: of the training, separated by commas; several give means and standard deviations.
        pairs: of the dataset, change and distractor pairs together.
        jitter: of camera and light.

    Raises:
        DiffcapError: too few minutes, or a stage failed.
    """
    if minutes < OTHER_MINUTES + 1:
        raise DiffcapError(f"{minutes:g} minutes leave no time to train; give at least {OTHER_MINUTES + 1:g}.")
    begin = time.perf_counter()
    scale = (minutes - OTHER_MINUTES) / (12 - OTHER_MINUTES)
    pretrain, finetune = round(PRETRAIN_STEPS * scale), round(FINETUNE_STEPS * scale)
    scratch = finetune + round(pretrain * STEPS_PER_PRETRAIN_STEP)
    folder, runs = Path("data/blocks-demo"), Path("runs/blocks-demo")
    make = Make(f"FOLDER={folder}", "DATASET=blocks", "LOGGER=none")
    make("the dataset", "data", f"PAIRS={pairs}", f"ARGS=--jitter={jitter}")
    cores = min(2, os.cpu_count() or 1)
    with ThreadPoolExecutor(cores) as pool:
        # One core a process: models this small gain nothing from a second, so two roads run side by side.
        for done in [pool.submit(make, "features", "extract"), pool.submit(make, "hard negatives", "negatives")]:
            done.result()
        roads = []
        for seed in seeds.split(","):
            for name, steps in (("pcl", (pretrain, finetune)), ("scratch", (0, scratch))):
                place = runs / f"{minutes:g}min-{name}-{seed}"
                roads.append(pool.submit(make.road, f"{name}, seed {seed}", place, int(seed), *steps))
        folders = [road.result() for road in roads]
    rows = {"IDC-PCL": folders[0::2], "the same without pre-training": folders[1::2]}
    out = runs / f"{minutes:g}min-report"
    command = ["--folder", folder, "--features", "blocks", "--runs", json.dumps(rows), "--out", out, "--pictures", "8"]
    call([".venv/bin/python", "stages/report.py", *map(str, command)], "the report")
    print(f"\n{(time.perf_counter() - begin) / 60:.1f} minutes; look at {out}/pairs.png and {out}/table.md")


def call(command: list[str], title: str) -> None:
    """Run a command with one thread a process; its failure is ours."""
    begin = time.perf_counter()
    print(f"== {title}: {' '.join(command[:3])}", flush=True)
    # What `make demo` itself was given is not for the targets below it.
    kept = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS")}
    if subprocess.run(command, env={**kept, "OMP_NUM_THREADS": "1"}, check=False).returncode:
        raise DiffcapError(f"{title} failed, see above; mend it and run `make demo` again: it goes on there.")
    print(f"== {title}: done after {time.perf_counter() - begin:.0f} s", flush=True)


class Make:
    """`make TARGET` with some variables fixed."""

    def __init__(self, *variables: str) -> None:
        self.variables = variables

    def __call__(self, title: str, target: str, *variables: str) -> None:
        """Run one target."""
        call(["make", "--no-print-directory", target, *self.variables, *variables], title)

    def road(self, title: str, folder: Path, seed: int, pretrain: int, finetune: int) -> str:
        """Pre-train (0 steps: not at all), fine-tune and evaluate one model; the folder of its run."""
        options = (f"RUN={folder}", f"SEED={seed}", f"PRETRAIN={'yes' if pretrain else 'no'}")
        if pretrain:
            self(f"{title}, pre-training", "pretrain", *options, f"ARGS={_steps(pretrain)}")
        self(f"{title}, captioning", "finetune", *options, f"ARGS={_steps(finetune)}")
        self(f"{title}, test captions", "eval", *options)
        return str(folder)


def _steps(steps: int) -> str:
    """Overrides for a run of so many steps that validates four times."""
    return f"--trainer.max_steps={steps} --trainer.val_check_interval={steps // 4}"


if __name__ == "__main__":
    run(demo)
