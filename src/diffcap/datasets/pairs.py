"""One's own dataset: a folder with images and a `pairs.jsonl`, one JSON object a line.

    {"before": "shots/desk_1.jpg", "after": "shots/desk_2.jpg", "captions": ["the red cup is gone"]}

`before` and `after` are paths under the folder; `captions` holds one sentence or more (none is allowed outside "train").
Optional: `id` (default: the line's number, six digits, blank lines not counted), `split` ("train", "val" or "test", on every line or on
none), `change_type` (a name of yours), `is_distractor` (true where nothing changed but the view), and two that reports read:
`viewpoint_iou` (a number) and `boxes` (`{"before": [x0, y0, x1, y1], "after": null}`, the pixels of what changed). Any other key
stays in the manifest as it is, but `changed` is refused: it has the attributes of an object of `blocks`.

Without `split`, every line needs a caption, and about 80 % of the pairs train, 10 % validate and 10 % test (at least one
each), drawn with a fixed seed. Lines that share an image, directly or through others, are drawn together, so no test image
was seen in training.
"""

import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from diffcap.datasets.checks import check_inside, note_once, sentences
from diffcap.errors import DiffcapError
from diffcap.records import SPLITS, ChangePair, is_blank, read_json_lines

SPLIT_SEED = 0
HELD_OUT = 0.1  # share of the pairs for val, and the same again for test


def read(folder: Path) -> list[ChangePair]:
    """The pairs of `pairs.jsonl`, in the order of its lines.

    Raises:
        DiffcapError: the file is missing, a line is malformed, only some lines have a split, or there are fewer than
            three groups to split.
    """
    path = folder / "pairs.jsonl"
    pairs: list[ChangePair] = []
    seen: dict[str, str] = {}
    without = ""  # where the first line without a split stands
    for number, (where, row) in enumerate(read_json_lines(path), 1):
        pair = _pair(row, where, number)
        note_once(seen, pair.id, where, "id", "give every pair its own")
        without = without or ("" if pair.split else where)
        pairs.append(pair)
    if not without:
        return pairs
    if any(pair.split for pair in pairs):
        raise DiffcapError(f'{without}: no "split", while other lines have one; give it on every line or on none.')
    bare = next((pair for pair in pairs if not pair.captions), None)
    if bare:
        raise DiffcapError(
            f'{seen[bare.id]}: this pair has no caption, so it cannot train; give every line a "split", and this one "test".'
        )
    return draw_splits(pairs, path)


def draw_splits(pairs: list[ChangePair], path: Path) -> list[ChangePair]:
    """Give every pair a split, about 80 : 10 : 10, groups that share no image whole; the same draw for the same images.

    Groups are taken in a drawn order, for val and then for test, as long as they fit into the tenth; where none does, the
    smallest is taken.

    Raises:
        DiffcapError: fewer than three such groups (`path` is named in the sentence).
    """
    group = _groups(pairs)
    keys = sorted(set(group.values()))
    if len(keys) < 3:
        raise DiffcapError(
            f"{path}: its pairs fall into {len(keys)} groups that share no image, and three are needed to split them; "
            'add pairs or write "split" yourself.'
        )
    random.Random(SPLIT_SEED).shuffle(keys)
    size, split = Counter(group[pair.before] for pair in pairs), dict.fromkeys(keys, "train")
    held = max(1, round(HELD_OUT * len(pairs)))
    for part, others in (("val", 2), ("test", 1)):  # a group at least stays for each of the others
        free = [key for key in keys if split[key] == "train"]
        chosen: list[str] = []
        room = held
        for key in free:
            if size[key] <= room and len(chosen) < len(free) - others:
                chosen, room = [*chosen, key], room - size[key]
        split |= dict.fromkeys(chosen or [min(free, key=lambda key: size[key])], part)
    return [replace(pair, split=split[group[pair.before]]) for pair in pairs]


def _groups(pairs: list[ChangePair]) -> dict[str, str]:
    """The first image, by name, of all those that each image is tied to by pairs."""
    parent: dict[str, str] = {}

    def first(image: str) -> str:
        while parent.setdefault(image, image) != image:
            parent[image] = image = parent[parent[image]]
        return image

    for pair in pairs:
        one, other = sorted(first(image) for image in pair.images)
        parent[other] = one
    return {image: first(image) for image in parent}


def _pair(row: dict[str, Any], where: str, number: int) -> ChangePair:
    row = dict(row)
    images = [_image(row.pop(key, None), key, where) for key in ("before", "after")]
    captions = sentences(row.pop("captions", None), where, "captions")
    if any(map(is_blank, captions)):
        raise DiffcapError(f'{where}: "captions" holds a blank sentence; fill it or take it out.')
    identity = row.pop("id", f"{number:06d}")
    if not isinstance(identity, str | int) or isinstance(identity, bool) or is_blank(str(identity)):
        raise DiffcapError(f'{where}: "id" must be a string, found {identity!r:.60}; fix that line.')
    split = row.pop("split", None) or ""
    if split not in (*SPLITS, ""):
        raise DiffcapError(f'{where}: "split" must be one of {", ".join(SPLITS)}, found {split!r:.60}; fix that line.')
    if split == "train" and not captions:
        raise DiffcapError(f"{where}: a training pair needs at least one caption; add one or take the line out.")
    kind, distractor = row.pop("change_type", None), row.pop("is_distractor", False)
    if not isinstance(kind, str | None) or not isinstance(distractor, bool):
        raise DiffcapError(f'{where}: "change_type" must be a string and "is_distractor" true or false; fix that line.')
    _check_known_keys(row, where)
    return ChangePair(str(identity), images[0], images[1], captions, split, kind, distractor, row)


def _check_known_keys(row: dict[str, Any], where: str) -> None:
    """Refuse keys that evaluation and reports would take for something else."""
    if "changed" in row:
        raise DiffcapError(f'{where}: "changed" is for objects of blocks, whose captions are parsed; rename that key.')
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
    return str(PurePosixPath(path))  # "./a.png" and "b//a.png" are "a.png" and "b/a.png": one name for one image
