"""RSICCformer and Chg2Cap by the real commands on a small folder in LEVIR-CC's form, from features and from pixels."""

import csv
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.commands import ROOT, in_process, logged, one_sentence, run, same_logs, weights
from tests.datasets.layouts import levir_entries, write_json
from torchvision import models

from diffcap.checkpoints.loading import load
from diffcap.experiment import Experiment
from diffcap.pair_captioner import load_captioner
from diffcap.stages import STAGES

NUMBERS = {"train": list(range(1, 9)), "val": [11, 12, 13], "test": [21, 22]}
SIZE = 64  # pixels; LEVIR-CC has 256
RESNET = "--model.captioner.init_args.backbone=resnet18"
SMALL = {
    "rsiccformer": ["width=16", "heads=2", "encoder_layers=2"],
    "chg2cap": ["width=16", "heads=2", "encoder_layers=2", "attention_width=16", "ffn=24"],
}
# The default form of each method: whether it reads pixels.
FORMS = {"rsiccformer": False, "chg2cap": True}
TRAINING = [
    "--trainer.max_steps=4", "--trainer.val_check_interval=2", "--run.checkpoint_every=2", "--run.patience=null", "--model.lr=1e-3",
    "--data.batch_size=6", "--data.min_count=1", "--data.max_length=12", "--trainer.log_every_n_steps=1", "--trainer.accelerator=cpu",
]  # fmt: skip


def column(out: Path, name: str) -> list[float]:
    """The logged values of a training."""
    with (out / "logs/version_0/metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


class Commands:
    """The commands of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def words(self, stage: str, method: str, *options: str, own: tuple[str, ...] = ()) -> list[str]:
        pixels = FORMS[method]
        words = ["--dataset", "levir_cc", "--data", str(self.folder / "files"), "--folder", str(self.folder / "data")]
        words += ["--method", method, "--logger", "none"]
        words += ["--weights", str(self.folder / "resnet18.pth"), "--run", str(self.folder / method), *options]
        given = list(own)
        if stage == "extract":
            given = [f"--model.image_size=[{SIZE},{SIZE}]", *([] if pixels else ["--model.network=resnet18"])]
        if stage == "finetune":
            given = [f"--model.captioner.init_args.{size}" for size in SMALL[method]]
            given += [*TRAINING, *([RESNET] if pixels else []), *own]
        if stage == "eval":
            given += ["--metrics=[BLEU-1, BLEU-4, ROUGE-L, CIDEr-D]", "--tokenizer=ptb"]  # METEOR's Java takes long
        return [sys.executable, "-m", "diffcap", stage, *words, "--", *given]

    def __call__(self, stage: str, method: str, *options: str, own: tuple[str, ...] = ()) -> None:
        done = run(self.words(stage, method, *options, own=own), self.folder)
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def levir(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    """Every form trained and evaluated."""
    folder = tmp_path_factory.mktemp("levir")
    write_json(folder / "files/LevirCCcaptions.json", {"images": levir_entries(NUMBERS)})
    draws = np.random.default_rng(0)
    for split, numbers in NUMBERS.items():
        for n in numbers:
            pixels = draws.integers(256, size=(SIZE, SIZE, 3), dtype=np.uint8)
            for side in "AB":
                path = folder / f"files/images/{split}/{side}/{split}_{n:06d}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(path)
                if n % 2 == 0:
                    pixels = pixels[::-1].copy()
    torch.manual_seed(0)
    torch.save(models.resnet18(weights=None).state_dict(), folder / "resnet18.pth")
    commands = Commands(folder)
    commands("data", "chg2cap")
    for form in FORMS:
        for stage in ("extract", "finetune", "eval"):
            commands(stage, form)
    return commands


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_trained_and_scored_by_group(levir: Commands, form: str) -> None:
    metrics = json.loads((levir.folder / form / "eval/metrics.json").read_text())
    assert {"total", "change", "no_change"} <= metrics["groups"].keys()
    trained = load(levir.folder / form / "finetune/best.ckpt")
    assert trained.metadata["method"] == form and trained.features["dtype"] == ("uint8" if FORMS[form] else "float16")
    assert trained.vocabulary.layout == {"rsiccformer": "rsicc", "chg2cap": "chg2cap"}[form]
    losses = [value for (_, name), value in sorted(logged(levir.folder / form / "finetune").items()) if "train" in name]
    assert losses and min(losses) > 0


def test_the_frozen_layers_keep_the_given_weights_and_the_others_learn(levir: Commands) -> None:
    given = torch.load(levir.folder / "resnet18.pth")
    learned = weights(levir.folder / "chg2cap/finetune/last.ckpt")
    names = {name: name.removeprefix("captioner.images.network.") for name in learned if ".images.network." in name}
    changed = {own.split(".")[0] for name, own in names.items() if not torch.equal(learned[name], given[own])}
    assert changed == {"layer2", "layer3", "layer4"}
    assert {own.split(".")[0] for own in names.values()} == {"conv1", "bn1", "layer1", *changed}


def test_captions_of_images_are_those_of_the_evaluation(levir: Commands) -> None:
    """The resized pixels or the features are computed again from the files, with a checkpoint or an exported folder."""
    for form in ("rsiccformer", "chg2cap"):
        checkpoint = levir.folder / form / "finetune/best.ckpt"
        exported = levir.folder / f"{form}-exported"
        assert in_process([sys.executable, "-m", "diffcap", "export", str(checkpoint), "--out", str(exported)]) is None
        predictions = json.loads((levir.folder / form / "eval/predictions.json").read_text())
        expected = {row["image_id"]: row["caption"] for row in predictions}
        captioner = load_captioner(exported, "cpu", str(levir.folder / "resnet18.pth"))
        for n in NUMBERS["test"]:
            before, after = (levir.folder / f"files/images/test/{side}/test_{n:06d}.png" for side in "AB")
            assert captioner(before, after).text == expected[f"test_{n:06d}"]


def test_the_resnet_has_its_own_rate(levir: Commands) -> None:
    out = levir.folder / "rates/finetune"
    levir("finetune", "chg2cap", "--run", str(out.parent), own=("--model.pretrained_lr=1e-5",))
    assert column(out, "lr-Adam/backbone") == pytest.approx([1e-5] * 4)
    assert column(out, "lr-Adam/captioner") == pytest.approx([1e-3] * 4)
    saved = torch.load(out / "last.ckpt", weights_only=True)["optimizer_states"][0]["param_groups"]
    rates = {group["name"]: group["lr"] for group in saved}
    assert rates["backbone"] == pytest.approx(1e-5) and rates["captioner"] == pytest.approx(1e-3)
    assert {group["eps"] for group in saved} == {1e-8}


def test_captions_without_an_end_are_scored_and_counted(levir: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    """A captioner whose output layer never prefers the end; its captions are cut at the largest length."""
    state = torch.load(levir.folder / "rsiccformer/finetune/best.ckpt", weights_only=True)
    state["state_dict"]["captioner.decoder.logit.bias"][-1] = -1e4
    checkpoint, out = levir.folder / "endless.ckpt", levir.folder / "endless"
    torch.save(state, checkpoint)
    words = ["--checkpoint", str(checkpoint), "--folder", str(levir.folder / "data"), "--out", str(out)]
    words += ["--metrics=[BLEU-4]", "--tokenizer=ptb", "--accelerator=cpu"]
    assert in_process([sys.executable, str(ROOT / "stages/evaluate.py"), *words]) is None
    assert "2 of 2 captions have no end token; they are scored as they are" in capsys.readouterr().out
    assert json.loads((out / "metrics.json").read_text())["unfinished"] == 2


@pytest.mark.thorough
def test_two_processes_have_the_gradients_of_one(levir: Commands) -> None:
    """Batch norm of the whole ResNet and of the residual block has the statistics of both processes' images.

    Adam makes a full step of a gradient that is rounding, so the moments are compared, not the weights.
    """
    still = ("dropout=0", "word_dropout=0", "batch_norm=train")
    options = [f"--model.captioner.init_args.{option}" for option in still]
    options += ["--trainer.max_steps=2", "--trainer.val_check_interval=2", "--data.batch_size=5"]
    options += ["--model.lr=1e-5", "--model.pretrained_lr=1e-5"]
    folders = [levir.folder / f"processes{devices}" for devices in (1, 2)]
    for devices, folder in zip(("1", "2"), folders):
        levir("finetune", "chg2cap", "--run", str(folder), "--devices", devices, own=tuple(options))
    one, two = (torch.load(folder / "finetune/last.ckpt", weights_only=True) for folder in folders)
    moments, others = (state["optimizer_states"][0]["state"] for state in (one, two))
    assert moments.keys() == others.keys()
    largest = max(moment["exp_avg"].abs().max() for moment in moments.values())
    for number, moment in moments.items():
        distance = (moment["exp_avg"] - others[number]["exp_avg"]).norm()
        assert distance <= 0.02 * moment["exp_avg"].norm() + 1e-5 * largest, number
    for name, value in one["state_dict"].items():
        if "running_" in name:
            torch.testing.assert_close(two["state_dict"][name], value, atol=1e-4, rtol=1e-3)
    assert one["state_dict"]["captioner.images.network.bn1.running_mean"].abs().max() > 1e-3
    assert "train/loss" in same_logs(folders[0] / "finetune", folders[1] / "finetune", rel=1e-3)


@pytest.mark.parametrize(
    ("form", "own", "output"),
    [
        ("rsiccformer", RESNET, "resnet101_layer3_256 contains features, but RSICCformer .* needs pixels"),
        ("chg2cap", "--model.initial_weights=null", "model.initial_weights is not set; give default, random, or a"),
        ("rsiccformer", "--model.decoder_clip_value=5", r"replaced by trainer\.callbacks; see `decoder_clip_value`"),
        ("chg2cap", "--data.vocabulary_layout=pcl", "data.vocabulary_layout is pcl; Chg2Cap needs chg2cap"),
        ("rsiccformer", "--run.monitor=null", r"DecoderPlateau in trainer\.callbacks needs run\.monitor"),
    ],
)
def test_settings_that_do_not_fit_are_one_sentence(levir: Commands, form: str, own: str, output: str) -> None:
    done = run(levir.words("finetune", form, "--run", str(levir.folder / "refused"), own=(own,)), levir.folder)
    assert re.search(output, one_sentence(done)), done.stderr


@pytest.mark.parametrize(
    ("variables", "backbone", "pixels"),
    [
        ({"method": "rsiccformer", "dataset": "levir_cc"}, "resnet101_layer3_256", False),
        ({"method": "rsiccformer", "dataset": "levir_cc", "ablation": "finetuned_backbone"}, "pixels_256", True),
        ({"method": "chg2cap", "dataset": "levir_cc", "ablation": "features"}, "resnet101_layer4_256", False),
        ({"method": "chg2cap", "dataset": "levir_cc", "offline": "yes"}, "blocks", False),
        ({"method": "chg2cap", "dataset": "blocks", "ablation": "finetuned_backbone"}, "blocks_pixels", True),
        ({"method": "clip4idc", "dataset": "tiles"}, "tiles_pixels", True),
    ],
)
def test_the_settings_say_whether_a_method_reads_pixels(variables: Any, backbone: str, pixels: bool) -> None:
    experiment = Experiment(**variables)
    assert (experiment.backbone, experiment.reads_pixels) == (backbone, pixels)
    experiment.check_inputs({"finetune"})
    if "offline" not in variables and variables["method"] != "clip4idc":
        experiment = Experiment(**variables, weights="w.pth")
        extract, finetune = (STAGES[stage].settings(experiment)["model"] for stage in ("extract", "finetune"))
        assert ("weights" in extract) == (not pixels)
        assert (finetune.get("initial_weights") == "w.pth") == pixels


def test_a_runs_config_says_it_too(levir: Commands) -> None:
    for form, pixels in FORMS.items():
        experiment = Experiment(config=str(levir.folder / form / "finetune/config.yaml"))
        assert experiment.reads_pixels == pixels and experiment.method == form
