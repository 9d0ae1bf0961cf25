"""Readers of CUB and NABirds, which have single images for pre-training, in their official form or as preprocessed for IDC-PCL.

IDC-PCL's authors have a file of JSON lines for each split; its extension may also be `.jsonl`:

    CUB      train.json   {"img": "...", "description": ["a", "bird", ...]}, one caption (or a list of captions) per line
    NABirds  train.json   {"img1": "...", "img2": "...", "class_id1": 0, "class_id2": 554, "label": 0}, one pair of images per line

Only the images and classes of NABirds are read, because pre-training samples pairs of images itself. The authors do not document where
the image files are. This module assumes `images/<name>`, with ".jpg" if the name has no extension.

The readers return a record for each image, which is a `ChangePair` whose `after` is None. Records are sorted by split, then by their
order in the files. An argument `place`, such as "train.json, line 3", tells error messages where a value is.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from diffcap.datasets import checks
from diffcap.datasets.official import OFFICIAL
from diffcap.records import SPLITS, ChangePair, JsonDict, read_json_lines
from diffcap.utils.errors import DiffcapError

_CUB_CAPTION_FOLDERS = ("text_c10", "cvpr2016_cub/text_c10", "CUB_200_2011/text_c10")
_CUB_HELD_OUT_FILES = ("testclasses.txt", "cvpr2016_cub/testclasses.txt", "CUB_200_2011/testclasses.txt")
_CUB_REMEDY = "unpack the captions of Reed et al. (cvpr2016_cub) into this folder"
_IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png")


def read_cub(folder: Path) -> list[ChangePair]:
    """Read CUB-200-2011 (Wah et al., 2011) with the captions of Reed et al. (CVPR 2016), ten sentences for each image.

        images.txt                       "1 001.Black_footed_Albatross/Black_Footed_Albatross_0046_18.jpg", one line per image
        images/001.Black_footed_Albatross/Black_Footed_Albatross_0046_18.jpg
        text_c10/001.Black_footed_Albatross/Black_Footed_Albatross_0046_18.txt   ten sentences, one per line
        testclasses.txt                  the 50 held-out classes, "004.Groove_billed_Ani", one per line

    The folder holds the unpacked archives `CUB_200_2011/` (images) and `cvpr2016_cub/` (texts), or their contents. As in the papers
    L2C and IDC-PCL, images of the held-out classes are in "val". Without `images.txt`, the images with captions are used, sorted by name.
    """
    caption_folder = next((folder / name for name in _CUB_CAPTION_FOLDERS if (folder / name).exists()), None)
    if caption_folder is None:
        if _lines_file(folder, "train").is_file():
            record_of_image: dict[str, ChangePair] = {}
            for split, place, row in _read_rows(folder):
                image_id = _image_id(row, "img", place)
                captions = checks.join_tokens(row.get("description"), place, "description")
                record = record_of_image.setdefault(
                    image_id, ChangePair(image_id, _image_path(row["img"]), None, [], split)
                )
                checks.check_split(record, split, place)
                record.captions.extend(captions)
            return list(record_of_image.values())
        raise DiffcapError(f"{folder}: no captions there ({_CUB_CAPTION_FOLDERS[0]}); {_CUB_REMEDY}.")
    images_parent = folder / "CUB_200_2011" if (folder / "CUB_200_2011/images.txt").is_file() else folder
    class_list = checks.read_numbered_lines(checks.find_file(folder, *_CUB_HELD_OUT_FILES), _CUB_REMEDY)
    held_out_classes = {line for _, line in class_list}
    records, empty_files = [], []
    if (images_parent / "images.txt").is_file():
        image_names = []
        for place, line in checks.read_numbered_lines(images_parent / "images.txt"):
            name = line.partition(" ")[2]
            checks.check_relative_path(name, place)  # because the path of the caption file is made from this name
            image_names.append(name)
    else:
        caption_files = caption_folder.glob("*/*.txt")
        image_names = sorted(file.relative_to(caption_folder).with_suffix(".jpg").as_posix() for file in caption_files)
    for name in image_names:
        species = name.partition("/")[0]
        image = (images_parent / "images" / name).relative_to(folder).as_posix()
        caption_file = (caption_folder / name).with_suffix(".txt")
        text = caption_file.read_text(encoding="utf-8", errors="replace") if caption_file.is_file() else ""
        text = text.replace("\ufffd", " ")  # a few files have invalid bytes in place of spaces
        captions = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
        if not captions:
            empty_files.append(caption_file)
        split = "val" if species in held_out_classes else "train"
        records.append(ChangePair(name.removesuffix(".jpg"), image, None, captions, split, extra={"species": species}))
    if empty_files:
        raise DiffcapError(
            f"{empty_files[0]}: the file is missing or empty ({len(empty_files)} of {len(records)} images have no sentences); "
            f"{_CUB_REMEDY} again."
        )
    if records and all(record.split == "train" for record in records):
        raise DiffcapError(
            f"{folder}: testclasses.txt names the class of no image, so there is no val split; {_CUB_REMEDY} again."
        )
    return sorted(records, key=lambda record: record.split)


def read_nabirds(folder: Path) -> list[ChangePair]:
    """Read NABirds (Van Horn et al., CVPR 2015), which has images with a class from 0 to 554 (`extra["class"]`), and no captions.

        images.txt               "<image id> 0817/0000139e21dc4d0cbfe14cae3c85c829.jpg"
        images/0817/0000139e21dc4d0cbfe14cae3c85c829.jpg
        image_class_labels.txt   "<image id> 817"
        classes.txt              "817 Oak Titmouse"; also has groups of species, which are not classes of images
        sizes.txt                "<image id> 341 296", width and height; optional
        train_test_split.txt     "<image id> 1", 1 for training, 0 for test

    `extra["class"]` is the rank of the number, such as 817, among the numbers that images have. The files may also be in `nabirds/`.
    """
    home, image_folder = folder, "images"
    if (folder / "nabirds/images.txt").is_file():
        home, image_folder = folder / "nabirds", "nabirds/images"
    elif _lines_file(folder, "train").is_file() and not (folder / "images.txt").is_file():
        return _read_nabirds_lines(folder)
    path_of_image, label_of_image, split_flag_of_image, name_of_label = (
        _read_table(home / f"{name}.txt") for name in ("images", "image_class_labels", "train_test_split", "classes")
    )
    size_of_image = _read_table(home / "sizes.txt") if (home / "sizes.txt").is_file() else {}
    name_of_image = {image: name_of_label.get(label, "") for image, label in label_of_image.items()}
    valid_values = {
        "image_class_labels.txt": (label_of_image, r"\d{1,9}"),
        "train_test_split.txt": (split_flag_of_image, "[01]"),
        "classes.txt": (name_of_image, ".+"),
        # An image may have no size.
        "sizes.txt": (dict.fromkeys(path_of_image, "1 1") | size_of_image, r"\d{1,9}\s+\d{1,9}"),
    }
    for file_name, (value_of_image, pattern) in valid_values.items():
        images = [image for image in path_of_image if not re.fullmatch(pattern, value_of_image.get(image, ""))]
        if images:
            raise DiffcapError(
                f"{home / file_name}: has no valid entry for {len(images)} of the {len(path_of_image)} images (first {images[0]}); fetch "
                "the lists again."
            )
    labels = sorted({label_of_image[image] for image in path_of_image}, key=int)
    class_of_label = {label: number for number, label in enumerate(labels)}
    records = []
    for image, path in path_of_image.items():
        label = label_of_image[image]
        extra: JsonDict = {"class": class_of_label[label], "species": name_of_image[image]}
        if image in size_of_image:
            extra["size"] = list(map(int, size_of_image[image].split()))
        split = "train" if split_flag_of_image[image] == "1" else "test"
        records.append(ChangePair(image, f"{image_folder}/{path}", None, [], split, extra=extra))
    return sorted(records, key=lambda record: record.split, reverse=True)


def _read_table(table_file: Path) -> dict[str, str]:
    """Return a dictionary from the first word of each line of a file to the rest of the line."""
    table: dict[str, str] = {}
    for place, line in checks.read_numbered_lines(table_file, "unpack nabirds.tar.gz into this folder"):
        key, _, value = line.partition(" ")
        if not value or key in table:
            fault = "is duplicated" if key in table else "has no value"
            raise DiffcapError(f"{place}: {key!r} {fault}; fetch the list again.")
        table[key] = value.strip()
    return table


def _read_nabirds_lines(folder: Path) -> list[ChangePair]:
    """Return one record per image, in the order of their first lines. An image has the split of its first line."""
    record_of_image: dict[str, ChangePair] = {}
    num_classes = OFFICIAL["nabirds"].num_classes
    for split, place, row in _read_rows(folder):
        for key, class_key in (("img1", "class_id1"), ("img2", "class_id2")):
            image_id, class_id = _image_id(row, key, place), row.get(class_key)
            if type(class_id) is not int or not 0 <= class_id < num_classes:
                raise DiffcapError(
                    f'{place}: "{class_key}" must be a whole number from 0 to {num_classes - 1}, found {class_id!r:.60}; fix that line.'
                )
            new_record = ChangePair(image_id, _image_path(row[key]), None, [], split, extra={"class": class_id})
            record = record_of_image.setdefault(image_id, new_record)
            if record.extra["class"] != class_id:
                raise DiffcapError(
                    f"{place}: {image_id} has class {class_id} here and class {record.extra['class']} before; download the file again."
                )
    return list(record_of_image.values())


def _read_rows(folder: Path) -> Iterator[tuple[str, str, JsonDict]]:
    """Yield (split, "<path>, line <number>", object) for every line. The files of val and test are optional."""
    for split in SPLITS:
        lines_file = _lines_file(folder, split)
        if lines_file.is_file():
            yield from ((split, place, row) for place, row in read_json_lines(lines_file, "annotations"))


def _lines_file(folder: Path, split: str) -> Path:
    return checks.find_file(folder, f"{split}.json", f"{split}.jsonl")


def _image_id(row: JsonDict, key: str, place: str) -> str:
    """Return the id of an image: its name without extension."""
    value = checks.get_text(row, key, place)
    checks.check_relative_path(value, place)
    return re.sub(r"\.(?:jpe?g|png)\Z", "", value, flags=re.IGNORECASE)


def _image_path(name: str) -> str:
    return f"images/{name}" if name.lower().endswith(_IMAGE_EXTENSIONS) else f"images/{name}.jpg"
