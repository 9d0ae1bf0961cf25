import json
from collections import Counter
from pathlib import Path

import pytest

from diffcap.negatives import CaptionNegatives, Negative, read_negatives, write_negatives
from diffcap.negatives.file import Report
from diffcap.records import file_hash
from diffcap.utils.errors import DiffcapError

ROWS = [
    CaptionNegatives("1.png", "the red cube moved.", [Negative("retrieve", "a b"), Negative("confuse", "c é d")]),
    CaptionNegatives("1.png_n", "nothing moved", [Negative("retrieve", "e"), Negative("replace", "f")]),
]


def test_round_trip_in_the_documented_form(tmp_path: Path) -> None:
    path = tmp_path / "negatives.jsonl"
    write_negatives(path, iter(ROWS))
    assert read_negatives(path) == ROWS
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
    assert read_negatives(path) == ROWS
    write_negatives(path, ROWS[:1])
    assert read_negatives(path) == ROWS[:1] and not notes.exists()


def test_a_file_of_ones_own_needs_no_record(tmp_path: Path) -> None:
    write_negatives(tmp_path / "negatives.jsonl", ROWS)
    (tmp_path / "negatives.json").write_text(json.dumps({"sha256": file_hash(tmp_path / "negatives.jsonl")}))
    (tmp_path / "mine.jsonl").write_text((tmp_path / "negatives.jsonl").read_text().splitlines()[0])
    assert read_negatives(tmp_path / "mine.jsonl") == ROWS[:1]


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
        read_negatives(path)
    assert "\n" not in str(caught.value)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(DiffcapError, match="make negatives"):
        read_negatives(tmp_path / "negatives.jsonl")
    (tmp_path / "negatives.jsonl").write_text("\n")
    with pytest.raises(DiffcapError, match="the file is empty"):
        read_negatives(tmp_path / "negatives.jsonl")


def report_row(number: int) -> CaptionNegatives:
    kinds = ("retrieve", "confuse") if number % 2 else ("retrieve", "replace")
    return CaptionNegatives(f"id{number}", f"caption {number}", [Negative(kind, f"{kind} {number}") for kind in kinds])


def test_examples_counts_and_settings(tmp_path: Path) -> None:
    report = Report(seed=5)
    for number in range(500):
        report.add(report_row(number))
    used = {
        ("retrieve", "alike"): 400,
        ("retrieve", "any other change caption"): 100,
        ("replace", "words replaced"): 250,
    }
    report.write(tmp_path / "negatives.md", {"seed": 5}, used)
    text = (tmp_path / "negatives.md").read_text()
    assert "500 captions" in text and "| seed | 5 |" in text
    assert "| retrieve | alike | 400 | 80.0% |  |" in text
    assert "| retrieve | any other change caption | 100 | 20.0% | fallback |" in text
    for kind in ("retrieve", "replace", "confuse"):
        section = text.split(f"## {kind}: 20 examples\n")[1].split("\n## ")[0]
        assert section.count("\n* id") == 20 and section.count(f"\n  * {kind} ") == 20


def test_every_caption_has_the_same_chance(tmp_path: Path) -> None:
    seen: Counter[int] = Counter()
    for seed in range(400):
        report = Report(examples=5, seed=seed)
        for number in range(20):
            report.add(report_row(number))
        report.write(tmp_path / "r.md", {}, {})
        section = (tmp_path / "r.md").read_text().split("## replace")[0]
        seen.update(int(line.split(":")[0][4:]) for line in section.split("\n") if line.startswith("* id"))
    assert sum(seen.values()) == 2000
    assert min(seen[number] for number in range(20)) > 60 and max(seen.values()) < 140  # 100 each, give or take
