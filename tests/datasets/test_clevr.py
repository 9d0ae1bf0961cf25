"""CLEVR-Change, official and as IDC-PCL's authors preprocessed it, and CLEVR-DC."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.datasets import layouts

from diffcap.datasets import describe, read_pairs
from diffcap.datasets.clevr import vote_change_type
from diffcap.records import ChangePair


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """CLEVR-Change. Ids with gaps, not in order, as in the released files."""
    return layouts.write_clevr_change(tmp_path, train=[12, 3], val=[39999], test=[1])


def test_every_id_gives_the_change_and_the_distractor(folder: Path) -> None:
    pairs = read_pairs("clevr_change", folder)
    splits = {"000003": "train", "000012": "train", "039999": "val", "000001": "test"}
    expected = [(f"{scene}.png{end}", split) for scene, split in splits.items() for end in ("", "_n")]
    assert [(pair.id, pair.split) for pair in pairs] == expected
    before, after = "images/CLEVR_default_000003.png", "sc_images/CLEVR_semantic_000003.png"
    captions = ["the cube 3 turned red", "cube 3 became red"]
    assert pairs[0] == ChangePair("000003.png", before, after, captions, "train", "add")
    after = "nsc_images/CLEVR_nonsemantic_000003.png"
    assert pairs[1] == ChangePair("000003.png_n", before, after, ["nothing changed", "no change"], "train", None, True)
    assert all((folder / path).is_file() for pair in pairs for path in pair.images)
    assert "no such folder" in layouts.refusal("clevr_change", folder / "nowhere")
    (folder / "type_mapping.json").unlink()
    layouts.change(folder / "change_captions.json", lambda captions: captions.update({"CLEVR_default_000001.png": []}))
    assert {pair.change_type for pair in read_pairs("clevr_change", folder)} == {None}


def test_scenes_add_boxes_and_viewpoints(folder: Path) -> None:
    change_only = {"boxes": {"before": [1, 2, 3, 4], "after": None}, "viewpoint_iou": 0.9, "changed": {"color": "red"}}
    scene = {**change_only, "viewpoint_iou_distractor": 0.4}
    layouts.write_json(folder / "scenes.json", {"000003.png": scene, "000012.png": {"viewpoint_iou": 0.7}})
    extra = {pair.id: pair.extra for pair in read_pairs("blocks", folder)}
    assert extra["000003.png"] == change_only and extra["000003.png_n"] == {"viewpoint_iou": 0.4}
    assert extra["000012.png"] == {"viewpoint_iou": 0.7}
    assert extra["000012.png_n"] == extra["000001.png"] == {}


@pytest.mark.parametrize("name", ["change_captions.json", "no_change_captions.json", "splits.json"])
def test_a_missing_or_malformed_file_is_named(folder: Path, name: str) -> None:
    path = folder / name
    for content, words in (('{"train": [', ": not valid JSON"), ("[]", ": expected a JSON object, found list")):
        path.write_text(content)
        assert f"{path}{words}" in layouts.refusal("clevr_change", folder)
    path.unlink()
    output = layouts.refusal("clevr_change", folder)
    assert f"{path}: no " in output and "extract the whole dataset" in output


@pytest.mark.parametrize(
    ("name", "edit", "words"),
    [
        ("change_captions", lambda v: v.pop("CLEVR_default_039999.png"), "no captions for 1 of the 4 numbers"),
        ("no_change_captions", lambda v: v.pop("CLEVR_default_039999.png"), "(first CLEVR_default_039999.png)"),
        ("change_captions", lambda v: v.update({"CLEVR_default_000012.png": []}), "training pair '000012.png' has no"),
        ("change_captions", lambda v: v.update({"CLEVR_default_000012.png": [" "]}), "'000012.png' has a blank capt"),
        ("change_captions", lambda v: v.update({"CLEVR_default_000012.png": "red"}), "must be a list of sentences"),
        ("splits", lambda v: v["val"].append(12), "id '000012.png' is duplicated (in train and val)"),
        ("splits", lambda v: v.update(val=["000012.png"]), '"val" must be a list of image numbers, found ['),
        ("splits", lambda v: v.pop("val"), '"val" must be a list of image numbers, found None'),
        ("type_mapping", lambda v: v["color"].append("000003.png"), "'000003.png' is listed under two types"),
        ("type_mapping", lambda v: v.update(color="000003.png"), '"color" must be a list of file names'),
    ],
)
def test_a_malformed_value_is_one_sentence(folder: Path, name: str, edit: Callable[[Any], Any], words: str) -> None:
    layouts.change(folder / f"{name}.json", edit)
    assert words in layouts.refusal("clevr_change", folder)


def test_the_authors_lines_name_the_pairs_of_the_official_layout(tmp_path: Path) -> None:
    lines = read_pairs("clevr_change", layouts.write_pcl_lines(tmp_path / "pcl", [3, 12], [5], [1]))
    official = read_pairs("clevr_change", layouts.write_clevr_change(tmp_path / "official", [3, 12], [5], [1]))
    key = [(pair.id, pair.images, pair.split, pair.is_distractor) for pair in lines]
    assert key == [(pair.id, pair.images, pair.split, pair.is_distractor) for pair in official]
    assert lines[0].captions == ["the cube 3 turned red"] and lines[1].captions == ["nothing changed"]
    assert {pair.change_type for pair in lines} == {None}
    layouts.write_json(tmp_path / "pcl/type_mapping.json", {"add": ["000003.png"]})
    assert [pair.change_type for pair in read_pairs("clevr_change", tmp_path / "pcl")][:2] == ["add", None]


def test_malformed_lines_of_the_authors(tmp_path: Path) -> None:
    folder = layouts.write_pcl_lines(tmp_path, [3], [5], [1])
    good = {"img1": "CLEVR_default_000001.png", "img2": "CLEVR_semantic_000001.png", "sentences": ["a"]}
    for wrong in (
        {"img2": "CLEVR_semantic_000002"},
        {"img2": "CLEVR_default_000001"},
        {"img1": None},
        {"img1": f"CLEVR_default_{'1' * 5000}", "img2": f"CLEVR_semantic_{'1' * 5000}"},
        {"sentences": "a"},
    ):
        layouts.write_lines(folder / "test.json", [good, {**good, **wrong}])
        assert f"{folder / 'test.json'}, line 2: " in layouts.refusal("clevr_change", folder)
    layouts.write_lines(folder / "test.json", [good, good])
    assert "id '000001.png' is duplicated (in test and test)" in layouts.refusal("clevr_change", folder)
    (folder / "val.json").unlink()
    assert "put train.json, val.json and test.json here" in layouts.refusal("clevr_change", folder)


SPLITS = {"train": [9, 0, 1, 2, 3], "val": [4], "test": [5, 47999]}  # of CLEVR-DC


@pytest.mark.parametrize("renamed", [False, True])
def test_both_forms_of_clevr_dc_give_the_same_pairs(tmp_path: Path, renamed: bool) -> None:
    folder = layouts.write_clevr_dc(tmp_path, SPLITS, renamed)
    pairs = read_pairs("clevr_dc", folder)
    ids = {split: [pair.id for pair in pairs if pair.split == split] for split in SPLITS}
    assert ids == {split: [f"{number:06d}.png" for number in sorted(numbers)] for split, numbers in SPLITS.items()}
    assert [pair.change_type for pair in pairs] == ["color", "material", "add", "drop", "drop", "move", None, None]
    assert [pair.id for pair in pairs if pair.is_distractor] == ["000005.png", "047999.png"]
    assert all((folder / path).is_file() for pair in pairs for path in pair.images)
    assert pairs[0].before.split("/")[0] == ("images" if renamed else "bef")
    output = describe("clevr_dc", pairs, folder)
    assert "derived from the captions; the files do not have them" in output["notes"][0] and len(output["notes"]) == 1
    assert output["official"]["state"] == "part" and output["official"]["splits"]["train"] == [5, 40_800]
    if renamed:
        (folder / "splits.json").rename(folder / "split.json")
        assert read_pairs("clevr_dc", folder) == pairs


def test_images_are_found_by_their_number(tmp_path: Path) -> None:
    folder = layouts.write_clevr_dc(tmp_path, SPLITS)
    (folder / "bef/9.png").rename(folder / "bef/CLEVR_default_000009.png")
    before = {pair.id: pair.before for pair in read_pairs("clevr_dc", folder)}
    assert before["000009.png"] == "bef/CLEVR_default_000009.png"
    layouts.change(folder / "captions.json", lambda captions: captions.update({"3": ["two cubes"]}))
    notes = describe("clevr_dc", read_pairs("clevr_dc", folder), folder)["notes"]
    assert notes[1].startswith("1 pairs (first 000003.png)")  # its type cannot be told
    layouts.write_image(folder / "bef/9.png")
    assert "has the same number" in layouts.refusal("clevr_dc", folder)


def test_types_are_voted_for() -> None:
    for kind, sentences in layouts.DC_CAPTIONS:
        assert vote_change_type(sentences) == (kind or "none")
    assert vote_change_type(["the cube moved", "the cube is gone"]) is None
    assert vote_change_type(["the cube moved", "the cube is gone", "it shifted"]) == "move"
    assert vote_change_type(["a cube"]) is None and vote_change_type([]) is None


@pytest.mark.parametrize(
    ("kind", "sentences"),
    [
        (
            "move",
            "the red cube moved to a new position|the cube is no longer in its place|the cube is not in its old place any more|"
            "someone changed the location of the cube|the thing with the same size as the ball was moved|it is in another spot",
        ),
        (
            "color",
            "someone changed the color of the rubber cube|the color of the cube has changed|the cube has a different colour|"
            "the cube that is the same size as the metal ball turned blue|the cube changed its color to red",
        ),
        ("material", "someone changed the texture of the red cube|the cube of the same color as the ball became shiny"),
        ("add", "there is a new cube|the cube of the same size as the ball has appeared|someone added a ball"),
        ("drop", "there is no longer a cube|there is no cube any more|a cube of the same material as the ball is gone"),
        ("none", "it is the same scene as before|nothing was moved|there are no changes"),
    ],
)
def test_one_sentence_is_enough(kind: str, sentences: str) -> None:
    found = {sentence: vote_change_type([sentence]) for sentence in sentences.split("|")}
    assert found == dict.fromkeys(found, kind)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"split": {**SPLITS, "val": [4, 5]}}, "id '000005.png' is duplicated (in val and test)"),
        ({"split": {**SPLITS, "val": [77]}}, "no captions for the id 77"),
        ({"captions": {"a": ["x"]}}, 'the key "a" is not the number of a pair'),
        ({"captions": {"1" * 5000: ["x"]}}, "is not the number of a pair"),
    ],
)
def test_malformed_files_of_clevr_dc(tmp_path: Path, files: dict[str, Any], words: str) -> None:
    assert "captions.json: no captions there; put captions.json and split.json" in layouts.refusal("clevr_dc", tmp_path)
    layouts.write_clevr_dc(tmp_path, SPLITS)
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert words in layouts.refusal("clevr_dc", tmp_path)
