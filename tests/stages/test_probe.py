"""TRAINER=probe by its real command."""

import json
import sys
from pathlib import Path

import pytest
from tests.commands import run

from diffcap.compose import compose
from diffcap.experiment import Experiment


@pytest.mark.parametrize(("method", "stage"), [("pcl", "pretrain"), ("scorer", "finetune"), ("clip4idc", "pretrain")])
def test_a_probe_calculates_the_whole_training_and_leaves_the_run_alone(
    pixels: Path, tmp_path: Path, method: str, stage: str
) -> None:
    variables = ["--folder", str(pixels), "--method", method, "--trainer", "probe", "--logger", "none"]
    short = ["--trainer.max_steps=6", "--trainer.val_check_interval=6", "--data.val_limit=4", "--data.batch_size=4"]
    done = run([sys.executable, "-m", "diffcap", stage, *variables, "--", *short], tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / f"runs/blocks/{method}-probe" / stage
    result = json.loads((folder / "probe.json").read_text())
    trainer = compose(Experiment(method=method), stage)["trainer"]
    whole = trainer["max_steps"], trainer["val_check_interval"]
    assert (result["steps"], result["validations"]) == (whole[0], whole[0] // whole[1])
    seconds = result["steps"] * result["seconds_per_step"] + result["validations"] * result["seconds_per_validation"]
    assert result["hours"] == pytest.approx(seconds / 3600) and result["memory_bytes"] > 1e8
    checkpoints = [folder / "last.ckpt", *folder.glob("best.ckpt")]
    assert result["disk_bytes"] == pytest.approx(sum(path.stat().st_size for path in checkpoints), rel=0.2)
    assert f"All {whole[0]:,} steps and" in done.stdout and "pairs. " in done.stdout
