"""Lists of pairs in the forms of other programs: JSON lists, Hugging Face's metadata.jsonl, messages of LLaMA-Factory and ms-swift."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.datasets.layouts import refusal, write_image, write_json, write_lines

from diffcap.cli import main
from diffcap.commands.data import prepare
from diffcap.datasets import read_pairs
from diffcap.records import ChangePair, read_dataset

QUESTION = "<image><image>What changed?"


def messages(number: int, caption: str, question: Any = QUESTION, **changes: Any) -> dict[str, Any]:
    contents = {"system": "Be short.", "user": question, "assistant": caption}
    turns = [{"role": role, "content": content} for role, content in contents.items()]
    return {"messages": turns, "images": [f"a/{number}.png", f"b/{number}.png"], **changes}


def conversations(number: int, caption: str) -> dict[str, Any]:
    turns = [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": caption}]
    return {"conversations": turns, "images": [{"path": f"a/{number}.png"}, {"path": f"b/{number}.png"}]}


def parts(number: int, caption: str) -> dict[str, Any]:
    images = [{"type": "image", "image": f"{side}/{number}.png"} for side in "ab"]
    question = [*images, {"type": "text", "text": "What changed?"}]
    return {"messages": messages(number, caption, question)["messages"]}


def rows(form: Any) -> list[dict[str, Any]]:
    return [form(number, caption) for number in range(40) for caption in (f"cup {number} is gone", f"no cup {number}")]


@pytest.mark.parametrize("form", [messages, conversations, parts])
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_messages_with_equal_images_are_one_pair(tmp_path: Path, form: Any, suffix: str) -> None:
    (write_json if suffix == ".json" else write_lines)(tmp_path / f"changes{suffix}", rows(form))
    write_json(tmp_path / "dataset_info.json", {"changes": {"file_name": "changes.json"}})
    write_lines(tmp_path / "manifest.jsonl", [])  # the folder is also the output folder
    pairs = read_pairs("desk", tmp_path)
    assert len(pairs) == 40
    assert {pair.split for pair in pairs} == {"train", "val", "test"}
    assert (pairs[3].id, *pairs[3].images) == ("3", "a/3.png", "b/3.png")
    assert pairs[3].captions == ["cup 3 is gone", "no cup 3"]


def test_a_list_for_each_split(tmp_path: Path) -> None:
    plain = {"before": "a/1.png", "after": "b/1.png", "caption": ["the cup is gone"]}
    same = messages(2, "no cup", images=["./a/2.png", "b//2.png"])
    write_json(tmp_path / "test.json", [messages(2, "the cup is gone"), same])  # without a list of the others
    (pair,) = read_pairs("desk", tmp_path)
    assert (pair.split, pair.captions) == ("test", ["the cup is gone", "no cup"])
    for number, name in enumerate(("train", "val", "test")):
        write_json(tmp_path / f"{name}.json", [messages(number, "the cup is gone") if number != 1 else plain])
    assert read_pairs("desk", tmp_path) == [
        ChangePair(id, f"a/{id}.png", f"b/{id}.png", ["the cup is gone"], split)
        for id, split in (("2", "test"), ("0", "train"), ("1", "val"))
    ]
    write_lines(tmp_path / "b.jsonl", [])
    assert "several lists of pairs (test.json, train.json, val.json, b.jsonl)" in refusal("desk", tmp_path)
    write_json(tmp_path / "captions.json", {"images": [{"filename": "7.png", "split": "test", "sentences": []}]})
    assert [pair.id for pair in read_pairs("desk", tmp_path)] == ["7"]  # not one of the lists


def test_metadata_of_hugging_face(tmp_path: Path) -> None:
    for number, split in enumerate(("train", "validation", "test")):
        row: dict[str, Any] = {f"{side}_file_name": f"images/{side}{number}.png" for side in ("before", "after")}
        write_lines(tmp_path / split / "metadata.jsonl", [{**row, "captions": ["the cup is gone"]}])
    found = {pair.split: pair for pair in read_pairs("desk", tmp_path)}
    assert [*found["val"].images] == ["validation/images/before1.png", "validation/images/after1.png"]
    write_lines(tmp_path / "test" / "metadata.jsonl", [{**row, "before_file_name": "../a.png"}])
    assert "line 1: the path 'test/../a.png' leads out of" in refusal("desk", tmp_path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (messages(1, "x", images=["a.png"]), "found 1 images and 2 marks"),
        (messages(1, "x", "<image>?"), "and 1 marks"),
        (messages(1, "x", messages=messages(1, "x")["messages"] * 3), "one answer, found 6 turns"),
        (messages(1, "x", messages="What?"), '"messages" must be a list of objects with "role" and "content"'),
        (messages(1, "x", images=["/a.png", "b.png"]), "leads out of the dataset's folder"),
    ],
)
def test_one_sentence_for_a_wrong_row(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    write_lines(tmp_path / "changes.jsonl", [messages(0, "the cup is gone"), row])
    refused = refusal("desk", tmp_path)
    assert "changes.jsonl, line 2" in refused
    assert message in refused


def test_exported_messages_are_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    for number in range(40):
        for side in "ab":
            write_image(source / side / f"{number}.png", number)
    write_lines(source / "changes.jsonl", rows(messages))
    prepare("desk", str(source), out=str(tmp_path / "desk"))
    main(["export", str(tmp_path / "desk"), "--form", "messages", "--out", str(tmp_path / "messages")])
    assert str(source) in capsys.readouterr().out
    info = json.loads((tmp_path / "messages" / "dataset_info.json").read_text())
    assert info["desk_train"]["file_name"] == "train.json"
    (source / "changes.jsonl").unlink()
    for entry in info.values():
        (source / entry["file_name"]).write_bytes((tmp_path / "messages" / entry["file_name"]).read_bytes())
    by_id = {pair.id: pair for pair in read_pairs("desk", source)}
    assert by_id == {pair.id: pair for pair in read_dataset(tmp_path / "desk").pairs}
