"""NABirds (Van Horn et al., CVPR 2015) in its official layout: single images, each with a class, without captions.

    images.txt               "<image id> 0817/0000139e21dc4d0cbfe14cae3c85c829.jpg"
    images/0817/0000139e21dc4d0cbfe14cae3c85c829.jpg
    image_class_labels.txt   "<image id> 817"
    classes.txt              "817 Oak Titmouse"; also has the inner nodes of the hierarchy, which are not classes of images
    sizes.txt                "<image id> 341 296", width and height; optional
    train_test_split.txt     "<image id> 1", 1 for training

The 555 classes of the images are numbered 0 to 554, in the order of the official numbers.
"""

import re
from pathlib import Path

from diffcap.datasets import pcl_single_images
from diffcap.datasets.checks import numbered_lines
from diffcap.records import ChangePair
from diffcap.utils.errors import DiffcapError

_NUMBER = re.compile(r"\d{1,9}")
_REMEDY = "unpack nabirds.tar.gz into this folder"


def read(folder: Path) -> list[ChangePair]:
    """Read one record per image, with `extra["class"]`, 0 to K - 1, and without captions.

    They are sorted by split, then in the order of `images.txt`. If the folder holds IDC-PCL's JSON lines and no official
    list, the JSON lines are read (`pcl_single_images`).
    """
    if (folder / "nabirds/images.txt").is_file():
        return _read(folder / "nabirds", "nabirds/images")
    if pcl_single_images.has_train_file(folder) and not (folder / "images.txt").is_file():
        return pcl_single_images.read_nabirds(folder)
    return _read(folder, "images")


def _read(home: Path, images: str) -> list[ChangePair]:
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
        extra = {"class": class_of[label], "species": names[label]}
        if image in sizes:
            extra["size"] = _size(sizes[image], f"{home / 'sizes.txt'}: {image}")
        split = "train" if splits[image] == "1" else "test"
        pairs.append(ChangePair(image, f"{images}/{path}", None, [], split, extra=extra))
    return sorted(pairs, key=lambda pair: pair.split, reverse=True)


def _size(text: str, where: str) -> list[int]:
    lengths = text.split()
    if len(lengths) != 2 or not all(_NUMBER.fullmatch(length) for length in lengths):
        raise DiffcapError(f"{where} must have a width and a height, found {text!r:.60}; fetch it again.")
    return [int(length) for length in lengths]


def _table(path: Path) -> dict[str, str]:
    """First word of each line -> the rest of the line."""
    table: dict[str, str] = {}
    for where, line in numbered_lines(path, _REMEDY):
        key, _, value = line.partition(" ")
        if not value or key in table:
            fault = "is duplicated" if key in table else "has no value"
            raise DiffcapError(f"{where}: {key!r} {fault}; fetch the list again.")
        table[key] = value.strip()
    return table
