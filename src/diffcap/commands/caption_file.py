"""The file of `diffcap caption PAIRS --out captions.jsonl` or `.csv`, which grows row by row; an interrupted command goes on."""

import csv
import fcntl
import hashlib
import io
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

from diffcap.commands.pairs import ImagePair
from diffcap.records import read_json, write_json
from diffcap.utils.errors import DiffcapError, printable
from diffcap.utils.files import add_filename, atomic_write

SUFFIXES = (".jsonl", ".csv")
COLUMNS = ("id", "before", "after", "caption", "log_probability", "nothing_changed", "notes", "error")  # of CSV


class _Row(NamedTuple):
    line: bytes
    failed: bool  # whether it has an error in place of a caption


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Allow one command at a time to write a file. The lock file stays; the file itself is replaced, so it cannot be the lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DiffcapError(
                f"--out {path}: another command is writing this file; wait until it ends, or give another name."
            ) from None
        except OSError:  # the file system has no locks
            pass
        yield


class CaptionFile:
    """A row for each pair, in their order, in a new file or one that the same command has begun.

    `pending` lists the pairs without a row, then those whose row has an error or that are in `repeated`. At the end of an unfinished
    file, pairs of an incomplete batch are repeated, so that a batch has the same pairs, and its numbers the same digits, as without
    an interruption.

    Args:
        settings: what the captions depend on besides the pairs, by option (JSON values), for FILE.settings.json.
        repeated: ids of pairs that are pending although they have a row.
    """

    def __init__(
        self,
        path: Path,
        pairs: Sequence[ImagePair],
        settings: Mapping[str, Any],
        batch_size: int,
        repeated: Collection[str],
    ) -> None:
        self.path, self._is_csv = path, path.suffix.lower() == ".csv"
        self._numbers = {_key(pair.id): number for number, pair in enumerate(pairs)}
        listed = json.dumps([[pair.id, *map(os.path.realpath, pair[1:])] for pair in pairs])
        self._check_settings({"pairs": hashlib.sha256(listed.encode()).hexdigest(), **settings})
        rows = self._read()
        end = next((number for key, number in self._numbers.items() if key not in rows), len(pairs))
        start = end - end % batch_size if end < len(pairs) else end
        self._rows = {key: row for key, row in rows.items() if not row.failed}
        pending = [
            number
            for key, number in self._numbers.items()
            if key not in self._rows or start <= number < end or pairs[number].id in repeated
        ]
        self.pending = [pairs[number] for number in sorted(pending, key=lambda number: number < start)]
        self._write_all()
        with add_filename(path):
            self._file = path.open("ab")

    def _check_settings(self, settings: dict[str, Any]) -> None:
        beside = self.path.with_name(f"{self.path.name}.settings.json")
        if self.path.exists() and (not self.path.is_file() or self.path.stat().st_size):
            if not beside.is_file():
                raise DiffcapError(
                    f"--out {self.path}: exists, and {beside.name} does not, so it is not a file of this command; give another name."
                )
            found = read_json(beside, "settings", f"delete {self.path} to start again")
            if other := [key for key, value in settings.items() if found.get(key) != value]:
                names = ", ".join("list of pairs" if key == "pairs" else f"--{key}" for key in other)
                raise DiffcapError(
                    f"--out {self.path}: its captions were made with another {names}; give another name, or delete the file to start again."
                )
        write_json(beside, settings)

    def _read(self) -> dict[str, _Row]:
        """The rows by the key of their pair; a line that a kill or a full disk has cut is left out."""
        lines = self.path.read_bytes().split(b"\n")[:-1] if self.path.exists() else []
        rows: dict[str, _Row] = {}
        for number, line in enumerate(lines, 1):
            try:
                if self._is_csv:
                    (cells,) = csv.reader([line.decode()], strict=True)
                    values = dict(zip(COLUMNS, cells, strict=True))
                else:
                    values = json.loads(line)
                if not (self._is_csv and number == 1):
                    key = _key(values["id"])
                    self._numbers[key]  # a KeyError for other ids
                    rows[key] = _Row(line, bool(values.get("error")))
            except (ValueError, KeyError, TypeError, AttributeError, csv.Error):
                raise DiffcapError(
                    f"{self.path}, line {number}: not a row of this command; delete that line, or the file to start again."
                ) from None
        return rows

    def _write_all(self) -> None:
        """Write the complete rows in the order of the pairs."""
        rows = [self._rows[key].line for key in sorted(self._rows, key=self._numbers.__getitem__)]
        header = [",".join(COLUMNS).encode()] if self._is_csv else []
        with atomic_write(self.path) as temporary:
            temporary.write_bytes(b"".join(line + b"\n" for line in [*header, *rows]))

    def append(self, pair: ImagePair, values: Mapping[str, Any]) -> None:
        """Add the row of a pair, unless it has one without an error; "text" of `values` is the caption, or there is an "error"."""
        if _key(pair.id) in self._rows:
            return
        row = {**pair.as_dict(), **values}
        row |= {"caption": row["text"]} if "text" in row else {}
        if self._is_csv:
            row["notes"] = "; ".join(row.get("notes", ()))
            text = io.StringIO()
            cells = (row.get(name) for name in COLUMNS)
            csv.writer(text, lineterminator="").writerow(["" if cell is None else printable(cell) for cell in cells])
            line = text.getvalue()
        else:
            line = json.dumps(row, ensure_ascii=False)
        encoded = line.encode(errors="backslashreplace")  # names that are not UTF-8; valid in JSON, too
        with add_filename(self.path):
            self._file.write(encoded + b"\n")
            self._file.flush()
        self._rows[_key(pair.id)] = _Row(encoded, "error" in row)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file; if all pairs have a row, put the rows in the order of the pairs."""
        with add_filename(self.path):
            self._file.close()
        if len(self._rows) == len(self._numbers) and [*self._rows] != [*self._numbers]:
            self._write_all()


def _key(id: str) -> str:
    """An id as CSV stores it."""
    return printable(id).encode(errors="backslashreplace").decode()
