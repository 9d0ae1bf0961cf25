"""Files of predictions and references: they come back as written, other programs read them, and bad ones are one sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diffcap.evaluation.coco import (
    read_other_predictions,
    read_predictions,
    read_references,
    write_predictions,
    write_references,
)
from diffcap.utils.errors import DiffcapError


def read_of_split(path: Path) -> dict[str, str]:
    return read_other_predictions(path, ["a", "b"], ["a", "b", "c"], "the test split")


def test_files_come_back_as_they_were_written(tmp_path: Path) -> None:
    predictions = {"1.png": "a caf\u00e9", "1.png_n": ""}
    references = {"1.png": ["x", "y"], "1.png_n": ["z"]}
    write_predictions(tmp_path / "p.json", predictions)
    write_references(tmp_path / "r.json", references)
    assert read_predictions(tmp_path / "p.json") == predictions
    assert read_references(tmp_path / "r.json") == references


def test_references_are_readable_by_cocos_own_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from pycocotools.coco import COCO

    write_references(tmp_path / "r.json", {"a": ["x", "y"], "b": ["z"]})
    write_predictions(tmp_path / "p.json", {"a": "x", "b": "y"})
    coco = COCO(str(tmp_path / "r.json"))
    assert [entry["caption"] for entry in coco.imgToAnns["a"]] == ["x", "y"]
    assert coco.loadRes(str(tmp_path / "p.json")).imgToAnns["b"][0]["caption"] == "y"


def test_numbers_as_ids_of_references_become_strings(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps({"annotations": [{"image_id": 7, "id": 1, "caption": "x"}]}))
    assert read_references(tmp_path / "r.json") == {"7": ["x"]}


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


JSON_LINES = '{"id": "a", "caption": "x"}\n'
ROW = '{"image_id": "a", "caption": "x"}'


@pytest.mark.parametrize(
    ("read", "name", "text", "words"),
    [
        (read_predictions, "p.jsonl", JSON_LINES + '{"id": "b"', "line 2: not JSON"),
        (read_predictions, "p.jsonl", JSON_LINES + '["b", "y"]', "line 2: expected a JSON object, found list"),
        (read_predictions, "p.jsonl", JSON_LINES + '{"id": "b", "caption": null}', 'line 2 needs "id" and "caption"'),
        (read_predictions, "p.jsonl", JSON_LINES + JSON_LINES, "1 ids have more than one prediction ('a')"),
        (read_predictions, "p.jsonl", "\n", "contains no caption"),
        (read_predictions, "p.json", None, "no predictions file there"),
        (read_predictions, "p.json", "", "not valid JSON"),
        (read_predictions, "p.json", "[]", "contains no caption"),
        (read_predictions, "p.json", "{}", "contains no caption"),
        (read_predictions, "p.json", "3", "must be a list, found int"),
        (read_predictions, "p.json", '{"a": 1}', 'entry 1 of the predictions needs "id" and "caption", found {\'id\''),
        (read_predictions, "p.json", '{"a": "x", "a": "y"}', "1 ids have more than one prediction ('a')"),
        (read_predictions, "p.json", JSON_LINES + JSON_LINES, "give a .json file, or a .jsonl file"),
        (read_predictions, "p.json", f"[{ROW}, 3]", "entry 2 of the predictions is 3"),
        (
            read_predictions,
            "p.json",
            '[{"image_id": "a"}]',
            'entry 1 of the predictions needs "image_id" and "caption"',
        ),
        (read_predictions, "p.json", f"[{ROW}, {ROW}]", "1 ids have more than one prediction ('a')"),
        (read_references, "r.json", "[]", 'the key "annotations" is missing'),
        (read_references, "r.json", '{"annotations": []}', '"annotations" is empty'),
        (read_references, "r.json", '{"annotations": [', "not valid JSON"),
        (
            read_of_split,
            "p.json",
            '{"a": "x", "b": "y", "d.png": "z"}',
            "1 of 3 ids are not in the test split (first 'd.png'; an id there is 'a')",
        ),
        (
            read_of_split,
            "p.json",
            '{"a": "x"}',
            "1 of the 2 pairs of the test split have no caption (first 'b'); caption",
        ),
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
