"""Folders that diffcap made at commit be08c90 are taken over: nothing is computed again, and checkpoints caption as they did.

`be08c90.tar.xz` holds `data` and `runs` of /tmp/diffcap, a checkout of that commit, after

    W="--model.captioner.init_args.width=16 --model.captioner.init_args.heads=2 --model.lr=5e-3 --model.warmup=0"
    T="--trainer.max_steps=200 --trainer.val_check_interval=200 --run.checkpoint_every=200"
    make data extract negatives pretrain finetune eval DATASET=blocks PAIRS=30 TRAINER=smoke LOGGER=none \\
        ARGS="$W $T --model.captioner.init_args.ffn=16"
    make finetune eval DATASET=blocks METHOD=scorer PAIRS=30 TRAINER=smoke LOGGER=none \\
        ARGS="$W $T --model.captioner.init_args.word_width=16"

and `times.json`, the modification times of all files in nanoseconds, which Python's tarfile rounds.
"""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from tests.commands import environment
from tests.preloaded import write_program

from diffcap.checkpoints.loading import load
from diffcap.lit.decoding import decode
from diffcap.records import read_dataset

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ARCHIVE = Path(__file__).with_name("be08c90.tar.xz")
MADE_IN = "/tmp/diffcap"
SIZES = (
    "--model.captioner.init_args.width=16 --model.captioner.init_args.heads=2 --model.lr=5e-3 --model.warmup=0 "
    "--trainer.max_steps=200 --trainer.val_check_interval=200 --run.checkpoint_every=200 --model.captioner.init_args."
)
COMMON = ("DATASET=blocks", "PAIRS=30", "TRAINER=smoke", "LOGGER=none")
PCL = ("data", "extract", "negatives", "pretrain", "finetune", "eval", *COMMON, f"ARGS={SIZES}ffn=16")
SCORER = ("finetune", "eval", "METHOD=scorer", *COMMON, f"ARGS={SIZES}word_width=16")
# Records may get another form; what they describe may not change.
RECORDS = ("checked.json", "verified.json", ".lock", ".done.json", "finished.json", "running.json", "identity.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkout with the folders of be08c90, as if that commit had been there before this one."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    for path in [path for path in tmp_path.rglob("*.json") if MADE_IN in path.read_text(encoding="utf-8")]:
        text = path.read_text(encoding="utf-8").replace(f"{MADE_IN}/configs", str(ROOT / "configs"))
        path.write_text(text.replace(MADE_IN, str(tmp_path)), encoding="utf-8")
    for name, time in json.loads((tmp_path / "times.json").read_text()).items():
        os.utime(tmp_path / name, ns=(time, time))
    (tmp_path / "times.json").unlink()
    for name in ("Makefile", "configs", "stages", "pyproject.toml", "requirements.lock"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    write_program(tmp_path / ".venv/bin/diffcap", [sys.executable, "-m", "diffcap"])
    (tmp_path / ".venv/ready").touch()
    return tmp_path


def state(folder: Path) -> dict[str, tuple[str, int]]:
    """SHA-256 and modification time of every file of data and runs that is no record."""
    files = [path for name in ("data", "runs") for path in (folder / name).rglob("*") if path.is_file()]
    kept = [path for path in files if not path.name.endswith(RECORDS)]
    return {
        str(path.relative_to(folder)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in kept
    }


def make(folder: Path, *words: str) -> str:
    kept = {key: value for key, value in environment().items() if not key.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(["make", *words], cwd=folder, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_finished_stages_are_taken_over(folder: Path) -> None:
    before = state(folder)
    for words, stages in (
        (("eval", *COMMON), ["eval"]),  # the others are only needed
        (PCL, ["extract", "negatives", "pretrain", "finetune", "eval"]),
        (SCORER, ["finetune", "eval"]),
    ):
        output = make(folder, *words)
        assert output.count("nothing to do") + output.count("already") >= len(stages), output
        assert state(folder) == before


@pytest.mark.parametrize("method", ["pcl", "scorer"])
def test_checkpoints_caption_as_they_did(folder: Path, method: str) -> None:
    run = folder / "runs/blocks" / method
    checkpoint = load(run / "finetune/best.ckpt")
    pairs = [pair for pair in read_dataset(folder / "data/blocks").pairs if pair.split == "test"]
    decoded = decode(checkpoint, pairs, folder / "data/blocks/features/blocks", accelerator="cpu")
    predicted = json.loads((run / "eval/predictions.json").read_text())
    assert decoded is not None
    assert decoded.captions == {row["image_id"]: row["caption"] for row in predicted}
