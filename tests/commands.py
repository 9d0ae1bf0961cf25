"""Running the stages by their real commands."""

import atexit
import csv
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache, reduce
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from diffcap.compose import merge
from diffcap.registry import get_method
from diffcap.utils.settings import backbones

ROOT = Path(__file__).parents[1]
# Results name the commit they come from; the checkout that the tests run in may get another one between two runs.
NO_COMMIT = {"GIT_DIR": os.devnull}


def environment(**more: str) -> dict[str, str]:
    """One thread a process, and nothing of the caller's accounts or clusters."""
    dropped = ("WANDB_", "SLURM_", "COVERAGE_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    return {**kept, **NO_COMMIT, "OMP_NUM_THREADS": "1", "NETRC": os.devnull, **more}


def command(stage: str, configs: Sequence[str | Path], *options: str, method: str = "pcl") -> list[str]:
    """A training stage's command line: settings of the trainer and the method, then `configs` (see `config_words`), then options."""
    settings = ["configs/trainer/default.yaml", part(method, stage), *configs]
    return [sys.executable, str(ROOT / "stages" / f"{stage}.py"), *config_words(*settings), *options]


def backbone_words(name: str) -> list[str]:
    """Options of the stage extract for a backbone of configs/backbones.yaml."""
    options = {"name": name, **backbones()[name]}
    return [f"--model.{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in options.items()]


def config_words(*settings: str | Path) -> list[str]:
    """Options for files of settings; their paths are relative to the project."""
    return [word for path in settings for word in ("--config", str(ROOT / path))]


def part(method: str, stage: str, dataset: str = "", ablation: str = "") -> Path:
    """A file with the settings of a stage in a method's file: for all datasets, or what differs on a dataset or in an ablation."""
    path = _parts_folder() / f"{method}-{stage}-{dataset}-{ablation}.yaml"
    path.write_text(json.dumps(part_settings(method, stage, dataset, ablation)), encoding="utf-8")
    return path


@cache
def _parts_folder() -> Path:
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return Path(folder.name)


def part_settings(method: str, stage: str, dataset: str = "", ablation: str = "") -> dict[str, Any]:
    """The settings in the file that `part` writes."""
    known = get_method(method)
    if dataset:
        parts = known.named("datasets", dataset, stage)
    else:
        parts = known.named("ablations", ablation, stage) if ablation else known.stage(stage)
    return reduce(merge, (part.settings for part in parts), {})


def run(words: Sequence[str], cwd: Path, timeout: float = 180, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        words, cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=timeout, check=False
    )


def logged(out: Path) -> dict[tuple[str, str], float]:
    """The losses and scores that a training stage logged, by step and name; of a part that a kill has repeated, the last."""
    rows = list[dict[str, str]]()
    for path in sorted(out.glob("logs/version_*/metrics.csv")):
        with path.open() as file:
            rows += csv.DictReader(file)
    kinds = ("train/", "val/")
    return {
        (row["step"], name): float(row[name]) for row in rows for name in row if name.startswith(kinds) and row[name]
    }


def same_logs(one: Path, two: Path, rel: float = 1e-5) -> set[str]:
    """Compare everything that two runs logged; returns the names."""
    first, second = logged(one), logged(two)
    assert first.keys() == second.keys()
    differing = {
        key: (value, second[key]) for key, value in first.items() if abs(value - second[key]) > rel * max(1, abs(value))
    }
    assert not differing, differing
    return {name for _, name in first}


def weights(path: Path) -> dict[str, torch.Tensor]:
    """The parameters of a checkpoint."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state["state_dict"]


def one_sentence(done: subprocess.CompletedProcess[str]) -> str:
    """The error of a failed command, which is one line and nothing else."""
    lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("Seed set to")]
    assert done.returncode not in (0, None), done.stdout
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    return lines[0]


def in_process(words: Sequence[str]) -> str | int | None:
    """Run a stage's script as `__main__` of this process, which has imported everything already; gives its exit status."""
    given, threads = sys.argv, torch.get_num_threads()
    torch.set_num_threads(1)  # as `environment` has it for the others
    module = list(words[1:3]) == ["-m", "diffcap"]
    sys.argv = list(words[2:] if module else words[1:])
    try:
        with mock.patch.dict(os.environ, NO_COMMIT):
            if module:
                runpy.run_module("diffcap", run_name="__main__")
            else:
                runpy.run_path(words[1], run_name="__main__")
    except SystemExit as stop:
        return stop.code
    finally:
        sys.argv = given
        torch.set_num_threads(threads)
    return None
