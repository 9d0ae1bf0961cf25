"""`negatives.jsonl`: the hard negative captions of every training caption."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from diffcap.records import file_hash, read_json, read_json_lines
from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import atomic_write

NEGATIVES = "negatives.jsonl"
NOTES = "negatives.json"  # the settings that the negatives were built with, and the SHA-256 of NEGATIVES
KINDS = ("retrieve", "replace", "confuse")
_REMEDY = "write it with `make negatives DATASET=<name>`"


@dataclass(frozen=True)
class Negative:
    """A caption that is wrong for its pair.

    Attributes:
        kind: how it was built (or which kind it replaces, if it is a fallback), one of `KINDS`.
        text: tokens joined with spaces.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class CaptionNegatives:
    """A training caption and its negatives.

    Attributes:
        id: of the pair in the manifest.
        caption: the caption as written in the manifest.
        negatives: in the order of `KINDS`; every caption of a file has the same number.
    """

    id: str
    caption: str
    negatives: list[Negative]


def write_negatives(
    path: str | Path, rows: Iterable[CaptionNegatives], finish: Callable[[], None] = lambda: None
) -> None:
    """Write the rows to a temporary file, call `finish`, then rename the file.

    The `negatives.json` of an earlier file is deleted before the renaming. So a killed process never leaves a
    `negatives.json` that describes another file.
    """
    notes = Path(path).with_name(NOTES)
    with atomic_write(path) as temporary:
        with temporary.open("w", encoding="utf-8") as file:
            for row in rows:
                negatives = [{"kind": negative.kind, "text": negative.text} for negative in row.negatives]
                value = {"id": row.id, "caption": row.caption, "negatives": negatives}
                file.write(json.dumps(value, ensure_ascii=False) + "\n")
        finish()
        notes.unlink(missing_ok=True)


def read_negatives(path: str | Path) -> list[CaptionNegatives]:
    """Read every line of a `negatives.jsonl`.

    Raises:
        DiffcapError: the file is missing, its SHA-256 differs from the one in `negatives.json`, a line is malformed,
            or the captions have different numbers of negatives.
    """
    path = Path(path)
    notes, rows = path.with_name(NOTES), []
    if path.name == NEGATIVES and path.is_file() and notes.is_file():  # a file that the user wrote has no notes
        done = read_json(notes, "record of the negatives", f"{_REMEDY} again")
        if not isinstance(done, dict) or done.get("sha256") != file_hash(path):
            tagger = done.get("settings", {}).get("tagger") if isinstance(done, dict) else None
            again = f"`make negatives FOLDER={path.parent} TAGGER={tagger}`" if tagger else "`make negatives`"
            raise DiffcapError(f"{path}: its SHA-256 is not the one in {NOTES}; write it again with {again}.")
    for where, row in read_json_lines(path, "negatives", _REMEDY):
        negatives = row.get("negatives")
        if not isinstance(row.get("id"), str) or not isinstance(row.get("caption"), str):
            raise DiffcapError(f'{where}: "id" and "caption" must be strings; {_REMEDY} again.')
        if not isinstance(negatives, list) or not negatives or not all(map(_is_negative, negatives)):
            raise DiffcapError(f'{where}: "negatives" must be a list of {{"kind", "text"}}; {_REMEDY} again.')
        found = [Negative(each["kind"], each["text"]) for each in negatives]
        rows.append(CaptionNegatives(row["id"], row["caption"], found))
        if len(found) != len(rows[0].negatives):
            raise DiffcapError(
                f"{where}: {len(found)} negatives, but the first line has {len(rows[0].negatives)}; {_REMEDY} again."
            )
    if not rows:
        raise DiffcapError(f"{path}: the file is empty; {_REMEDY} again.")
    return rows


def _is_negative(value: object) -> bool:
    return isinstance(value, dict) and value.get("kind") in KINDS and isinstance(value.get("text"), str)
