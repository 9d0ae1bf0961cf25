"""The lock of a stage's folder."""

import subprocess
import sys
from pathlib import Path

import pytest

from diffcap.run_folder import stage_lock
from diffcap.utils.errors import DiffcapError

# Holds the lock and has a forked child, as a training has data-loader workers; both wait until their input is closed.
TRAINING = """
import os, sys
from pathlib import Path
from diffcap.run_folder import stage_lock

with stage_lock(Path(sys.argv[1]), seed=1):
    if os.fork():
        print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_killed_training_is_not_in_the_way_while_its_workers_live(tmp_path: Path) -> None:
    out = tmp_path / "run" / "finetune"
    words = [sys.executable, "-c", TRAINING, str(out)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None and training.stdout.readline() == "locked\n"
        refused = f"finetune: process {training.pid} on .*seed 1, started .*`kill {training.pid}`.*RUN={out.parent}-2 "
        with pytest.raises(DiffcapError, match=refused), stage_lock(out, seed=2):
            pass
        with stage_lock(out.with_name("pretrain"), seed=2):  # of another stage
            pass
        training.kill()
        training.wait()
        with stage_lock(out, seed=2):
            pass
