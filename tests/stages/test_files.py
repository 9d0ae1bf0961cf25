"""Image files as a feature store, by the real commands: extraction, captioning, evaluation and report are those of the store of pixels."""

import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image, ImageOps
from tests.commands import in_process, one_sentence, run, same_logs
from tests.stages.test_adaptation import words

from diffcap.records import read_dataset, read_json

SHORT = "--trainer.max_steps=3", "--trainer.val_check_interval=3", "--data.val_limit=4"


def extract(folder: Path, *options: str) -> list[str]:
    variables = "--dataset", "blocks", "--folder", str(folder), "--backbone", "files", "--method", "clip4idc"
    return [sys.executable, "-m", "diffcap", "extract", *variables, "--", "--model.image_size=[96,128]", *options]


@pytest.fixture(scope="module")
def folder(pixels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the dataset with its pixels, and the store without an array."""
    copy = shutil.copytree(pixels, tmp_path_factory.mktemp("copied") / "blocks")
    images = read_json(copy / "dataset.json")["images"]
    done = run(extract(copy), copy)
    assert done.returncode == 0 and f"files: complete, {images} image files read." in done.stdout, done.stderr
    return copy


@pytest.fixture(scope="module")
def finetuned(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of two runs, "blocks_pixels" and "files", the latter with two workers."""
    runs = tmp_path_factory.mktemp("runs")
    for name, workers in (("blocks_pixels", 0), ("files", 2)):
        options = f"--data.features={name}", f"--data.num_workers={workers}"
        assert in_process(words("finetune", folder, runs / name / "finetune", *SHORT, *options)) is None
    return runs


def test_the_captioner_learns_the_same(finetuned: Path) -> None:
    names = same_logs(finetuned / "blocks_pixels/finetune", finetuned / "files/finetune", rel=0)
    assert {"train/loss", "val/caption_loss", "val/CIDEr-D"} <= names


def test_a_changed_image_is_refused_and_makes_another_training(folder: Path, tmp_path: Path) -> None:
    copy, out = shutil.copytree(folder, tmp_path / "blocks"), tmp_path / "run/finetune"
    command = words("finetune", copy, out, *SHORT, "--data.features=files")
    assert in_process(command) is None
    assert "already finished with these settings" in run(command, tmp_path).stdout
    dataset = read_dataset(copy)
    file = dataset.root / next(pair.before for pair in dataset.pairs if pair.split == "val")
    with Image.open(file) as image:
        ImageOps.mirror(image.convert("RGB")).save(file)
    message = one_sentence(run([*command, "--model.lr=1e-5"], tmp_path))  # another run, which reads the file
    assert f"{file}: the image has changed" in message and f"make extract FOLDER={copy} BACKBONE=files" in message
    assert "image files read." in run(extract(copy), copy).stdout
    assert run(extract(copy), copy).stdout.endswith("files: already complete.\n")
    done = run(command, tmp_path)
    assert "it holds a run with other settings (" in done.stdout, done.stderr


def test_only_pixels_are_read_from_files(folder: Path) -> None:
    other = {"library": "blocks", "image_size": "null"}
    message = one_sentence(run(extract(folder, *(f"--model.{name}={value}" for name, value in other.items())), folder))
    assert "--model.from_files is only for pixels; remove the option for blocks" in message
