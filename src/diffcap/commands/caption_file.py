"""The output file of `diffcap caption PAIRS --out captions.jsonl` (or .csv). Rows are appended, so that a command can be continued."""

import csv
import fcntl
import hashlib
import io
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from diffcap.commands.pairs import ImagePair
from diffcap.records import JsonDict, read_json, write_json
from diffcap.utils.console import echo
from diffcap.utils.errors import DiffcapError, printable
from diffcap.utils.files import add_filename, atomic_write

CAPTION_FILE_SUFFIXES = (".jsonl", ".csv")
CSV_COLUMNS = ("id", "before", "after", "caption", "log_probability", "nothing_changed", "changed", "notes", "error")


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Allow only one command at a time to write the file `path`. A second file has the lock, because a new file replaces `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("a") as lock_file:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DiffcapError(
                f"--out {path}: another command is writing this file; wait until it ends, or give another name."
            ) from None
        except OSError:  # the file system has no locks
            pass
        yield


class CaptionFile(AbstractContextManager["CaptionFile"]):
    """A file with a row for each pair. The file is new, or an earlier run of the same command began it.

    `pending_pairs` lists the pairs to caption: pairs without a row, then pairs whose row has an error and pairs of `repeated_ids`. If the
    last batch of the earlier run is incomplete, all its pairs are captioned again: then each probability has the same digits as without
    an interruption.

    Args:
        settings: option -> value, for the options that change the captions; stored in `path` + ".settings.json".
        repeated_ids: ids of pairs to caption although they have a row.
        needs_changed: also repeat, with a note, the rows of earlier versions, which lack "changed", the probability of a change.
    """

    def __init__(
        self,
        path: Path,
        pairs: Sequence[ImagePair],
        settings: Mapping[str, Any],
        batch_size: int,
        repeated_ids: Collection[str],
        needs_changed: bool = False,
    ) -> None:
        self.path, self._is_csv = path, path.suffix.lower() == ".csv"
        self._index_by_key = {_key(pair.id): index for index, pair in enumerate(pairs)}
        pair_list = json.dumps([[pair.id, *map(os.path.realpath, pair[1:])] for pair in pairs])  # pair[1:]: paths
        settings = {"pairs": hashlib.sha256(pair_list.encode()).hexdigest(), **settings}
        settings_file = path.with_name(f"{path.name}.settings.json")
        if path.exists() and (not path.is_file() or path.stat().st_size):
            if not settings_file.is_file():
                raise DiffcapError(
                    f"--out {path}: exists, and {settings_file.name} does not, so it is not a file of this command; give another name."
                )
            old_settings = read_json(settings_file, "settings", f"delete {path} to start again")
            if changed_keys := [key for key, value in settings.items() if old_settings.get(key) != value]:
                names = ", ".join("list of pairs" if key == "pairs" else f"--{key}" for key in changed_keys)
                raise DiffcapError(
                    f"--out {path}: its captions were made with another {names}; give another name, or delete the file to start again."
                )
        write_json(settings_file, settings)
        self._columns: tuple[str, ...] = CSV_COLUMNS  # or those of the earlier version that began the file
        rows, open_keys = self._read_rows(needs_changed)
        self._columns = CSV_COLUMNS if needs_changed else self._columns
        first_missing = next((index for key, index in self._index_by_key.items() if key not in rows), len(pairs))
        # The index of the first pair of the incomplete last batch, or of the first pair without a row if no batch is incomplete.
        batch_start = first_missing - first_missing % batch_size if first_missing < len(pairs) else first_missing
        self._rows = {key: line for key, line in rows.items() if key not in open_keys}
        pending_indices = [
            index
            for key, index in self._index_by_key.items()
            if key not in self._rows or batch_start <= index < first_missing or pairs[index].id in repeated_ids
        ]
        self.pending_pairs = [pairs[index] for index in sorted(pending_indices, key=lambda index: index < batch_start)]
        self._write_all()
        with add_filename(path):  # errors, such as that of a full disk, then name the file
            self._file = path.open("ab")

    def _read_rows(self, needs_changed: bool) -> tuple[dict[str, bytes], set[str]]:
        """Return key -> line, and the keys to caption again. The last line is left out if it is incomplete (killed process, full disk)."""
        lines = self.path.read_bytes().split(b"\n")[:-1] if self.path.exists() else []
        rows: dict[str, bytes] = {}
        old, faulty = set[str](), set[str]()  # keys
        for number, line in enumerate(lines, 1):
            try:
                if self._is_csv and number == 1:
                    names = line.decode("utf-8-sig").rstrip("\r").split(",")
                    self._columns = tuple(name for name in names if CSV_COLUMNS.index(name) >= 0)
                    continue
                values = self._parse(line)
                key = _key(values["id"])
                self._index_by_key[key]  # raises a KeyError for other ids
                rows[key] = line
                if values.get("error"):
                    faulty.add(key)
                elif needs_changed and "changed" not in values:
                    old.add(key)
            except (ValueError, KeyError, TypeError, AttributeError, csv.Error):
                raise DiffcapError(
                    f"{self.path}, line {number}: not a row of this command; delete that line, or the file to start again."
                ) from None
        if old:
            note = f"{len(old):,} rows of an earlier version lack the probability of a change"
            echo(f"note: {self.path}: {note}; their pairs are captioned again.", err=True)
        return rows, faulty | old

    def _write_all(self) -> None:
        """Replace the file by the rows in `_rows`, in the order of the pairs."""
        rows = [self._rows[key] for key in sorted(self._rows, key=self._index_by_key.__getitem__)]
        header = [",".join(self._columns).encode()] if self._is_csv else []
        with atomic_write(self.path) as temporary:
            temporary.write_bytes(b"".join(line + b"\n" for line in [*header, *rows]))

    def append(self, row: JsonDict) -> None:
        """Append a row if the file has none of this pair. The row has the caption as "text", or an error message as "error"."""
        if _key(row["id"]) in self._rows:
            return
        row |= {"caption": row["text"]} if "text" in row else {}
        if self._is_csv:
            row["notes"] = "; ".join(row.get("notes", ()))
            buffer = io.StringIO()
            cells = (row.get(name) for name in self._columns)
            csv.writer(buffer, lineterminator="").writerow(["" if cell is None else printable(cell) for cell in cells])
            line = buffer.getvalue()
        else:
            line = json.dumps(row, ensure_ascii=False)
        encoded = line.encode(errors="backslashreplace")  # escapes names that are not UTF-8
        with add_filename(self.path):
            self._file.write(encoded + b"\n")
            self._file.flush()
        self._rows[_key(row["id"])] = encoded

    def rows(self) -> list[JsonDict]:
        """Return the rows with a caption, in the order of the pairs. Values of a CSV file are strings."""
        keys = sorted(self._rows, key=self._index_by_key.__getitem__)
        return [row for key in keys if not (row := self._parse(self._rows[key])).get("error")]

    def _parse(self, line: bytes) -> JsonDict:
        if not self._is_csv:
            return dict(json.loads(line))
        (cells,) = csv.reader([line.decode()], strict=True)
        return dict(zip(self._columns, cells, strict=True))

    def __exit__(self, *_: object) -> None:
        """Close the file; if all pairs have a row, rewrite the file with the rows in the order of the pairs."""
        with add_filename(self.path):
            self._file.close()
        if len(self._rows) == len(self._index_by_key) and [*self._rows] != [*self._index_by_key]:
            self._write_all()


def _key(id: str) -> str:
    """Return an id as the CSV file stores it: control characters, and characters that UTF-8 cannot encode, are escaped."""
    return printable(id).encode(errors="backslashreplace").decode()
