"""SCORER and DIRL by the real commands: smoke settings, scoring, a kill, two processes against one; all ablations' settings."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from tests.commands import ROOT, command, in_process, one_sentence, run, same_logs, weights
from tests.stages.small_runs import evaluation, kill_when, same_training

from diffcap.checkpoints.loading import load
from diffcap.data.pretraining import CAPTIONED
from diffcap.methods import import_object, methods

METHODS = ("scorer", "dirl")
SETTINGS = ROOT / "configs" / "method"
# Dropout and swapping on: their draws are what a resumed run could get wrong.
SMALL = (
    *(f"--model.captioner.init_args.{key}" for key in ("width=16", "heads=2", "word_width=12", "dropout=0.2")),
    *("--data.batch_size=5", "--data.features=blocks", "--trainer.accelerator=cpu", "--trainer.limit_val_batches=1"),
    *("--trainer.max_steps=60", "--trainer.val_check_interval=20", "--run.checkpoint_every=4", "--model.warmup=5"),
)


def finetune(method: str, folder: Path, out: Path, *options: str) -> list[str]:
    files = SETTINGS.parent / "dataset/blocks.yaml", SETTINGS / method / "finetune.blocks.yaml"
    return command("finetune", files, *SMALL, f"--data.folder={folder}", f"--run.out={out}", *options, method=method)


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_a_killed_run_ends_as_an_undisturbed_one(method: str, blocks: Path, tmp_path: Path) -> None:
    words = finetune(method, blocks, tmp_path / "a/finetune")
    kill_when(words, tmp_path / "a/finetune/last.ckpt", tmp_path)
    assert not (tmp_path / "a/finetune/finished.json").exists()
    assert in_process(words) is None
    assert in_process(finetune(method, blocks, tmp_path / "b/finetune")) is None
    for name in ("last.ckpt", "best.ckpt"):
        same_training(tmp_path / "a/finetune" / name, tmp_path / "b/finetune" / name)
    for runs in ("a", "b"):
        assert in_process(evaluation(blocks, tmp_path / runs)) is None
    scores = [json.loads((tmp_path / runs / "eval/metrics.json").read_text()) for runs in ("a", "b")]
    assert scores[0] == scores[1] and {"total", "semantic", "distractor"} <= scores[0]["groups"].keys()
    trained = load(tmp_path / "a/finetune/best.ckpt")
    assert trained.metadata["method"] == method and trained.vocabulary.layout == "rcc"
    columns = (tmp_path / "b/finetune/logs/version_0/metrics.csv").read_text().splitlines()[0].split(",")
    parts = {"scorer": {"cross_view_loss", "cbr_loss"}, "dirl": {"diagonal_loss", "off_diagonal_loss", "ccr_loss"}}
    assert {f"train/{name}" for name in parts[method] | {"caption_loss"}} <= set(columns)
    assert "val/caption_loss" in columns


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_two_processes_train_to_the_weights_of_one(method: str, blocks: Path, tmp_path: Path) -> None:
    """5 scenes are 3 and 2 on two ranks, 7 validation pairs 4 and 4; without dropout, whose draws belong to a rank."""
    still = "--model.captioner.init_args.dropout=0", "--trainer.max_steps=8", "--trainer.val_check_interval=4"
    still += "--data.val_limit=7", "--trainer.log_every_n_steps=2"
    assert in_process(finetune(method, blocks, tmp_path / "one", *still)) is None
    done = run(
        finetune(method, blocks, tmp_path / "two", *still, "--trainer.devices=2", "--trainer.strategy=ddp"), tmp_path
    )
    assert done.returncode == 0, done.stderr
    one, two = weights(tmp_path / "one/last.ckpt"), weights(tmp_path / "two/last.ckpt")
    assert one.keys() == two.keys()
    for name, value in one.items():
        if not name.endswith(
            ("qkv.bias", "key.bias")
        ):  # a key's bias has no gradient but rounding, see test_distributed.py
            torch.testing.assert_close(
                value, two[name], atol=2e-4, rtol=0, msg=lambda output, name=name: f"{name}: {output}"
            )
    assert {"train/loss", "val/caption_loss"} <= same_logs(tmp_path / "one", tmp_path / "two")


ABLATIONS = [path for path in sorted(SETTINGS.glob("*/ablation/*.yaml")) if not methods()[path.parts[-3]].base_model]


@pytest.mark.parametrize("path", ABLATIONS, ids=lambda path: path.stem)
def test_an_ablations_settings_build_a_model(path: Path, blocks: Path, tmp_path: Path) -> None:
    method = path.parts[-3]
    settings = yaml.safe_load(path.read_text())
    if path.stem.endswith(".pretrain") and "data" in settings:  # some differ in their tasks alone
        assert set(settings["data"]["without"]) < set(CAPTIONED)
    # The row that is the whole method by default need not name a part of it.
    given = settings.get("model", {}).get("captioner", {"init_args": {}})["init_args"]
    assert settings
    base = yaml.safe_load((SETTINGS / method / "finetune.yaml").read_text())["model"]["captioner"]["init_args"]
    small = {"network": "ViT-blocks-16", "intra_layers": 3} if method == "clip4idc" else {"feature_channels": 3}
    model = import_object(methods()[method].captioner)(
        **{**base, "width": 16, "heads": 2, "vocabulary_size": 9, **small, **given}
    )
    assert all(model.hyperparameters[key] == value for key, value in given.items())


def test_a_baseline_trains_by_its_ablations_file(blocks: Path, tmp_path: Path) -> None:
    for method, row, absent in (("scorer", "subtraction", "encoder"), ("dirl", "transformer", "projector")):
        words = finetune(method, blocks, tmp_path / row, "--trainer.max_steps=2", "--trainer.val_check_interval=2")
        place = words.index(SMALL[0])
        words[place:place] = ["--config", str(SETTINGS / method / "ablation" / f"{row}.yaml")]
        assert in_process(words) is None
        assert not [name for name in weights(tmp_path / row / "last.ckpt") if name.startswith(f"captioner.{absent}")]


def test_the_wrong_words_are_one_sentence_and_long_captions_are_cut(blocks: Path, tmp_path: Path) -> None:
    done = run(finetune("scorer", blocks, tmp_path / "x", "--data.vocabulary_layout=pcl"), tmp_path)
    assert "data.vocabulary_layout is pcl; SCORER needs rcc" in one_sentence(done)
    done = run(finetune("scorer", blocks, tmp_path / "y", "--data.max_length=9"), tmp_path)
    assert done.returncode == 0, done.stderr  # longer captions are cut
