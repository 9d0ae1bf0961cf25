"""Files of the COCO form, written and read, and what is refused."""

import json
from pathlib import Path

import pytest

from diffcap.evaluation.coco import read_predictions, read_references, write_predictions, write_references
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
    ("text", "words"),
    [
        (None, "no predictions file there"),
        ("", "not valid JSON"),
        ("[]", "is empty"),
        ('{"a": 1}', "must be a list, found dict"),
        ('[{"image_id": "a", "caption": "x"}, 3]', "entry 2 of the list of predictions is 3"),
        ('[{"image_id": "a"}]', 'entry 1 of the list of predictions needs "image_id" and "caption"'),
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
