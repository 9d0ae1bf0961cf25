import json
from pathlib import Path

import pytest

from diffcap.negatives.file import (
    KINDS,
    CaptionNegatives,
    Negative,
    Report,
    authors_negatives,
    iter_negatives,
    write_negatives,
)
from diffcap.records import ChangePair, file_hash
from diffcap.utils.errors import DiffcapError

ROWS = [
    CaptionNegatives("1.png", "the red cube moved.", [Negative("retrieve", "a b"), Negative("confuse", "c é d")]),
    CaptionNegatives("1.png_n", "nothing moved", [Negative("retrieve", "e"), Negative("replace", "f")]),
]


def test_round_trip_in_the_documented_form(tmp_path: Path) -> None:
    path = tmp_path / "negatives.jsonl"
    write_negatives(path, iter(ROWS))
    assert [*iter_negatives(path)] == ROWS
    assert json.loads(path.read_text().splitlines()[0]) == {
        "id": "1.png",
        "caption": "the red cube moved.",
        "negatives": [{"kind": "retrieve", "text": "a b"}, {"kind": "confuse", "text": "c é d"}],
    }
    assert [each.name for each in tmp_path.iterdir()] == ["negatives.jsonl"]


def test_the_name_is_given_last(tmp_path: Path) -> None:
    path = tmp_path / "negatives.jsonl"

    def finish() -> None:
        assert not path.exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_negatives(path, ROWS, finish)
    assert list(tmp_path.iterdir()) == []


def test_a_new_file_has_no_record_of_an_earlier_one(tmp_path: Path) -> None:
    """A kill before the stage writes the new record leaves a file that is read without one."""
    path, notes = tmp_path / "negatives.jsonl", tmp_path / "negatives.json"
    write_negatives(path, ROWS)
    notes.write_text(json.dumps({"sha256": file_hash(path)}))
    assert [*iter_negatives(path)] == ROWS
    (tmp_path / "mine.jsonl").write_text(path.read_text().splitlines()[0])
    assert [*iter_negatives(tmp_path / "mine.jsonl")] == ROWS[:1]  # a file of one's own has no record
    write_negatives(path, ROWS[:1])
    assert [*iter_negatives(path)] == ROWS[:1] and not notes.exists()


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"id": "1", "caption": "a", "negatives": [{"kind": "retrieve", "text": "a"}]}', "line 2: 1 negatives, but"),
        ('{"id": "1", "caption": "a", "negatives": []}', 'line 2: "negatives" must be'),
        ('{"id": "1", "caption": "a", "negatives": [{"kind": "odd", "text": "a"}]}', 'line 2: "negatives" must be'),
        ('{"id": 1, "caption": "a", "negatives": [{"kind": "replace", "text": "a"}]}', 'line 2: "id" and "caption"'),
        ('{"id": "1", ', "line 2"),
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "negatives.jsonl"
    write_negatives(path, ROWS[:1])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DiffcapError, match=complaint) as caught:
        list(iter_negatives(path))
    assert "\n" not in str(caught.value)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(DiffcapError, match="make negatives"):
        list(iter_negatives(tmp_path / "negatives.jsonl"))
    (tmp_path / "negatives.jsonl").write_text("\n")
    with pytest.raises(DiffcapError, match="the file is empty"):
        list(iter_negatives(tmp_path / "negatives.jsonl"))


def test_examples_counts_and_settings(tmp_path: Path) -> None:
    report = Report(seed=5)
    for number in range(500):
        negatives = [Negative(kind, f"{kind} {number}") for kind in KINDS]
        report.add(CaptionNegatives(f"id{number}", f"caption {number}", negatives))
    used = {("retrieve", "alike"): 400, ("retrieve", "any other change caption"): 100, ("replace", "words replaced"): 9}
    report.write(tmp_path / "negatives.md", {"seed": 5}, used)
    text = (tmp_path / "negatives.md").read_text()
    assert "500 captions" in text and "| seed | 5 |" in text
    assert "| retrieve | alike | 400 | 80.0% |  |" in text
    assert "| retrieve | any other change caption | 100 | 20.0% | fallback |" in text
    for kind in KINDS:
        section = text.split(f"## {kind}: 20 examples\n")[1].split("\n## ")[0]
        assert section.count("\n* id") == 20 and section.count(f"\n  * {kind} ") == 20


SIX = ["The cube, moved.", "b", "c", "d", "e", "f"]
PAIRS = [
    ChangePair("000001.png", "images/CLEVR_default_000001.png", "sc_images/CLEVR_semantic_000001.png", ["A cube.", "b b"], "train"),
    ChangePair("000001.png_n", "images/CLEVR_default_000001.png", "nsc_images/CLEVR_nonsemantic_000001.png", ["nothing"], "train"),
    ChangePair("001.Gull/Gull_1", "images/001.Gull/Gull_1.jpg", None, ["a gull"], "train"),
]  # fmt: skip


def row(kind: str, number: int, *sentences: str) -> dict:
    names = {"img1": f"CLEVR_default_{number:06d}", "img2": f"CLEVR_{kind}_{number:06d}.png"}
    return {**names, "sentences": list(sentences), "neg_samples": SIX}


def write(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_caption_of_a_pair_gets_its_negatives(tmp_path: Path) -> None:
    bird = {"img": "Gull_1", "sentences": ["a gull"], "neg_samples": SIX}
    rows = row("semantic", 1, "a cube .", "other"), row("nonsemantic", 1, "nothing"), row("semantic", 7, "gone"), bird
    found = list(authors_negatives(write(tmp_path / "train_neg_tfidf6.json", *rows), PAIRS))
    assert [(each.id, each.caption) for each in found] == [
        ("000001.png", "A cube."),  # as it stands in the manifest
        ("000001.png_n", "nothing"),
        ("001.Gull/Gull_1", "a gull"),
    ]
    assert all([negative.text for negative in each.negatives] == ["the cube , moved .", *"bcdef"] for each in found)


def test_one_sentence_for_each_fault(tmp_path: Path) -> None:
    good = row("semantic", 1, "a cube .")
    for bad, output in (
        ({**good, "neg_samples": None}, 'line 2: "neg_samples" must be a list of sentences'),
        ({**good, "sentences": "a"}, 'line 2: "sentences" must be a list of sentences'),
    ):
        with pytest.raises(DiffcapError, match="line 2") as caught:
            list(authors_negatives(write(tmp_path / "x.json", good, bad), PAIRS))
        assert output in str(caught.value)
    with pytest.raises(DiffcapError, match="none of its sentences is a caption of these pairs"):
        list(authors_negatives(write(tmp_path / "x.json", row("semantic", 9, "a cube .")), PAIRS))
