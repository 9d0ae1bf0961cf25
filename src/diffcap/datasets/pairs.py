"""A dataset of your own: a folder with images and a `pairs.jsonl`, one JSON object per line.

    {"before": "shots/desk_1.jpg", "after": "shots/desk_2.jpg", "captions": ["the red cup is gone"]}

`before` and `after` are paths relative to the folder. `captions` has at least one sentence (it may be empty for "val" and "test").
Optional keys:

* `id`: see `default_ids` for the default, which `diffcap caption` has as well;
* `split`: "train", "val" or "test", on every line or on none;
* `change_type`: any name except `RESERVED_CHANGE_TYPES`;
* `is_distractor`: true if only the viewpoint or the light changed;
* `viewpoint_iou` (a number) and `boxes` (`{"before": [x0, y0, x1, y1], "after": null}`, the changed object in pixels): used in
  reports;
* `mask`: path of an image of the changed pixels, 0 where nothing changed: used by `diffcap audit` and in reports.

Other keys are copied to the manifest. Only two are refused: `changed`, which describes an object of `blocks`, and `changeflag`, for
which there is `is_distractor`.

Without `split`, every line needs a caption. About 80 % of the pairs become "train", 10 % "val" and 10 % "test" (at least one
each), drawn with a fixed seed. Lines that share an image, directly or through other lines, get the same split, so that no test
image is seen in training.
"""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from diffcap.datasets.checks import check_inside, note_once, sentences
from diffcap.records import RESERVED_CHANGE_TYPES, SPLITS, ChangePair, is_blank, read_json_lines
from diffcap.utils.errors import DiffcapError

SPLIT_SEED = 0
HELD_OUT = 0.1  # fraction of the pairs for val, and the same for test


def read(folder: Path) -> list[ChangePair]:
    """Read the pairs of `pairs.jsonl`, in the order of its lines.

    Raises:
        DiffcapError: the file is missing, a line is malformed, only some lines have a split, or there are fewer than
            three groups to split.
    """
    path = folder / "pairs.jsonl"
    pairs: list[ChangePair] = []
    seen: dict[str, str] = {}
    without_split = ""  # file and number of the first line without a split
    lines = list(read_json_lines(path))
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


def default_ids(images: Sequence[Sequence[str]]) -> list[str]:
    """The ids of pairs that have none of their own.

    They all have the same form, the first of these that gives every pair another id: the file name of the image before without
    its suffix; its path without suffix; both file names without suffix, joined by "-"; the number of the pair, with six digits.

    Args:
        images: paths of both images of each pair of a file, in the order of the lines.

    Example:
        >>> default_ids([("a/1.jpg", "b/1.jpg"), ("a/2.jpg", "b/2.jpg")])
        ['1', '2']
        >>> default_ids([("1/a.jpg", "1/b.jpg"), ("2/a.jpg", "2/b.jpg")])
        ['1/a', '2/a']
        >>> default_ids([("1.jpg", "2.jpg"), ("1.jpg", "3.jpg")])
        ['1-2', '1-3']
    """
    paths = [[PurePosixPath(path) for path in pair] for pair in images]
    forms = (
        [before.stem for before, _ in paths],
        [str(before.parent / before.stem) for before, _ in paths],
        [f"{before.stem}-{after.stem}" for before, after in paths],
    )
    for ids in forms:
        if len(set(ids)) == len(ids) and not any(map(is_blank, ids)):
            return ids
    return [f"{number:06d}" for number in range(1, len(paths) + 1)]


def draw_splits(pairs: list[ChangePair], path: Path) -> list[ChangePair]:
    """Give every pair a split, about 80 : 10 : 10; pairs that share an image get the same split.

    The groups of such pairs are shuffled with a fixed seed. "val", and then "test", takes the groups that fit into its tenth,
    or the smallest group if none fits.

    Args:
        pairs: all pairs. path: of their file, for the message.

    Raises:
        DiffcapError: there are fewer than three groups.
    """
    group = _groups(pairs)
    keys = sorted(set(group.values()))
    if len(keys) < 3:
        raise DiffcapError(
            f"{path}: the pairs form only {len(keys)} groups without common images, and three are needed to split them; "
            'add pairs or write "split" yourself.'
        )
    random.Random(SPLIT_SEED).shuffle(keys)
    size, split = Counter(group[pair.before] for pair in pairs), dict.fromkeys(keys, "train")
    held = max(1, round(HELD_OUT * len(pairs)))
    for name, reserved in (("val", 2), ("test", 1)):  # one group is reserved for each of the other splits
        free = [key for key in keys if split[key] == "train"]
        chosen: list[str] = []
        room = held
        for key in free:
            if size[key] <= room and len(chosen) < len(free) - reserved:
                chosen, room = [*chosen, key], room - size[key]
        split |= dict.fromkeys(chosen or [min(free, key=lambda key: size[key])], name)
    return [replace(pair, split=split[group[pair.before]]) for pair in pairs]


def _groups(pairs: list[ChangePair]) -> dict[str, str]:
    """Image -> the alphabetically first image of its connected component (union-find); pairs are the edges."""
    parent: dict[str, str] = {}

    def find(image: str) -> str:
        while parent.setdefault(image, image) != image:
            parent[image] = image = parent[parent[image]]
        return image

    for pair in pairs:
        root, other = sorted(find(image) for image in pair.images)
        parent[other] = root
    return {image: find(image) for image in parent}


def _pair(row: dict[str, Any], where: str, before: str, after: str, default_id: str) -> ChangePair:
    row = {key: value for key, value in row.items() if key not in ("before", "after")}
    captions = sentences(row.pop("captions", None), where, "captions")
    if any(map(is_blank, captions)):
        raise DiffcapError(f'{where}: "captions" has a blank sentence; fill it or delete it.')
    identity = row.pop("id", default_id)
    if not isinstance(identity, str | int) or isinstance(identity, bool) or is_blank(str(identity)):
        raise DiffcapError(f'{where}: "id" must be a string, found {identity!r:.60}; fix that line.')
    split = row.pop("split", None) or ""
    if split not in (*SPLITS, ""):
        raise DiffcapError(f'{where}: "split" must be one of {", ".join(SPLITS)}, found {split!r:.60}; fix that line.')
    if split == "train" and not captions:
        raise DiffcapError(f"{where}: a training pair needs at least one caption; add one or delete the line.")
    kind, distractor = row.pop("change_type", None), row.pop("is_distractor", False)
    if not isinstance(kind, str | None) or not isinstance(distractor, bool):
        raise DiffcapError(f'{where}: "change_type" must be a string and "is_distractor" true or false; fix that line.')
    if kind in RESERVED_CHANGE_TYPES and not distractor:
        raise DiffcapError(f'{where}: "change_type" is {kind!r}, which is a reserved name; use another name.')
    _check_known_keys(row, where)
    return ChangePair(str(identity), before, after, captions, split, kind, distractor, row)


def _check_known_keys(row: dict[str, Any], where: str) -> None:
    """Check the optional keys that evaluation and reports use."""
    if "changed" in row:
        raise DiffcapError(f'{where}: "changed" is reserved for the dataset blocks; rename that key.')
    if "changeflag" in row:
        raise DiffcapError(
            f'{where}: "changeflag" is not a key of this format; write "is_distractor": true for no change.'
        )
    if "mask" in row:
        row["mask"] = _image(row["mask"], "mask", where)
    if row.get("viewpoint_iou") is not None and not _is_number(row["viewpoint_iou"]):
        raise DiffcapError(
            f'{where}: "viewpoint_iou" must be a number, found {row["viewpoint_iou"]!r:.60}; fix or rename that key.'
        )
    boxes = row.get("boxes")
    if boxes is not None and not (isinstance(boxes, dict) and all(map(_is_box, boxes.values()))):
        raise DiffcapError(
            f'{where}: "boxes" must be {{"before": [x0, y0, x1, y1] or null, "after": ...}}, found {boxes!r:.60}; fix or rename '
            "that key."
        )


def _is_box(value: object) -> bool:
    return value is None or (isinstance(value, list) and len(value) == 4 and all(map(_is_number, value)))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _image(path: object, key: str, where: str) -> str:
    if not isinstance(path, str) or not path:
        raise DiffcapError(f'{where}: "{key}" must be the path of an image, found {path!r:.60}; fix that line.')
    check_inside(path, where)
    return str(PurePosixPath(path))  # "./a.png" becomes "a.png", so that each image has one name
