"""Birds-to-Words (Forbes et al., EMNLP 2019): pairs of iNaturalist photographs and paragraphs that compare the birds.

Two forms are read, whichever the folder holds:

* the official `birds-to-words-v1.0.tsv` (or the folder's only `*.tsv`), 11 columns, one annotation a row, with or without
  a first row of names. Rows with the same two image addresses are one pair. Text becomes what the tokenised form holds:
  lower case, every punctuation mark a token of its own, "animal 1" one word.
* the tokenised `train.jsonl`, `val.jsonl` (or `dev.jsonl`), `test.jsonl`, or the same named `.json` as in IDC-PCL's code:
  `{"img1", "img2", "description"}`, where the description is one caption (a list of tokens; lines with the same two photos
  are one pair) or a list of captions.

The photos are not part of it (`photo_urls` says where they are). They stand in `images/`, named by photo id: the number
behind `photos/` in the image's address, or in the observation's where the image's has none, or else the last part of the
image's address without its extension; `https://www.inaturalist.org/photos/647514` is `images/647514.jpg`. `.jpeg` and
`.png` are found too. A pair's id is "<photo id>_<photo id>".
"""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from diffcap.datasets.checks import token_captions
from diffcap.errors import DiffcapError
from diffcap.records import SPLITS, ChangePair, read_json_lines
from diffcap.text.vocabulary import tokenize

COLUMNS = (
    "img1ObservationURL", "img1ImgURL", "img1Species", "img1Selection",
    "img2ObservationURL", "img2ImgURL", "img2Species", "img2Selection",
    "split", "annN", "description",
)  # fmt: skip
SPLIT_NAMES = {**{split: split for split in SPLITS}, "dev": "val"}
EXTENSIONS = (".jpg", ".jpeg", ".png")


class Annotation(NamedTuple):
    """One caption list with the two photos it compares, from one line of a file ("where")."""

    photos: tuple[str, str]
    key: tuple[str, str]
    split: str
    captions: list[str]
    where: str
    extra: dict[str, Any]


def read(folder: Path) -> list[ChangePair]:
    """The pairs of the TSV or of the JSON lines, by split (train, val, test), then in the order of the file.

    Raises:
        DiffcapError: neither form is there, or both; a line is malformed; or a pair stands in two splits.
    """
    tables = sorted(folder.glob("*.tsv"))
    lines = next(
        (folder / name for name in ("train.jsonl", "train.json") if (folder / name).is_file()), folder / "train.jsonl"
    )
    if len(tables) > 1 or (tables and lines.is_file()):
        both = ", ".join(path.name for path in [*tables, lines] if path.is_file())
        raise DiffcapError(f"{folder}: holds {both}; leave only one form of Birds-to-Words there.")
    annotations = _read_table(tables[0]) if tables else _read_lines(folder)
    return _group(annotations, _photo_files(folder / "images"))


def photo_urls(folder: Path) -> dict[str, list[str]]:
    """Where the photos of the TSV are: path below `folder` -> its addresses, of which one is enough.

    Raises:
        DiffcapError: a line of the TSV is malformed.
    """
    files, urls = _photo_files(folder / "images"), dict[str, list[str]]()
    for table in sorted(folder.glob("*.tsv")):
        for _, row in _rows(table):
            for photo, url in zip(_photos(row), (row["img1ImgURL"], row["img2ImgURL"])):
                known = urls.setdefault(files.get(photo, f"images/{photo}{EXTENSIONS[0]}"), [])
                if url.strip() not in known:
                    known.append(url.strip())
    return urls


def photo_id(image_url: str, observation_url: str) -> str:
    """The name, without extension, that a photo's file has in `images/`; see the module's docstring."""
    for url in (image_url, observation_url):
        if found := re.search(r"photos/(\d+)", url):
            return found.group(1)
    return PurePosixPath(re.split("[?#]", image_url)[0]).stem  # not urlsplit, which refuses what is no address


def tokenised(text: str) -> str:
    """Raw text as the tokenised form spells it: "Animal 1's beak" becomes "animal1 ' s beak", a double quote "``"."""
    return " ".join(tokenize(text.replace('"', " `` ")))


def _group(annotations: Iterator[Annotation], files: dict[str, str]) -> list[ChangePair]:
    pairs: dict[tuple[str, str], ChangePair] = {}
    for found in annotations:
        if found.key in pairs:
            pair = pairs[found.key]
            if pair.split != found.split:
                raise DiffcapError(
                    f"{found.where}: the pair {pair.id} is in {found.split} here and in {pair.split} before; keep one."
                )
            pair.captions.extend(found.captions)
        else:
            before, after = (files.get(photo, f"images/{photo}{EXTENSIONS[0]}") for photo in found.photos)
            captions = list(found.captions)
            pairs[found.key] = ChangePair(
                "_".join(found.photos), before, after, captions, found.split, extra=found.extra
            )
    return sorted(pairs.values(), key=lambda pair: SPLITS.index(pair.split))


def _photo_files(folder: Path) -> dict[str, str]:
    """Photo id -> path under the dataset's folder, for the photos that are there; the first extension wins."""
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
        photos = _photos(row)
        yield Annotation(
            photos=photos,
            key=photos,  # not the URLs: one photo is found under several
            split=SPLIT_NAMES[row["split"]],
            captions=[tokenised(row["description"])],
            where=where,
            extra={
                "species": [row["img1Species"], row["img2Species"]],
                "selection": [row["img1Selection"], row["img2Selection"]],
            },
        )


def _photos(row: dict[str, str]) -> tuple[str, str]:
    return (
        photo_id(row["img1ImgURL"], row["img1ObservationURL"]),
        photo_id(row["img2ImgURL"], row["img2ObservationURL"]),
    )


def _rows(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Where each line of the TSV stands, and what is in its columns."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise DiffcapError(f"{path}: not UTF-8 text (byte {error.start}); fetch the file again.") from None
    columns: tuple[str, ...] = COLUMNS
    for number, line in enumerate(lines, 1):
        where, fields = f"{path}, line {number}", [_unquote(field) for field in line.rstrip("\r").split("\t")]
        if not line.strip():
            continue
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
    """Undo the quoting of spreadsheet programs, which double the quotes inside."""
    if len(field) >= 2 and field[0] == field[-1] == '"' and '"' not in field[1:-1].replace('""', ""):
        return field[1:-1].replace('""', '"')
    return field


def _read_lines(folder: Path) -> Iterator[Annotation]:
    for split in SPLITS:
        names = [f"{name}.{ending}" for ending in ("jsonl", "json") for name, of in SPLIT_NAMES.items() if of == split]
        path = next((folder / name for name in names if (folder / name).is_file()), folder / names[0])
        remedy = "put the official birds-to-words-v1.0.tsv or train.jsonl, val.jsonl and test.jsonl into this folder"
        for where, row in read_json_lines(path, "annotations", remedy):
            first, second = (row.get(key) for key in ("img1", "img2"))
            if not isinstance(first, str) or not isinstance(second, str) or not first or not second:
                raise DiffcapError(f'{where}: "img1" and "img2" must be photo ids (strings); fix that line.')
            photos = first, second
            yield Annotation(
                photos, photos, split, token_captions(row.get("description"), where, "description"), where, {}
            )
