"""Self-critical training by its real command: rewards, kills, two processes against one."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from tests.commands import ROOT, command, in_process, logged, run, same_logs, weights
from tests.stages.small_runs import kill_when, same_training
from tests.toy import write_toy

from diffcap.checkpoints.loading import load
from diffcap.datasets.no_change import is_no_change
from diffcap.evaluation.metric import CaptionMetric
from diffcap.features.store import FeatureStore
from diffcap.records import ChangePair, read_dataset

BASE = ROOT / "configs/reinforce/base.yaml"
FILES = [ROOT / "configs/trainer/smoke.yaml"]
SMALL = (
    "width=16",
    "heads=2",
    "word_width=12",
    "dropout=0.0",
    "decoder_std=0.3",
    "position_std=0.3",
    "change_weight=0.5",
)
TRAINING = ("--data.features=toy", "--data.max_length=16", "--data.samples=scenes", "--trainer.accelerator=cpu")


def settings(method: str = "scorer") -> list[str]:
    sizes = SMALL if method == "scorer" else ("width=16", "heads=2", "ffn=24", "dropout=0.0")
    return [f"--model.captioner.init_args.{size}" for size in sizes]


def finetuning(folder: Path, out: Path, method: str, *options: str) -> list[str]:
    files = f"--data.folder={folder}", f"--run.out={out / 'finetune'}", "--data.batch_size=7"
    return command("finetune", FILES, *settings(method), *TRAINING, *files, *options, method=method)


def reinforcing(folder: Path, out: Path, method: str, *options: str) -> list[str]:
    """The fine-tuning's settings with the stage's own on top, as Make gives them."""
    words = finetuning(folder, out, method)
    words[1] = str(ROOT / "stages/reinforce.py")
    place = words.index(str(FILES[0])) - 1
    own = f"--run.out={out / 'reinforce'}", f"--model.init_from={out / 'finetune' / 'best.ckpt'}", "--data.batch_size=7"
    return [*words[:place], "--config", str(BASE), *words[place:], *own, *options]


LONG = ("--model.lr=3e-3", "--trainer.max_steps=60", "--trainer.val_check_interval=20", "--run.checkpoint_every=4")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy dataset, a SCORER trained on it for some steps, and its self-critical training that nobody killed."""
    out = tmp_path_factory.mktemp("reinforce")
    folder = write_toy(out / "data")
    learnt = "--trainer.max_steps=50", "--trainer.val_check_interval=25", "--model.lr=5e-3", "--model.schedule=constant"
    learnt += "--run.keep_last_k=2", "--run.checkpoint_every=15"
    assert in_process(finetuning(folder, out, "scorer", *learnt)) is None
    assert in_process(reinforcing(folder, out, "scorer", *LONG)) is None
    return out


def test_every_step_logs_its_reward(undisturbed: Path) -> None:
    rewards = [value for (_, name), value in logged(undisturbed / "reinforce").items() if name == "train/reward"]
    assert len(rewards) == 60 and all(0 <= reward <= 10 for reward in rewards)
    finished = json.loads((undisturbed / "reinforce/finished.json").read_text())
    assert finished["stage"] == "reinforce" and finished["monitor"] == "val/CIDEr-D" and finished["steps"] == 60


def test_its_checkpoint_captions(undisturbed: Path) -> None:
    checkpoint = load(undisturbed / "reinforce/best.ckpt")
    assert checkpoint.metadata["stage"] == "reinforce" and checkpoint.metadata["method"] == "scorer"
    files = f"--checkpoint={undisturbed / 'reinforce/best.ckpt'}", f"--folder={undisturbed / 'data'}"
    quick = "--tokenizer=raw", "--metrics=[CIDEr-D]", "--batch_size=3"
    output = {}
    for name, *options in (
        ("alone",),
        ("beams", "--beams=2", "--length_penalty=1"),
        ("twice", f"--ensemble={files[0][13:]}"),
    ):
        out = undisturbed / f"eval-{name}"
        words = [sys.executable, str(ROOT / "stages/evaluate.py"), *files, *quick, f"--out={out}", *options]
        assert in_process(words) is None
        output[name] = (out / "predictions.json").read_text()
        if name == "twice":
            metrics = json.loads((out / "metrics.json").read_text())
            assert metrics["protocol"]["ensemble"] == 2
            both = metrics["provenance"]["checkpoints"]
            assert [one["file"] for one in both] == ["../reinforce/best.ckpt"] * 2 and both[0]["stage"] == "reinforce"
    assert output["alone"] == output["twice"]  # an ensemble of a captioner with itself has its captions
    check_changes(undisturbed)


def check_changes(undisturbed: Path) -> None:
    """The change head is trained, stored and evaluated, and self-critical training leaves it as it is."""
    logs = logged(undisturbed / "finetune")
    assert {"train/change_loss", "train/change_type_loss", "val/change_loss"} <= {name for _, name in logs}
    fine, reinforced = (load(undisturbed / stage / "best.ckpt").captioner for stage in ("finetune", "reinforce"))
    assert fine.hyperparameters["change_types"] == ["move"] and fine.change_head is not None
    for one, other in zip(fine.change_head.parameters(), reinforced.change_head.parameters()):
        assert torch.equal(one, other)
    dataset, store = read_dataset(undisturbed / "data"), FeatureStore.open(undisturbed / "data/features/toy")
    test = [pair for pair in dataset.pairs if pair.split == "test"]
    sides = zip(*(pair.images for pair in test))
    with torch.no_grad():
        maps = [torch.from_numpy(store.read(store.rows(paths))).float() for paths in sides]
        no_change = reinforced.nothing_changed(*maps).tolist()
    for name in ("alone", "twice"):
        out = undisturbed / f"eval-{name}"
        captions, changed = (json.loads((out / file).read_text()) for file in ("predictions.json", "changed.json"))
        texts = {row["image_id"]: row["caption"] for row in captions}
        values = [0 if is_no_change(texts[pair.id]) else 1 - value for pair, value in zip(test, no_change)]
        assert changed == {pair.id: pytest.approx(value, abs=1e-4) for pair, value in zip(test, values)}
        scores = json.loads((out / "metrics.json").read_text())["change_probability"]
        assert scores == pytest.approx(naive_scores(changed, test))


def naive_scores(changed: dict[str, float], pairs: list[ChangePair]) -> dict[str, float]:
    changes, others = ([changed[pair.id] for pair in pairs if pair.is_distractor == kind] for kind in (False, True))
    wins = [(one > other) + (one == other) / 2 for one in changes for other in others]
    right = [value > 0.5 for value in changes] + [value <= 0.5 for value in others]
    return {"AUC": sum(wins) / len(wins), "accuracy": sum(right) / len(right)}


@pytest.mark.thorough
def test_a_killed_run_ends_as_an_undisturbed_one(undisturbed: Path, tmp_path: Path) -> None:
    (tmp_path / "finetune").symlink_to(undisturbed / "finetune")
    words = reinforcing(undisturbed / "data", tmp_path, "scorer", *LONG)
    kill_when(words, tmp_path / "reinforce/last.ckpt", tmp_path)
    assert not (tmp_path / "reinforce/finished.json").exists()
    done = run(words, tmp_path)
    assert done.returncode == 0, done.stderr
    same_training(tmp_path / "reinforce/last.ckpt", undisturbed / "reinforce/last.ckpt")
    one, other = (weights(folder / "reinforce/best.ckpt") for folder in (tmp_path, undisturbed))
    assert all(value.equal(other[name]) for name, value in one.items())
    assert scores(tmp_path / "reinforce")[0] == scores(undisturbed / "reinforce")[0]


@pytest.mark.thorough
def test_two_processes_train_to_the_weights_of_one(undisturbed: Path, tmp_path: Path) -> None:
    (tmp_path / "finetune").symlink_to(undisturbed / "finetune")
    short = "--model.lr=1e-3", "--trainer.max_steps=4", "--model.baseline=greedy", "--data.val_limit=7"
    for devices in (1, 2):
        more = ["--trainer.strategy=ddp"] if devices == 2 else []
        own = f"--trainer.devices={devices}", f"--run.out={tmp_path / str(devices)}", *more
        words = reinforcing(undisturbed / "data", tmp_path, "scorer", *short, *own)
        done = run(words, tmp_path)
        assert done.returncode == 0, done.stderr
    one, two = (weights(tmp_path / str(devices) / "last.ckpt") for devices in (1, 2))
    start = weights(tmp_path / "finetune/best.ckpt")
    # The keys' bias moves all scores of a query alike: its gradient is rounding, which Adam makes a full step.
    names = [name for name in one if not name.endswith("qkv.bias")]
    for name in names:
        assert (one[name] - two[name]).abs().max() < 2e-5, name
    assert {"train/reward", "train/baseline", "val/caption_loss"} <= same_logs(tmp_path / "1", tmp_path / "2")
    assert max((one[name] - start[name]).abs().max() for name in names) > 1e-3


def scores(folder: Path) -> dict[int, float]:
    """Optimiser step -> val/CIDEr-D."""
    return {int(step): value for (step, name), value in logged(folder).items() if name == "val/CIDEr-D"}


def test_it_hands_over_nothing_worse_than_its_start(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert next(iter(scores(undisturbed / "reinforce"))) == 0
    (tmp_path / "finetune").symlink_to(undisturbed / "finetune")
    given = iter([0.5, 0.25, 0.375])  # of the start, of steps 2 and 4
    monkeypatch.setattr(CaptionMetric, "compute", lambda _: {"CIDEr-D": next(given)})
    options = "--trainer.max_steps=4", "--trainer.val_check_interval=2"
    assert in_process(reinforcing(undisturbed / "data", tmp_path, "scorer", *options)) is None
    assert list(scores(tmp_path / "reinforce").values()) == [0.5, 0.25, 0.375]
    fine, best, last = (
        weights(tmp_path / name) for name in ("finetune/best.ckpt", "reinforce/best.ckpt", "reinforce/last.ckpt")
    )
    assert all(value.equal(best[name]) for name, value in fine.items())
    assert not all(value.equal(last[name]) for name, value in fine.items())
    finished = json.loads((tmp_path / "reinforce/finished.json").read_text())
    assert finished["best"] == 0.5 and finished["steps"] == 4


def test_what_it_starts_from_is_part_of_the_run(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint from elsewhere is known by its weights, not by its name or by what its training took."""
    start = tmp_path / "start.ckpt"
    state = torch.load(undisturbed / "finetune/best.ckpt", weights_only=True)
    words = reinforcing(undisturbed / "data", tmp_path, "scorer", "--trainer.max_steps=2", f"--model.init_from={start}")
    torch.save(state, start)
    assert in_process(words) is None
    torch.save({**state, "diffcap": {**state["diffcap"], "train_seconds": 1e6}}, start)
    capsys.readouterr()
    in_process(words)
    assert "already finished" in capsys.readouterr().out and not (tmp_path / "reinforce.1").exists()
    shutil.copyfile(undisturbed / "finetune/step-000030.ckpt", start)
    assert in_process(words) is None
    assert (tmp_path / "reinforce.1/finished.json").is_file() and (tmp_path / "reinforce/finished.json").is_file()


def test_another_method_trains_on_by_it(undisturbed: Path, tmp_path: Path) -> None:
    method = "pcl"
    assert in_process(finetuning(undisturbed / "data", tmp_path, method)) is None
    half = "--trainer.precision=bf16-mixed", "--run.force_bf16=true", "--trainer.max_steps=2"
    assert in_process(reinforcing(undisturbed / "data", tmp_path, method, *half)) is None
    assert load(tmp_path / "reinforce/best.ckpt").metadata["method"] == method
