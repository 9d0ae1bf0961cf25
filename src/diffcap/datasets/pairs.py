"""Reader of a user's own dataset: a folder with images and a list of pairs. The list is `pairs.jsonl`, one JSON object per line:

    {"before": "shots/desk_1.jpg", "after": "shots/desk_2.jpg", "captions": ["the red cup is gone"]}

docs/own_dataset.md describes the optional keys, for example "viewpoint_iou", the overlap of both viewpoints. The data stage warns of
other keys, and copies them to the list of pairs that it writes (the manifest). If no pair has a split, `draw_splits` divides the pairs
at random. The list may also be

* `pairs.csv` or `pairs.tsv`, whose first line names the keys, and whose column "caption" has one sentence;
* a list of another program, see `diffcap.datasets.forms`;
* a JSON file in Karpathy's form, see `diffcap.datasets.karpathy`. The before images are then in `images/<split>/A`, the after images in
  `images/<split>/B`, masks in `images/<split>/label`. `images/`, `<split>/` or both may be missing in these paths.
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

from diffcap.datasets.checks import PlacedRow, check_relative_path, check_sentences, make_default_ids
from diffcap.datasets.forms import find_lists, read_lists
from diffcap.datasets.karpathy import LEVIR_LAYOUT, ImageLayout, read_files
from diffcap.datasets.registry import datasets
from diffcap.records import RANGES, RESERVED_CHANGE_TYPES, SPLITS, ChangePair, is_blank, read_json, read_json_lines
from diffcap.utils.errors import DiffcapError, wrap_errors

TABLE_NAMES = ("pairs.jsonl", "pairs.csv", "pairs.tsv")
IMAGE_LAYOUTS = (
    LEVIR_LAYOUT,
    *(
        ImageLayout(f"{home}A/{{name}}", f"{home}B/{{name}}", f"{home}label/{{name}}")
        for home in ("{folder}/", "images/", "")
    ),
)
HELD_OUT_FRACTION = 0.1  # fraction of the pairs in val, and in test
KEYS = ("before", "after", "captions", "id", "split", "change_type", "is_distractor", "viewpoint_iou", "boxes", "mask")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_box(value: Any) -> bool:
    return value is None or (isinstance(value, list) and len(value) == 4 and all(map(_is_number, value)))


# Optional key -> (function that returns True for a valid value; what the value must be, for error messages).
_VALUE_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
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
_REFUSED_KEYS = {  # key -> why it is refused
    "changed": "is a key of the rendered dataset `blocks`; rename it",
    "changeflag": 'is not a key of this format; write "is_distractor": true for no change',
}


def read(folder: Path) -> list[ChangePair]:
    """Read the pairs of a user's own folder, in the order of the file."""
    json_lists, json_files = [], []  # JSON files whose content is a list; those in Karpathy's form
    for file in sorted(folder.glob("*.json")):
        with suppress(DiffcapError, AttributeError):  # another file, such as one with comments
            content = read_json(file)
            if isinstance(content, list):
                json_lists.append(file)
            elif isinstance(content.get("images"), list) and "annotations" not in content:  # COCO's form has this key
                json_files.append(file)
    tables = [folder / name for name in TABLE_NAMES if (folder / name).is_file()]
    file_names = ", ".join(file.name for file in json_files)
    if tables and json_files:
        raise DiffcapError(f"{folder}: has both {tables[0].name} and {file_names}; keep one of the two formats.")
    if tables:
        has_cells = tables[0].suffix != ".jsonl"
        rows = [(place, _parse_cells(row) if has_cells else row) for place, row in read_rows(tables[0])]
        return _make_pairs(rows, tables[0])
    if not json_files and (lists := find_lists(folder, json_lists)):
        return _make_pairs(read_lists(folder, lists), lists[0])
    if len(json_files) > 1:
        raise DiffcapError(f"{folder}: has several JSON files with images ({file_names}); keep one of them.")
    # If no JSON file lists images, but the folder has a single JSON file, read this file: the error then states what is wrong in it.
    json_files = json_files or sorted(folder.glob("*.json"))
    if len(json_files) != 1:
        raise DiffcapError(
            f"{folder}: no pairs.jsonl there (nor pairs.csv, pairs.tsv or a JSON file of images); write pairs.jsonl, one JSON object "
            'per line: {"before": "a.png", "after": "b.png", "captions": ["..."]}, or choose a dataset that has a reader '
            f"({', '.join(sorted(datasets()))})."
        )
    return read_files(folder, {json_files[0]: ""}, *IMAGE_LAYOUTS)


def _make_pairs(rows: Sequence[PlacedRow], table_file: Path) -> list[ChangePair]:
    """Make the pairs of the rows of `table_file`, which are (place, values); draw the splits if no row has one."""
    image_paths = [[_check_image_path(row.get(key), key, place) for key in ("before", "after")] for place, row in rows]
    values = zip(rows, image_paths, make_default_ids(image_paths))
    pairs = [_make_pair(row, place, before, after, id) for (place, row), (before, after), id in values]
    place_of_id: dict[str, str] = {}
    for (place, _), pair in zip(rows, pairs):
        if (other := place_of_id.setdefault(pair.id, place)) != place:
            raise DiffcapError(f"{place}: the id {pair.id!r} is also in {other}; give every pair its own id.")
    unsplit = [place_of_id[pair.id] for pair in pairs if not pair.split]
    if not unsplit:
        return pairs
    if len(unsplit) < len(pairs):
        raise DiffcapError(f'{unsplit[0]}: no "split", while other lines have one; give it on every line or on none.')
    if pair_id := next((pair.id for pair in pairs if not pair.captions), None):
        raise DiffcapError(
            f"{place_of_id[pair_id]}: this pair has no caption, so it cannot be used for training; "
            'give every line a "split", and this one "test".'
        )
    return draw_splits(pairs, table_file)


def _parse_cells(row: dict[str, str]) -> dict[str, Any]:
    """Convert the cells of a CSV row to values as in a line of `pairs.jsonl`. Empty cells are left out."""
    values: dict[str, Any] = {key: text.strip() for key, text in row.items() if not is_blank(text)}
    for key in {"is_distractor", "viewpoint_iou", "boxes"} & values.keys():
        with suppress(ValueError):  # `_make_pair` refuses a cell that is not JSON
            values[key] = json.loads(values[key].lower())
    if values.get("is_distractor") in (0, 1):
        values["is_distractor"] = bool(values["is_distractor"])
    caption = values.pop("caption", None) or values.get("captions")
    return {**values, "captions": [caption] if caption else []}


def notes(pairs: Sequence[ChangePair]) -> list[str]:
    """Return a list with one warning that names all unknown keys, or an empty list. The data stage prints and stores the warning."""
    # Two keys are of the reader of Karpathy's form, and "fit" is of `write_fitted`.
    known_keys = {*KEYS, "changeflag", "changeflag_derived", "fit"}
    remarks = []
    for key, num_pairs in Counter(key for pair in pairs for key in pair.extra if key not in known_keys).items():
        lower_key = key.lower()
        similar_keys = difflib.get_close_matches(lower_key, KEYS, 1, 0.7)
        similar_keys += [known_key for known_key in KEYS if lower_key in known_key.split("_")]
        hint = f'; did you mean "{similar_keys[0]}"?' if similar_keys else ""
        remarks.append(f'"{key}" ({num_pairs:,} pairs{hint})')
    return [f"warning: unknown keys, which are only copied to the manifest: {', '.join(remarks)}"] if remarks else []


def draw_splits(pairs: list[ChangePair], table_file: Path) -> list[ChangePair]:
    """Give every pair a split: about 80 % train, 10 % val and 10 % test, and at least one pair in each.

    Pairs that are connected by common images are one group. All pairs of a group get the same split, so that no test image is seen in
    training. The groups are shuffled with a fixed seed. The kind of a group is the set of the change types of its pairs. If pairs have
    change types, `_spread_kinds` reorders the groups so that each split gets all kinds. Then "val" takes one group after the other, except
    those with which it would have more than a tenth of all pairs. If all groups are too large, it takes the smallest group. "test" does
    the same.
    """
    group_of_image = group_connected_images(pairs)
    groups = sorted(set(group_of_image.values()))
    if len(groups) < 3:
        raise DiffcapError(
            f"{table_file}: the pairs form only {len(groups)} groups without common images, and three are needed to split them; "
            'add pairs or write "split" yourself.'
        )
    random.Random(0).shuffle(groups)
    kinds_of_group: dict[str, set[str]] = {group: set() for group in groups}
    if any(pair.change_type for pair in pairs):
        for pair in pairs:
            kinds_of_group[group_of_image[pair.before]].add(f"{pair.change_type} {pair.is_distractor}")
    kind_of_group = {group: frozenset(kinds) for group, kinds in kinds_of_group.items()}
    num_of_kind = Counter(kind_of_group.values())
    # All groups of kinds with fewer than three groups count as one kind.
    kind_of_group = {group: kind if num_of_kind[kind] > 2 else frozenset() for group, kind in kind_of_group.items()}
    num_pairs = Counter(group_of_image[pair.before] for pair in pairs)
    split_of_group = dict.fromkeys(groups, "train")
    num_held_out = max(1, round(HELD_OUT_FRACTION * len(pairs)))
    for split, num_reserved in (("val", 2), ("test", 1)):  # num_reserved: groups that later splits need
        free_groups = _spread_kinds([group for group in groups if split_of_group[group] == "train"], kind_of_group)
        chosen_groups: list[str] = []
        num_left = num_held_out  # pairs that the split can still take
        for group in free_groups:
            if num_pairs[group] <= num_left and len(chosen_groups) < len(free_groups) - num_reserved:
                chosen_groups.append(group)
                num_left -= num_pairs[group]
        split_of_group |= dict.fromkeys(chosen_groups or [min(free_groups, key=num_pairs.__getitem__)], split)
    return [replace(pair, split=split_of_group[group_of_image[pair.before]]) for pair in pairs]


def _spread_kinds(groups: list[str], kind_of_group: Mapping[str, frozenset[str]]) -> list[str]:
    """Reorder groups so that their first tenth has about a tenth of each kind, and at least one group of each kind of three or more groups.

    Groups of one kind keep their order. `kind_of_group` also has the groups that already have a split, which are not in `groups`.
    """
    num_of_kind = Counter(kind_of_group.values())
    num_in_groups, num_placed = Counter(kind_of_group[group] for group in groups), Counter[frozenset[str]]()
    order_key: dict[str, tuple[float, int]] = {}
    for group in groups:  # the first of three groups of a kind has the key 0.25 / 3, so it is in the first tenth
        kind = kind_of_group[group]
        order_key[group] = ((num_placed[kind] + 0.25) / num_of_kind[kind], -num_in_groups[kind])
        num_placed[kind] += 1
    return sorted(groups, key=order_key.__getitem__)


def group_connected_images(pairs: list[ChangePair]) -> dict[str, str]:
    """Return image -> name of its group. All images that pairs connect are one group, named after its alphabetically first image."""
    from scipy.cluster.hierarchy import DisjointSet

    images = DisjointSet(image for pair in pairs for image in pair.images)
    for pair in pairs:
        images.merge(pair.before, pair.images[-1])
    return {image: name for group in images.subsets() for name in [min(group)] for image in group}


def _make_pair(values: dict[str, Any], place: str, before: str, after: str, default_id: str) -> ChangePair:
    # The data stage computes the ranges of pixel values, so a given `RANGES` is dropped.
    values = {key: value for key, value in values.items() if key not in ("before", "after", RANGES)}
    for key, (is_valid, requirement) in _VALUE_CHECKS.items():
        if key in values and not is_valid(values[key]):
            raise DiffcapError(f'{place}: "{key}" must be {requirement}, found {values[key]!r:.60}; fix that line.')
    for key in _REFUSED_KEYS.keys() & values.keys():
        raise DiffcapError(f'{place}: "{key}" {_REFUSED_KEYS[key]}.')
    if "captions" not in values:
        similar_keys = difflib.get_close_matches("captions", values, 1)
        found = f', and "{similar_keys[0]}" is not a known key' if similar_keys else ""
        raise DiffcapError(f'{place}: "captions" is missing{found}; write "captions": ["a sentence", ...].')
    captions = check_sentences(values.pop("captions"), place, "captions")
    if any(map(is_blank, captions)):
        raise DiffcapError(f"{place}: a blank caption; write its text or remove it.")
    pair_id, split = str(values.pop("id", default_id)), values.pop("split", None) or ""
    change_type, is_distractor = values.pop("change_type", None), values.pop("is_distractor", False)
    if change_type in RESERVED_CHANGE_TYPES and not is_distractor:
        raise DiffcapError(f'{place}: "change_type" is {change_type!r}, which is a reserved name; use another name.')
    if "mask" in values:
        values["mask"] = _check_image_path(values["mask"], "mask", place)
    return ChangePair(pair_id, before, after, captions, split, change_type, is_distractor, values)


def _check_image_path(path: object, key: str, place: str) -> str:
    if not isinstance(path, str) or not path:
        raise DiffcapError(f'{place}: "{key}" must be the path of an image, found {path!r:.60}; fix that line.')
    check_relative_path(path, place)
    return str(PurePosixPath(path))  # "./a.png" becomes "a.png", so that each image has one name


def read_rows(table_file: Path) -> Iterable[PlacedRow]:
    """Yield ("<file>, line <number>", row) for each line of a table of pairs (.jsonl, .csv or .tsv). Cells of .csv and .tsv are strings."""
    if table_file.suffix.lower() == ".jsonl":
        yield from read_json_lines(table_file, "table of pairs")
        return
    if not table_file.is_file():
        raise DiffcapError(f"{table_file}: file not found; check the path.")
    with wrap_errors(table_file, "not a table of UTF-8 text", "save it as UTF-8"):
        text = table_file.read_text(encoding="utf-8-sig")
        if "\0" in text:
            raise ValueError("it contains a NUL character")
    with wrap_errors(table_file, "not a CSV table", "separate columns with commas"):
        dialect: Any = csv.excel_tab
        if table_file.suffix.lower() != ".tsv":
            first_line = text.partition("\n")[0]
            dialect = csv.excel if "," in first_line else csv.Sniffer().sniff(text[:4096], ",;\t")
        reader = csv.reader(io.StringIO(text), dialect, strict=True)
        numbered_cells = [(reader.line_num, cells) for cells in reader]
    first_cells = [cell.strip() for cell in numbered_cells[0][1]] if numbered_cells else []
    columns = [name.lower() for name in first_cells]
    if "before" in columns and "after" in columns:
        del numbered_cells[0]
    elif len(first_cells) == 2 and all(re.search(r"\.\w+$", cell) for cell in first_cells):
        columns = ["before", "after"]  # two columns of image paths, without a header
    else:
        raise DiffcapError(f'{table_file}: its first line must name the columns, among them "before" and "after".')
    if name := next((name for name in ("before", "after", "id", "caption") if columns.count(name) > 1), None):
        raise DiffcapError(f'{table_file}, line 1: {columns.count(name)} columns are named "{name}"; keep one of them.')
    for line_number, cells in numbered_cells:
        if any(cell.strip() for cell in cells[len(columns) :]):
            raise DiffcapError(
                f"{table_file}, line {line_number}: {len(cells)} cells for {len(columns)} columns; put quotes around a path with a comma."
            )
        if any(cell.strip() for cell in cells):
            yield f"{table_file}, line {line_number}", dict(zip(columns, cells))
