"""A dataset of your own: a folder with images and a `pairs.jsonl`, one JSON object per line, or a JSON file in Karpathy's form.

    {"before": "shots/desk_1.jpg", "after": "shots/desk_2.jpg", "captions": ["the red cup is gone"]}

docs/own_dataset.md describes the optional keys (`KEYS`). Other keys are copied to the manifest, and the data stage names them; only
those of `_REFUSED` are refused, and `pixel_ranges` is ignored, since the data stage writes it. Instead of `pairs.jsonl`, there may be a
`pairs.csv` or `pairs.tsv` whose first line names the keys; "caption" is one sentence. Without `split`, see `draw_splits`.

The images of a JSON file (`diffcap.datasets.karpathy`) are in `images/<split>/A` (before) and `images/<split>/B` (after), or in such
folders without `images` or without `<split>`, where <split> is the `filepath` of an entry, by default its split. Masks of the change,
if there are any, are in `label` beside `A`.
"""

import csv
import difflib
import io
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from diffcap.datasets.checks import check_inside, default_ids, note_once, sentences
from diffcap.datasets.karpathy import LEVIR, Layout, read_files
from diffcap.datasets.registry import datasets
from diffcap.records import RANGES, RESERVED_CHANGE_TYPES, SPLITS, ChangePair, is_blank, read_json, read_json_lines
from diffcap.utils.errors import DiffcapError

FILES = ("pairs.jsonl", "pairs.csv", "pairs.tsv")
LAYOUTS = (
    LEVIR,
    *(
        Layout(f"{home}A/{{name}}", f"{home}B/{{name}}", f"{home}label/{{name}}")
        for home in ("{folder}/", "images/", "")
    ),
)
HELD_OUT = 0.1  # fraction of the pairs for val, and the same for test
KEYS = ("before", "after", "captions", "id", "split", "change_type", "is_distractor", "viewpoint_iou", "boxes", "mask")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_box(value: Any) -> bool:
    return value is None or (isinstance(value, list) and len(value) == 4 and all(map(_is_number, value)))


# Optional keys: whether a value is valid, and what it must be.
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "id": (lambda value: type(value) in (str, int) and not is_blank(str(value)), "a string"),
    "split": (lambda value: value in (None, "", *SPLITS), f"one of {', '.join(SPLITS)}"),
    "change_type": (lambda value: isinstance(value, str | None), "a string"),
    "is_distractor": (lambda value: isinstance(value, bool), "true or false"),
    "viewpoint_iou": (lambda value: value is None or _is_number(value), "a number"),
    "boxes": (
        lambda value: value is None or (isinstance(value, dict) and all(map(_is_box, value.values()))),
        '{"before": [x0, y0, x1, y1] or null, "after": ...}',
    ),
}
_REFUSED = {
    "changed": "is reserved for the dataset blocks; rename that key",
    "changeflag": 'is not a key of this format; write "is_distractor": true for no change',
}


def read(folder: Path) -> list[ChangePair]:
    """Read the pairs of a user's own folder, in the order of the file."""
    files = [path for path in sorted(folder.glob("*.json")) if _has_images(path)]
    remedy = 'write pairs.jsonl, one JSON object per line: {"before": "a.png", "after": "b.png", "captions": ["..."]}'
    names = ", ".join(path.name for path in files)
    table = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if table:
        if files:
            raise DiffcapError(f"{folder}: has both {table.name} and {names}; keep one of the two formats.")
        return _read_table(table)
    if len(files) > 1:
        raise DiffcapError(f"{folder}: has several JSON files with images ({names}); keep one of them.")
    # Without such a file, read the only JSON file: the error message then states what is wrong with it.
    files = files or sorted(folder.glob("*.json"))
    if len(files) != 1:
        raise DiffcapError(
            f"{folder}: no pairs.jsonl there, which one's own dataset needs, no pairs.csv and no JSON file of images; "
            f"{remedy}, or choose a dataset that has a reader ({', '.join(sorted(datasets()))})."
        )
    (path,) = files
    if isinstance(read_json(path), list):
        raise DiffcapError(f"{path}: a JSON list, which is not read; {remedy}.")
    return read_files(folder, {path: ""}, *LAYOUTS)


def _has_images(path: Path) -> bool:
    """Whether a JSON file has a list of images; one in COCO's form, which may be beside a `pairs.jsonl`, does not count."""
    try:
        value = read_json(path)
    except DiffcapError:
        return False
    return isinstance(value, dict) and isinstance(value.get("images"), list) and "annotations" not in value


def _read_table(path: Path) -> list[ChangePair]:
    pairs: list[ChangePair] = []
    seen: dict[str, str] = {}
    without_split = ""  # file and number of the first line without a split
    lines = list(read_rows(path))
    if path.suffix != ".jsonl":
        lines = [(where, _from_cells(row)) for where, row in lines]
    images = [[_image(row.get(key), key, where) for key in ("before", "after")] for where, row in lines]
    for (where, row), (before, after), default_id in zip(lines, images, default_ids(images)):
        pair = _pair(row, where, before, after, default_id)
        note_once(seen, pair.id, where, "id", "give every pair its own")
        without_split = without_split or ("" if pair.split else where)
        pairs.append(pair)
    if not without_split:
        return pairs
    if any(pair.split for pair in pairs):
        raise DiffcapError(
            f'{without_split}: no "split", while other lines have one; give it on every line or on none.'
        )
    no_caption = next((pair for pair in pairs if not pair.captions), None)
    if no_caption:
        raise DiffcapError(
            f"{seen[no_caption.id]}: this pair has no caption, so it cannot be used for training; "
            'give every line a "split", and this one "test".'
        )
    return draw_splits(pairs, path)


def _from_cells(row: dict[str, str]) -> dict[str, Any]:
    """Convert a row of a CSV table to the values of a line of `pairs.jsonl`, without empty cells."""
    values: dict[str, Any] = {key: text.strip() for key, text in row.items() if not is_blank(text)}
    for key in {"is_distractor", "viewpoint_iou", "boxes"} & values.keys():
        with suppress(ValueError):  # such a cell is refused with the other values
            values[key] = json.loads(values[key].lower())
    if values.get("is_distractor") in (0, 1):
        values["is_distractor"] = bool(values["is_distractor"])
    caption = values.pop("caption", None) or values.get("captions")
    return {**values, "captions": [caption] if caption else []}


def notes(pairs: Sequence[ChangePair]) -> list[str]:
    """Return a warning of unknown keys, which the data stage prints and stores."""
    known = {*KEYS, "changeflag", "changeflag_derived"}  # the last two: of Karpathy's form
    unknown = []
    for key, count in Counter(key for pair in pairs for key in pair.extra if key not in known).items():
        name = key.lower()
        near = difflib.get_close_matches(name, KEYS, 1, 0.7) or [known for known in KEYS if name in known.split("_")]
        hint = f'; did you mean "{near[0]}"?' if near else ""
        unknown.append(f'"{key}" ({count:,} pairs{hint})')
    return [f"warning: unknown keys, which are only copied to the manifest: {', '.join(unknown)}"] if unknown else []


def draw_splits(pairs: list[ChangePair], path: Path) -> list[ChangePair]:
    """Give every pair a split, about 80 : 10 : 10, at least one pair each.

    Pairs that share an image, directly or through other pairs, are one group and get the same split, so that no test image is seen in
    training. The groups are shuffled with a fixed seed; if there are change types, the kinds of groups are then spread over the order,
    see `_spread`. "val", and then "test", takes the first groups that fit into its tenth, or the smallest group if none fits.
    """
    group = connected_images(pairs)
    keys = sorted(set(group.values()))
    if len(keys) < 3:
        raise DiffcapError(
            f"{path}: the pairs form only {len(keys)} groups without common images, and three are needed to split them; "
            'add pairs or write "split" yourself.'
        )
    random.Random(0).shuffle(keys)
    kinds: dict[str, set[str]] = {key: set() for key in keys}
    if any(pair.change_type for pair in pairs):
        for pair in pairs:
            kinds[group[pair.before]].add(f"{pair.change_type} {pair.is_distractor}")
    kind = {key: frozenset(found) for key, found in kinds.items()}
    groups = Counter(kind.values())
    kind = {key: found if groups[found] > 2 else frozenset() for key, found in kind.items()}
    size, split = Counter(group[pair.before] for pair in pairs), dict.fromkeys(keys, "train")
    held = max(1, round(HELD_OUT * len(pairs)))
    for name, reserved in (("val", 2), ("test", 1)):  # one group is reserved for each of the other splits
        free = _spread([key for key in keys if split[key] == "train"], kind)
        chosen: list[str] = []
        room = held
        for key in free:
            if size[key] <= room and len(chosen) < len(free) - reserved:
                chosen, room = [*chosen, key], room - size[key]
        split |= dict.fromkeys(chosen or [min(free, key=lambda key: size[key])], name)
    return [replace(pair, split=split[group[pair.before]]) for pair in pairs]


def _spread(keys: list[str], kind: Mapping[str, frozenset[str]]) -> list[str]:
    """Reorder groups so that the first tenth has about a tenth of each kind, and one of a kind with three groups or more.

    Args:
        keys: the groups that are left; those of one kind keep their order. kind: of every group: the change types and
            `is_distractor` of its pairs; kinds with fewer than three groups are one kind together.
    """
    groups, left, rank = Counter(kind.values()), Counter(kind[key] for key in keys), Counter[frozenset[str]]()
    place: dict[str, tuple[float, int]] = {}
    for key in keys:  # 0.25 of 3 is below 0.1; of equal places, kinds of which no group was taken are first
        place[key] = ((rank[kind[key]] + 0.25) / groups[kind[key]], -left[kind[key]])
        rank[kind[key]] += 1
    return sorted(keys, key=place.__getitem__)


def connected_images(pairs: list[ChangePair]) -> dict[str, str]:
    """Image -> the alphabetically first image of its connected component (union-find); pairs are the edges."""
    parent: dict[str, str] = {}

    def find(image: str) -> str:
        while parent.setdefault(image, image) != image:
            parent[image] = image = parent[parent[image]]
        return image

    for pair in pairs:
        roots = sorted(find(image) for image in pair.images)
        parent[roots[-1]] = roots[0]
    return {image: find(image) for image in parent}


def _pair(row: dict[str, Any], where: str, before: str, after: str, default_id: str) -> ChangePair:
    row = {key: value for key, value in row.items() if key not in ("before", "after", RANGES)}
    for key, (is_valid, form) in _VALUES.items():
        if key in row and not is_valid(row[key]):
            raise DiffcapError(f'{where}: "{key}" must be {form}, found {row[key]!r:.60}; fix that line.')
    for key in _REFUSED.keys() & row.keys():
        raise DiffcapError(f'{where}: "{key}" {_REFUSED[key]}.')
    if "captions" not in row:
        near = difflib.get_close_matches("captions", row, 1)
        found = f', and "{near[0]}" is not a known key' if near else ""
        raise DiffcapError(f'{where}: "captions" is missing{found}; write "captions": ["a sentence", ...].')
    captions = sentences(row.pop("captions"), where, "captions")
    if any(map(is_blank, captions)):
        raise DiffcapError(f'{where}: "captions" has a blank sentence; fill it or delete it.')
    identity, split = str(row.pop("id", default_id)), row.pop("split", None) or ""
    if split == "train" and not captions:
        raise DiffcapError(f"{where}: a training pair needs at least one caption; add one or delete the line.")
    kind, distractor = row.pop("change_type", None), row.pop("is_distractor", False)
    if kind in RESERVED_CHANGE_TYPES and not distractor:
        raise DiffcapError(f'{where}: "change_type" is {kind!r}, which is a reserved name; use another name.')
    if "mask" in row:
        row["mask"] = _image(row["mask"], "mask", where)
    return ChangePair(identity, before, after, captions, split, kind, distractor, row)


def _image(path: object, key: str, where: str) -> str:
    if not isinstance(path, str) or not path:
        raise DiffcapError(f'{where}: "{key}" must be the path of an image, found {path!r:.60}; fix that line.')
    check_inside(path, where)
    return str(PurePosixPath(path))  # "./a.png" becomes "a.png", so that each image has one name


def read_rows(path: Path) -> Iterable[tuple[str, dict[str, Any]]]:
    """Yield `(where, row)` for each line of a table of pairs: .jsonl, .csv or .tsv. The cells of a CSV table are strings."""
    if path.suffix.lower() == ".jsonl":
        yield from read_json_lines(path, "table of pairs")
        return
    if not path.is_file():
        raise DiffcapError(f"{path}: file not found; check the path.")
    try:
        text = path.read_text(encoding="utf-8-sig")
        if "\0" in text:
            raise ValueError("it contains a NUL character")
    except (ValueError, OSError) as error:
        raise DiffcapError(
            f"{path}: not a table of UTF-8 text ({' '.join(str(error).split())[:80]}); save it as UTF-8."
        ) from None
    try:
        if path.suffix.lower() == ".tsv":
            dialect: type[csv.Dialect] | csv.Dialect = csv.excel_tab
        else:
            dialect = csv.excel if "," in text.partition("\n")[0] else csv.Sniffer().sniff(text[:4096], ",;\t")
        reader = csv.reader(io.StringIO(text), dialect, strict=True)
        lines = [(reader.line_num, cells) for cells in reader]
    except csv.Error as error:
        raise DiffcapError(f"{path}: not a CSV table ({error}); separate columns with commas.") from None
    first = [cell.strip() for cell in lines[0][1]] if lines else []
    head = [name.lower() for name in first]
    if "before" in head and "after" in head:
        del lines[0]
    elif len(first) == 2 and all(re.search(r"\.\w+$", cell) for cell in first):
        head = ["before", "after"]  # two columns of image paths, without a header
    else:
        raise DiffcapError(f'{path}: its first line must name the columns, among them "before" and "after".')
    duplicate = next((name for name in ("before", "after", "id", "caption") if head.count(name) > 1), None)
    if duplicate:
        raise DiffcapError(
            f'{path}, line 1: {head.count(duplicate)} columns are named "{duplicate}"; keep one of them.'
        )
    for number, cells in lines:
        if any(cell.strip() for cell in cells[len(head) :]):
            raise DiffcapError(
                f"{path}, line {number}: {len(cells)} cells for {len(head)} columns; put quotes around a path with a comma."
            )
        if any(cell.strip() for cell in cells):
            yield f"{path}, line {number}", dict(zip(head, cells))
