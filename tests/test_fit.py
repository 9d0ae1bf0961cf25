"""`--fit` of `diffcap caption` and of own datasets, for images that do not fit each other; and the box of the change in JSON."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.test_pair_captioner import make, noise
from tests.utils.test_fitting import MOVEMENTS, move, picture

from diffcap.cli import main
from diffcap.commands.data import prepare
from diffcap.records import read_dataset
from diffcap.report import heatmaps
from diffcap.utils.errors import DiffcapError

Caption = Callable[..., tuple[str, list[dict[str, Any]]]]


@pytest.fixture
def caption(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> Caption:
    """Run `diffcap caption` in the folder; returns its error and the rows of --json."""
    monkeypatch.chdir(tmp_path)
    checkpoint = str(make(tmp_path_factory.mktemp("trained") / "best.ckpt", "scorer"))

    def command(*words: str) -> tuple[str, list[dict[str, Any]]]:
        error = ""
        try:
            main(["caption", *words, "--checkpoint", checkpoint])
        except SystemExit as stop:
            error = str(stop.code)
        lines = capsys.readouterr().out.splitlines()
        return error, list(map(json.loads, lines)) if "--json" in words else []

    return command


def write(folder: Path, before: list[Image.Image], after: list[Image.Image]) -> None:
    for side, images in {"before": before, "after": after}.items():
        (folder / side).mkdir()
        for number, image in enumerate(images, 1):
            image.save(folder / side / f"{number}.png")


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """A folder with a pair whose camera moved, one of different sizes, and an unrelated one."""
    image = picture(1)
    write(tmp_path, [image] * 3, [move(image, MOVEMENTS["turned"]), image.crop((0, 0, 400, 320)), picture(2)])
    return tmp_path


def test_images_are_fitted_and_the_rows_say_how(pairs: Path, caption: Caption, monkeypatch: pytest.MonkeyPatch) -> None:
    error, (moved, _, unrelated) = caption(".", "--json", "--fit", "register")
    assert error == "" and "registered by SIFT: moved by" in moved["notes"][0] and moved["fit"]["kind"] == "register"
    assert moved["fit"]["movement"] > 10 and moved["fit"]["correlation"] > 0.9 and moved["fit"]["size"][0] < 480
    assert "not registered" in unrelated["notes"][0] and unrelated["fit"]["size"] == [480, 320]
    _, stretched = caption(".", "--json")
    assert stretched[0]["fit"] is None and stretched[0]["log_probability"] != moved["log_probability"]
    assert stretched[2]["log_probability"] == unrelated["log_probability"]  # used as it is
    error, rows = caption(".", "--json", "--fit", "register", "--strict")
    assert error.startswith("error: 1 of 3 pairs could not be captioned") and "text" in rows[0]
    assert "before/3.png and after/3.png: the images cannot be registered" in rows[2]["error"]
    drawn, draw = [], heatmaps.draw_caption
    monkeypatch.setattr(heatmaps, "draw_caption", lambda *images: drawn.append(images[:2]) or draw(*images))
    assert caption("before/2.png", "after/2.png", "--heatmap", "a.png", "--fit", "crop")[0] == ""
    assert [image.size for image in drawn[0]] == [(400, 320), (400, 320)]


def test_wrong_options_are_one_sentence(pairs: Path, caption: Caption, monkeypatch: pytest.MonkeyPatch) -> None:
    images = "before/1.png", "after/1.png"
    assert caption(*images, "--strict")[0] == "error: --strict is for --fit register; add it, or remove --strict."
    assert "--fit is for pairs of images; remove it" in caption(*images, "--fit", "pad", "--out", "x.geojson")[0]
    assert caption(".", "--out", "a.jsonl", "--fit", "crop")[0] == ""
    assert "its captions were made with another --fit" in caption(".", "--out", "a.jsonl")[0]
    monkeypatch.setitem(sys.modules, "cv2", None)
    assert caption(".", "--json", "--fit", "register") == (
        "error: --fit register needs opencv; run: pip install 'diffcap[register]'.",
        [],
    )


def test_json_has_the_box_of_the_change(tmp_path: Path, caption: Caption) -> None:
    before, padded = picture(3), Image.new("RGB", (520, 400))
    changed = before.copy()
    changed.paste((255, 0, 255), (100, 200, 140, 260))
    large = [image.resize((1920, 1280), Image.Resampling.NEAREST) for image in (before, changed)]
    padded.paste(changed, (20, 40))  # its middle is the image before
    write(tmp_path, [before, large[0], before, noise(1), before], [changed, large[1], padded, noise(2), before])
    _, rows = caption(".", "--json", "--fit", "crop")
    small_box, large_box, cropped_box, (left, top, right, bottom), no_box = boxes = [row["box"] for row in rows]
    assert small_box == [100, 200, 140, 260] and np.allclose(large_box, [400, 800, 560, 1040], atol=8)
    assert cropped_box == [120, 240, 160, 300]  # in the image after, not in its cropped part
    # Nearly all pixels of the fourth pair differ, so its box is that of the attention.
    assert 0 <= left < right <= 128 and 0 <= top < bottom <= 96 and (right - left) * (bottom - top) < 0.9 * 128 * 96
    assert no_box is None
    caption(".", "--out", "x.jsonl", "--fit", "crop")
    assert [json.loads(line)["box"] for line in (tmp_path / "x.jsonl").read_text().splitlines()] == boxes


def write_list(folder: Path, **values: str) -> None:
    splits = {1: "train", 2: "val", 3: "test"}
    rows = [{"before": f"before/{n}.png", "after": f"after/{n}.png", "split": splits[n], **values} for n in splits]
    (folder / "pairs.jsonl").write_text("".join(json.dumps({**row, "captions": ["a cup"]}) + "\n" for row in rows))


def test_images_of_an_own_dataset_are_fitted_once(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_list(pairs)
    prepare("desk", str(pairs), str(pairs / "out"), fit="register")
    output = " ".join(capsys.readouterr().out.split())
    assert '1 of 3 pairs are not registered; the key "fit" in the manifest says why.' in output
    dataset = read_dataset(pairs / "out")
    assert "unknown keys" not in output and dataset.info["settings"]["fit"] == "register"
    fit = dataset.pairs[0].extra["fit"]
    assert fit["movement"] > 10 and {Image.open(dataset.root / path).size for path in dataset.pairs[0].images} == {
        tuple(fit["size"])
    }
    times = {path.name: path.stat().st_mtime_ns for path in dataset.root.iterdir()}
    picture(9).save(pairs / "after/3.png")
    prepare("desk", str(pairs), str(pairs / "out"), fit="register")
    again = {path.name: path.stat().st_mtime_ns for path in dataset.root.iterdir()}
    assert (
        times.items() < again.items() and len(times) == 6 and len(again) == 8
    )  # only the changed pair is fitted again
    assert read_dataset(pairs / "out").pairs[:2] == dataset.pairs[:2]


@pytest.mark.parametrize(
    ("dataset", "values", "strict", "sentence"),
    [
        ("desk", {"mask": "before/1.png"}, False, 'register: pairs have "mask", which does not fit the new images'),
        ("desk", {}, True, r"before/3.png and .*after/3.png: the images cannot be registered"),
        ("levir_cc", {}, False, "--fit register is for your own pairs; the images of levir_cc are used as published."),
    ],
)
def test_datasets_whose_images_cannot_be_fitted(
    pairs: Path, dataset: str, values: dict[str, str], strict: bool, sentence: str
) -> None:
    write_list(pairs, **values)
    with pytest.raises(DiffcapError, match=sentence):
        prepare(dataset, str(pairs), str(pairs / "out"), fit="register", strict=strict)
    with pytest.raises(DiffcapError, match="--strict is for --fit register; add it"):
        prepare("desk", str(pairs), str(pairs / "out"), fit="pad", strict=True)
    assert not (pairs / "out" / "manifest.jsonl").exists()
