"""CUB and NABirds as IDC-PCL's authors preprocessed them: JSON lines, one file per split.

    CUB      train.json   {"img": "...", "description": ["a", "bird", ...]}, one caption per line
             val.json     {"img": "...", "description": [["a", "bird", ...], ...]}, one image per line
    NABirds  train.json   {"img1": "...", "img2": "...", "class_id1": 0, "class_id2": 554, "label": 0}, one pair of images per line

In each of CUB's files, a description may be one caption (a list of tokens) or several captions (a list of such lists). The
extension may also be `.jsonl`. The authors do not document two things:

* the image files: here, `images/<name>`, with ".jpg" if the name has no extension;
* whether NABirds' label 1 means the same class or different classes: here, only the classes are used, and the label must have the
  same meaning in all lines.

Only the images and classes of NABirds are read. Its pairs are ignored, because pre-training samples its own pairs.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diffcap.datasets.checks import check_inside, check_split, text_of, token_captions
from diffcap.datasets.official import OFFICIAL
from diffcap.records import SPLITS, ChangePair, read_json_lines
from diffcap.utils.errors import DiffcapError

_NUM_CLASSES = OFFICIAL["nabirds"].classes
_EXTENSIONS = (".jpg", ".jpeg", ".png")


def has_train_file(folder: Path) -> bool:
    """Whether a folder contains train.json or train.jsonl of this format."""
    return _file(folder, "train") is not None


def read_cub(folder: Path) -> list[ChangePair]:
    """Read one record per image of CUB (`after` is None), sorted by split, then in the order of the lines."""
    found: dict[str, ChangePair] = {}
    for split, where, row in _rows(folder):
        name = _image_id(row, "img", where)
        captions = token_captions(row.get("description"), where, "description")
        image = found.setdefault(name, ChangePair(name, _path(row["img"]), None, [], split))
        check_split(image, split, where)
        image.captions.extend(captions)
    return list(found.values())


def read_nabirds(folder: Path) -> list[ChangePair]:
    """Read one record per image of NABirds, with `extra["class"]` and without captions, in the order of first appearance.

    An image that occurs in several splits belongs to the first.
    """
    found: dict[str, ChangePair] = {}
    first_meaning = ""  # what label 1 means according to the first line
    for split, where, row in _rows(folder):
        classes = [_checked_int(row.get(key), where, key, _NUM_CLASSES) for key in ("class_id1", "class_id2")]
        label = _checked_int(row.get("label"), where, "label", 2)
        meaning = "the same class" if (label == 1) is (classes[0] == classes[1]) else "different classes"
        first_meaning = first_meaning or meaning
        if meaning != first_meaning:
            raise DiffcapError(
                f"{where}: the label {label} of the classes {classes[0]} and {classes[1]} contradicts earlier lines, in which "
                f"label 1 means {first_meaning}; download the file again."
            )
        for key, class_id in zip(("img1", "img2"), classes):
            name = _image_id(row, key, where)
            image = found.setdefault(
                name, ChangePair(name, _path(row[key]), None, [], split, extra={"class": class_id})
            )
            if image.extra["class"] != class_id:
                raise DiffcapError(
                    f"{where}: {name} has class {class_id} here and class {image.extra['class']} before; download the file again."
                )
    return list(found.values())


def _rows(folder: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (split, "<path>, line <number>", object) of every line; the files of val and test are optional."""
    for split in SPLITS:
        path = _file(folder, split)
        if path is not None:
            yield from ((split, where, row) for where, row in read_json_lines(path, "annotations"))


def _file(folder: Path, split: str) -> Path | None:
    return next((path for end in ("json", "jsonl") if (path := folder / f"{split}.{end}").is_file()), None)


def _image_id(row: dict[str, Any], key: str, where: str) -> str:
    """The id of an image: its name without extension."""
    value = text_of(row, key, where)
    check_inside(value, where)
    return next((value[: -len(end)] for end in _EXTENSIONS if value.lower().endswith(end)), value)


def _path(name: str) -> str:
    return f"images/{name}" if name.lower().endswith(_EXTENSIONS) else f"images/{name}.jpg"


def _checked_int(value: object, where: str, key: str, limit: int) -> int:
    if type(value) is not int or not 0 <= value < limit:
        raise DiffcapError(
            f'{where}: "{key}" must be a whole number from 0 to {limit - 1}, found {value!r:.60}; fix that line.'
        )
    return value
