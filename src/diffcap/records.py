"""`ChangePair`, the one record that everything after a reader works on, and its files, `manifest.jsonl`, `dataset.json`."""

import hashlib
import json
import math
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from diffcap.errors import DiffcapError
from diffcap.files import atomic_write

SPLITS = ("train", "val", "test")
_FIELDS: dict[str, Any] = {"id": str, "before": str, "after": str | None, "captions": list, "split": str}
Changes = Literal["single", "multi"]
MULTI_WORDS = 60  # CARD's released captions end there
_REMEDY = "write it with `make data DATASET=<name> DATA=<folder>`"


@dataclass(frozen=True)
class ChangePair:
    """Two images of one place and the sentences that say what changed between them.

    Datasets that only lend a hand in pre-training are of single images instead: `after` is None, and a picture has
    captions that describe it (CUB), or none and its class, `extra["class"]`, 0 ... K - 1 (NABirds).

    Attributes:
        id: unique in its manifest; the id that predictions and references carry (CLEVR-Change: "000123.png", and
            "000123.png_n" for the distractor pair).
        before, after: image paths, relative to the dataset's root.
        captions: reference sentences, at least one for a training pair; empty only where a dataset hides them, or where
            it has classes.
        split: "train", "val" or "test".
        change_type: the dataset's own name for the kind of change ("color", "move", ...), None where it has none.
        is_distractor: True when nothing changed but the viewpoint or the light.
        extra: what else the dataset knows ("viewpoint_iou", "boxes"), JSON values; top-level keys in the file.
    """

    id: str
    before: str
    after: str | None
    captions: list[str]
    split: str
    change_type: str | None = None
    is_distractor: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def images(self) -> tuple[str, ...]:
        """Path of the one image, or of both."""
        return (self.before,) if self.after is None else (self.before, self.after)


@dataclass(frozen=True)
class Dataset:
    """What the data stage left in `data/<dataset>/`: where the images are, the pairs, and the counts beside them.

    Attributes:
        name: the dataset's name ("clevr_change").
        root: the folder that `before` and `after` of every pair are relative to.
        pairs: every pair of the manifest, in its order.
        info: `dataset.json` as it stands: counts by split, what was skipped, the reader's settings, "manifest_sha256".
            `info["captions_only"]` is True where nobody looked whether the images are there.
    """

    name: str
    root: Path
    pairs: list[ChangePair]
    info: dict[str, Any]


def _pair(row: dict[str, Any], where: str) -> ChangePair:
    for key, kind in _FIELDS.items():
        if key not in row or not isinstance(row[key], kind):
            found = "nothing" if key not in row else repr(row[key])[:60]
            name = getattr(kind, "__name__", "str or null")
            raise DiffcapError(f'{where}: "{key}" must be a {name}, found {found}; fix that line.')
    if row["split"] not in SPLITS:
        raise DiffcapError(
            f'{where}: "split" must be one of {", ".join(SPLITS)}, found {row["split"]!r}; fix that line.'
        )
    if not all(isinstance(caption, str) for caption in row["captions"]):
        raise DiffcapError(f'{where}: "captions" must be a list of strings; fix that line.')
    change_type, is_distractor = row.pop("change_type", None), row.pop("is_distractor", False)
    if not isinstance(change_type, str | None) or not isinstance(is_distractor, bool):
        raise DiffcapError(
            f'{where}: "change_type" must be a string or null and "is_distractor" true or false; fix that line.'
        )
    known = {key: row.pop(key) for key in _FIELDS}
    return ChangePair(**known, change_type=change_type, is_distractor=is_distractor, extra=row)


def read_manifest(path: str | Path) -> list[ChangePair]:
    """Read every pair of a `manifest.jsonl`.

    Raises:
        DiffcapError: the file is missing, a line is malformed (named by number), or an id stands twice.
    """
    pairs: list[ChangePair] = []
    seen: dict[str, str] = {}
    for where, row in read_json_lines(path, "manifest", _REMEDY):
        pair = _pair(row, where)
        if pair.id in seen:
            raise DiffcapError(f"{where}: id {pair.id!r} stands already in {seen[pair.id]}; give every pair its own.")
        seen[pair.id] = where
        pairs.append(pair)
    return pairs


def take_changes(pairs: Iterable[ChangePair], changes: Changes | None) -> list[ChangePair]:
    """The pairs with the captions of a protocol, for datasets whose sentences tell one change each (Spot-the-Diff).

    Args:
        changes: "single": every sentence is a caption of its own, and a reference (SCORER, DIRL, CLIP4IDC). "multi": the
            sentences of a pair, joined with ". " and cut behind the 60th word, are its one caption and reference (CARD's
            released files). None: as they are; the protocol has no name.
    """
    if changes != "multi":
        return list(pairs)
    return [
        replace(pair, captions=[" ".join(". ".join(pair.captions).split(" ")[:MULTI_WORDS])]) if pair.captions else pair
        for pair in pairs
    ]


def is_blank(text: str) -> bool:
    """Whether a text shows nothing: it has no letter, digit, symbol or punctuation, only spaces and zero-width characters."""
    return not any(unicodedata.category(letter)[0] in "LNPS" for letter in text)


def with_words(pairs: Iterable[ChangePair]) -> list[ChangePair]:
    """The pairs that have a caption which is not blank, with those captions only."""
    told = (replace(pair, captions=[text for text in pair.captions if not is_blank(text)]) for pair in pairs)
    return [pair for pair in told if pair.captions]


def manifest_text(pairs: Iterable[ChangePair]) -> str:
    """The text of a `manifest.jsonl`: one JSON object a line, keys always in the same order."""
    lines = []
    for pair in pairs:
        row = {key: getattr(pair, key) for key in (*_FIELDS, "change_type", "is_distractor")}
        lines.append(json.dumps({**row, **pair.extra}, ensure_ascii=False) + "\n")
    return "".join(lines)


def write_manifest(path: str | Path, pairs: Iterable[ChangePair]) -> None:
    """Write `manifest.jsonl` whole or not at all (temporary name, then rename)."""
    write_text(path, manifest_text(pairs))


def read_dataset(folder: str | Path) -> Dataset:
    """Read the `dataset.json` and the `manifest.jsonl` of a folder that the data stage wrote.

    Raises:
        DiffcapError: one of the two is missing or malformed, or the manifest is not the one that `dataset.json` counts.
    """
    folder = Path(folder)
    info = read_json(folder / "dataset.json", "dataset", _REMEDY)
    missing = [key for key in ("name", "root", "manifest_sha256") if not isinstance(info, dict) or key not in info]
    if missing:
        raise DiffcapError(f"{folder / 'dataset.json'}: lacks {', '.join(missing)}; {_REMEDY}.")
    pairs = read_manifest(folder / "manifest.jsonl")
    if file_hash(folder / "manifest.jsonl") != info["manifest_sha256"]:
        raise DiffcapError(f"{folder / 'manifest.jsonl'}: not the manifest that dataset.json counts; {_REMEDY}.")
    return Dataset(info["name"], folder / info["root"], pairs, info)


def write_dataset(folder: str | Path, name: str, root: str | Path, pairs: list[ChangePair], notes: Any) -> Dataset:
    """Write `dataset.json` and `manifest.jsonl`; files that would not change are not touched, so Make sees them as done.

    Args:
        folder: `data/<dataset>`.
        name: the dataset's name.
        root: the folder the image paths are relative to; stored relative to `folder` when it lies below it, so that
            such a folder can be moved, and absolute otherwise.
        pairs: the pairs in the order of the manifest.
        notes: a dict stored as it is beside the counts (what was skipped, the reader's settings).
    """
    # abspath, not resolve: `..` must go before asking what lies below what, and a user's links must stay as they are
    folder, absolute, home = Path(folder), Path(os.path.abspath(root)), os.path.abspath(folder)  # noqa: PTH100
    manifest, text = folder / "manifest.jsonl", manifest_text(pairs)
    info = {
        "name": name,
        "root": (absolute.relative_to(home) if absolute.is_relative_to(home) else absolute).as_posix(),
        **_counts(pairs),
        **notes,
        "manifest_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    stale = not manifest.is_file() or file_hash(manifest) != info["manifest_sha256"]
    if stale:
        manifest.unlink(missing_ok=True)  # killed between the two files, the stage must count as not done
    update_text(folder / "dataset.json", json_text(info))
    if stale:
        write_text(manifest, text)
    return Dataset(name, absolute, pairs, info)


def _counts(pairs: list[ChangePair]) -> dict[str, Any]:
    captions = sum(len(pair.captions) for pair in pairs)
    splits = {}
    for split in SPLITS:
        ours = [pair for pair in pairs if pair.split == split]
        splits[split] = {
            "pairs": len(ours),
            "distractors": sum(pair.is_distractor for pair in ours),
            "captions": sum(len(pair.captions) for pair in ours),
            "change_types": dict(sorted(Counter(pair.change_type for pair in ours if pair.change_type).items())),
        }
    return {
        "pairs": len(pairs),
        "images": len({path for pair in pairs for path in pair.images}),
        "captions": captions,
        "captions_per_pair": round(captions / max(1, len(pairs)), 2),
        "splits": splits,
    }


def write_text(path: str | Path, text: str) -> None:
    """Write a small file whole or not at all; makes its folder."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def update_text(path: Path, text: str) -> None:
    """Write a small file unless it has this text already, so that Make sees an unchanged file as up to date."""
    if not path.is_file() or path.read_bytes() != text.encode():
        write_text(path, text)


def write_json(path: str | Path, value: Any) -> None:
    """Write indented JSON whole or not at all."""
    write_text(path, json_text(value))


def json_text(value: Any) -> str:
    """A value as indented JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def read_json(path: str | Path, what: str = "JSON file", remedy: str = "") -> Any:
    """Read a JSON file.

    Args:
        what: what the file is, for the message. remedy: what to do when it is missing or damaged.

    Raises:
        DiffcapError: the file is missing or malformed.
    """
    path = Path(path)
    if not path.is_file():
        raise DiffcapError(f"{path}: no {what} there; {remedy or 'check the path'}.")
    try:
        return _loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DiffcapError(f"{path}: not valid JSON ({error}); {remedy or 'fix it or fetch it again'}.") from None


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError(f"it holds {number}, which is not a finite number")
    return value


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def _loads(text: str) -> Any:
    """Parse JSON that other programs can take, too.

    Raises:
        ValueError: it is not JSON, or holds half a character (a lone surrogate), a NUL, NaN or an infinite number.
    """
    value = _DECODER.decode(text)
    if "\\u" in text:  # nothing else can bring one in
        plain = json.dumps(value, ensure_ascii=False)
        if "\\u0000" in plain.replace("\\\\", ""):
            raise ValueError("it holds a NUL character")
        try:
            plain.encode()
        except UnicodeEncodeError as error:
            half = plain[error.start : error.end].encode("unicode_escape").decode()
            raise ValueError(f"it holds half a character, {half}") from None
    return value


def read_json_lines(
    path: str | Path, what: str = "JSON-lines file", remedy: str = "check the path"
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield `(where, object)` for every line of a JSON-lines file that is not blank.

    `where` ("<path>, line <number>") is for the caller's own complaints.

    Raises:
        DiffcapError: the file is missing (`what`, `remedy` as in `read_json`), or a line is not one JSON object.
    """
    path = Path(path)
    if not path.is_file():
        raise DiffcapError(f"{path}: no {what} there; {remedy}.")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = _loads(line.decode("utf-8-sig"))
            except json.JSONDecodeError as error:
                raise DiffcapError(
                    f"{where}: not JSON ({error.msg} at column {error.colno}); fix or delete that line."
                ) from None
            except UnicodeDecodeError:
                raise DiffcapError(f"{where}: not UTF-8 text; save the file as UTF-8.") from None
            except (ValueError, RecursionError) as error:
                raise DiffcapError(f"{where}: not usable JSON ({error}); fix or delete that line.") from None
            if not isinstance(row, dict):
                raise DiffcapError(f"{where}: expected a JSON object, found {type(row).__name__}; fix that line.")
            yield where, row


def file_hash(path: str | Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
