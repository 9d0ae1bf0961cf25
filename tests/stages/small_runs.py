"""Small training runs of the real commands, and what several test files do with them."""

import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from tests.commands import ROOT, command, environment, part

SMOKE = ROOT / "configs/trainer/smoke.yaml"
TINY = tuple(f"--model.captioner.init_args.{size}" for size in ("width=16", "heads=2", "ffn=24"))
# Small enough for seconds; dropout and swapping on, because their draws are what a resumed run could get wrong.
SMALL = (
    *TINY,
    *("--model.captioner.init_args.dropout=0.2", "--data.batch_size=14", "--data.swap=true", "--data.features=blocks"),
    *("--model.lr=3e-3", "--trainer.accelerator=cpu", "--trainer.max_steps=60", "--trainer.val_check_interval=15"),
    *("--run.checkpoint_every=4", "--run.patience=null", "--run.select_after=0", "--trainer.limit_val_batches=1"),
)
SETTINGS = {"pretrain": ("--model.warmup=10",), "finetune": ("--model.tokenizer=raw", "--model.schedule=cosine")}


def training(stage: str, folder: Path, runs: Path, *options: str) -> list[str]:
    chain = [f"--model.init_from={runs / 'pretrain' / 'last.ckpt'}"] if stage == "finetune" else []
    files = f"--data.folder={folder}", f"--run.out={runs / stage}"
    return command(stage, [], *SMALL, *SETTINGS[stage], *files, *chain, *options)


def smoke(stage: str, folder: Path, out: Path, *options: str) -> list[str]:
    """What `make <stage> DATASET=blocks TRAINER=smoke` runs."""
    files = f"--data.folder={folder}", "--data.features=blocks", f"--run.out={out}"
    return command(stage, [part("pcl", stage, "blocks"), SMOKE], *files, *options)


def evaluation(folder: Path, runs: Path, *options: str) -> list[str]:
    # METEOR's Java would cost more than all the rest.
    quick = "--tokenizer=ptb", "--metrics=[BLEU-1, BLEU-4, ROUGE-L, CIDEr-D]"
    files = f"--checkpoint={runs / 'finetune' / 'best.ckpt'}", f"--out={runs / 'eval'}", f"--folder={folder}"
    return [sys.executable, str(ROOT / "stages/evaluate.py"), *files, *quick, *options]


def start_process(words: list[str], cwd: Path | None = None) -> subprocess.Popen[str]:
    """Start a command in a process group of its own, as in a terminal; it gives only its errors."""
    quiet, pipe = subprocess.DEVNULL, subprocess.PIPE
    return subprocess.Popen(
        words, cwd=cwd, env=environment(), stdout=quiet, stderr=pipe, text=True, start_new_session=True
    )


def kill_when(words: list[str], sign: Path, cwd: Path) -> None:
    """Start a command, and SIGKILL it and its children at a random moment after `sign` is there."""
    process = start_process(words, cwd)
    while not sign.exists():
        assert process.poll() is None, "ended before it could be killed"
        time.sleep(0.002)
    time.sleep(random.uniform(0, 0.3))
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "ended before it could be killed"


def same_training(one: Path, other: Path) -> None:
    """Weights, optimiser, schedule and step of two checkpoints are equal to the last bit."""
    a, b = (torch.load(path, map_location="cpu", weights_only=True) for path in (one, other))
    assert a["global_step"] == b["global_step"] > 0
    for name, value in a["state_dict"].items():
        assert torch.equal(value, b["state_dict"][name]), name
    moments, others = (state["optimizer_states"][0]["state"] for state in (a, b))
    assert all(
        torch.equal(moments[n][key], others[n][key]) for n in moments for key in ("exp_avg", "exp_avg_sq", "step")
    )
    assert a["lr_schedulers"] == b["lr_schedulers"]


def named_command(message: str | int | None) -> list[str]:
    """The command that an error message names between backquotes."""
    assert isinstance(message, str) and "\n" not in message, message
    (command,) = re.findall(r"`([^`]+)`", message)
    return shlex.split(command)
