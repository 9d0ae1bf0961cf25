"""How many experiments run at the same time, and on which GPUs."""

import json
import os
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffcap.runner import Job, device_groups, parse_seeds, run_queues
from diffcap.utils.errors import DiffcapError


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the number of GPUs that torch reports, on a machine with 16 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def set_count(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return set_count


@pytest.mark.parametrize(
    ("count", "visible", "devices", "groups"),
    [
        (0, None, 1, [None, None]),
        (1, None, 1, [None]),
        (3, None, 1, ["0", "1", "2"]),
        (2, "5,GPU-7", 1, ["5", "GPU-7"]),
        (4, None, 2, ["0,1", "2,3"]),
        (3, None, 2, [None]),  # one process, which sees all
        (1, None, 2, [None]),
    ],
)
def test_each_process_has_gpus_of_its_own(
    gpus: Any, monkeypatch: pytest.MonkeyPatch, count: int, visible: str | None, devices: int, groups: list
) -> None:
    gpus(count)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device_groups(devices) == groups


@pytest.mark.parametrize(
    ("count", "devices", "expected"), [(2, "1", {"0", "1"}), (4, "2", {"0,1", "2,3"}), (1, "1", {"-"}), (0, "1", {"-"})]
)
def test_the_queues_of_experiments_share_no_gpu(
    gpus: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, count: int, devices: str, expected: set[str]
) -> None:
    gpus(count)
    monkeypatch.chdir(tmp_path)
    queues = 1 if count == 1 else 2
    started = threading.Barrier(queues, timeout=60)
    calls: list[tuple[str, str]] = []

    def process(command: list[str], env: dict[str, str], check: bool) -> SimpleNamespace:
        run = command[command.index("--run") + 1]
        if run not in [name for name, _ in calls]:
            started.wait()
        calls.append((run, env.get("CUDA_VISIBLE_DEVICES", "-")))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", process)
    shared = {"dataset": "blocks", "method": "scorer", "devices": devices}
    jobs = [[Job(f"{queue}{n}", {**shared, "run": f"runs/{queue}{n}"}) for n in range(2)] for queue in "ab"]
    run_queues(jobs)
    assert {visible for _, visible in calls} == expected
    assert len({json.dumps(pair) for pair in calls}) == 4, "every experiment has one group of GPUs"


@pytest.mark.parametrize("text", ["1,-1", "1,1", "1,x", "1,,2"])
def test_seeds_are_different_whole_numbers(text: str) -> None:
    assert parse_seeds("3, 1") == [3, 1]
    with pytest.raises(DiffcapError, match=f"--seeds {text}: not different whole numbers"):
        parse_seeds(text)
