"""The training stages and the evaluation by their real commands: kills, full disks, smoke settings, bad input.

Where the kind of process does not matter the script runs inside this one, which has imported everything already.
"""

import csv
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from tests.commands import METHOD, ROOT, command, environment, in_process, logged, one_sentence, run, weights

from diffcap.checkpoints.reading import read_checkpoint
from diffcap.evaluation.captions import score_captions
from diffcap.evaluation.coco import read_predictions, read_references
from diffcap.lit.pretraining import Pretraining
from diffcap.records import read_dataset, write_dataset
from diffcap.report.comparison import read_evaluation
from diffcap.utils.errors import DiffcapError

SMOKE = ROOT / "configs/trainer/smoke.yaml"
# Small enough for seconds; dropout and swapping on, because their draws are what a resumed run could get wrong.
SMALL = (
    *(
        "--model.captioner.init_args.width=16",
        "--model.captioner.init_args.heads=2",
        "--model.captioner.init_args.ffn=24",
    ),
    *("--model.captioner.init_args.dropout=0.2", "--data.batch_size=14", "--data.swap=true", "--data.features=blocks"),
    *("--model.lr=3e-3", "--trainer.accelerator=cpu", "--trainer.max_steps=90", "--trainer.val_check_interval=15"),
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
    return command(stage, [METHOD / f"{stage}.blocks.yaml", SMOKE], *files, *options)


def evaluation(folder: Path, runs: Path, *options: str) -> list[str]:
    # METEOR's Java would cost more than all the rest.
    quick = "--tokenizer=ptb", "--metrics=[BLEU-1, BLEU-4, ROUGE-L, CIDEr-D]"
    files = f"--checkpoint={runs / 'finetune' / 'best.ckpt'}", f"--out={runs / 'eval'}", f"--folder={folder}"
    return [sys.executable, str(ROOT / "stages/evaluate.py"), *files, *quick, *options]


@pytest.fixture(scope="module")
def undisturbed(blocks: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of all stages that nobody killed."""
    runs = tmp_path_factory.mktemp("undisturbed")
    for words in (*(training(stage, blocks, runs) for stage in SETTINGS), evaluation(blocks, runs)):
        assert in_process(words) is None
    return runs


def kill_when(words: list[str], sign: Path, cwd: Path) -> None:
    """Start a command, and SIGKILL it and its children at a random moment after `sign` is there."""
    process = subprocess.Popen(
        words, cwd=cwd, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
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


def test_killed_stages_run_again_end_as_undisturbed_ones(blocks: Path, undisturbed: Path, tmp_path: Path) -> None:
    for stage in SETTINGS:
        words = training(stage, blocks, tmp_path)
        kill_when(words, tmp_path / stage / "last.ckpt", tmp_path)
        assert not (tmp_path / stage / "finished.json").exists()
        done = run(words, tmp_path)
        assert done.returncode == 0, done.stderr
        for name in ("last.ckpt", "best.ckpt")[: 1 + (stage == "finetune")]:
            same_training(tmp_path / stage / name, undisturbed / stage / name)
        assert not list((tmp_path / stage).glob(".*.tmp"))
    kill_when(evaluation(blocks, tmp_path), tmp_path, tmp_path)  # at any time of its start
    done = run(evaluation(blocks, tmp_path), tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("predictions.json", "references.json", "metrics.json"):
        assert (tmp_path / "eval" / name).read_bytes() == (undisturbed / "eval" / name).read_bytes(), name
    finished = json.loads((tmp_path / "finetune/finished.json").read_text())
    assert finished["steps"] == 90 and finished["checkpoint"] == "best.ckpt" and finished["monitor"] == "val/CIDEr-D"


def _interrupt(words: list[str], last: Path, number: signal.Signals) -> str | None:
    """Send a signal once a new `last.ckpt` is there; what the run said, or None if it had finished by then."""
    before = last.stat().st_mtime_ns if last.exists() else 0
    process = subprocess.Popen(
        words,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # What a shell starts in the background ignores Ctrl-C, and so would everything that these tests start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while not last.exists() or last.stat().st_mtime_ns == before:
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(number)
    error = process.communicate(timeout=60)[1].strip()
    if process.returncode == 0 and last.with_name("finished.json").exists():
        return None
    assert process.returncode == 1, error  # not 0: Make would go on with half a run
    return error


def test_an_interrupted_run_says_so_and_goes_on(blocks: Path, undisturbed: Path, tmp_path: Path) -> None:
    words, last = training("pretrain", blocks, tmp_path), tmp_path / "pretrain/last.ckpt"
    for number in (signal.SIGTERM, signal.SIGINT):
        for _ in range(5):  # a run may be over before the signal comes; the next one is not
            error = _interrupt(words, last, number)
            if error is not None:
                break
            shutil.rmtree(last.parent)
        assert error is not None, f"{number.name} was ignored five times"
        assert error.splitlines()[-1].startswith("error: interrupted at step") and "Traceback" not in error
        assert not (tmp_path / "pretrain/finished.json").exists()
    assert in_process(words) is None
    same_training(last, undisturbed / "pretrain/last.ckpt")


@pytest.mark.thorough
def test_a_run_of_two_processes_goes_on_in_one(blocks: Path, tmp_path: Path) -> None:
    still = "--model.captioner.init_args.dropout=0"  # dropout is drawn by each rank
    two = "--trainer.devices=2", "--trainer.strategy=ddp"
    kill_when(training("pretrain", blocks, tmp_path / "a", still, *two), tmp_path / "a/pretrain/last.ckpt", tmp_path)
    assert in_process(training("pretrain", blocks, tmp_path / "a", still)) is None
    assert in_process(training("pretrain", blocks, tmp_path / "b", still)) is None
    one, other = weights(tmp_path / "a/pretrain/last.ckpt"), weights(tmp_path / "b/pretrain/last.ckpt")
    for name, value in one.items():
        if not name.endswith("qkv.bias"):  # see tests/lit/test_distributed.py
            torch.testing.assert_close(
                value, other[name], atol=2e-3, rtol=0, msg=lambda output, name=name: f"{name}: {output}"
            )


@pytest.mark.thorough
def test_accumulated_gradients_go_on_at_a_whole_step(
    blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "--trainer.accumulate_grad_batches=3", "--trainer.max_steps=20", "--trainer.val_check_interval=30"
    assert in_process(training("pretrain", blocks, tmp_path / "a", *options)) is None
    real = Pretraining.training_step

    def stumble(self: Pretraining, batch: dict, batch_idx: int) -> torch.Tensor:
        if batch_idx == 28:  # in the middle of step 9; the last checkpoint is of step 8
            raise RuntimeError("power cut")
        return real(self, batch, batch_idx)

    words = training("pretrain", blocks, tmp_path / "b", *options)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        patch.setattr(Pretraining, "training_step", stumble)
        in_process(words)
    assert in_process(words) is None
    same_training(tmp_path / "b/pretrain/last.ckpt", tmp_path / "a/pretrain/last.ckpt")


def test_a_run_killed_in_its_last_moment_does_not_train_on(blocks: Path, tmp_path: Path) -> None:
    """Whether it was over by its steps or by its patience."""
    for number, options in enumerate((["--run.patience=1", "--model.lr=0"], ["--trainer.max_steps=30"])):
        out = tmp_path / str(number)
        words = command(
            "finetune", [], *SMALL, *SETTINGS["finetune"], f"--data.folder={blocks}", f"--run.out={out}", *options
        )
        assert in_process(words) is None
        steps = json.loads((out / "finished.json").read_text())["steps"]
        assert steps == 30 < 90
        before = {name: weights(out / name) for name in ("last.ckpt", "best.ckpt")}
        (out / "finished.json").unlink()
        assert in_process(words) is None
        assert json.loads((out / "finished.json").read_text())["steps"] == steps
        for name, state in before.items():
            assert all(torch.equal(value, state[key]) for key, value in weights(out / name).items())


def test_early_stopping_ignores_the_validations_before_select_after(blocks: Path, tmp_path: Path) -> None:
    """With lr 0, no validation after the first one that counts is better."""
    options = "--model.lr=0", "--run.patience=2", "--run.select_after=50", "--trainer.val_check_interval=10"
    words = command(
        "finetune", [], *SMALL, *SETTINGS["finetune"], f"--data.folder={blocks}", f"--run.out={tmp_path}", *options
    )
    assert in_process(words) is None
    assert json.loads((tmp_path / "finished.json").read_text())["steps"] == 70  # 50 is the first that counts
    assert read_checkpoint(tmp_path / "best.ckpt")["global_step"] == 50


@pytest.mark.parametrize("accumulated", [1, 2])
def test_lengths_and_milestones_in_epochs(accumulated: int, blocks: Path, tmp_path: Path) -> None:
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
        assert names == {"config.yaml", "identity.json", "last.ckpt", "logs", "finished.json"} | (
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
        f"{tmp_path / 'pretrain'}: it holds a run with other settings; the folder is renamed to {tmp_path / 'pretrain.1'}"
        in output
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
    typo = run(smoke("finetune", blocks, tmp_path / "x", "--data.batchsize=3"), tmp_path)
    assert "unknown option --data.batchsize, did you mean --data.batch_size" in one_sentence(typo)
    other = run(
        smoke("finetune", blocks, tmp_path / "x", f"--model.init_from={undisturbed / 'pretrain/last.ckpt'}"), tmp_path
    )
    output = one_sentence(other)
    assert (
        "parameters do not fit (unexpected: trunk.cross_encoder.layers.2." in output
        and "give both stages the same width" in output
    )
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
        "--limit=-3": "--limit is -3",
        "--metrics=[]": "the list is empty",
        "--accelerator=gpus": "invalid settings: ",
    }.items():
        code = in_process([*evaluation(blocks, undisturbed), f"--out={tmp_path / 'eval'}", option])
        assert code not in (None, 0) and (not isinstance(code, str) or (sentence in code and "\n" not in code)), option
    assert not list((tmp_path / "eval").glob("*.json"))


def test_other_features_are_another_run_and_not_for_this_captioner(
    blocks: Path, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One image has been replaced: its row in the store, and nothing in the manifest or in the store's name, is new."""
    folder = tmp_path / "data"
    shutil.copytree(blocks, folder)
    out = tmp_path / "pretrain"
    words = smoke("pretrain", folder, out)
    assert in_process(words) is None
    capsys.readouterr()
    assert in_process(words) == 0 and "already finished" in capsys.readouterr().out
    store = folder / "features/blocks"
    data = bytearray((store / "features.f16").read_bytes())
    row = len(data) // len(json.loads((store / "index.json").read_text())["paths"])
    data[:row] = bytes(row)
    (store / "features.f16").write_bytes(data)
    with (store / "sums.u32").open("r+b") as file:
        file.write(zlib.crc32(data[:row]).to_bytes(4, "little"))
    assert in_process(words) is None
    assert "holds a run with other settings" in capsys.readouterr().out and (tmp_path / "pretrain.1").is_dir()
    meta = json.loads((store / "meta.json").read_text())
    (store / "meta.json").write_text(json.dumps({**meta, "weights_sha256": "0" * 64}))
    output = in_process([*evaluation(folder, undisturbed), f"--out={tmp_path / 'eval'}"])
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
    config = f"--config={ROOT / 'configs/backbone/blocks.yaml'}"
    extraction = [sys.executable, str(ROOT / "stages/extract.py"), config, f"--data.folder={folder}"]
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
    assert repaired() == f"{store}: already complete."
    for words in ([*finetune, "--data.num_workers=1"], evaluation(folder, undisturbed)):
        flip(0)
        output = in_process(words)
        assert isinstance(output, str) and "\n" not in output
        assert output.startswith(f"error: {store}: the features of ") and "are damaged" in output
        assert f"run `make extract FOLDER={folder} BACKBONE=blocks`" in output
        output = in_process(words)
        assert isinstance(output, str) and "extraction is not complete" in output and "\n" not in output
        assert repaired() == f"{store}: complete, {images} images extracted."
    flip(images - 3)
    assert repaired() == f"{store}: complete, 3 images extracted."
    os.truncate(data, 2 * row + 1)
    output = in_process(finetune)
    assert isinstance(output, str) and f"features.f16: truncated, {2 * row + 1} bytes" in output and "\n" not in output
    assert repaired() == f"{store}: complete, {images - 2} images extracted."
    data.with_name("sums.u32").unlink()
    output = in_process(evaluation(folder, undisturbed))
    assert isinstance(output, str) and "sums.u32: truncated, 0 bytes" in output and "\n" not in output
    assert repaired() == f"{store}: complete, {images} images extracted."
    assert in_process(finetune) is None


def test_pairs_without_references_are_captioned_and_not_scored(
    blocks: Path, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset, folder = read_dataset(blocks), tmp_path / "data"
    test = [pair.id for pair in dataset.pairs if pair.split == "test"]
    for silent in (test[:2], test):
        pairs = [replace(pair, captions=[]) if pair.id in silent else pair for pair in dataset.pairs]
        write_dataset(folder, "blocks", dataset.root, pairs, {})
        if not (folder / "features").exists():
            (folder / "features").symlink_to(blocks / "features")
        status = in_process([*evaluation(folder, undisturbed), f"--out={tmp_path / 'eval'}"])
        output = json.loads((tmp_path / "eval/predictions-unscored.json").read_text())
        assert [row["image_id"] for row in output] == silent
        if silent == test:
            assert isinstance(status, str) and f"none of its {len(test)} test pairs has a reference caption" in status
        else:
            assert status is None and f"2 of {len(test)} pairs have no reference caption" in capsys.readouterr().out
            files = [tmp_path / "eval" / name for name in ("predictions.json", "references.json")]
            again = score_captions(read_predictions(files[0]), read_references(files[1]), metrics=["CIDEr-D"])
            assert (
                again["CIDEr-D"]
                == json.loads((tmp_path / "eval/metrics.json").read_text())["groups"]["total"]["CIDEr-D"]
            )
            counted = json.loads((tmp_path / "eval/metrics.json").read_text())["protocol"]["pairs"]["total"]
            assert counted == len(test) - 2


def test_two_processes_write_the_captions_of_one(blocks: Path, undisturbed: Path, tmp_path: Path) -> None:
    out = f"--out={tmp_path / 'two'}", "--limit=9"  # of which one process gets five and the other four, and one again
    done = run(evaluation(blocks, undisturbed, *out, "--devices=2", "--accelerator=cpu", "--batch_size=2"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert in_process(evaluation(blocks, undisturbed, f"--out={tmp_path / 'one'}", "--limit=9")) is None
    for name in ("predictions.json", "references.json", "metrics.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    assert len(json.loads((tmp_path / "one/predictions.json").read_text())) == 9


def test_scores_of_raw_tokens_come_with_those_of_ptb_tokens_beside_them(
    blocks: Path, undisturbed: Path, tmp_path: Path
) -> None:
    for out, *options in (("ptb",), ("raw", "--tokenizer=raw")):
        assert in_process([*evaluation(blocks, undisturbed, "--limit=6"), f"--out={tmp_path / out}", *options]) is None
    raw, beside, ptb = (
        json.loads((tmp_path / name).read_text())
        for name in ("raw/metrics.json", "raw/metrics-ptb.json", "ptb/metrics.json")
    )
    assert raw["protocol"]["tokenizer"] == "raw" and not (tmp_path / "ptb/metrics-ptb.json").exists()
    assert beside["protocol"] == ptb["protocol"] and beside["groups"] == ptb["groups"]


def test_a_file_that_the_training_did_not_write_is_not_evaluated(
    blocks: Path, undisturbed: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(undisturbed / "finetune", runs / "finetune")
    shutil.copyfile(runs / "finetune/last.ckpt", runs / "finetune/best.ckpt")
    output = f"{runs / 'finetune'}: best.ckpt is not the file that the finished training wrote; run `make finetune`"
    assert output in str(in_process(evaluation(blocks, runs)))
    (runs / "finetune/finished.json").write_text("")
    assert "finished.json is damaged" in str(in_process(evaluation(blocks, runs)))
    assert not (runs / "eval").exists()


def test_an_interrupted_evaluation_leaves_no_scores_of_earlier_captions(
    blocks: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "eval"
    words = [*evaluation(blocks, undisturbed, "--tokenizer=raw", "--metrics=[CIDEr-D]"), f"--out={out}"]
    assert in_process([*words, "--limit=6"]) is None
    read_evaluation(out)
    assert len(list(out.glob("metrics*.json"))) == 2
    with monkeypatch.context() as patch:
        patch.setattr("diffcap.evaluation.protocols.evaluate", interrupted)
        assert "interrupted" in str(in_process([*words, "--limit=7"]))
    assert len(read_predictions(out / "predictions.json")) == 7 and not list(out.glob("metrics*.json"))
    with pytest.raises(DiffcapError, match="file not found"):
        read_evaluation(out)


def named_command(message: str | int | None) -> list[str]:
    """The command that an error message names between backquotes."""
    assert isinstance(message, str) and "\n" not in message, message
    (command,) = re.findall(r"`([^`]+)`", message)
    return shlex.split(command)


def test_a_second_training_in_a_folder_is_refused_until_the_first_ends(
    blocks: Path, undisturbed: Path, tmp_path: Path
) -> None:
    words, out = training("pretrain", blocks, tmp_path), tmp_path / "pretrain"
    first = subprocess.Popen(
        words, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        while not (out / "last.ckpt").exists():
            assert first.poll() is None
            time.sleep(0.002)
        os.kill(first.pid, signal.SIGSTOP)  # it must not end before the others have started
        for options in ([], ["--data.seed=2", "--seed_everything=2"]):
            message = in_process([*words, *options])
            assert f"{out}: process {first.pid} on " in str(message) and "seed 1234" in str(message)
        assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["pretrain"]
        assert named_command(message) == ["kill", str(first.pid)]
        subprocess.run(named_command(message), check=True)
        os.kill(first.pid, signal.SIGCONT)
        assert "interrupted at step" in first.communicate(timeout=60)[1]
    finally:
        first.kill()
    assert in_process(words) is None
    same_training(out / "last.ckpt", undisturbed / "pretrain/last.ckpt")


def test_a_finished_stage_whose_files_are_damaged_is_trained_again(
    blocks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "finetune"
    words = smoke("finetune", blocks, out)
    assert in_process(words) is None
    best = weights(out / "best.ckpt")
    finished = json.loads((out / "finished.json").read_text())

    def again() -> str:
        """What the same command prints; the stage is finished afterwards, with the same weights."""
        capsys.readouterr()
        status = in_process(words)
        output = capsys.readouterr().out
        assert status == (0 if "already finished" in output else None)
        assert all(torch.equal(value, best[name]) for name, value in weights(out / "best.ckpt").items())
        assert json.loads((out / "finished.json").read_text())["steps"] == finished["steps"]
        return output

    os.utime(out / "best.ckpt", (1, 1))  # as after copying
    assert "already finished" in again()
    old = {key: value for key, value in finished.items() if not key.startswith("checkpoint_")}
    (out / "finished.json").write_text(json.dumps(old))  # as earlier versions wrote it
    assert "already finished" in again()

    (out / "finished.json").write_text("")
    assert "already finished" not in again() and not out.with_name("finetune.1").exists()
    assert json.loads((out / "finished.json").read_text())["checkpoint_sha256"]

    other = bytearray((out / "best.ckpt").read_bytes())
    other[len(other) // 2] ^= 1
    damages = {
        "best.ckpt of the finished training is missing": lambda: (out / "best.ckpt").unlink(),
        "best.ckpt is not the file": lambda: (out / "best.ckpt").write_bytes(other),
        "finished.json belongs to another training": lambda: (out / "finished.json").write_text(
            json.dumps({**finished, "identity": "0"})
        ),
        "identity.json is missing or damaged": lambda: (out / "identity.json").write_text(""),
    }
    for number, (reason, damage) in enumerate(damages.items(), 1):
        damage()
        aside = out.with_name(f"finetune.{number}")
        assert f"{out}: {reason}" in (output := again()) and f"the folder is renamed to {aside}, and" in output
        assert (aside / "last.ckpt").is_file()
        assert "already finished" in again()

    (out / "finished.json").write_text(json.dumps(old))
    (out / "best.ckpt").write_bytes((out / "best.ckpt").read_bytes()[:-3000])
    assert "best.ckpt is not the file" in again()


def test_a_damaged_earlier_stage_is_trained_again_by_the_command_in_the_message(blocks: Path, tmp_path: Path) -> None:
    start, out = tmp_path / "pretrain", tmp_path / "finetune"
    before, words = smoke("pretrain", blocks, start), smoke("finetune", blocks, out)
    words.append(f"--model.init_from={start / 'last.ckpt'}")
    assert in_process(before) is None
    last = weights(start / "last.ckpt")
    damages = {
        "last.ckpt is not the file": lambda: (start / "last.ckpt").write_bytes(b"cut"),
        "last.ckpt of the finished training is missing": lambda: (start / "last.ckpt").unlink(),
        "finished.json is damaged": lambda: (start / "finished.json").write_text(""),
        "its training is not finished": lambda: (start / "finished.json").unlink(),
        "identity.json is missing or damaged": lambda: (start / "identity.json").write_text(""),
    }
    for reason, damage in damages.items():
        damage()
        message = in_process(words)
        assert f"{start}: {reason}" in str(message) and not out.exists()
        assert in_process(named_command(message)) is None
        assert all(torch.equal(value, last[name]) for name, value in weights(start / "last.ckpt").items())
        assert in_process(before) == 0  # the settings are the same
    assert in_process(words) is None
    # A finished captioner does not need the pre-trained weights any more.
    (start / "last.ckpt").unlink()
    assert in_process(words) == 0


def test_an_interrupted_training_that_cannot_go_on_names_the_command_to_start_again(
    blocks: Path, tmp_path: Path
) -> None:
    out = tmp_path / "finetune"
    words = smoke("finetune", blocks, out)
    assert in_process(words) is None
    best = weights(out / "best.ckpt")
    damages = {
        "last.ckpt: not a readable checkpoint": lambda: (out / "last.ckpt").write_bytes(
            (out / "last.ckpt").read_bytes()[:-3000]
        ),
        "best.ckpt: no checkpoint there": lambda: (out / "best.ckpt").unlink(),
    }
    for number, (reason, damage) in enumerate(damages.items()):
        (out / "finished.json").unlink()
        damage()
        message = in_process(words)
        assert reason in str(message)
        assert named_command(message)[:2] == ["mv", str(out)]
        subprocess.run(named_command(message), check=True)
        assert in_process(words) is None
        assert all(torch.equal(value, best[name]) for name, value in weights(out / "best.ckpt").items())
        (tmp_path / "finetune.damaged").rename(tmp_path / f"damaged.{number}")


def test_seeds_out_of_range_are_one_sentence(blocks: Path, tmp_path: Path) -> None:
    for option in ("--seed_everything=-1", "--data.seed=-1", "--seed_everything=4294967296"):
        message = in_process([*smoke("pretrain", blocks, tmp_path / "pretrain"), option])
        assert isinstance(message, str) and f"{option.replace('=', ' is ')}; give a seed from 0 to" in message


def test_a_full_disk_is_one_sentence_and_costs_nothing(blocks: Path, tmp_path: Path) -> None:
    words, out = smoke("pretrain", blocks, tmp_path / "pretrain"), tmp_path / "pretrain"
    out.mkdir()
    (out / ".last.ckpt.tmp").symlink_to("/dev/full")  # where the checkpoint is written before it gets its name
    done = run(words, tmp_path)
    assert f"no space left on the disk while writing {out / 'last.ckpt'}" in one_sentence(done)
    assert done.returncode == 1 and not (out / "last.ckpt").exists() and not (out / "finished.json").exists()
    assert in_process(words) is None
    assert (out / "finished.json").is_file()


def test_tensorboard_logs_beside_the_csv_file(blocks: Path, tmp_path: Path) -> None:
    assert in_process(smoke("finetune", blocks, tmp_path / "run", "--run.logger=tensorboard")) is None
    (events,) = (tmp_path / "run/logs/tensorboard").glob("events.out.tfevents.*")
    assert b"val/CIDEr-D" in events.read_bytes()
    assert (tmp_path / "run/logs/version_0/metrics.csv").is_file()


def test_wandb_logs_offline_without_an_account(blocks: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    done = run(smoke("finetune", blocks, tmp_path / "run", "--run.logger=wandb"), here, HOME=str(tmp_path / "home"))
    assert done.returncode == 0, done.stderr
    assert list(here.iterdir()) == []
    logs = list((tmp_path / "run/wandb").glob("offline-run-*/run-*.wandb"))
    assert len(logs) == 1 and b"val/CIDEr-D" in logs[0].read_bytes()
    assert (tmp_path / "run/logs/version_0/metrics.csv").is_file()  # beside it, always
