"""CUB and NABirds as IDC-PCL's authors preprocessed them: JSON lines, one file per split.

    CUB      train.json   {"img": "...", "description": ["a", "bird", ...]}, one caption per line
             val.json     {"img": "...", "description": [["a", "bird", ...], ...]}, one image per line
    NABirds  train.json   {"img1": "...", "img2": "...", "class_id1": 0, "class_id2": 554, "label": 0}, one pair of images per line

Both kinds of description may occur in both files, and the extension may be `.jsonl`. The authors do not document two things:

* the image files: here, `images/<name>`, with ".jpg" if the name has no extension;
* whether NABirds' label 1 means the same class or different classes: here, only the classes are used, and the label must have the
  same meaning in all lines.

NABirds' pairs are not used, because pre-training draws its own.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from diffcap.datasets.checks import check_inside, token_captions
from diffcap.datasets.official import OFFICIAL
from diffcap.records import SPLITS, ChangePair, read_json_lines
from diffcap.utils.errors import DiffcapError

_CLASSES = OFFICIAL["nabirds"].classes
_EXTENSIONS = (".jpg", ".jpeg", ".png")


def is_there(folder: Path) -> bool:
    """Whether a folder holds this format."""
    return _file(folder, "train") is not None


def read_captioned(folder: Path) -> list[ChangePair]:
    """Read one record per image of CUB (`after` is None), sorted by split, then in the order of the lines.

    Raises:
        DiffcapError: a line is malformed, or an image is in two splits.
    """
    found: dict[str, ChangePair] = {}
    for split, where, row in _rows(folder):
        name = _name(row.get("img"), where, "img")
        captions = token_captions(row.get("description"), where, "description")
        image = found.setdefault(name, ChangePair(name, _path(row["img"]), None, [], split))
        if image.split != split:
            raise DiffcapError(f"{where}: {name} is in {split} here and in {image.split} before; keep one.")
        image.captions.extend(captions)
    return list(found.values())


def read_classified(folder: Path) -> list[ChangePair]:
    """Read one record per image of NABirds, with `extra["class"]` and without captions, in the order of their first lines.

    Raises:
        DiffcapError: a line is malformed, an image has two classes, or label 1 does not have the same meaning in all lines.
    """
    found: dict[str, ChangePair] = {}
    first_meaning = ""  # of label 1 in the first line
    for split, where, row in _rows(folder):
        classes = [
            _number(row.get(key), where, key, lambda value: 0 <= value < _CLASSES) for key in ("class_id1", "class_id2")
        ]
        label = _number(row.get("label"), where, "label", lambda value: value in (0, 1))
        meaning = "the same class" if (label == 1) is (classes[0] == classes[1]) else "different classes"
        first_meaning = first_meaning or meaning
        if meaning != first_meaning:
            raise DiffcapError(
                f"{where}: label 1 means {meaning} here and {first_meaning} before; fetch the file again."
            )
        for key, label_of in zip(("img1", "img2"), classes):
            name = _name(row.get(key), where, key)
            image = found.setdefault(
                name, ChangePair(name, _path(row[key]), None, [], split, extra={"class": label_of})
            )
            if image.extra["class"] != label_of:
                raise DiffcapError(
                    f"{where}: {name} has class {label_of} here and class {image.extra['class']} before; fetch the file again."
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


def _name(value: object, where: str, key: str) -> str:
    """Return the id of an image: its name without extension."""
    if not isinstance(value, str) or not value:
        raise DiffcapError(f'{where}: "{key}" must be the name of an image, found {value!r:.60}; fix that line.')
    check_inside(value, where)
    return next((value[: -len(end)] for end in _EXTENSIONS if value.lower().endswith(end)), value)


def _path(name: str) -> str:
    return f"images/{name}" if name.lower().endswith(_EXTENSIONS) else f"images/{name}.jpg"


def _number(value: object, where: str, key: str, fits: Callable[[int], bool]) -> int:
    if type(value) is not int or not fits(value):
        raise DiffcapError(
            f'{where}: "{key}" must be a number (0 to {_CLASSES - 1} for a class, 0 or 1 for a label), found '
            f"{value!r:.60}; fix that line."
        )
    return value
