"""Training stages that are killed, interrupted, started twice, or whose files are damaged, by their real commands.

Where the kind of process does not matter the script runs inside this one, which has imported everything already.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tests.commands import command, in_process, logged, one_sentence, run, weights
from tests.stages.small_runs import (
    SETTINGS,
    SMALL,
    evaluation,
    kill_when,
    named_command,
    same_training,
    smoke,
    start_process,
    training,
)

from diffcap.methods.pcl.pretraining import Pretraining


def _same_logs(resumed: Path, undisturbed: Path) -> None:
    """The resumed run logs the same values at the same steps.

    A row of the pre-training has the latest loss of each task, but none of a task that only had batches before the interruption.
    """
    logs, whole = logged(resumed), logged(undisturbed)
    assert logs.items() <= whole.items()
    assert all(name in ("train/mlm", "train/mvcl", "train/fda") for _, name in whole.keys() - logs.keys())


def test_killed_stages_run_again_end_as_undisturbed_ones(blocks: Path, undisturbed: Path, tmp_path: Path) -> None:
    for stage in SETTINGS:
        words = training(stage, blocks, tmp_path)
        kill_when(words, tmp_path / stage / "last.ckpt", tmp_path)
        assert not (tmp_path / stage / "finished.json").exists()
        done = run(words, tmp_path)
        assert done.returncode == 0, done.stderr
        for name in ("last.ckpt", "best.ckpt")[: 1 + (stage == "finetune")]:
            same_training(tmp_path / stage / name, undisturbed / stage / name)
        _same_logs(tmp_path / stage, undisturbed / stage)
        assert not list((tmp_path / stage).glob(".*.tmp"))
    kill_when(evaluation(blocks, tmp_path), tmp_path, tmp_path)  # at any time of its start
    done = run(evaluation(blocks, tmp_path), tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("predictions.json", "references.json", "metrics.json"):
        assert (tmp_path / "eval" / name).read_bytes() == (undisturbed / "eval" / name).read_bytes(), name
    finished = json.loads((tmp_path / "finetune/finished.json").read_text())
    assert finished["steps"] == 60 and finished["checkpoint"] == "best.ckpt" and finished["monitor"] == "val/CIDEr-D"


def _send(monkeypatch: pytest.MonkeyPatch, at: int, numbers: Sequence[signal.Signals], pause: float = 0) -> None:
    """Send signals to this process, with a pause between them, in the training step of a batch."""
    real = Pretraining.training_step

    def step(self: Pretraining, batch: dict, batch_idx: int) -> torch.Tensor:
        for number in numbers if batch_idx == at else ():
            os.kill(os.getpid(), number)
            time.sleep(pause)
        return real(self, batch, batch_idx)

    monkeypatch.setattr(Pretraining, "training_step", step)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it


ACCUMULATED = "--trainer.accumulate_grad_batches=3", "--trainer.max_steps=20", "--trainer.val_check_interval=30"


@pytest.mark.parametrize(
    ("number", "batch", "step", "options"),
    [
        (signal.SIGTERM, 9, 10, ()),
        pytest.param(signal.SIGINT, 14, 15, (), marks=pytest.mark.thorough, id="a validation follows"),
        pytest.param(
            *(signal.SIGINT, 28, 10, (*ACCUMULATED, "--trainer.log_every_n_steps=3")),
            marks=pytest.mark.thorough,
            id="the second batch of the step",
        ),
    ],
)
def test_a_signal_ends_a_training_after_the_whole_step(
    blocks: Path,
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    batch: int,
    step: int,
    options: tuple[str, ...],
) -> None:
    words, out = training("pretrain", blocks, tmp_path, *options), tmp_path / "pretrain"
    with monkeypatch.context() as patch:
        _send(patch, batch, [number, number])  # make and its process group may send it twice
        message = f"error: interrupted at step {step}; run the same command again to resume at step {step}."
        assert in_process(words) == message
    assert in_process(words) is None
    whole = undisturbed / "pretrain"
    if options:
        whole = tmp_path / "whole/pretrain"
        assert in_process(training("pretrain", blocks, tmp_path / "whole", *options)) is None
    same_training(out / "last.ckpt", whole / "last.ckpt")
    _same_logs(out, whole)


def test_a_second_signal_ends_a_training_at_once(blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for batch, numbers, sentence in (
        (2, [signal.SIGINT, signal.SIGTERM], "step 2; run the same command again to start from step 0"),
        (6, [signal.SIGTERM, signal.SIGTERM], "step 6; run the same command again to resume at step 4."),
        (5, [signal.SIGINT, signal.SIGINT], "step 5; run the same command again to resume at step 4."),
    ):
        with monkeypatch.context() as patch:
            _send(patch, batch, numbers, pause=1.1)
            message = in_process(training("pretrain", blocks, tmp_path))
        assert isinstance(message, str) and message.startswith(f"error: interrupted at {sentence}")


@pytest.mark.thorough
def test_two_processes_are_killed_and_interrupted_and_end_as_undisturbed_ones(
    blocks: Path, undisturbed: Path, tmp_path: Path
) -> None:
    def words(runs: Path) -> list[str]:
        two = "--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.log_every_n_steps=5"
        start = f"--model.init_from={undisturbed / 'pretrain/last.ckpt'}"
        more = "--run.checkpoint_every=5", "--data.num_workers=1"  # the signals also go to the workers
        return [*training("finetune", blocks, runs, *two, start), *more]

    def ended_by(send: Callable[[subprocess.Popen], None]) -> str:
        """Errors of the processes, which get a signal as soon as they have written a new checkpoint."""
        before = last.stat().st_mtime_ns if last.exists() else 0
        process = start_process(words(tmp_path / "a"))
        while not last.exists() or last.stat().st_mtime_ns == before:
            assert process.poll() is None
            time.sleep(0.002)
        send(process)
        error = process.communicate(timeout=120)[1].strip()
        assert process.returncode in (1, -signal.SIGKILL) and "Traceback" not in error, error  # Lightning may kill it
        return error

    last = tmp_path / "a/finetune/last.ckpt"
    killed = ended_by(
        lambda process: subprocess.run(["pkill", "-KILL", "-o", "-P", str(process.pid), "python"], check=True)
    )
    assert killed.splitlines()[-1].startswith("error: another process of this run has ended or cannot be reached")
    assert killed.endswith("run the same command again to resume.")
    for send in (
        lambda process: os.killpg(process.pid, signal.SIGINT),  # Ctrl-C
        lambda process: os.killpg(process.pid, signal.SIGTERM),  # `timeout`
    ):
        error = ended_by(send)
        step = torch.load(last, weights_only=True)["global_step"]
        assert "stops after the next multiple of 5 steps" in error and step % 5 == 0
        sentence = f"error: interrupted at step {step}; run the same command again to resume at step {step}."
        assert error.splitlines()[-1] == sentence
    for runs in (tmp_path / "a", tmp_path / "b"):
        done = run(words(runs), tmp_path)
        assert done.returncode == 0, done.stderr
    same_training(last, tmp_path / "b/finetune/last.ckpt")
    _same_logs(tmp_path / "a/finetune", tmp_path / "b/finetune")


def test_ctrl_c_during_a_validation_saves_a_checkpoint_after_it(
    blocks: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """A terminal sends it to Java, too, which computes the scores."""
    start = f"--model.init_from={undisturbed / 'pretrain/last.ckpt'}"
    words = training("finetune", blocks, tmp_path, start, "--run.checkpoint_every=1000", "--model.tokenizer=ptb")
    process = start_process(words)
    while subprocess.run(["pgrep", "-P", str(process.pid), "java"], capture_output=True).returncode:
        assert process.poll() is None
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGINT)
    error = process.communicate(timeout=60)[1].strip()
    step = torch.load(tmp_path / "finetune/last.ckpt", weights_only=True)["global_step"]
    sentence = f"error: interrupted at step {step}; run the same command again to resume at step {step}."
    assert error.splitlines()[-1] == sentence


def test_a_run_killed_in_its_last_moment_does_not_train_on(blocks: Path, tmp_path: Path) -> None:
    """Whether it was over by its steps or by its patience."""
    for number, options in enumerate((["--run.patience=1", "--model.lr=0"], ["--trainer.max_steps=30"])):
        out = tmp_path / str(number)
        words = command(
            "finetune", [], *SMALL, *SETTINGS["finetune"], f"--data.folder={blocks}", f"--run.out={out}", *options
        )
        assert in_process(words) is None
        steps = json.loads((out / "finished.json").read_text())["steps"]
        assert steps == 30 < 60
        before = {name: weights(out / name) for name in ("last.ckpt", "best.ckpt")}
        (out / "finished.json").rename(out / "running.json")
        assert in_process(words) is None
        assert json.loads((out / "finished.json").read_text())["steps"] == steps
        for name, state in before.items():
            assert all(torch.equal(value, state[key]) for key, value in weights(out / name).items())


def test_an_interrupted_run_of_diffcap_0_1_goes_on_unless_an_option_differs(blocks: Path, tmp_path: Path) -> None:
    """Its hash of the settings was another one, in identity.json; the settings are in config.yaml."""
    out = tmp_path / "pretrain"
    words = smoke("pretrain", blocks, out)
    assert in_process(words) is None
    for options, aside in (([], False), (["--model.lr=1e-5"], True)):
        (out / "finished.json").unlink()
        (out / "identity.json").write_text('{"identity": "0"}')
        assert in_process([*words, *options]) is None
        assert (tmp_path / "pretrain.1").exists() == aside and not (out / "identity.json").exists()


def test_a_second_training_in_a_folder_is_refused_until_the_first_ends(
    blocks: Path, undisturbed: Path, tmp_path: Path
) -> None:
    words, out = training("pretrain", blocks, tmp_path), tmp_path / "pretrain"
    first = start_process(words)
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
    other = bytearray((out / "best.ckpt").read_bytes())
    other[len(other) // 2] ^= 1
    damages = {
        "best.ckpt of the finished training is missing": lambda: (out / "best.ckpt").unlink(),
        "best.ckpt is not what": lambda: (out / "best.ckpt").write_bytes(other),
        "finished.json is damaged": lambda: (out / "finished.json").write_text(""),
        "running.json is missing or damaged": lambda: (out / "finished.json").unlink(),
    }
    for number, (reason, damage) in enumerate(damages.items(), 1):
        damage()
        aside = out.with_name(f"finetune.{number}")
        assert f"{out}: {reason}" in (output := again()) and f"the folder is renamed to {aside}, and" in output
        assert (aside / "last.ckpt").is_file()
        assert "already finished" in again()


def test_a_damaged_earlier_stage_is_trained_again_by_the_command_in_the_message(blocks: Path, tmp_path: Path) -> None:
    start, out = tmp_path / "pretrain", tmp_path / "finetune"
    before, words = smoke("pretrain", blocks, start), smoke("finetune", blocks, out)
    words.append(f"--model.init_from={start / 'last.ckpt'}")
    assert in_process(before) is None
    last = weights(start / "last.ckpt")
    damages = {
        "last.ckpt is not what": lambda: (start / "last.ckpt").write_bytes(b"cut"),
        "last.ckpt of the finished training is missing": lambda: (start / "last.ckpt").unlink(),
        "finished.json is damaged": lambda: (start / "finished.json").write_text(""),
        "its training is not finished": lambda: (start / "finished.json").rename(start / "running.json"),
        "running.json is missing or damaged": lambda: (
            (start / "finished.json").rename(start / "running.json").write_text("")
        ),
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
        (out / "finished.json").rename(out / "running.json")
        damage()
        message = in_process(words)
        assert reason in str(message)
        assert named_command(message)[:2] == ["mv", str(out)]
        subprocess.run(named_command(message), check=True)
        assert in_process(words) is None
        assert all(torch.equal(value, best[name]) for name, value in weights(out / "best.ckpt").items())
        (tmp_path / "finetune.damaged").rename(tmp_path / f"damaged.{number}")


def test_a_full_disk_is_one_sentence_and_costs_nothing(blocks: Path, tmp_path: Path) -> None:
    words, out = smoke("pretrain", blocks, tmp_path / "pretrain"), tmp_path / "pretrain"
    out.mkdir()
    (out / ".last.ckpt.tmp").symlink_to("/dev/full")  # where the checkpoint is written before it gets its name
    done = run(words, tmp_path)
    assert f"no space left on the disk while writing {out / 'last.ckpt'}" in one_sentence(done)
    assert done.returncode == 1 and not (out / "last.ckpt").exists() and not (out / "finished.json").exists()
    assert in_process(words) is None
    assert (out / "finished.json").is_file()
