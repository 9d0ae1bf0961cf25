"""CUB and NABirds as IDC-PCL's authors preprocessed them: JSON lines, in files that are called by their split.

    CUB      train.json   {"img": "...", "description": ["a", "bird", ...]}, a caption a line
             val.json     {"img": "...", "description": [["a", "bird", ...], ...]}, an image a line
    NABirds  train.json   {"img1": "...", "img2": "...", "class_id1": 0, "class_id2": 554, "label": 0}, a pair of images a line

Either form of a description may stand in either file, and `.jsonl` for `.json`. What the images are called there is said nowhere:
here they are taken to be `images/<name>`, with ".jpg" where the name has no extension. Nor is it said whether NABirds' label 1 means
one class or two: the classes themselves are read, and the label only has to go with them, one way or the other. The pairs are
not kept: pre-training draws its own.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from diffcap.datasets.checks import check_inside, token_captions
from diffcap.datasets.official import OFFICIAL
from diffcap.errors import DiffcapError
from diffcap.records import SPLITS, ChangePair, read_json_lines

_CLASSES = OFFICIAL["nabirds"].classes
_EXTENSIONS = (".jpg", ".jpeg", ".png")


def is_there(folder: Path) -> bool:
    """Whether a folder holds this form."""
    return _file(folder, "train") is not None


def read_captioned(folder: Path) -> list[ChangePair]:
    """An image a record, without a second one, by split, then in the order of the lines (CUB).

    Raises:
        DiffcapError: a line is malformed, or an image stands in two splits.
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
    """An image a record, with `extra["class"]`, and no caption, in the order in which the pairs name them (NABirds).

    Raises:
        DiffcapError: a line is malformed, an image has two classes, or the labels do not go with the classes.
    """
    found: dict[str, ChangePair] = {}
    means = ""  # where the first line stands, and what label 1 means there
    for split, where, row in _rows(folder):
        classes = [
            _number(row.get(key), where, key, lambda value: 0 <= value < _CLASSES) for key in ("class_id1", "class_id2")
        ]
        label = _number(row.get("label"), where, "label", lambda value: value in (0, 1))
        meaning = "the same class" if (label == 1) is (classes[0] == classes[1]) else "different classes"
        means = means or meaning
        if meaning != means:
            raise DiffcapError(f"{where}: label 1 means {meaning} here and {means} before; fetch the file again.")
        for key, label_of in zip(("img1", "img2"), classes):
            name = _name(row.get(key), where, key)
            image = found.setdefault(
                name, ChangePair(name, _path(row[key]), None, [], split, extra={"class": label_of})
            )
            if image.extra["class"] != label_of:
                raise DiffcapError(
                    f"{where}: {name} is of class {label_of} here and of {image.extra['class']} before; fetch the file again."
                )
    return list(found.values())


def _rows(folder: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Split, where, and object of every line; only the training file has to be there."""
    for split in SPLITS:
        path = _file(folder, split)
        if path is not None:
            yield from ((split, where, row) for where, row in read_json_lines(path, "annotations"))


def _file(folder: Path, split: str) -> Path | None:
    return next((path for end in ("json", "jsonl") if (path := folder / f"{split}.{end}").is_file()), None)


def _name(value: object, where: str, key: str) -> str:
    """The id of an image: its name without extension."""
    if not isinstance(value, str) or not value:
        raise DiffcapError(f'{where}: "{key}" must be the name of an image, found {value!r:.60}; fix that line.')
    check_inside(value, where)
    return next((value[: -len(end)] for end in _EXTENSIONS if value.lower().endswith(end)), value)


def _path(name: str) -> str:
    return f"images/{name}" if name.lower().endswith(_EXTENSIONS) else f"images/{name}.jpg"


def _number(value: object, where: str, key: str, fits: Callable[[int], bool]) -> int:
    if type(value) is not int or not fits(value):
        raise DiffcapError(
            f'{where}: "{key}" must be the number of a class, 0 ... {_CLASSES - 1}, or 0 or 1 of a label, found '
            f"{value!r:.60}; fix that line."
        )
    return value
