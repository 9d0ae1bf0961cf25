import json
from pathlib import Path
from typing import Any

import pytest
from tests.datasets.layouts import refusal, write_clevr_change

from diffcap.datasets import read_pairs
from diffcap.records import ChangePair


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ids with gaps, not in order, as in the released files."""
    return write_clevr_change(tmp_path, train=[12, 3], val=[39999], test=[1])


def change(folder: Path, name: str, edit: Any) -> None:
    value = json.loads((folder / name).read_text())
    edit(value)
    (folder / name).write_text(json.dumps(value))


def test_every_id_gives_the_change_and_the_distractor(folder: Path) -> None:
    pairs = read_pairs("clevr_change", folder)
    assert [(pair.id, pair.split) for pair in pairs] == [
        ("000003.png", "train"), ("000003.png_n", "train"), ("000012.png", "train"), ("000012.png_n", "train"),
        ("039999.png", "val"), ("039999.png_n", "val"), ("000001.png", "test"), ("000001.png_n", "test"),
    ]  # fmt: skip
    before = "images/CLEVR_default_000003.png"
    assert pairs[0] == ChangePair(
        "000003.png",
        before,
        "sc_images/CLEVR_semantic_000003.png",
        ["the cube 3 turned red", "cube 3 became red"],
        "train",
        "add",
    )
    assert pairs[1] == ChangePair(
        "000003.png_n",
        before,
        "nsc_images/CLEVR_nonsemantic_000003.png",
        ["nothing changed", "no change"],
        "train",
        None,
        True,
    )
    assert all((folder / path).is_file() for pair in pairs for path in (pair.before, pair.after))


def test_change_types_may_be_absent(folder: Path) -> None:
    (folder / "type_mapping.json").unlink()
    assert {pair.change_type for pair in read_pairs("clevr_change", folder)} == {None}


def test_scenes_add_boxes_and_viewpoints(folder: Path) -> None:
    scene = {
        "boxes": {"before": [1, 2, 3, 4], "after": None},
        "viewpoint_iou": 0.9,
        "viewpoint_iou_distractor": 0.4,
        "changed": {"color": "red"},
    }
    (folder / "scenes.json").write_text(json.dumps({"000003.png": scene, "000012.png": {"viewpoint_iou": 0.7}}))
    extra = {pair.id: pair.extra for pair in read_pairs("blocks", folder)}
    assert extra["000003.png"] == {key: scene[key] for key in ("boxes", "viewpoint_iou", "changed")}
    assert extra["000003.png_n"] == {"viewpoint_iou": 0.4}
    assert extra["000012.png"] == {"viewpoint_iou": 0.7}
    assert extra["000012.png_n"] == extra["000001.png"] == {}


@pytest.mark.parametrize("name", ["change_captions.json", "no_change_captions.json", "splits.json"])
def test_a_missing_or_malformed_file_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text('{"train": [')
    assert f"{folder / name}: not valid JSON" in refusal("clevr_change", folder)
    (folder / name).write_text("[]")
    assert f"{folder / name}: expected a JSON object, found list" in refusal("clevr_change", folder)
    (folder / name).unlink()
    assert f"{folder / name}: no " in refusal("clevr_change", folder) and "extract the whole dataset" in refusal(
        "clevr_change", folder
    )


@pytest.mark.parametrize("name", ["change_captions.json", "no_change_captions.json"])
def test_an_id_without_captions_is_refused(folder: Path, name: str) -> None:
    change(folder, name, lambda captions: captions.pop("CLEVR_default_039999.png"))
    assert f"{folder / name}: no captions for 1 of the 4 numbers" in refusal("clevr_change", folder)
    assert "CLEVR_default_039999.png" in refusal("clevr_change", folder)


def test_a_training_pair_needs_a_caption(folder: Path) -> None:
    change(folder, "change_captions.json", lambda captions: captions.update({"CLEVR_default_000001.png": []}))
    read_pairs("clevr_change", folder)  # id 1 is a test pair
    change(folder, "change_captions.json", lambda captions: captions.update({"CLEVR_default_000012.png": []}))
    assert "training pair '000012.png' has no caption" in refusal("clevr_change", folder)
    change(folder, "change_captions.json", lambda captions: captions.update({"CLEVR_default_000012.png": [" "]}))
    assert "'000012.png' has a blank caption" in refusal("clevr_change", folder)
    change(folder, "change_captions.json", lambda captions: captions.update({"CLEVR_default_000012.png": "red"}))
    assert "must be a list of sentences" in refusal("clevr_change", folder)


def test_splits_hold_each_number_once(folder: Path) -> None:
    change(folder, "splits.json", lambda splits: splits["val"].append(12))
    assert "12 is duplicated (in train and val)" in refusal("clevr_change", folder)
    change(folder, "splits.json", lambda splits: splits.update(val=["000012.png"]))
    assert "\"val\" holds '000012.png', not the number of an image" in refusal("clevr_change", folder)
    change(folder, "splits.json", lambda splits: splits.pop("val"))
    assert '"val" must be a list of numbers' in refusal("clevr_change", folder)


def test_a_file_has_one_change_type(folder: Path) -> None:
    change(folder, "type_mapping.json", lambda kinds: kinds["color"].append("000003.png"))
    assert "'000003.png' is listed under 'color' and under 'add'" in refusal("clevr_change", folder)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert "no such folder" in refusal("clevr_change", tmp_path / "nowhere")
