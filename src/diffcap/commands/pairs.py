"""Find the image pairs that a command line names: two images, two folders, a folder of pairs, or a table of pairs."""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from diffcap.datasets.checks import make_default_ids
from diffcap.datasets.pairs import read_rows
from diffcap.records import is_blank
from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import existing_path, url_of

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl")
_ARCHIVE_SUFFIXES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar")
_FOLDER_NAMES = (("before", "after"), ("bef", "aft"), ("images", "sc_images"), ("A", "B"))  # tried in this order
_NAME_ENDINGS = (("_before", "_after"), ("-before", "-after"), ("_1", "_2"), ("", "_2"))  # "", "_2": Spot-the-Diff
IMAGE_TYPES = tuple(
    ["bmp", "gif", "jpg", "jpeg", "png", "tif", "tiff", "webp", "avif", "heic", "heif", "jp2", "ppm", "pgm", "tga"]
)
_MAX_LISTED_IMAGES = 3  # in the note on unpaired images
Found = tuple[list["ImagePair"], list[str]]  # pairs, and a list with a note if images are not paired


class ImagePair(NamedTuple):
    """Two images and the id of the pair."""

    id: str
    before: Path
    after: Path

    def as_dict(self) -> dict[str, str]:
        """Return the id and the paths as JSON values."""
        return {"id": self.id, "before": str(self.before), "after": str(self.after)}


def is_parquet(path: str) -> bool:
    """Return whether a path or URL is a Parquet table: a .parquet file, a folder with such files, or a URL without a suffix."""
    suffix = PurePosixPath(path).suffix.lower()
    has_table = any(table.is_file() for table in table_paths(Path(path)))
    is_folder = Path(path).is_dir() and any(Path(path).glob("*.parquet")) and not has_table
    return suffix == ".parquet" or is_folder or ("://" in path and not suffix)


def parquet_advice(table: str) -> str:
    """Return advice for users: how to convert a table, such as a .csv file, to a Parquet table."""
    path = Path(table)
    reader = {".csv": "csv.read_csv", ".jsonl": "json.read_json"}.get(path.suffix.lower())
    if reader is None:
        return "give a .parquet file with the columns before and after"
    out = str(path.with_suffix(".parquet"))
    return f'make one: python -c "from pyarrow import csv, json, parquet; parquet.write_table({reader}({table!r}), {out!r})"'


def table_paths(path: Path) -> list[Path]:
    """Return where to look for a table of pairs: the possible files in a folder, or the path itself if it is a file."""
    return [path / f"pairs{ending}" for ending in TABLE_SUFFIXES] if path.is_dir() else [path]


def find_pairs(before: str, after: str | None = None) -> Found:
    """Find the image pairs that one or two arguments name.

    | arguments | pairs |
    |---|---|
    | two images | this pair |
    | two folders | images with the same name; the suffixes may differ |
    | a folder | its `pairs.csv`, `.tsv` or `.jsonl`; else its folders `before` and `after`; else images `x_before` and `x_after` |
    | a `.csv`, `.tsv` or `.jsonl` file | the columns "before", "after" and, optionally, "id"; paths relative to the file |

    Returns:
        The pairs, with unique ids, and a list with a note if images are not paired. Images of a folder are in natural order (2 before
        10). Pairs of a table keep its order, whether their images exist or not.
    """
    before_path = Path(before)
    if after is not None:
        after_path = Path(after)
        if before_path.is_dir() != after_path.is_dir() and before_path.exists() and after_path.exists():
            raise DiffcapError(f"{before} and {after}: one is a folder and one is not; give two images or two folders.")
        if before_path.is_dir():
            return _pairs_of_folders(before_path, after_path)
        return [ImagePair(before_path.stem, before_path, after_path)], []
    if before_path.is_dir():
        return _pairs_in_folder(before_path)
    if url := url_of(before):
        raise DiffcapError(f"{url}: a URL; download the images, then: diffcap caption BEFORE AFTER.")
    suffix = before_path.suffix.lower()
    if suffix in TABLE_SUFFIXES:
        return _pairs_in_table(before_path), []
    fault = "the image after the change is missing; give both: diffcap caption BEFORE AFTER"
    if not before_path.exists():
        fault = "file not found; give BEFORE and AFTER, a folder of pairs, or a table of pairs"
    elif suffix == ".json":
        fault = "a .json file; give a table of pairs as .csv, .tsv or .jsonl (one object per line)"
    elif suffix in _ARCHIVE_SUFFIXES:
        fault = "an archive; extract it, and give its folder of pairs or its table of pairs"
    raise DiffcapError(f"{before}: {fault}.")


def _image_files(folder: Path) -> dict[str, list[Path]]:
    """Return name without suffix (in Unicode form NFC) -> image files of a folder. The order is natural: 2.png before 10.png."""
    files: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir(), key=_natural_key):
        if path.suffix.lower().removeprefix(".") in IMAGE_TYPES and path.is_file():
            files.setdefault(unicodedata.normalize("NFC", path.stem), []).append(path)
    return files


def _natural_key(path: Path) -> tuple[list[tuple[int, str]], str]:
    """Return a sort key that compares the numbers in names as numbers, so that 2.png comes before 10.png."""
    parts = re.split(r"([0-9]+)", path.name)
    key = [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
    return key, path.name


def _make_pairs(
    matches: Iterable[tuple[str, Sequence[Path], Sequence[Path]]], all_files: Iterable[Sequence[Path]]
) -> Found:
    """Make a pair of each match (id, before files, after files), which must have one file of each. Also return notes on unpaired files."""
    pairs = []
    for id, before_files, after_files in matches:
        for files in (before_files, after_files):
            if len(files) > 1:
                raise DiffcapError(
                    f"{files[0]} and {files[1].name}: both belong to the pair {id}; move one away, or give a CSV file of pairs."
                )
        pairs.append(ImagePair(id, before_files[0], after_files[0]))
    paired = {path for pair in pairs for path in (pair.before, pair.after)}
    unpaired = [str(path) for files in all_files for path in files if path not in paired]
    if not unpaired:
        return pairs, []
    more = f" and {len(unpaired) - _MAX_LISTED_IMAGES:,} more" if len(unpaired) > _MAX_LISTED_IMAGES else ""
    count = "1 unpaired image was" if len(unpaired) == 1 else f"{len(unpaired):,} unpaired images were"
    return pairs, [f"{count} ignored: {', '.join(unpaired[:_MAX_LISTED_IMAGES])}{more}."]


def _pairs_of_folders(before: Path, after: Path) -> Found:
    before_files, after_files = _image_files(before), _image_files(after)
    matches = [(name, files, after_files[name]) for name, files in before_files.items() if name in after_files]
    if not matches:
        raise DiffcapError(
            f"{before} and {after}: no image has the same name in both; rename the images, or give a CSV file of pairs."
        )
    return _make_pairs(matches, [*before_files.values(), *after_files.values()])


def _pairs_in_folder(folder: Path) -> Found:
    for table in table_paths(folder):
        if table.is_file():
            return _pairs_in_table(table), []
    for before, after in _FOLDER_NAMES:
        if (folder / before).is_dir() and (folder / after).is_dir():
            return _pairs_of_folders(folder / before, folder / after)
    files = _image_files(folder)
    for before_ending, after_ending in _NAME_ENDINGS:
        ids = [name.removesuffix(before_ending) for name in files if name.endswith(before_ending)]
        ids = [id for id in ids if id + after_ending in files]
        matches = [(id, files[id + before_ending], files[id + after_ending]) for id in ids]
        if matches:
            return _make_pairs(matches, files.values())
    raise DiffcapError(
        f"{folder}: no pairs found; add pairs.csv (columns before, after), folders before and after (or A and B) with images of the "
        "same names, or images named X_before and X_after."
    )


def _pairs_in_table(path: Path) -> list[ImagePair]:
    rows: list[tuple[str, dict[str, Any]]] = []
    for place, row in read_rows(path):  # place: "<path>, line <number>"
        for key in ("before", "after"):
            if not isinstance(row.get(key), str) or is_blank(row[key]):
                raise DiffcapError(f'{place}: "{key}" is missing; every pair needs "before" and "after".')
        if not isinstance(row.get("id"), str | int | float | None):
            raise DiffcapError(f'{place}: "id" is {row["id"]!r:.60}; give a string or a number.')
        rows.append((place, row))
    images = [(row["before"].strip(), row["after"].strip()) for _, row in rows]
    pairs: dict[str, ImagePair] = {}
    for (place, row), pair_images, default_id in zip(rows, images, make_default_ids(images)):
        id = str("" if row.get("id") is None else row["id"]).strip()
        id = default_id if is_blank(id) else id
        if id in pairs:
            raise DiffcapError(f'{place}: the id "{id}" is duplicated; give each pair a unique "id".')
        # A path with umlauts may have another Unicode form in the table than on the disk.
        before, after = (existing_path(path.parent / image) for image in pair_images)
        pairs[id] = ImagePair(id, before, after)
    if not pairs:
        raise DiffcapError(f"{path}: it contains no pair; write one line per pair, with the columns before and after.")
    return list(pairs.values())
