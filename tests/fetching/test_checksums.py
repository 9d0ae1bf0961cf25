import json
import os
from pathlib import Path

import pytest

from diffcap.fetching.folder import Checksums
from diffcap.records import file_hash
from diffcap.utils.errors import DiffcapError


def test_a_checksum_is_recorded_once_and_compared_afterwards(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one")
    sums = Checksums(tmp_path)
    assert sums.existing_problem(file, lambda path: "verified") == "verified" and sums.sha256(file) == ""
    sums.record(file, "https://desk.invalid/a.txt")
    sums.save()
    row = json.loads(sums.path.read_text())["a.txt"]
    assert row["sha256"] == file_hash(file) and row["size"] == 3 and row["url"] == "https://desk.invalid/a.txt"

    sums = Checksums(tmp_path)
    assert sums.existing_problem(file, lambda path: "verified") == ""
    os.utime(file, (1, 1))
    assert sums.existing_problem(file, lambda path: "verified") == ""  # hashed again: the same content
    file.write_text("two")
    assert "differs from the checksum in" in sums.existing_problem(file, lambda path: "verified")
    sums.record(file, "")
    assert sums.sha256(file) == row["sha256"]


def test_no_file_is_written_without_checksums(tmp_path: Path) -> None:
    Checksums(tmp_path).save()
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checksums.json").write_text("{")
    with pytest.raises(DiffcapError, match="checksums"):
        Checksums(tmp_path)
