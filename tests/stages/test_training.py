"""The training stages by their real commands: settings, lengths, bad input, logs.

Where the kind of process does not matter the script runs inside this one, which has imported everything already.
"""

import csv
import json
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from tests.commands import ROOT, backbone_words, command, in_process, logged, one_sentence, run
from tests.stages.small_runs import SETTINGS, SMALL, evaluation, smoke, training

from diffcap.checkpoints.reading import read_checkpoint
from diffcap.compose import compose
from diffcap.experiment import Experiment
from diffcap.records import read_dataset


def test_early_stopping_ignores_the_validations_before_select_after(blocks: Path, tmp_path: Path) -> None:
    """With lr 0, no validation after the first one that counts is better."""
    options = "--model.lr=0", "--run.patience=2", "--run.select_after=30", "--trainer.val_check_interval=10"
    words = command(
        "finetune", [], *SMALL, *SETTINGS["finetune"], f"--data.folder={blocks}", f"--run.out={tmp_path}", *options
    )
    assert in_process(words) is None
    assert json.loads((tmp_path / "finished.json").read_text())["steps"] == 50  # 30 is the first that counts
    assert read_checkpoint(tmp_path / "best.ckpt")["global_step"] == 30


def test_lengths_and_milestones_in_epochs(blocks: Path, tmp_path: Path) -> None:
    accumulated = 2
    epochs = (
        "--trainer.max_steps=3ep",
        "--trainer.val_check_interval=1ep",
        "--model.schedule=step",
        "--model.milestones=[1ep,2ep]",
    )
    batches = f"--data.batch_size={20 // accumulated}", f"--trainer.accumulate_grad_batches={accumulated}"
    options = *batches, "--data.samples=pairs", "--trainer.log_every_n_steps=1", "--model.lr=1e-3"
    folder = f"--data.folder={blocks}", f"--run.out={tmp_path}"
    steps = sum(pair.split == "train" for pair in read_dataset(blocks).pairs) // 20  # optimizer steps of an epoch
    assert in_process(command("finetune", [], *SMALL, *SETTINGS["finetune"], *folder, *options, *epochs)) is None
    assert json.loads((tmp_path / "finished.json").read_text())["steps"] == 3 * steps
    with (tmp_path / "logs/version_0/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    rates = {int(row["step"]): float(row["lr-Adam"]) for row in rows if row["lr-Adam"]}
    assert list(rates.values()) == pytest.approx([1e-3] * steps + [1e-4] * steps + [1e-5] * steps)
    validated = [int(row["step"]) for row in rows if row["val/CIDEr-D"]]
    assert validated == [number * steps - 1 for number in (1, 2, 3)]
    refused = one_sentence(run(training("pretrain", blocks, tmp_path, "--trainer.max_steps=2ep"), tmp_path))
    assert "the stage has no epochs" in refused


def test_smoke_settings_run_every_stage(blocks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for stage in SETTINGS:
        chain = [f"--model.init_from={tmp_path / 'pretrain/last.ckpt'}"] if stage == "finetune" else []
        assert in_process(smoke(stage, blocks, tmp_path / stage, *chain)) is None
        assert json.loads((tmp_path / stage / "finished.json").read_text())["steps"] == 4
        settings = yaml.safe_load((tmp_path / stage / "config.yaml").read_text())["data"]
        assert settings["batch_size"] <= 16 and settings["val_limit"] <= 8  # seconds for every method
        names = {path.name for path in (tmp_path / stage).iterdir()}
        assert names == {"config.yaml", "last.ckpt", "logs", "finished.json"} | (
            {"best.ckpt"} if stage == "finetune" else set()
        )
        rows = (tmp_path / stage / "logs/version_0/metrics.csv").read_text().splitlines()
        assert {"pretrain": "val/mlm", "finetune": "val/CIDEr-D"}[stage] in rows[0] and len(rows) > 4
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step 4 of 4")]
    losses, _, scores = lines[-1].partition("scores x 100: ")
    printed = {name: float(value) for name, value in re.findall(r"([\w-]+) ([\d.]+)", scores)}
    fractions = {name: value for (_, name), value in sorted(logged(tmp_path / "finetune").items())}  # of the last step
    assert "word_loss" in losses and {"BLEU-1", "CIDEr-D"} <= set(printed)
    assert printed == {name: pytest.approx(100 * fractions[f"val/{name}"], abs=6e-4) for name in printed}
    assert in_process(evaluation(blocks, tmp_path, "--beams=2", "--limit=4")) is None
    assert len(json.loads((tmp_path / "eval/predictions.json").read_text())) == 4
    capsys.readouterr()

    # Again: finished. With other settings: the old run is put aside. With more workers: the same run.
    words = smoke("pretrain", blocks, tmp_path / "pretrain")
    assert in_process([*words, "--data.num_workers=1"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'pretrain'}: already finished with these settings\n"
    old = (tmp_path / "pretrain/last.ckpt").read_bytes()
    assert in_process([*words, "--model.lr=1e-5"]) is None
    output = capsys.readouterr().out
    assert (
        f"{tmp_path / 'pretrain'}: it holds a run with other settings (model.lr 0.002, now 1e-05); the folder is renamed to "
        f"{tmp_path / 'pretrain.1'}" in output
    )
    assert (tmp_path / "pretrain.1/last.ckpt").read_bytes() == old != (tmp_path / "pretrain/last.ckpt").read_bytes()


def test_settings_that_cannot_run_leave_the_earlier_run_alone(
    blocks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "pretrain"
    assert in_process(smoke("pretrain", blocks, out)) is None
    files = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    (tmp_path / "broken.ckpt").write_bytes((out / "last.ckpt").read_bytes()[:5000])
    cases = {
        f"--data.folder={tmp_path / 'nowhere'}": "nowhere/dataset.json: no dataset there; write it with `make data",
        "--data.features=resnet": "features/resnet/meta.json: no feature store there",
        "--data.negatives=nowhere.jsonl": "nowhere.jsonl: no negatives there; build it with `make negatives",
        "--data.tasks={nabirds: 1}": "data.tasks has the unknown task 'nabirds'",
        "--data.max_length=2": "data.max_length is 2; it must be at least 4",
        "--data.batch_size=0": "data.batch_size is 0; it must be at least 1",
        "--seed_everything=-1": "seed_everything is -1; give a seed from 0 to",
        "--model.captioner.init_args.heads=5": "width 64 is not a multiple of heads 5",
        "--model.init_from=nowhere.ckpt": "nowhere.ckpt: no checkpoint there; train one with",
        f"--model.init_from={tmp_path / 'broken.ckpt'}": "broken.ckpt: not a readable checkpoint",
        "--run.monitor=val/CIDEr-D": "run.monitor is 'val/CIDEr-D', but validation logs val/mlm, val/mlm_accuracy",
    }
    for option, sentence in cases.items():
        code = in_process([*smoke("pretrain", blocks, out), option])
        assert isinstance(code, str) and sentence in code and code.startswith("error: ") and "\n" not in code, (
            option,
            code,
        )
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == files, option
        assert not out.with_name("pretrain.1").exists()
    capsys.readouterr()
    for option, sentence in {
        "--model.lrr=1": "unknown option --model.lrr, did you mean --model.lr",
        "--trainer.max_step=3": "unknown option --trainer.max_step, did you mean --trainer.max_steps",
        "--model.captioner.init_args.widht=3": "unknown option --model.captioner.init_args.widht",
        "--model.schedule=stairs": "'constant']. Got value: stairs",
        "--config=nowhere.yaml": "nowhere.yaml",
    }.items():
        assert in_process([*smoke("finetune", blocks, tmp_path / "finetune"), option]) == 2
        error = capsys.readouterr().err
        assert sentence in error and error.startswith("error: ") and error.count("\n") == 1, error
    assert not (tmp_path / "finetune").exists()


def test_bad_input_of_the_real_commands_is_one_line(blocks: Path, undisturbed: Path, tmp_path: Path) -> None:
    start = f"--model.init_from={undisturbed / 'pretrain/last.ckpt'}"
    output = one_sentence(run(smoke("finetune", blocks, tmp_path / "x", start), tmp_path))
    assert "do not fit (unexpected: trunk.cross_encoder.layers.2." in output and "both stages the same width" in output
    words = evaluation(blocks, tmp_path)
    assert "finetune/best.ckpt: no checkpoint there; train one with" in one_sentence(run(words, tmp_path))
    for option, sentence in {
        f"--checkpoint={undisturbed / 'pretrain/last.ckpt'}": "of the pretrain stage cannot caption",
        "--features=resnet": "features/resnet/meta.json: no feature store there",
        f"--folder={tmp_path}": "no dataset there; write it with `make data",
        "--split=dev": "dev",
        "--beem=3": "beem",
        "--batch_size=0": "--batch_size is 0; it must be at least 1",
        "--beams=0": "--beams is 0",
        "--devices=0": "--devices is 0",
        "--max_length=0": "--max_length is 0",
        "--limit=-3": "--limit is -3",
        "--metrics=[]": "the list is empty",
        "--accelerator=gpus": "invalid settings: ",
    }.items():
        code = in_process([*evaluation(blocks, undisturbed), f"--out={tmp_path / 'eval'}", option])
        assert code not in (None, 0) and (not isinstance(code, str) or (sentence in code and "\n" not in code)), option
    assert not list((tmp_path / "eval").glob("*.json"))


def test_other_features_are_not_for_this_captioner(blocks: Path, undisturbed: Path, tmp_path: Path) -> None:
    shutil.copytree(blocks, tmp_path / "data")
    meta = tmp_path / "data/features/blocks/meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "weights_sha256": "0" * 64}))
    output = in_process([*evaluation(tmp_path / "data", undisturbed), f"--out={tmp_path / 'eval'}"])
    assert isinstance(output, str) and "its features have weights_sha256" in output and "\n" not in output


def test_damaged_features_stop_training_and_evaluation_until_extraction_has_repaired_them(
    blocks: Path, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data"
    shutil.copytree(blocks, folder)
    data = folder / "features/blocks/features.f16"
    whole, sums = data.read_bytes(), data.with_name("sums.u32").read_bytes()
    images = len(json.loads(data.with_name("index.json").read_text())["paths"])
    row = len(whole) // images
    backbone = backbone_words("blocks")
    extraction = [sys.executable, str(ROOT / "stages/extract.py"), *backbone, f"--data.folder={folder}"]
    finetune = smoke("finetune", folder, tmp_path / "finetune")

    def flip(first: int) -> None:
        """Change the sign of all features from a row on."""
        values = np.frombuffer(whole, np.float16).copy()
        values[first * row // 2 :] *= -1
        data.write_bytes(values.tobytes())

    def repaired() -> str:
        capsys.readouterr()
        assert in_process([*extraction, "--data.num_workers=0"]) is None
        assert data.read_bytes() == whole and data.with_name("sums.u32").read_bytes() == sums
        return capsys.readouterr().out.splitlines()[-1]

    store = folder / "features/blocks"
    for words in ([*finetune, "--data.num_workers=1"], evaluation(folder, undisturbed)):
        flip(0)
        output = in_process(words)
        assert isinstance(output, str) and "\n" not in output
        assert output.startswith(f"error: {store}: the features of ") and "are damaged" in output
        assert f"run `make extract FOLDER={folder} BACKBONE=blocks`" in output
        output = in_process(words)
        assert isinstance(output, str) and "extraction is not complete" in output and "\n" not in output
        assert repaired() == f"{store}: complete, {images} images extracted."
    os.truncate(data, 2 * row + 1)
    output = in_process(finetune)
    assert isinstance(output, str) and f"features.f16: truncated, {2 * row + 1} bytes" in output and "\n" not in output
    assert repaired() == f"{store}: complete, {images - 2} images extracted."
    assert in_process(finetune) is None


def test_wandb_logs_offline_without_an_account(blocks: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    done = run(smoke("finetune", blocks, tmp_path / "run", "--run.logger=wandb"), here, HOME=str(tmp_path / "home"))
    assert done.returncode == 0, done.stderr
    assert list(here.iterdir()) == []
    logs = list((tmp_path / "run/wandb").glob("offline-run-*/run-*.wandb"))
    assert len(logs) == 1 and b"val/CIDEr-D" in logs[0].read_bytes()
    assert (tmp_path / "run/logs/version_0/metrics.csv").is_file()  # beside it, always


@pytest.mark.parametrize(("method", "stage"), [("pcl", "pretrain"), ("scorer", "finetune")])
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
