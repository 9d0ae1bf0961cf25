import json
from pathlib import Path

import pytest

from diffcap.errors import DiffcapError
from diffcap.negatives import CaptionNegatives, Negative, read_negatives, write_negatives

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


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"id": "1", "caption": "a", "negatives": [{"kind": "retrieve", "text": "a"}]}', "line 2: 1 negatives, where"),
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
    with pytest.raises(DiffcapError, match="holds no caption"):
        read_negatives(tmp_path / "negatives.jsonl")
