"""A function on two gloo processes beside the test's own."""

import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.commands import ROOT, environment


def on_two_ranks(work: Callable[[Any], Any], data: Any, folder: Path) -> list[Any]:
    """What a function of a module gives for `data` on each of two ranks."""
    torch.save(data, folder / "data.pt")
    words = [sys.executable, "-m", "tests.losses.ranks", work.__module__, work.__name__]
    ranks = [
        subprocess.Popen([*words, str(rank), folder], cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in ranks:
        output = process.communicate(timeout=120)[1]
        assert process.returncode == 0, output
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def main(module: str, name: str, rank: str, folder: str) -> None:
    """One of the two processes."""
    work = getattr(import_module(module), name)
    meeting, timeout = f"file://{folder}/meet", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=meeting, rank=int(rank), world_size=2, timeout=timeout)
    torch.save(work(torch.load(f"{folder}/data.pt")), f"{folder}/{rank}.pt")
    dist.barrier()  # a rank that leaves while the other is still talking makes gloo abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
