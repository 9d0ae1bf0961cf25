"""Files of predictions and references: they come back as written, other programs read them, and bad ones are one sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diffcap.evaluation import coco
from diffcap.evaluation.coco import read_predictions, read_references
from diffcap.utils.errors import DiffcapError


def read_of_split(path: Path) -> dict[str, str]:
    return coco.read_other_predictions(path, ["a", "b"], ["a", "b", "c"], "the test split")


def test_files_come_back_as_they_were_written_and_cocos_own_reader_reads_them(tmp_path: Path) -> None:
    from pycocotools.coco import COCO

    predictions, references = {"a": "a caf\u00e9", "b": ""}, {"a": ["x", "y"], "b": ["z"]}
    coco.write_predictions(tmp_path / "p.json", predictions)
    coco.write_references(tmp_path / "r.json", references)
    assert read_predictions(tmp_path / "p.json") == predictions
    assert read_references(tmp_path / "r.json") == references
    read = COCO(str(tmp_path / "r.json"))
    assert [entry["caption"] for entry in read.imgToAnns["a"]] == ["x", "y"]
    assert read.loadRes(str(tmp_path / "p.json")).imgToAnns["a"][0]["caption"] == "a caf\u00e9"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.json", '[{"image_id": 7, "caption": "x"}, {"image_id": "b", "caption": "y"}]'),
        ("p.json", '[{"id": 7, "caption": "x"}, {"id": "b", "caption": "y", "model": {"name": "z"}}]'),
        ("p.json", '{"7": "x", "b": "y"}'),
        ("p.jsonl", '{"id": 7, "caption": "x", "tokens": [1]}\n\n{"id": "b", "caption": "y"}\n'),
        ("P.JSONL", '{"image_id": "7", "id": 1, "caption": "x"}\n{"image_id": "b", "id": 2, "caption": "y"}'),
    ],
)
def test_every_form_of_predictions_is_read(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert read_predictions(tmp_path / name) == {"7": "x", "b": "y"}


def test_other_predictions_are_those_of_the_scored_pairs_on_one_line(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps({"c": "z", "b": "a cube\nmoved ", "a": "x"}))
    assert list(read_of_split(tmp_path / "p.json").items()) == [("a", "x"), ("b", "a cube moved")]


LINES = '{"id": "a", "caption": "x"}\n'
ROW = '{"image_id": "a", "caption": "x"}'
NO_PAIR_HAS = "1 of 3 ids are not in the test split (first 'd.png'; an id there is 'a')"


@pytest.mark.parametrize(
    ("read", "name", "text", "words"),
    [
        (read_predictions, "p.jsonl", LINES + '{"id": "b"', "line 2: not JSON"),
        (read_predictions, "p.jsonl", LINES + '["b", "y"]', "line 2: expected a JSON object, found list"),
        (read_predictions, "p.jsonl", LINES + '{"id": "b", "caption": null}', 'line 2 needs "id" and "caption"'),
        (read_predictions, "p.jsonl", LINES + LINES, "1 ids have more than one prediction ('a')"),
        (read_predictions, "p.json", None, "no predictions file there"),
        (read_predictions, "p.json", "3", "must be a list, found int"),
        (read_predictions, "p.json", '{"a": 1}', 'entry 1 of the predictions needs "id" and "caption", found {\'id\''),
        (read_predictions, "p.json", '{"a": "x", "a": "y"}', "1 ids have more than one prediction ('a')"),
        (read_predictions, "p.json", LINES + LINES, "give a .json file, or a .jsonl file"),
        (read_predictions, "p.json", f"[{ROW}, 3]", "entry 2 of the predictions is 3"),
        (read_predictions, "p.json", '[{"image_id": "a"}]', 'entry 1 of the predictions needs "image_id"'),
        (read_references, "r.json", "[]", 'the key "annotations" is missing'),
        (read_of_split, "p.json", '{"a": "x", "b": "y", "d.png": "z"}', NO_PAIR_HAS),
        (read_of_split, "p.json", '{"a": "x"}', "1 of the 2 pairs of the test split have no caption (first 'b')"),
        (read_of_split, "p.json", '{"a": " \\n", "b": "y"}', "1 of the 2 captions are empty (first that of 'a')"),
    ],
)
def test_bad_files_are_one_sentence_with_the_file(
    tmp_path: Path, read: Callable[[Path], Any], name: str, text: str | None, words: str
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(DiffcapError) as caught:
        read(path)
    assert words in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)
