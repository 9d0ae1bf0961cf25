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

Caption = Callable[..., tuple[str, list[dict[str, Any]], str]]


@pytest.fixture
def caption(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> Caption:
    """Run `diffcap caption` in the folder; returns its error, JSON lines and notes."""
    monkeypatch.chdir(tmp_path)
    checkpoint = str(make(tmp_path_factory.mktemp("trained") / "best.ckpt", "scorer"))

    def command(*words: str) -> tuple[str, list[dict[str, Any]], str]:
        try:
            main(["caption", *words, "--checkpoint", checkpoint])
            status = ""
        except SystemExit as stop:
            status = str(stop.code)
        output = capsys.readouterr()
        rows = [json.loads(line) for line in output.out.splitlines()] if "--json" in words and "." in words else []
        return status, rows, output.err

    return command


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """A folder with a pair whose camera moved, one of different sizes, and an unrelated one."""
    before = picture(1)
    moved = move(before, MOVEMENTS["turned"])
    cut = before.crop((0, 0, 400, 320))
    for side, images in {"before": [before, before, before], "after": [moved, cut, picture(2)]}.items():
        (tmp_path / side).mkdir()
        for number, image in enumerate(images, 1):
            image.save(tmp_path / side / f"{number}.png")
    return tmp_path


def test_images_are_fitted_and_the_rows_say_how(pairs: Path, caption: Caption) -> None:
    status, rows, notes = caption(".", "--json", "--fit", "register")
    assert status == "" and [row["fit"]["kind"] for row in rows] == 3 * ["register"]
    moved, _, unrelated = rows
    assert moved["fit"]["movement"] > 10 and moved["fit"]["correlation"] > 0.9 and moved["fit"]["size"][0] < 480
    assert moved["notes"][0] in notes and "registered by SIFT: moved by" in moved["notes"][0]
    assert "not registered" in unrelated["notes"][0] and unrelated["fit"]["size"] == [480, 320]
    _, stretched, _ = caption(".", "--json")
    assert stretched[0]["fit"] is None and stretched[0]["log_probability"] != moved["log_probability"]
    assert stretched[2]["log_probability"] == unrelated["log_probability"]  # used as it is
    assert (
        "their aspect ratios differ (480 x 320 and 400 x 320 pixels), so both are stretched" in stretched[1]["notes"][0]
    )
    _, cropped, _ = caption(".", "--json", "--fit", "crop")
    assert cropped[1]["fit"]["size"] == [400, 320] and cropped[0]["notes"] == []
    status, rows, _ = caption(".", "--json", "--fit", "register", "--strict")
    assert status.startswith("error: 1 of 3 pairs could not be captioned") and "text" in rows[0]
    assert "before/3.png and after/3.png: the images cannot be registered" in rows[2]["error"]


def test_a_heat_map_shows_the_fitted_images(pairs: Path, caption: Caption, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    draw = heatmaps.draw_caption
    monkeypatch.setattr(heatmaps, "draw_caption", lambda *images: drawn.append(images[:2]) or draw(*images))
    assert caption("before/2.png", "after/2.png", "--heatmap", "a.png", "--fit", "crop")[0] == ""
    assert [image.size for image in drawn[0]] == [(400, 320), (400, 320)] and (pairs / "a.png").is_file()


def test_a_file_of_another_fit_is_left_alone(pairs: Path, caption: Caption) -> None:
    assert caption(".", "--out", "a.jsonl", "--fit", "crop")[0] == ""
    assert "its captions were made with another --fit" in caption(".", "--out", "a.jsonl")[0]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--strict"], "--strict is for --fit register; add it, or remove --strict."),
        (["--fit", "pad", "--out", "x.geojson"], "--fit is for pairs of images; remove it for a whole scene"),
    ],
)
def test_wrong_options_are_one_sentence(pairs: Path, caption: Caption, words: list[str], sentence: str) -> None:
    assert sentence in caption("before/1.png", "after/1.png", *words)[0]


def test_a_missing_opencv_is_one_error(pairs: Path, caption: Caption, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    status, rows, notes = caption(".", "--json", "--fit", "register")
    assert status.startswith("error: --fit register needs opencv") and rows == [] and notes == ""


def test_json_has_the_box_of_the_change(tmp_path: Path, caption: Caption) -> None:
    before = picture(3)
    changed = before.copy()
    changed.paste((255, 0, 255), (100, 200, 140, 260))
    large = [image.resize((1920, 1280), Image.Resampling.NEAREST) for image in (before, changed)]
    padded = Image.new("RGB", (520, 400), (128, 128, 128))
    padded.paste(changed, (20, 40))  # its middle is the image before
    for side, images in {
        "before": [before, large[0], before, noise(1), before],
        "after": [changed, large[1], padded, noise(2), before],
    }.items():
        (tmp_path / side).mkdir()
        for number, image in enumerate(images, 1):
            image.save(tmp_path / side / f"{number}.png")
    _, rows, _ = caption(".", "--json", "--fit", "crop")
    small_box, large_box, cropped_box, attention_box, no_box = (row["box"] for row in rows)
    assert small_box == [100, 200, 140, 260] and np.allclose(large_box, [400, 800, 560, 1040], atol=8)
    assert cropped_box == [120, 240, 160, 300]  # in the image after, not in its cropped part
    left, top, right, bottom = attention_box  # nearly all pixels differ
    assert 0 <= left < right <= 128 and 0 <= top < bottom <= 96 and (right - left) * (bottom - top) < 0.9 * 128 * 96
    assert no_box is None
    assert caption("before/1.png", "after/1.png", "--out", "x.jsonl")[0].startswith("error: --out x.jsonl: give a name")
    caption(".", "--out", "x.jsonl", "--fit", "crop")
    assert [json.loads(line)["box"] for line in (tmp_path / "x.jsonl").read_text().splitlines()] == [
        row["box"] for row in rows
    ]


def write_list(folder: Path, **values: Any) -> None:
    rows = [
        {
            "before": f"before/{number}.png",
            "after": f"after/{number}.png",
            "captions": ["a cup"],
            "split": split,
            **values,
        }
        for number, split in enumerate(("train", "val", "test"), 1)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_images_of_an_own_dataset_are_fitted_once(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_list(pairs)
    out = pairs / "out"
    prepare("desk", str(pairs), str(out), fit="register")
    output = " ".join(capsys.readouterr().out.split())
    assert '1 of 3 pairs are not registered; the key "fit" in the manifest says why.' in output
    assert "unknown keys" not in output
    dataset = read_dataset(out)
    assert dataset.root == out / "fitted" and dataset.info["settings"]["fit"] == "register"
    for pair in dataset.pairs:
        images = [Image.open(dataset.root / path) for path in pair.images]
        assert pair.id != "1" or {image.size for image in images} == {tuple(pair.extra["fit"]["size"])}
    assert dataset.pairs[0].extra["fit"]["movement"] > 10 and "correlation" in dataset.pairs[0].extra["fit"]
    times = {path.name: path.stat().st_mtime_ns for path in dataset.root.iterdir()}
    assert len(times) == 6
    picture(9).save(pairs / "after/3.png")
    prepare("desk", str(pairs), str(out), fit="register")
    again = {path.name: path.stat().st_mtime_ns for path in dataset.root.iterdir()}
    assert times.items() < again.items() and len(again) == 8  # only the changed pair is fitted again
    assert read_dataset(out).pairs[:2] == dataset.pairs[:2]


@pytest.mark.parametrize(
    ("dataset", "values", "strict", "sentence"),
    [
        (
            "desk",
            {"mask": "before/1.png"},
            False,
            '--fit register: pairs have "mask", which does not fit the new images',
        ),
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
    assert not (pairs / "out" / "manifest.jsonl").exists()
