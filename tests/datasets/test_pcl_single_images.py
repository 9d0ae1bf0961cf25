"""CUB and NABirds in IDC-PCL's preprocessed form."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.datasets.layouts import refusal

from diffcap.datasets import describe, read_pairs

BIRD = "Black_Footed_Albatross_0046_18"


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path.parent


def pair(first: str, second: str, one: int, two: int, label: int) -> dict[str, Any]:
    return {"img1": first, "img2": second, "class_id1": one, "class_id2": two, "label": label}


def test_captions_of_one_image_come_together(tmp_path: Path) -> None:
    lines = [{"img": f"{BIRD}.jpg", "description": ["a", "brown", "bird"]}, {"img": "Ani_1", "description": ["black"]}]
    write(tmp_path / "train.json", *lines, {"img": f"{BIRD}.jpg", "description": ["a", "bird", "."]})
    write(tmp_path / "val.jsonl", {"img": "Gull_2", "description": [["a", "gull"], ["white"]]})
    pairs = read_pairs("cub", tmp_path)
    assert [(pair.id, pair.before, pair.split, pair.captions) for pair in pairs] == [
        (BIRD, f"images/{BIRD}.jpg", "train", ["a brown bird", "a bird ."]),
        ("Ani_1", "images/Ani_1.jpg", "train", ["black"]),
        ("Gull_2", "images/Gull_2.jpg", "val", ["a gull", "white"]),
    ]
    assert all(pair.after is None for pair in pairs)
    assert describe("cub", pairs, tmp_path)["official"]["splits"]["train"] == [2, 8_855]
    (tmp_path / "text_c10").mkdir()
    assert "no list of held-out classes" in refusal("cub", tmp_path)  # the official form comes first


@pytest.mark.parametrize("same", [1, 0])
def test_classified_images_of_all_pairs(tmp_path: Path, same: int) -> None:
    write(tmp_path / "train.json", pair("a", "b", 0, 554, 1 - same), pair("b", "c.jpg", 554, 554, same))
    pairs = read_pairs("nabirds", tmp_path)
    assert [(pair.id, pair.before, pair.extra) for pair in pairs] == [
        ("a", "images/a.jpg", {"class": 0}),
        ("b", "images/b.jpg", {"class": 554}),
        ("c", "images/c.jpg", {"class": 554}),
    ]
    assert describe("nabirds", pairs, tmp_path)["official"]["state"] == "part"


def test_one_sentence_for_each_fault(tmp_path: Path) -> None:
    for row in (
        {"img": 3, "description": ["x"]},
        {"img": "../x", "description": ["x"]},
        {"img": "x", "description": []},
    ):
        write(tmp_path / "train.json", row)
        assert f"{tmp_path / 'train.json'}, line 1: " in refusal("cub", tmp_path)
    write(tmp_path / "train.json", {"img": "x", "description": ["x"]})
    write(tmp_path / "val.json", {"img": "x.jpg", "description": ["x"]})
    assert "x is in val here and in train before" in refusal("cub", tmp_path)
    (tmp_path / "val.json").unlink()
    good = pair("a", "b", 0, 1, 0)
    for rows, output in (
        ([good, pair("c", "d", 2, 2, 0)], "line 2: the label 0 of the classes 2 and 2 contradicts earlier lines"),
        ([good, pair("a", "c", 3, 1, 0)], "line 2: a has class 3 here and class 0 before"),
        ([pair("a", "b", 0, 1, 2)], '"label" must be'),
        ([pair("a", "b", -1, 1, 0)], '"class_id1" must be'),
        ([good, pair("c", "d", 554, 555, 0)], 'line 2: "class_id2" must be a whole number from 0 to 554'),
        ([pair("a", "", 0, 1, 0)], '"img2" must be a string'),
    ):
        write(tmp_path / "train.json", *rows)
        assert output in refusal("nabirds", tmp_path)
