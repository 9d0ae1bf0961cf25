"""Birds-to-Words (Forbes et al., EMNLP 2019): pairs of iNaturalist photos and paragraphs that compare the birds.

The folder holds one of two formats:

* the official `birds-to-words-v1.0.tsv` (or the only `*.tsv` in the folder): 11 columns, one annotation per row, with or
  without a header. Rows with the same two photos form one pair. The text is tokenised as in the other format: lower case,
  every punctuation mark is a token, "animal 1" becomes one word.
* the tokenised `train.jsonl`, `val.jsonl` (or `dev.jsonl`) and `test.jsonl`, or the same names with `.json` as in IDC-PCL's
  code: `{"img1", "img2", "description"}`. A description is one caption (a list of tokens) or a list of captions. Lines with
  the same two photos form one pair.

The photos are not in these files; `photo_urls` returns their URLs. They belong into `images/`, with the photo id as name:
the number after `photos/` in the image's URL, or else in the observation's URL, or else the last part of the image's URL
without its extension. For example, `https://www.inaturalist.org/photos/647514` is `images/647514.jpg`. The extensions `.jpeg`
and `.png` are found as well. The id of a pair is "<photo id>_<photo id>".
"""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from diffcap.datasets.checks import check_split, first_file, text_of, token_captions
from diffcap.records import SPLITS, ChangePair, read_json_lines
from diffcap.text.vocabulary import tokenize
from diffcap.utils.errors import DiffcapError

COLUMNS = (
    "img1ObservationURL", "img1ImgURL", "img1Species", "img1Selection",
    "img2ObservationURL", "img2ImgURL", "img2Species", "img2Selection",
    "split", "annN", "description",
)  # fmt: skip
SPLIT_NAMES = {**{split: split for split in SPLITS}, "dev": "val"}
EXTENSIONS = (".jpg", ".jpeg", ".png")


class Annotation(NamedTuple):
    """The captions of one line."""

    photos: tuple[str, str]  # ids, which also identify the pair; one photo can have several URLs
    split: str
    captions: list[str]
    where: str  # file and line, for messages
    extra: dict[str, Any]  # see `ChangePair`


def read(folder: Path) -> list[ChangePair]:
    """Read the pairs of either format, sorted by split (train, val, test), then in the order of the file."""
    tables = sorted(folder.glob("*.tsv"))
    lines = first_file(folder, "train.jsonl", "train.json")
    if len(tables) > 1 or (tables and lines.is_file()):
        both = ", ".join(path.name for path in [*tables, lines] if path.is_file())
        raise DiffcapError(f"{folder}: holds {both}; keep only one format of Birds-to-Words there.")
    files, pairs = _photo_files(folder / "images"), dict[tuple[str, str], ChangePair]()
    for found in _read_table(tables[0]) if tables else _read_lines(folder):
        before, after = (files.get(photo, f"images/{photo}{EXTENSIONS[0]}") for photo in found.photos)
        new = ChangePair("_".join(found.photos), before, after, [], found.split, extra=found.extra)
        pair = pairs.setdefault(found.photos, new)
        check_split(pair, found.split, found.where)
        pair.captions.extend(found.captions)
    return sorted(pairs.values(), key=lambda pair: SPLITS.index(pair.split))


def photo_urls(folder: Path) -> dict[str, list[str]]:
    """The URLs of the photos of the TSV: path relative to `folder` -> alternative URLs of the same photo."""
    files, urls = _photo_files(folder / "images"), dict[str, list[str]]()
    for table in sorted(folder.glob("*.tsv")):
        for _, row in _rows(table):
            for photo, url in zip(_photos(row), (row["img1ImgURL"], row["img2ImgURL"])):
                known = urls.setdefault(files.get(photo, f"images/{photo}{EXTENSIONS[0]}"), [])
                if url.strip() not in known:
                    known.append(url.strip())
    return urls


def photo_id(image_url: str, observation_url: str) -> str:
    """A photo's file name in `images/`, without extension; see the module's docstring."""
    for url in (image_url, observation_url):
        if found := re.search(r"photos/(\d+)", url):
            return found.group(1)
    return PurePosixPath(re.split("[?#]", image_url)[0]).stem  # not urlsplit, which raises on an invalid URL


def tokenised(text: str) -> str:
    """Tokenise raw text as the tokenised files do: "Animal 1's beak" becomes "animal1 ' s beak", and '"' becomes "``"."""
    return " ".join(tokenize(text.replace('"', " `` ")))


def _photo_files(folder: Path) -> dict[str, str]:
    """Photo id -> path relative to the dataset's folder, of the files that exist; the first extension has priority."""
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
        yield Annotation(_photos(row), SPLIT_NAMES[row["split"]], [tokenised(row["description"])], where, extra)


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
        names = [f"{name}.{ending}" for ending in ("jsonl", "json") for name, of in SPLIT_NAMES.items() if of == split]
        for where, row in read_json_lines(first_file(folder, *names), "annotations", remedy):
            photos = text_of(row, "img1", where), text_of(row, "img2", where)
            captions = token_captions(row.get("description"), where, "description")
            yield Annotation(photos, split, captions, where, {})
