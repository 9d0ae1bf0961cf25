import json
import os
from pathlib import Path

import pytest

from diffcap.errors import DiffcapError
from diffcap.fetching.ledger import Ledger
from diffcap.records import file_hash


def test_a_checksum_is_noted_once_and_compared_ever_after(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one")
    ledger = Ledger(tmp_path / "checksums.json")
    assert ledger.changed("a.txt", file) is None and ledger.sha256("a.txt") == ""
    ledger.note("a.txt", file, file_hash(file), "https://desk.invalid/a.txt")
    ledger.flush()
    row = json.loads(ledger.path.read_text())["a.txt"]
    assert row["sha256"] == file_hash(file) and row["size"] == 3 and row["url"] == "https://desk.invalid/a.txt"

    ledger = Ledger(ledger.path)
    assert ledger.changed("a.txt", file) is False
    os.utime(file, (1, 1))
    assert ledger.changed("a.txt", file) is False  # read again: the same
    file.write_text("two")
    assert ledger.changed("a.txt", file) is True and ledger.sha256("a.txt") == row["sha256"]


def test_nothing_noted_nothing_written(tmp_path: Path) -> None:
    Ledger(tmp_path / "checksums.json").flush()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1}', '{"a": {"sha256": 1}}'])
def test_a_file_of_someone_else(tmp_path: Path, text: str) -> None:
    (tmp_path / "checksums.json").write_text(text)
    with pytest.raises(DiffcapError, match="checksums"):
        Ledger(tmp_path / "checksums.json")
