"""Two gloo processes beside the test's own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def on_two_ranks(worker: Path, data: dict[str, Any], folder: Path) -> list[Any]:
    """Run `worker RANK MEETING-FILE DATA OUT` twice at the same time; what each rank saved."""
    torch.save(data, folder / "data.pt")
    paths = f"{Path(__file__).parents[2]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    ranks = [
        subprocess.Popen(
            [sys.executable, worker, str(n), folder / "meet", folder / "data.pt", folder / f"{n}.pt"],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for n in range(2)
    ]
    for process in ranks:
        output = process.communicate(timeout=120)[1]
        assert process.returncode == 0, output
    return [torch.load(folder / f"{n}.pt") for n in range(2)]
