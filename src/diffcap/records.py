"""`ChangePair`, the one record that everything after a reader works on, and its file, `manifest.jsonl`."""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffcap.errors import DiffcapError

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class ChangePair:
    """Two images of one place and the sentences that say what changed between them.

    Attributes:
        id: unique in its manifest; the id that predictions and references carry (CLEVR-Change: "000123.png", and
            "000123.png_n" for the distractor pair).
        before, after: image paths, relative to the dataset's root.
        captions: reference sentences, at least one for a training pair; empty only where a dataset hides them.
        split: "train", "val" or "test".
        change_type: the dataset's own name for the kind of change ("color", "move", ...), None where it has none.
        is_distractor: True when nothing changed but the viewpoint or the light.
        extra: what else the dataset knows ("viewpoint_iou", "boxes"), JSON values; top-level keys in the file.
    """

    id: str
    before: str
    after: str
    captions: list[str]
    split: str
    change_type: str | None = None
    is_distractor: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


_FIELDS = {"id": str, "before": str, "after": str, "captions": list, "split": str}


def _parse(line: str, where: str) -> ChangePair:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DiffcapError(
            f"{where}: not JSON ({error.msg} at column {error.colno}); mend or delete that line."
        ) from None
    if not isinstance(row, dict):
        raise DiffcapError(f"{where}: expected a JSON object, found {type(row).__name__}; write one pair a line.")
    for key, kind in _FIELDS.items():
        if not isinstance(row.get(key), kind):
            found = "nothing" if key not in row else repr(row[key])[:60]
            raise DiffcapError(f'{where}: "{key}" must be a {kind.__name__}, found {found}; mend that line.')
    if row["split"] not in SPLITS:
        raise DiffcapError(
            f'{where}: "split" must be one of {", ".join(SPLITS)}, found {row["split"]!r}; mend that line.'
        )
    if not all(isinstance(caption, str) for caption in row["captions"]):
        raise DiffcapError(f'{where}: "captions" must be a list of strings; mend that line.')
    known = {**{key: row.pop(key) for key in _FIELDS}, "change_type": row.pop("change_type", None)}
    return ChangePair(**known, is_distractor=bool(row.pop("is_distractor", False)), extra=row)


def read_manifest(path: str | Path) -> list[ChangePair]:
    """Read every pair of a `manifest.jsonl`.

    Raises:
        DiffcapError: the file is missing, a line is malformed (named by number), or an id stands twice.
    """
    path = Path(path)
    if not path.is_file():
        raise DiffcapError(f"{path}: no manifest there; write it with `make data DATASET=<name> DATA=<folder>`.")
    pairs: list[ChangePair] = []
    seen: dict[str, int] = {}
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            pair = _parse(line, f"{path}, line {number}")
            if pair.id in seen:
                raise DiffcapError(
                    f"{path}, line {number}: id {pair.id!r} stands already on line {seen[pair.id]}; give every pair its own."
                )
            seen[pair.id] = number
            pairs.append(pair)
    return pairs


def write_manifest(path: str | Path, pairs: Iterable[ChangePair]) -> None:
    """Write `manifest.jsonl` whole or not at all (temporary name, then rename)."""
    lines = []
    for pair in pairs:
        row = {key: getattr(pair, key) for key in (*_FIELDS, "change_type", "is_distractor")}
        lines.append(json.dumps({**row, **pair.extra}, ensure_ascii=False))
    write_text(path, "\n".join(lines) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Write a small file whole or not at all; makes its folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def write_json(path: str | Path, value: Any) -> None:
    """Write indented JSON whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: str | Path, what: str = "JSON file", remedy: str = "check the path") -> Any:
    """Read a JSON file; one sentence when it is missing or malformed (`what` names it, `remedy` says what to do)."""
    path = Path(path)
    if not path.is_file():
        raise DiffcapError(f"{path}: no {what} there; {remedy}.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DiffcapError(f"{path}: not valid JSON ({error}); mend it or fetch it again.") from None


def file_hash(path: str | Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
