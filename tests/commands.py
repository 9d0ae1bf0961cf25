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
    """Run a command to its end: one of Python and diffcap in a fork of `tests.preloaded`, where the imports are done already."""
    if _can_fork(words, more):
        return _run_in_fork(words, cwd, timeout, environment(**more))
    return subprocess.run(
        words, cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=timeout, check=False
    )


def _can_fork(words: Sequence[str], more: dict[str, str]) -> bool:
    script = len(words) > 1 and (list(words[1:3]) == ["-m", "diffcap"] or words[1].endswith(".py"))
    read_at_start = {"PYTHONPATH", "OMP_NUM_THREADS", "PYTHONIOENCODING", "LANG", "LC_ALL", "COLUMNS"}
    return bool(script and words[0] == sys.executable and not any(name in read_at_start for name in more))


@cache
def _preloaded(packages: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "tests/preloaded.py")]
    more = {"PYTHONPATH": packages} if packages else {}
    server = subprocess.Popen(
        command, env=environment(**more), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.kill)
    return server


def run_with_packages(folder: Path, words: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Like `run` of several commands with PYTHONPATH=folder, with one start of the interpreter for all of them."""
    return _run_in_fork(words, cwd, 180, environment(PYTHONPATH=str(folder)), str(folder))


def _run_in_fork(
    words: Sequence[str], cwd: Path, timeout: float, environment: dict[str, str], packages: str = ""
) -> subprocess.CompletedProcess[str]:
    server = _preloaded(packages)
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder) / "stdout", Path(folder) / "stderr"
        stdout.touch()
        stderr.touch()
        command = {
            "words": [str(word) for word in words],
            "cwd": str(cwd),
            "environment": environment,
            "timeout": timeout,
            "stdout": str(stdout),
            "stderr": str(stderr),
        }
        server.stdin.write(f"{json.dumps(command)}\n")
        server.stdin.flush()
        status = json.loads(server.stdout.readline())
        output = [path.read_text(encoding="utf-8", errors="surrogateescape") for path in (stdout, stderr)]
    if status is None:
        raise subprocess.TimeoutExpired(words, timeout, *output)
    return subprocess.CompletedProcess(words, status, *output)


def logged(out: Path) -> dict[tuple[str, str], float]:
    """The losses and scores that a training stage logged, by step and name; of a part that a kill has repeated, the last."""
    rows = []
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
