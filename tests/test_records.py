import json
import shutil
from pathlib import Path

import pytest

from diffcap.records import (
    ChangePair,
    file_hash,
    manifest_text,
    read_dataset,
    read_json,
    read_json_lines,
    read_manifest,
    with_words,
    write_dataset,
    write_text,
)
from diffcap.utils.errors import DiffcapError

PAIRS = [
    ChangePair("1", "a/1.png", "b/1.png", ["the cube ist weg", "größer"], "train", "drop", False, {"boxes": [1, 2]}),
    ChangePair("1_n", "a/1.png", "c/1.png", ["no change"], "train", None, True),
    ChangePair("2", "a/2.png", "b/2.png", [], "test"),
    ChangePair("3", "a/3.png", None, [], "test", extra={"class": 4}),
]


def line(**changes: object) -> str:
    row = {"id": "1", "before": "a", "after": "b", "captions": ["c"], "split": "train"}
    return json.dumps({key: value for key, value in {**row, **changes}.items() if value is not ...}) + "\n"


def test_a_manifest_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write_text(tmp_path / "deep/manifest.jsonl", manifest_text(PAIRS))
    assert read_manifest(tmp_path / "deep/manifest.jsonl") == PAIRS
    first = json.loads((tmp_path / "deep/manifest.jsonl").read_text().splitlines()[0])
    assert first["boxes"] == [1, 2] and first["is_distractor"] is False
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["manifest.jsonl"]


@pytest.mark.parametrize(
    ("bad", "output"),
    [
        ('{"id": "2",\n', "not JSON"),
        ("[1]\n", "expected a JSON object"),
        (line(id="2", before=...), '"before" must be a str'),
        (line(id="2", after=...), '"after" must be a str or null, found nothing'),
        (line(id="2", after=3), '"after" must be a str or null, found 3'),
        (line(id="2", captions="c"), '"captions" must be a list'),
        (line(id="2", captions=[1]), "list of strings"),
        (line(id="2", split="dev"), '"split" must be one of'),
        (line(id="2", is_distractor="false"), '"is_distractor" true or false'),
        (line(), "is already used"),
        ("\xff", "not UTF-8"),
    ],
)
def test_a_malformed_line_is_named_by_number(tmp_path: Path, bad: str, output: str) -> None:
    path = tmp_path / "manifest.jsonl"
    path.write_bytes(line().encode() + b"\n" + bad.encode("latin-1"))  # the blank line counts
    with pytest.raises(DiffcapError) as caught:
        read_manifest(path)
    assert f"{path}, line 3" in str(caught.value) and output in str(caught.value)
    assert "\n" not in str(caught.value)


def test_captions_that_show_nothing_are_left_out() -> None:
    captions = ["", " \t", "\u200b\u200d\ufeff", "\u2060 \ufe0f", "no\u200bchange", "?", "変"]
    pairs = with_words(ChangePair(str(number), "a", "b", [text], "train") for number, text in enumerate(captions))
    assert [pair.id for pair in pairs] == ["4", "5", "6"]


def test_json_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"caption": "größer"}', encoding="utf-8-sig")
    assert read_json(tmp_path / "x.json") == {"caption": "größer"}
    assert [row for _, row in read_json_lines(tmp_path / "x.json")] == [{"caption": "größer"}]


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ('{"a": "cut \\ud83d"}', r"can't encode character '\\ud83d' .*surrogates not allowed"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "recursion"),
        ('{"a": ' + "1" * 5_000 + "}", "digits"),
        ('{"a": [NaN]}', "NaN, which is not a finite number"),
        ('{"a": 1e999}', "1e999, which is not a finite number"),
    ],
)
def test_json_that_no_other_program_takes_is_one_sentence(tmp_path: Path, text: str, output: str) -> None:
    (tmp_path / "x.json").write_text(text + "\n")
    for read in (read_json, lambda path: list(read_json_lines(path))):
        with pytest.raises(DiffcapError, match=output) as caught:
            read(tmp_path / "x.json")
        assert "\n" not in str(caught.value) and "x.json" in str(caught.value)
    (tmp_path / "x.json").write_text(r'{"a": "\ud83d\ude00 \u00e4 C:\\u0000dir"}')  # whole characters may be written so
    assert read_json(tmp_path / "x.json") == {"a": r"😀 ä C:\u0000dir"}


def test_a_dataset_comes_back_with_counts_and_root(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data/x", "x", tmp_path / "elsewhere", PAIRS, {"skipped": {"pairs": 3}})
    dataset = read_dataset(tmp_path / "data/x")
    assert (dataset.name, dataset.root, dataset.pairs) == ("x", tmp_path / "elsewhere", PAIRS)
    info = dataset.info
    assert info["root"] == str(tmp_path / "elsewhere")
    assert (info["pairs"], info["images"], info["captions"], info["captions_per_pair"]) == (4, 6, 3, 0.75)
    assert info["splits"]["train"] == {"pairs": 2, "distractors": 1, "captions": 3, "change_types": {"drop": 1}}
    assert info["splits"]["val"]["pairs"] == 0 and info["splits"]["test"]["pairs"] == 2
    assert info["skipped"] == {"pairs": 3}
    assert info["manifest_sha256"] == file_hash(tmp_path / "data/x/manifest.jsonl")


def test_a_root_below_the_folder_moves_with_it(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data/x", "x", tmp_path / "data/y/../x/official", PAIRS, {})
    shutil.move(tmp_path / "data/x", tmp_path / "moved")
    assert read_dataset(tmp_path / "moved").root == tmp_path / "moved/official"


def test_writing_the_same_again_touches_nothing(tmp_path: Path) -> None:
    write_dataset(tmp_path, "x", tmp_path, PAIRS, {})
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    write_dataset(tmp_path, "x", tmp_path, PAIRS, {})
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    write_dataset(tmp_path, "x", tmp_path, PAIRS[:2], {})
    assert len(read_dataset(tmp_path).pairs) == 2


def test_a_manifest_with_another_hash_than_in_dataset_json_is_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path, "x", tmp_path, PAIRS, {})
    write_text(tmp_path / "manifest.jsonl", manifest_text(PAIRS[:1]))
    with pytest.raises(DiffcapError, match=r"its SHA-256 is not the one in dataset\.json"):
        read_dataset(tmp_path)
    (tmp_path / "dataset.json").write_text('{"name": "x"}')
    with pytest.raises(DiffcapError, match=r"the keys root, manifest_sha256 are missing"):
        read_dataset(tmp_path)
    (tmp_path / "dataset.json").unlink()
    with pytest.raises(DiffcapError, match=r"no dataset there; write it with `make data"):
        read_dataset(tmp_path)
