"""Readers of Spot-the-Diff, Image-Editing-Request and Birds-to-Words. Pairs are sorted by split, then by their place in the file."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from diffcap.datasets import checks
from diffcap.records import SPLITS, ChangePair, read_json_lines
from diffcap.text.vocabulary import tokenize
from diffcap.utils.errors import DiffcapError, wrap_errors

_SPOT_REMEDY = "put train.json, val.json and test.json into annotations/"
_SPOT_IMAGE_FOLDERS = ("resized_images", "images", "data/resized_images", "data/images")
_EDITING_FILES = {"train": ("train.json",), "val": ("valid.json", "val.json"), "test": ("test.json",)}


def read_spot_the_diff(folder: Path) -> list[ChangePair]:
    """Read Spot-the-Diff (Jhamtani and Berg-Kirkpatrick, EMNLP 2018), which has frames of surveillance cameras and written sentences.

        annotations/train.json, val.json, test.json   [{"img_id": "256", "sentences": ["person with umbrella is gone", ...]}, ...]
        resized_images/256.png, 256_2.png             before and after (256_diff.jpg is not read)

    The annotations may also be in `data/annotations/` or in the folder itself. The images may be in `images/` or in the folder
    itself. A pair has one to three entries, one for each annotator; the sentences of its entries are merged. The ids of pairs,
    such as "256.png", are those that papers use. The sentences are not changed. The 66 empty sentences are kept, because the authors'
    vocabularies and the scores of papers include them. The option `data.changes` decides if each sentence of a pair is a caption, or
    all of them together are one caption.
    """
    train_file = checks.find_file(folder, "annotations/train.json", "data/annotations/train.json", "train.json")
    subfolder = next((name for name in _SPOT_IMAGE_FOLDERS if (folder / name).is_dir()), _SPOT_IMAGE_FOLDERS[0])
    image_prefix = "" if any(folder.glob("*_2.png")) else f"{subfolder}/"
    pairs: dict[str, ChangePair] = {}
    for split in SPLITS:
        for place, row in checks.read_entries(train_file.with_name(f"{split}.json"), "annotations", _SPOT_REMEDY):
            image_id = checks.get_text(row, "img_id", place)
            captions = checks.check_sentences(row.get("sentences"), place, "sentences")
            before, after = f"{image_prefix}{image_id}.png", f"{image_prefix}{image_id}_2.png"
            new_pair = ChangePair(f"{image_id}.png", before, after, [], split, extra={"annotators": []})
            pair = pairs.setdefault(image_id, new_pair)
            checks.check_split(pair, split, place)
            pair.captions.extend(captions)
            pair.extra["annotators"].append(len(captions))  # the number of sentences of each annotator
    return list(pairs.values())


def spot_the_diff_notes(pairs: list[ChangePair]) -> list[str]:
    """Return a remark with the number of entries in each split; a pair has one entry for each annotator."""
    num_rows = Counter[str]()
    for pair in pairs:
        num_rows[pair.split] += len(pair.extra["annotators"])
    counts = ", ".join(f"{split} {num_rows[split]:,}" for split in SPLITS)
    return [f"annotators' rows, merged by pair: {counts}"]


def read_image_editing_request(folder: Path) -> list[ChangePair]:
    """Read Image-Editing-Request (Tan et al., ACL 2019), which has photos before and after an edit, and requests for the edit.

        train.json, valid.json, test.json   [{"img0": "a.jpg", "img1": "b.jpg", "sents": ["brighten the sky"], "uid": "Reddit_1052"}, ...]
        images/a.jpg, images/b.jpg

    These are the files in the authors' folder `dataset/adobe`. The images may also be in the folder itself. The id of a pair is its `uid`,
    because the same two photos can have several uids (2,507 distinct image pairs and 3,061 uids in train). The sentences are not changed,
    so they have mixed case, punctuation and repeated spaces.
    """
    image_prefix = "images/" if (folder / "images").is_dir() or not any(folder.glob("*.jp*g")) else ""
    pairs: list[ChangePair] = []
    remedy = "put train.json, valid.json and test.json into this folder"
    for split, file_names in _EDITING_FILES.items():
        for place, row in checks.read_entries(checks.find_file(folder, *file_names), "annotations", remedy):
            pair_id, before, after = (checks.get_text(row, key, place) for key in ("uid", "img0", "img1"))
            captions = checks.check_sentences(row.get("sents"), place, "sents")
            pairs.append(ChangePair(pair_id, image_prefix + before, image_prefix + after, captions, split))
    return pairs


# Selection: how the authors chose the photo for the pair.
BIRDS_COLUMNS = (
    *(f"img{number}{name}" for number in (1, 2) for name in ("ObservationURL", "ImgURL", "Species", "Selection")),
    *("split", "annN", "description"),
)
# Name of a split in the files -> name of the split in diffcap.
SPLIT_OF_NAME = {**{split: split for split in SPLITS}, "dev": "val"}
PHOTO_EXTENSIONS = (".jpg", ".jpeg", ".png")
# (place, ids of the two photos, split, captions, `ChangePair.extra`)
BirdAnnotation = tuple[str, tuple[str, ...], str, list[str], dict[str, Any]]


def read_birds2words(folder: Path) -> list[ChangePair]:
    """Read Birds-to-Words (Forbes et al., EMNLP 2019), which has pairs of iNaturalist photos and paragraphs that compare the birds.

        birds-to-words-v1.0.tsv     (or another single *.tsv) 11 columns, one annotation per row, with or without a header
        train.jsonl, val.jsonl (or dev.jsonl), test.jsonl: {"img1", "img2", "description"}, tokenised; IDC-PCL's files end with .json

    The folder holds one of the two formats. Rows and lines with the same two photos form one pair. A "description" in JSON is one caption
    (a list of tokens) or a list of captions. A description in the table is a text, which is tokenised here in the same way.

    The photos are files `images/<photo id>.jpg`, .jpeg or .png, which can be downloaded from the URLs that `photo_urls` returns. The photo
    id is the number after `photos/` in the URL of the image or, if this URL has no such number, in the URL of the observation. If neither
    URL has such a number, the photo id is the last part of the image's URL without extension. The id of a pair is "<photo id>_<photo id>".
    """
    table_files = sorted(folder.glob("*.tsv"))
    lines_file = checks.find_file(folder, "train.jsonl", "train.json")
    if len(table_files) > 1 or (table_files and lines_file.is_file()):
        found_names = ", ".join(path.name for path in [*table_files, lines_file] if path.is_file())
        raise DiffcapError(f"{folder}: holds {found_names}; keep only one format of Birds-to-Words there.")
    path_of_photo, pairs = _find_photos(folder / "images"), dict[tuple[str, ...], ChangePair]()
    annotations = _read_table(table_files[0]) if table_files else _read_json_lines(folder)
    for place, photo_ids, split, captions, extra in annotations:
        before, after = (path_of_photo.get(photo, f"images/{photo}.jpg") for photo in photo_ids)
        new_pair = ChangePair("_".join(photo_ids), before, after, [], split, extra=extra)
        pair = pairs.setdefault(photo_ids, new_pair)
        checks.check_split(pair, split, place)
        pair.captions.extend(captions)
    return sorted(pairs.values(), key=lambda pair: SPLITS.index(pair.split))


def photo_urls(folder: Path) -> dict[str, list[str]]:
    """Return path of a photo relative to `folder` -> its URLs in the TSV file; all URLs of a photo give the same photo."""
    path_of_photo, urls_of_path = _find_photos(folder / "images"), dict[str, dict[str, None]]()
    for table_file in sorted(folder.glob("*.tsv")):
        for _, row in _table_rows(table_file):
            for photo, url in zip(_photo_ids(row), (row["img1ImgURL"], row["img2ImgURL"])):
                path = path_of_photo.get(photo, f"images/{photo}.jpg")
                urls_of_path.setdefault(path, {})[url.strip()] = None
    return {path: list(urls) for path, urls in urls_of_path.items()}


def photo_id(image_url: str, observation_url: str) -> str:
    """Return the id of a photo, which is its file name in `images/` without extension."""
    for url in (image_url, observation_url):
        if found := re.search(r"photos/(\d+)", url):
            return found.group(1)
    return PurePosixPath(re.split("[?#]", image_url)[0]).stem  # `urlsplit` fails on invalid URLs


def tokenize_text(text: str) -> str:
    """Tokenise raw text as the JSON files are tokenised: "Animal 1's beak" becomes "animal1 ' s beak", and '"' becomes "``"."""
    return " ".join(tokenize(text.replace('"', " `` ")))


def _find_photos(folder: Path) -> dict[str, str]:
    """Return photo id -> path relative to the dataset's folder. If an id has several files, the first of `PHOTO_EXTENSIONS` counts."""
    path_of_photo: dict[str, str] = {}
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    for extension in reversed(PHOTO_EXTENSIONS):
        path_of_photo |= {file.stem: f"images/{file.name}" for file in files if file.suffix.lower() == extension}
    return path_of_photo


def _read_table(table_file: Path) -> Iterator[BirdAnnotation]:
    for place, row in _table_rows(table_file):
        if row["split"] not in SPLIT_OF_NAME:
            raise DiffcapError(
                f'{place}: the column split must be train, val or test, found "{row["split"]:.60}"; fix that line.'
            )
        extra = {name.lower(): [row[f"img1{name}"], row[f"img2{name}"]] for name in ("Species", "Selection")}
        yield place, _photo_ids(row), SPLIT_OF_NAME[row["split"]], [tokenize_text(row["description"])], extra


def _photo_ids(row: dict[str, str]) -> tuple[str, ...]:
    return tuple(photo_id(row[f"img{number}ImgURL"], row[f"img{number}ObservationURL"]) for number in (1, 2))


def _table_rows(table_file: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield ("<path>, line <number>", column -> text) for each line of the TSV file, without the header."""
    with wrap_errors(table_file, "not UTF-8 text", "fetch the file again"):
        lines = table_file.read_text(encoding="utf-8-sig").split("\n")
    columns: tuple[str, ...] = BIRDS_COLUMNS
    for line_number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place, cells = f"{table_file}, line {line_number}", [_unquote(field) for field in line.rstrip("\r").split("\t")]
        if line_number == 1 and "img1ImgURL" in cells:
            columns = tuple(cells)
            if sorted(columns) != sorted(BIRDS_COLUMNS):
                raise DiffcapError(f"{place}: the columns must be {', '.join(BIRDS_COLUMNS)}; fetch the file again.")
            continue
        if len(cells) != len(columns):
            raise DiffcapError(f"{place}: {len(cells)} columns, not {len(columns)}; fix or delete that line.")
        row = dict(zip(columns, cells))
        for column in ("img1ImgURL", "img2ImgURL", "description"):
            if not row[column].strip():
                raise DiffcapError(f"{place}: the column {column} is empty; fix or delete that line.")
        yield place, row


def _unquote(cell: str) -> str:
    """Undo the quoting of spreadsheet programs, which put quotes around a cell and double the quotes inside."""
    quoted = re.fullmatch(r'"((?:[^"]|"")*)"', cell)
    return quoted[1].replace('""', '"') if quoted else cell


def _read_json_lines(folder: Path) -> Iterator[BirdAnnotation]:
    remedy = "put the official birds-to-words-v1.0.tsv or train.jsonl, val.jsonl and test.jsonl into this folder"
    for split in SPLITS:
        names = ("val", "dev") if split == "val" else (split,)
        file_names = [f"{name}.{extension}" for extension in ("jsonl", "json") for name in names]
        for place, row in read_json_lines(checks.find_file(folder, *file_names), "annotations", remedy):
            photo_ids = checks.get_text(row, "img1", place), checks.get_text(row, "img2", place)
            captions = checks.join_tokens(row.get("description"), place, "description")
            yield place, photo_ids, split, captions, {}
