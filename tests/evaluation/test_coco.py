"""Files of the COCO form, written and read, and what is refused."""

import json
from pathlib import Path

import pytest

from diffcap.evaluation.coco import (
    read_other_predictions,
    read_predictions,
    read_references,
    write_predictions,
    write_references,
)
from diffcap.utils.errors import DiffcapError


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


def test_numbers_as_ids_become_strings(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps([{"image_id": 7, "caption": "x"}]))
    (tmp_path / "r.json").write_text(json.dumps({"annotations": [{"image_id": 7, "id": 1, "caption": "x"}]}))
    assert read_predictions(tmp_path / "p.json") == {"7": "x"}
    assert read_references(tmp_path / "r.json") == {"7": ["x"]}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.json", '[{"image_id": "7", "caption": "x"}, {"image_id": "b", "caption": "y"}]'),
        ("p.json", '[{"id": 7, "caption": "x"}, {"id": "b", "caption": "y", "model": {"name": "z"}}]'),
        ("p.json", '{"7": "x", "b": "y"}'),
        ("p.jsonl", '{"id": 7, "caption": "x", "tokens": [1]}\n\n{"id": "b", "caption": "y"}\n'),
        ("P.JSONL", '{"image_id": "7", "id": 1, "caption": "x"}\n{"image_id": "b", "id": 2, "caption": "y"}'),
    ],
)
def test_every_form_of_predictions_is_read(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert read_predictions(tmp_path / name) == {"7": "x", "b": "y"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"id": "a", "caption": "x"}\n{"id": "b"', "line 2: not JSON"),
        ('{"id": "a", "caption": "x"}\n["b", "y"]', "line 2: expected a JSON object, found list"),
        ('{"id": "a", "caption": "x"}\n{"id": "b", "caption": null}', 'line 2 needs "id" and "caption"'),
        ('{"id": "a", "caption": "x"}\n{"id": "a", "caption": "x"}', "1 ids have more than one prediction ('a')"),
        ("\n", "contains no caption"),
    ],
)
def test_bad_json_lines_are_one_sentence_with_the_file(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(DiffcapError) as caught:
        read_predictions(path)
    assert words in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("captions", "words"),
    [
        (
            {"a": "x", "b": "y", "d.png": "z"},
            "1 of 3 ids are not in the test split (first 'd.png'; an id there is 'a')",
        ),
        ({"a": "x"}, "1 of the 2 pairs of the test split have no caption (first 'b'); caption every pair"),
        ({"a": " \n", "b": "y"}, "1 of the 2 captions are empty (first that of 'a')"),
    ],
)
def test_predictions_that_are_not_of_the_split_are_one_sentence(
    tmp_path: Path, captions: dict[str, str], words: str
) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(captions))
    with pytest.raises(DiffcapError) as caught:
        read_other_predictions(path, ["a", "b"], ["a", "b", "c"], "the test split")
    assert words in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_other_predictions_are_those_of_the_scored_pairs_on_one_line(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps({"c": "z", "b": "a cube\nmoved ", "a": "x"}))
    found = read_other_predictions(tmp_path / "p.json", ["a", "b"], ["a", "b", "c"], "the test split")
    assert list(found.items()) == [("a", "x"), ("b", "a cube moved")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "no predictions file there"),
        ("", "not valid JSON"),
        ("[]", "contains no caption"),
        ("{}", "contains no caption"),
        ("3", "must be a list, found int"),
        ('{"a": 1}', "entry 1 of the predictions needs \"id\" and \"caption\", found {'id': 'a', 'caption': 1}"),
        ('{"a": "x", "a": "y"}', "1 ids have more than one prediction ('a')"),
        ('{"id": "a", "caption": "x"}\n{"id": "b", "caption": "y"}', "give a .json file, or a .jsonl file"),
        ('[{"image_id": "a", "caption": "x"}, 3]', "entry 2 of the predictions is 3"),
        ('[{"image_id": "a"}]', 'entry 1 of the predictions needs "image_id" and "caption"'),
        (
            '[{"image_id": "a", "caption": "x"}, {"image_id": "a", "caption": "x"}]',
            "1 ids have more than one prediction ('a')",
        ),
    ],
)
def test_bad_predictions_are_one_sentence_with_the_file(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "p.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DiffcapError) as caught:
        read_predictions(path)
    assert words in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", 'the key "annotations" is missing'),
        ('{"annotations": []}', '"annotations" is empty'),
        ('{"annotations": [', "not valid JSON"),
    ],
)
def test_bad_references_are_one_sentence_with_the_file(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(DiffcapError) as caught:
        read_references(path)
    assert words in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)
