"""Read and write the records of image pairs and their captions, and also JSON and small text files.

A prepared dataset has the files `manifest.jsonl`, with one `ChangePair` per line, and `dataset.json`, with counts and settings.
"""

import hashlib
import json
import math
import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import atomic_write

JsonDict = dict[str, Any]  # an object of JSON, such as settings, a record or scores
ObjectType = Callable[[list[tuple[str, Any]]], Any] | None
SPLITS = ("train", "val", "test")
RANGES = "pixel_ranges"  # the key of `ChangePair.ranges` in `ChangePair.extra`
NO_CHANGE_GROUPS = ("distractor", "no_change")  # values of `ChangePair.group` for pairs without change
_FIELD_TYPES: dict[str, Any] = {"id": str, "before": str, "after": str | None, "captions": list, "split": str}
# "single": each sentence of a pair is a caption; "multi": all sentences of a pair, joined, are one caption
Changes = Literal["single", "multi"]
MULTI_WORDS = 60  # maximum number of words of a "multi" caption, as in the captions that the authors of CARD released
_REMEDY = "write it with `make data DATASET=<name> DATA=<folder>`"

# A change type must not have one of these names: the results table uses them for other groups of pairs and for other values.
_GROUP_NAMES = ("total", "semantic", "distractor", "change", "no_change")
_ROW_KEYS = ("slots", "type_accuracy", "id_tokens", "change_probability", "seconds", "steps", "std", "runs")
RESERVED_CHANGE_TYPES = frozenset((*_GROUP_NAMES, *_ROW_KEYS))


@dataclass(frozen=True)
class ChangePair:
    """An image pair and the captions that describe the change.

    Datasets of single images, which are for pre-training only, use the same record with `after` None. Such an image has captions (CUB),
    or it has no captions but a class, an integer from 0, as `extra["class"]` (NABirds).
    """

    # Unique in the manifest. Files of captions name the pair by it. CLEVR-Change: "000123.png", and "000123.png_n" for its distractor.
    id: str
    before: str  # path, relative to the dataset's root
    after: str | None
    captions: list[str]  # empty if the dataset publishes none, or has classes instead
    split: str  # "train", "val" or "test"
    change_type: str | None = None  # the kind of change as the dataset names it, such as "color"
    is_distractor: bool = False  # True if nothing changed except, perhaps, the viewpoint or the light
    # Other annotations of the dataset as JSON values, such as "viewpoint_iou"; in the file they are top-level keys. "changeflag" is 1
    # for a change and 0 for none. "mask" is the path of an image, relative to `Dataset.root`, that is 0 where nothing changed.
    extra: JsonDict = field(default_factory=dict)

    @property
    def images(self) -> tuple[str, ...]:
        """Return the paths of both images, or the path of a single image."""
        return (self.before,) if self.after is None else (self.before, self.after)

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """For each path of an image of more than 8 bits, return the two pixel values that become black and white."""
        return self.extra.get(RANGES, {})

    @property
    def group(self) -> str:
        """Return the pair's group in the scores: "change" or "no_change" if it has a "changeflag", else "semantic" or "distractor"."""
        names = ("change", "no_change") if "changeflag" in self.extra else ("semantic", "distractor")
        return names[self.is_distractor]


@dataclass(frozen=True)
class Dataset:
    """The content of `data/<dataset>/`, which the data stage writes."""

    name: str
    root: Path  # folder of the images; `before` and `after` of every pair are relative to it
    pairs: list[ChangePair]  # in the order of the manifest
    # The content of `dataset.json`: counts of each split, settings of the data stage, "manifest_sha256" and other entries.
    # "captions_only" is True if the data stage did not check that the images exist.
    info: JsonDict


def _make_pair(row: JsonDict, place: str) -> ChangePair:
    """Check a line of the manifest and return its pair; `place` is "<path>, line <number>", for messages."""
    for key, field_type in _FIELD_TYPES.items():
        if key not in row or not isinstance(row[key], field_type):
            value = "nothing" if key not in row else repr(row[key])[:60]
            type_name = getattr(field_type, "__name__", "str or null")
            raise DiffcapError(f'{place}: "{key}" must be a {type_name}, found {value}; fix that line.')
    if row["split"] not in SPLITS:
        raise DiffcapError(f'{place}: "split" must be one of {", ".join(SPLITS)}, found {row["split"]!r}; fix it.')
    if not all(isinstance(caption, str) for caption in row["captions"]):
        raise DiffcapError(f'{place}: "captions" must be a list of strings; fix that line.')
    change_type = row.pop("change_type", None)
    is_distractor = row.pop("is_distractor", False)
    if not isinstance(change_type, str | None) or not isinstance(is_distractor, bool):
        raise DiffcapError(f'{place}: "change_type" must be a string or null, "is_distractor" true or false; fix it.')
    fields = {key: row.pop(key) for key in _FIELD_TYPES}
    return ChangePair(**fields, change_type=change_type, is_distractor=is_distractor, extra=row)


def read_manifest(path: str | Path) -> list[ChangePair]:
    """Read every pair of a `manifest.jsonl`."""
    pairs: list[ChangePair] = []
    places: dict[str, str] = {}  # id -> path and line of its pair
    for place, row in read_json_lines(path, "manifest", _REMEDY):
        pair = _make_pair(row, place)
        if pair.id in places:
            raise DiffcapError(f"{place}: id {pair.id!r} is already used in {places[pair.id]}; give each pair its own.")
        places[pair.id] = place
        pairs.append(pair)
    return pairs


def take_changes(pairs: Iterable[ChangePair], changes: Changes | None) -> list[ChangePair]:
    """Return the pairs with captions according to `changes`, for datasets that have one sentence per change (Spot-the-Diff).

    "single" or None: each sentence is a caption and a reference of its pair (as in SCORER, DIRL and CLIP4IDC).
    "multi": the sentences are joined with ". ". The first 60 words are the pair's only caption and reference (as in CARD).
    """
    if changes != "multi":
        return list(pairs)
    return [
        replace(pair, captions=[" ".join(". ".join(pair.captions).split(" ")[:MULTI_WORDS])]) if pair.captions else pair
        for pair in pairs
    ]


def is_blank(text: str) -> bool:
    """Return True if a text has no visible character (letter, digit, symbol or punctuation mark)."""
    return not any(unicodedata.category(letter)[0] in "LNPS" for letter in text)


def with_words(pairs: Iterable[ChangePair]) -> list[ChangePair]:
    """Remove blank captions, and then the pairs that have no caption."""
    cleaned = (replace(pair, captions=[text for text in pair.captions if not is_blank(text)]) for pair in pairs)
    return [pair for pair in cleaned if pair.captions]


def manifest_text(pairs: Iterable[ChangePair]) -> str:
    """Return the text of a `manifest.jsonl`: one JSON object per line, keys always in the same order."""
    lines = []
    for pair in pairs:
        row = {key: getattr(pair, key) for key in (*_FIELD_TYPES, "change_type", "is_distractor")}
        lines.append(json.dumps({**row, **pair.extra}, ensure_ascii=False) + "\n")
    return "".join(lines)


def read_dataset(folder: str | Path) -> Dataset:
    """Read the `dataset.json` and the `manifest.jsonl` of a folder that the data stage wrote."""
    folder = Path(folder)
    info = _read_info(folder)
    pairs = read_manifest(folder / "manifest.jsonl")
    if file_hash(folder / "manifest.jsonl") != info["manifest_sha256"]:
        raise DiffcapError(f"{folder / 'manifest.jsonl'}: its SHA-256 is not the one in dataset.json; {_REMEDY}.")
    return Dataset(info["name"], folder / info["root"], pairs, info)


def read_root(folder: str | Path) -> Path:
    """Return the folder of a dataset's images (`Dataset.root`) without reading the manifest."""
    folder = Path(folder)
    return folder / _read_info(folder)["root"]


def _read_info(folder: Path) -> JsonDict:
    info = read_json(folder / "dataset.json", "dataset", _REMEDY)
    missing_keys = [key for key in ("name", "root", "manifest_sha256") if not isinstance(info, dict) or key not in info]
    if missing_keys:
        raise DiffcapError(f"{folder / 'dataset.json'}: the keys {', '.join(missing_keys)} are missing; {_REMEDY}.")
    return dict(info)


def write_dataset(folder: str | Path, name: str, root: str | Path, pairs: list[ChangePair], notes: Any) -> Dataset:
    """Write `dataset.json` and `manifest.jsonl`; unchanged files are not touched, so that Make treats them as up to date.

    A `root`, which is the folder of the images, inside `folder` is stored as a relative path, so that `folder` can be moved.
    `notes`: a dict of further entries of `dataset.json`, such as the number of skipped pairs.
    """
    # abspath, not resolve: ".." must be removed before the paths are compared, but symbolic links must stay
    folder, root, absolute_folder = Path(folder), Path(os.path.abspath(root)), os.path.abspath(folder)  # noqa: PTH100
    manifest_file = folder / "manifest.jsonl"
    text = manifest_text(pairs)
    info = {
        "name": name,
        "root": (root.relative_to(absolute_folder) if root.is_relative_to(absolute_folder) else root).as_posix(),
        **_counts(pairs),
        **notes,
        "manifest_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    is_stale = not manifest_file.is_file() or file_hash(manifest_file) != info["manifest_sha256"]
    if is_stale:
        manifest_file.unlink(missing_ok=True)  # until a manifest is there again, Make repeats the stage
    update_text(folder / "dataset.json", json_text(info))
    if is_stale:
        write_text(manifest_file, text)
    return Dataset(name, root, pairs, info)


def _counts(pairs: list[ChangePair]) -> JsonDict:
    captions = sum(len(pair.captions) for pair in pairs)
    splits = {}
    for split in SPLITS:
        split_pairs = [pair for pair in pairs if pair.split == split]
        splits[split] = {
            "pairs": len(split_pairs),
            "distractors": sum(pair.is_distractor for pair in split_pairs),
            "captions": sum(len(pair.captions) for pair in split_pairs),
            "change_types": dict(sorted(Counter(pair.change_type for pair in split_pairs if pair.change_type).items())),
        }
    return {
        "pairs": len(pairs),
        "images": len({path for pair in pairs for path in pair.images}),
        "captions": captions,
        "captions_per_pair": round(captions / max(1, len(pairs)), 2),
        "splits": splits,
    }


def write_text(path: str | Path, text: str) -> None:
    """Write a small file atomically; its folder is created."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def update_text(path: Path, text: str) -> None:
    """Write a small file unless it has this text already, so that Make treats an unchanged file as up to date."""
    if not path.is_file() or path.read_bytes() != text.encode():
        write_text(path, text)


def write_json(path: str | Path, value: Any) -> None:
    """Write indented JSON atomically."""
    write_text(path, json_text(value))


def json_text(value: Any) -> str:
    """Return a value as indented JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def read_json(path: str | Path, what: str = "JSON file", remedy: str = "", object_type: ObjectType = None) -> Any:
    """Read a JSON file. Errors name the kind of file (`what`) and advise a `remedy`.

    `object_type` makes a JSON object from a list of (key, value), by default `dict`; `tuple` keeps repeated keys.
    """
    path = Path(path)
    if not path.is_file():
        raise DiffcapError(f"{path}: no {what} there; {remedy or 'check the path'}.")
    try:
        return _loads(path.read_text(encoding="utf-8-sig"), _decoder(object_type))
    except (ValueError, RecursionError) as error:
        raise DiffcapError(f"{path}: not valid JSON ({error}); {remedy or 'fix it or download it again'}.") from None


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError(f"it contains {number}, which is not a finite number")
    return value


def _decoder(object_type: ObjectType = None) -> json.JSONDecoder:
    return json.JSONDecoder(parse_float=_finite, parse_constant=_finite, object_pairs_hook=object_type)


_DECODER = _decoder()


def _loads(text: str, decoder: json.JSONDecoder = _DECODER) -> Any:
    """Parse JSON; raise a ValueError for values that other programs may refuse: NaN, infinity, and invalid Unicode."""
    value = decoder.decode(text)
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()  # raises an error for half of a surrogate pair
    return value


def read_complete_lines(path: Path) -> list[JsonDict]:
    """Read a JSON-lines file, which may be missing. If a killed process has not completed the last line, remove it from the file."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    write_text(path, text[: text.rfind("\n") + 1])
    return [row for _, row in read_json_lines(path)]


def read_json_lines(
    path: str | Path, what: str = "JSON-lines file", remedy: str = "check the path"
) -> Iterator[tuple[str, JsonDict]]:
    """For every line that is not blank, yield "<path>, line <number>" and its JSON object; `what`, `remedy`: as for `read_json`."""
    path = Path(path)
    if not path.is_file():
        raise DiffcapError(f"{path}: no {what} there; {remedy}.")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                row = _loads(line.decode("utf-8-sig"))
            except json.JSONDecodeError as error:
                raise DiffcapError(
                    f"{place}: not JSON ({error.msg} at column {error.colno}); fix or delete that line."
                ) from None
            except UnicodeDecodeError:
                raise DiffcapError(f"{place}: not UTF-8 text; save the file as UTF-8.") from None
            except (ValueError, RecursionError) as error:
                raise DiffcapError(f"{place}: not usable JSON ({error}); fix or delete that line.") from None
            if not isinstance(row, dict):
                raise DiffcapError(f"{place}: expected a JSON object, found {type(row).__name__}; fix that line.")
            yield place, row


def file_hash(path: str | Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
