"""A tiny `blocks` dataset made by the real commands, once for all tests of the training stages."""

import fcntl
import os
import sys
from pathlib import Path

import pytest
from tests.commands import ROOT, backbone_words, in_process, run
from tests.stages.small_runs import SETTINGS, evaluation, training

PAIRS = 60


@pytest.fixture(scope="session")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the dataset: manifest, features of the embedded backbone, negatives."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # of all workers
    folder = base / "blocks"
    with (base / "blocks.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "negatives.jsonl").is_file():
            for stage, *options in (
                ("data", "--dataset=blocks", f"--pairs={PAIRS}", f"--out={folder}", "--seed=1"),
                ("extract", *backbone_words("blocks"), f"--data.folder={folder}", "--data.num_workers=0"),
                ("negatives", f"--folder={folder}", "--tagger=blocks", "--workers=1"),
            ):
                done = run([sys.executable, str(ROOT / "stages" / f"{stage}.py"), *options], base)
                assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def pixels(blocks: Path) -> Path:
    """The dataset's folder, with its pixels."""
    with (blocks.parent / "pixels.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (blocks / "features/blocks_pixels/complete").is_file():
            options = *backbone_words("blocks_pixels"), f"--data.folder={blocks}", "--data.num_workers=0"
            done = run([sys.executable, str(ROOT / "stages/extract.py"), *options], blocks.parent)
            assert done.returncode == 0, done.stderr
    return blocks


@pytest.fixture(scope="session")
def undisturbed(blocks: Path) -> Path:
    """Runs of all stages that nobody killed."""
    runs = blocks.parent / "undisturbed"
    with (blocks.parent / "undisturbed.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (runs / "eval/metrics.json").is_file():
            for words in (*(training(stage, blocks, runs) for stage in SETTINGS), evaluation(blocks, runs)):
                assert in_process(words) in (None, 0)  # 0: finished before another stage failed
    return runs
