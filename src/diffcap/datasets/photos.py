"""Spot-the-Diff, Image-Editing-Request and Birds-to-Words: photos, and sentences that people wrote.

Pairs are sorted by split, then in the order of the file.
"""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from diffcap.datasets.checks import check_split, first_file, note_once, read_entries, sentences, text_of, token_captions
from diffcap.records import SPLITS, ChangePair, read_json_lines
from diffcap.text.vocabulary import tokenize
from diffcap.utils.errors import DiffcapError

_ANNOTATIONS = ("annotations/train.json", "data/annotations/train.json", "train.json")
_IMAGES = ("resized_images", "images", "data/resized_images", "data/images")
_EDITS = {"train": ("train.json",), "val": ("valid.json", "val.json"), "test": ("test.json",)}


def read_spot_the_diff(folder: Path) -> list[ChangePair]:
    """Spot-the-Diff (Jhamtani and Berg-Kirkpatrick, EMNLP 2018): frames of surveillance cameras and written sentences.

        annotations/train.json, val.json, test.json   [{"img_id": "256", "sentences": ["person with umbrella is gone", ...]}, ...]
        resized_images/256.png, 256_2.png             before and after (256_diff.jpg is not read)

    The annotations may also be in `data/annotations/` or in the folder itself, the images in `images/` or in the folder itself. A
    pair has one to three rows, one per annotator, whose sentences are merged. Its id is "256.png", as in the ground truth of the papers.

    The sentences are not changed, and the 66 empty ones are kept: the released vocabularies and the 1,270 scored pairs have them. The
    protocol decides whether each sentence or all sentences of a pair are one caption, see `diffcap.records.take_changes`.
    """
    annotations = first_file(folder, *_ANNOTATIONS).parent
    in_folder = any(folder.glob("*_2.png"))
    images = "" if in_folder else next((f"{name}/" for name in _IMAGES if (folder / name).is_dir()), f"{_IMAGES[0]}/")
    pairs: dict[str, ChangePair] = {}
    for split in SPLITS:
        path = annotations / f"{split}.json"
        for where, row in read_entries(path, "annotations", "put train.json, val.json and test.json into annotations/"):
            image, captions = text_of(row, "img_id", where), sentences(row.get("sentences"), where, "sentences")
            before, after = f"{images}{image}.png", f"{images}{image}_2.png"
            new = ChangePair(f"{image}.png", before, after, [], split, extra={"annotators": []})
            pair = pairs.setdefault(image, new)
            check_split(pair, split, where)
            pair.captions.extend(captions)
            pair.extra["annotators"].append(len(captions))
    return list(pairs.values())


def spot_the_diff_notes(pairs: list[ChangePair]) -> list[str]:
    """Return a remark with the number of annotators' rows in each split."""
    rows = {split: sum(len(pair.extra["annotators"]) for pair in pairs if pair.split == split) for split in SPLITS}
    counts = ", ".join(f"{split} {count:,}" for split, count in rows.items())
    return [f"annotators' rows, merged by pair: {counts}"]


def read_image_editing_request(folder: Path) -> list[ChangePair]:
    """Image-Editing-Request (Tan et al., ACL 2019): photos before and after an edit, and the request for the edit.

        train.json, valid.json, test.json   [{"img0": "a.jpg", "img1": "b.jpg", "sents": ["brighten the sky"], "uid": "Reddit_1052"}, ...]
        images/a.jpg, images/b.jpg

    This is the content of the authors' `dataset/adobe/`. The images may also be in the folder itself. A pair is identified by its `uid`,
    because the same two photos occur under several (2,507 distinct image pairs for 3,061 uids in train). The sentences are not changed:
    they have mixed case, punctuation and repeated spaces.
    """
    images = "images/" if (folder / "images").is_dir() or not any(folder.glob("*.jp*g")) else ""
    pairs: list[ChangePair] = []
    seen: dict[str, str] = {}
    remedy = "put train.json, valid.json and test.json into this folder"
    for split, names in _EDITS.items():
        for where, row in read_entries(first_file(folder, *names), "annotations", remedy):
            uid, before, after = (text_of(row, key, where) for key in ("uid", "img0", "img1"))
            note_once(seen, uid, where, "the uid")
            captions = sentences(row.get("sents"), where, "sents")
            pairs.append(ChangePair(uid, images + before, images + after, captions, split))
    return pairs


COLUMNS = (
    "img1ObservationURL", "img1ImgURL", "img1Species", "img1Selection",
    "img2ObservationURL", "img2ImgURL", "img2Species", "img2Selection",
    "split", "annN", "description",
)  # fmt: skip
SPLIT_NAMES = {**{split: split for split in SPLITS}, "dev": "val"}
EXTENSIONS = (".jpg", ".jpeg", ".png")
# File and line; ids of the photos, which identify the pair (one photo can have several URLs); split; captions; `ChangePair.extra`.
Annotation = tuple[str, tuple[str, str], str, list[str], dict[str, Any]]


def read_birds2words(folder: Path) -> list[ChangePair]:
    """Birds-to-Words (Forbes et al., EMNLP 2019): pairs of iNaturalist photos and paragraphs that compare the birds.

        birds-to-words-v1.0.tsv     (or the only *.tsv) 11 columns, one annotation per row, with or without a header
        train.jsonl, val.jsonl (or dev.jsonl), test.jsonl, or .json as in IDC-PCL's code: {"img1", "img2", "description"}, tokenised

    The folder holds one of the two formats. Rows and lines with the same two photos form one pair. A description of a line is one caption
    (a list of tokens) or a list of captions; the text of the table is tokenised in the same way.

    The photos are not in these files; `photo_urls` returns their URLs. They are `images/<photo id>.jpg`, .jpeg or .png: the number after
    `photos/` in the image's URL, or else in the observation's URL, or else the last part of the image's URL without its extension. The
    id of a pair is "<photo id>_<photo id>".
    """
    tables = sorted(folder.glob("*.tsv"))
    lines = first_file(folder, "train.jsonl", "train.json")
    if len(tables) > 1 or (tables and lines.is_file()):
        both = ", ".join(path.name for path in [*tables, lines] if path.is_file())
        raise DiffcapError(f"{folder}: holds {both}; keep only one format of Birds-to-Words there.")
    files, pairs = _photo_files(folder / "images"), dict[tuple[str, str], ChangePair]()
    for where, photos, split, captions, extra in _read_table(tables[0]) if tables else _read_lines(folder):
        before, after = (files.get(photo, f"images/{photo}{EXTENSIONS[0]}") for photo in photos)
        pair = pairs.setdefault(photos, ChangePair("_".join(photos), before, after, [], split, extra=extra))
        check_split(pair, split, where)
        pair.captions.extend(captions)
    return sorted(pairs.values(), key=lambda pair: SPLITS.index(pair.split))


def photo_urls(folder: Path) -> dict[str, list[str]]:
    """Return the URLs of the photos of the TSV: path relative to `folder` -> alternative URLs of the same photo."""
    files, urls = _photo_files(folder / "images"), dict[str, list[str]]()
    for table in sorted(folder.glob("*.tsv")):
        for _, row in _rows(table):
            for photo, url in zip(_photos(row), (row["img1ImgURL"], row["img2ImgURL"])):
                known = urls.setdefault(files.get(photo, f"images/{photo}{EXTENSIONS[0]}"), [])
                if url.strip() not in known:
                    known.append(url.strip())
    return urls


def photo_id(image_url: str, observation_url: str) -> str:
    """Return a photo's file name in `images/`, without extension; see `read_birds2words`."""
    for url in (image_url, observation_url):
        if found := re.search(r"photos/(\d+)", url):
            return found.group(1)
    return PurePosixPath(re.split("[?#]", image_url)[0]).stem  # not urlsplit, which raises on an invalid URL


def tokenised(text: str) -> str:
    """Tokenise raw text as the tokenised files do: "Animal 1's beak" becomes "animal1 ' s beak", and '"' becomes "``"."""
    return " ".join(tokenize(text.replace('"', " `` ")))


def _photo_files(folder: Path) -> dict[str, str]:
    """Return photo id -> path relative to the dataset's folder, of the files that exist; the first extension has priority."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    wanted = sorted(
        (name for name in names if Path(name).suffix.lower() in EXTENSIONS),
        key=lambda name: (-EXTENSIONS.index(Path(name).suffix.lower()), name),
    )
    return {Path(name).stem: f"images/{name}" for name in wanted}


def _read_table(path: Path) -> Iterator[Annotation]:
    for where, row in _rows(path):
        if row["split"] not in SPLIT_NAMES:
            raise DiffcapError(
                f'{where}: the column split must be train, val or test, found "{row["split"]:.60}"; fix that line.'
            )
        extra = {
            "species": [row["img1Species"], row["img2Species"]],
            "selection": [row["img1Selection"], row["img2Selection"]],
        }
        yield where, _photos(row), SPLIT_NAMES[row["split"]], [tokenised(row["description"])], extra


def _photos(row: dict[str, str]) -> tuple[str, str]:
    return (
        photo_id(row["img1ImgURL"], row["img1ObservationURL"]),
        photo_id(row["img2ImgURL"], row["img2ObservationURL"]),
    )


def _rows(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield ("<path>, line <number>", column -> text) of each line of the TSV."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise DiffcapError(f"{path}: not UTF-8 text (byte {error.start}); fetch the file again.") from None
    columns: tuple[str, ...] = COLUMNS
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where, fields = f"{path}, line {number}", [_unquote(field) for field in line.rstrip("\r").split("\t")]
        if number == 1 and "img1ImgURL" in fields:
            columns = tuple(fields)
            if sorted(columns) != sorted(COLUMNS):
                raise DiffcapError(f"{where}: the columns must be {', '.join(COLUMNS)}; fetch the file again.")
            continue
        if len(fields) != len(columns):
            raise DiffcapError(f"{where}: {len(fields)} columns, not {len(columns)}; fix or delete that line.")
        row = dict(zip(columns, fields))
        for column in ("img1ImgURL", "img2ImgURL", "description"):
            if not row[column].strip():
                raise DiffcapError(f"{where}: the column {column} is empty; fix or delete that line.")
        yield where, row


def _unquote(field: str) -> str:
    """Undo the quoting of spreadsheet programs: quotes around the field, doubled quotes inside."""
    if len(field) >= 2 and field[0] == field[-1] == '"' and '"' not in field[1:-1].replace('""', ""):
        return field[1:-1].replace('""', '"')
    return field


def _read_lines(folder: Path) -> Iterator[Annotation]:
    remedy = "put the official birds-to-words-v1.0.tsv or train.jsonl, val.jsonl and test.jsonl into this folder"
    for split in SPLITS:
        aliases = [alias for alias, split_name in SPLIT_NAMES.items() if split_name == split]
        names = [f"{alias}.{ending}" for ending in ("jsonl", "json") for alias in aliases]
        for where, row in read_json_lines(first_file(folder, *names), "annotations", remedy):
            photos = text_of(row, "img1", where), text_of(row, "img2", where)
            captions = token_captions(row.get("description"), where, "description")
            yield where, photos, split, captions, {}
