"""CUB and NABirds: single images for pre-training, in their official layouts or as IDC-PCL's authors preprocessed them.

The authors' form has JSON lines, one file per split; the extension may also be `.jsonl`:

    CUB      train.json   {"img": "...", "description": ["a", "bird", ...]}, one caption (or a list of captions) per line
    NABirds  train.json   {"img1": "...", "img2": "...", "class_id1": 0, "class_id2": 554, "label": 0}, one pair of images per line

Only the images and classes of NABirds are read, because pre-training samples its own pairs. The authors do not document the image files
(here, `images/<name>`, with ".jpg" if the name has no extension), and whether label 1 means the same class or different classes.

Records are sorted by split, then in the order of the list of images or of the lines; `after` is None.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diffcap.datasets.checks import check_inside, check_split, numbered_lines, text_of, token_captions
from diffcap.datasets.official import OFFICIAL
from diffcap.records import SPLITS, ChangePair, read_json_lines
from diffcap.utils.errors import DiffcapError

_CAPTIONS = ("text_c10", "cvpr2016_cub/text_c10", "CUB_200_2011/text_c10")
_HELD_OUT = ("testclasses.txt", "cvpr2016_cub/testclasses.txt", "CUB_200_2011/testclasses.txt")
_TEXTS = "unpack the captions of Reed et al. (cvpr2016_cub) into this folder"
_EXTENSIONS = (".jpg", ".jpeg", ".png")
_NUMBER = re.compile(r"\d{1,9}")


def read_cub(folder: Path) -> list[ChangePair]:
    """CUB-200-2011 (Wah et al., 2011) with the captions of Reed et al. (CVPR 2016): ten sentences for each image.

        images.txt                       "1 001.Black_footed_Albatross/Black_Footed_Albatross_0046_18.jpg", one line per image
        images/001.Black_footed_Albatross/Black_Footed_Albatross_0046_18.jpg
        text_c10/001.Black_footed_Albatross/Black_Footed_Albatross_0046_18.txt   ten sentences, one per line
        testclasses.txt                  the 50 held-out classes, "004.Groove_billed_Ani", one per line

    The folder holds the unpacked archives `CUB_200_2011/` (images) and `cvpr2016_cub/` (texts), or their contents. The split is by class,
    as in L2C and IDC-PCL: the held-out classes are "val". Without `images.txt`, the images are those with captions, sorted by name.
    """
    has_texts = any((folder / name).exists() for name in _CAPTIONS)
    if not has_texts and _lines_of(folder, "train"):
        return _read_cub_lines(folder)
    home = folder / "CUB_200_2011" if (folder / "CUB_200_2011/images.txt").is_file() else folder
    texts = _first(folder, _CAPTIONS, "captions")
    list_of_classes = _first(folder, _HELD_OUT, "list of held-out classes")
    held_out = {line for _, line in numbered_lines(list_of_classes)}
    pairs, bare, classes = [], [], set()
    if (home / "images.txt").is_file():
        listed = _listed(home / "images.txt")
    else:
        listed = sorted(file.relative_to(texts).with_suffix(".jpg").as_posix() for file in texts.glob("*/*.txt"))
    for path in listed:
        species = path.partition("/")[0]
        classes.add(species)
        image = (home / "images" / path).relative_to(folder).as_posix()
        file = (texts / path).with_suffix(".txt")
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        text = text.replace("\ufffd", " ")  # a few files have invalid bytes in place of spaces
        captions = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
        if not captions:
            bare.append(file)
        split = "val" if species in held_out else "train"
        pairs.append(ChangePair(path.removesuffix(".jpg"), image, None, captions, split, extra={"species": species}))
    if bare:
        raise DiffcapError(
            f"{bare[0]}: the file is missing or empty ({len(bare)} of {len(pairs)} images have no sentences); {_TEXTS} again."
        )
    if pairs and not classes & held_out:
        raise DiffcapError(
            f"{list_of_classes}: no image has one of these classes, so there is no validation split; "
            "fetch this file and the list of images again."
        )
    return sorted(pairs, key=lambda pair: pair.split)


def _listed(path: Path) -> list[str]:
    """Name "<class>/<image>.jpg" of every line."""
    found = []
    for where, line in numbered_lines(path):
        number, _, name = line.partition(" ")
        species, _, image = name.partition("/")
        if not number.isdigit() or not image.endswith(".jpg") or not species:
            raise DiffcapError(f'{where}: expected "<number> <class>/<image>.jpg", found {line!r:.80}; fix that line.')
        check_inside(name, where)  # before the file of its sentences is opened
        found.append(name)
    return found


def _first(folder: Path, names: tuple[str, ...], what: str) -> Path:
    found = next((folder / name for name in names if (folder / name).exists()), None)
    if found is None:
        raise DiffcapError(f"{folder}: no {what} there ({names[0]}); {_TEXTS}.")
    return found


def _read_cub_lines(folder: Path) -> list[ChangePair]:
    found: dict[str, ChangePair] = {}
    for split, where, row in _rows(folder):
        name = _image_id(row, "img", where)
        captions = token_captions(row.get("description"), where, "description")
        image = found.setdefault(name, ChangePair(name, _path(row["img"]), None, [], split))
        check_split(image, split, where)
        image.captions.extend(captions)
    return list(found.values())


def read_nabirds(folder: Path) -> list[ChangePair]:
    """NABirds (Van Horn et al., CVPR 2015): images with a class, `extra["class"]`, 0 to 554, and without captions.

        images.txt               "<image id> 0817/0000139e21dc4d0cbfe14cae3c85c829.jpg"
        images/0817/0000139e21dc4d0cbfe14cae3c85c829.jpg
        image_class_labels.txt   "<image id> 817"
        classes.txt              "817 Oak Titmouse"; also has the inner nodes of the hierarchy, which are not classes of images
        sizes.txt                "<image id> 341 296", width and height; optional
        train_test_split.txt     "<image id> 1", 1 for training

    The classes of the images are numbered in the order of the official numbers. The files may be in `nabirds/`.
    """
    home, images = folder, "images"
    if (folder / "nabirds/images.txt").is_file():
        home, images = folder / "nabirds", "nabirds/images"
    elif _lines_of(folder, "train") and not (folder / "images.txt").is_file():
        return _read_nabirds_lines(folder)
    paths = _table(home / "images.txt")
    labels, splits = _table(home / "image_class_labels.txt"), _table(home / "train_test_split.txt")
    names = _table(home / "classes.txt")
    sizes = _table(home / "sizes.txt") if (home / "sizes.txt").is_file() else {}
    faults = {
        "image_class_labels.txt": [image for image in paths if image not in labels],
        "train_test_split.txt": [image for image in paths if splits.get(image) not in ("0", "1")],
        "classes.txt": [
            image for image in paths if (label := labels.get(image, "")) not in names or not _NUMBER.fullmatch(label)
        ],
    }
    for name, without in faults.items():
        if without:
            raise DiffcapError(
                f"{home / name}: has no valid entry for {len(without)} of the {len(paths)} images (first {without[0]}); fetch the "
                "lists again."
            )
    class_of = {label: number for number, label in enumerate(sorted({labels[image] for image in paths}, key=int))}
    pairs = []
    for image, path in paths.items():
        label = labels[image]
        extra: dict[str, Any] = {"class": class_of[label], "species": names[label]}
        if image in sizes:
            lengths = sizes[image].split()
            if len(lengths) != 2 or not all(map(_NUMBER.fullmatch, lengths)):
                raise DiffcapError(
                    f"{home / 'sizes.txt'}: {image} must have a width and a height, found {sizes[image]!r:.60}; fetch it again."
                )
            extra["size"] = list(map(int, lengths))
        split = "train" if splits[image] == "1" else "test"
        pairs.append(ChangePair(image, f"{images}/{path}", None, [], split, extra=extra))
    return sorted(pairs, key=lambda pair: pair.split, reverse=True)


def _table(path: Path) -> dict[str, str]:
    """First word of each line -> the rest of the line."""
    table: dict[str, str] = {}
    for where, line in numbered_lines(path, "unpack nabirds.tar.gz into this folder"):
        key, _, value = line.partition(" ")
        if not value or key in table:
            fault = "is duplicated" if key in table else "has no value"
            raise DiffcapError(f"{where}: {key!r} {fault}; fetch the list again.")
        table[key] = value.strip()
    return table


def _read_nabirds_lines(folder: Path) -> list[ChangePair]:
    """One record per image, in the order of first appearance; an image that occurs in several splits belongs to the first."""
    found: dict[str, ChangePair] = {}
    first_meaning = ""  # what label 1 means according to the first line
    for split, where, row in _rows(folder):
        classes = [_checked_int(row, key, where, OFFICIAL["nabirds"].classes) for key in ("class_id1", "class_id2")]
        label = _checked_int(row, "label", where, 2)
        meaning = "the same class" if (label == 1) is (classes[0] == classes[1]) else "different classes"
        first_meaning = first_meaning or meaning
        if meaning != first_meaning:
            raise DiffcapError(
                f"{where}: the label {label} of the classes {classes[0]} and {classes[1]} contradicts earlier lines, in which "
                f"label 1 means {first_meaning}; download the file again."
            )
        for key, class_id in zip(("img1", "img2"), classes):
            name = _image_id(row, key, where)
            new = ChangePair(name, _path(row[key]), None, [], split, extra={"class": class_id})
            image = found.setdefault(name, new)
            if image.extra["class"] != class_id:
                raise DiffcapError(
                    f"{where}: {name} has class {class_id} here and class {image.extra['class']} before; download the file again."
                )
    return list(found.values())


def _rows(folder: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (split, "<path>, line <number>", object) of every line; the files of val and test are optional."""
    for split in SPLITS:
        path = _lines_of(folder, split)
        if path is not None:
            yield from ((split, where, row) for where, row in read_json_lines(path, "annotations"))


def _lines_of(folder: Path, split: str) -> Path | None:
    return next((path for end in ("json", "jsonl") if (path := folder / f"{split}.{end}").is_file()), None)


def _image_id(row: dict[str, Any], key: str, where: str) -> str:
    """The id of an image: its name without extension."""
    value = text_of(row, key, where)
    check_inside(value, where)
    return next((value[: -len(end)] for end in _EXTENSIONS if value.lower().endswith(end)), value)


def _path(name: str) -> str:
    return f"images/{name}" if name.lower().endswith(_EXTENSIONS) else f"images/{name}.jpg"


def _checked_int(row: dict[str, Any], key: str, where: str, limit: int) -> int:
    value = row.get(key)
    if type(value) is not int or not 0 <= value < limit:
        raise DiffcapError(
            f'{where}: "{key}" must be a whole number from 0 to {limit - 1}, found {value!r:.60}; fix that line.'
        )
    return value
