"""Find the image pairs that a command line names: two images, two folders, a folder of pairs, or a table of pairs."""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diffcap.datasets.checks import default_ids
from diffcap.datasets.pairs import read_rows
from diffcap.records import is_blank
from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import existing_path, url_of

_TABLES = (".csv", ".tsv", ".jsonl")
_ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar")
_BEFORE, _AFTER = ("before", "bef", "images", "A"), ("after", "aft", "sc_images", "B")
_ENDINGS = (("_before", "_after"), ("-before", "-after"), ("_1", "_2"), ("", "_2"))  # the last: Spot-the-Diff
_KINDS = ("bmp", "gif", "jpg", "jpeg", "png", "tif", "tiff", "webp", "avif", "jp2", "ppm", "pgm", "tga")
_SUFFIXES = {f".{kind}" for kind in _KINDS}
_MAX_NAMED = 3  # unpaired images that a note names


class ImagePair(NamedTuple):
    """Two images and the id of the pair."""

    id: str
    before: Path
    after: Path

    def as_dict(self) -> dict[str, str]:
        """The id and the paths as JSON values."""
        return {"id": self.id, "before": str(self.before), "after": str(self.after)}


def names_many(before: str, after: str | None) -> bool:
    """Whether the arguments are a folder, two folders or a table of pairs, as opposed to two images."""
    return Path(before).is_dir() or (after is None and Path(before).suffix.lower() in _TABLES)


def table_paths(path: Path) -> list[Path]:
    """Return the paths at which `find_pairs` looks for a table of pairs: in a folder, or the file itself."""
    return [path / f"pairs{ending}" for ending in _TABLES] if path.is_dir() else [path]


def find_pairs(before: str, after: str | None = None) -> tuple[list[ImagePair], list[str]]:
    """Find the image pairs that one or two arguments name.

    | arguments | pairs |
    |---|---|
    | two images | this pair |
    | two folders | images with the same name; the suffixes may differ |
    | a folder | its `pairs.csv` or `pairs.jsonl`; else its folders `before` and `after`, or `A`, `B`; else `X_before.*` with `X_after.*` |
    | a `.csv`, `.tsv` or `.jsonl` file | the columns "before", "after" and, optionally, "id"; paths relative to the file |

    Returns:
        The pairs, with unique ids, and a list with a note if images are not paired. Images of a folder are in natural order (2 before
        10); a table keeps its order, and its images are not looked up. Default ids: see `default_ids`.
    """
    first = Path(before)
    if after is not None:
        second = Path(after)
        if first.is_dir() != second.is_dir() and first.exists() and second.exists():
            raise DiffcapError(f"{before} and {after}: one is a folder and one is not; give two images or two folders.")
        if first.is_dir():
            return _pairs_of_folders(first, second)
        return [ImagePair(first.stem, first, second)], []
    if first.is_dir():
        return _pairs_in_folder(first)
    if url := url_of(before):
        raise DiffcapError(f"{url}: a URL; download the images, then: diffcap caption BEFORE AFTER.")
    if first.suffix.lower() in _TABLES:
        return _pairs_in_table(first), []
    if not first.exists():
        raise DiffcapError(f"{before}: file not found; give BEFORE and AFTER, a folder of pairs, or a table of pairs.")
    if first.suffix.lower() == ".json":
        raise DiffcapError(
            f"{before}: a .json file; give a table of pairs as .csv, .tsv or .jsonl (one object per line)."
        )
    if first.suffix.lower() in _ARCHIVES:
        raise DiffcapError(f"{before}: an archive; extract it, and give its folder of pairs or its table of pairs.")
    raise DiffcapError(f"{before}: the image after the change is missing; give both: diffcap caption BEFORE AFTER.")


def _images(folder: Path) -> dict[str, list[Path]]:
    """The image files of a folder by name without suffix, in natural order. Names have their composed Unicode form."""
    images: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir(), key=_natural_key):
        if path.suffix.lower() in _SUFFIXES and path.is_file():
            images.setdefault(unicodedata.normalize("NFC", path.stem), []).append(path)
    return images


def _natural_key(path: Path) -> tuple[list[tuple[int, str]], str]:
    """Sort key that compares the numbers in names as numbers, so that 2.png comes before 10.png."""
    parts = re.split(r"([0-9]+)", path.name)
    key = [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
    return key, path.name


def _with_note(
    found: Iterable[tuple[str, Sequence[Path], Sequence[Path]]], images: Iterable[Sequence[Path]]
) -> tuple[list[ImagePair], list[str]]:
    """The pairs of (name, images before, images after), and a note on those of all images that are in no pair."""
    pairs = []
    for name, before, after in found:
        for side in (before, after):
            if len(side) > 1:
                raise DiffcapError(
                    f"{side[0]} and {side[1].name}: both belong to the pair {name}; move one away, or give a CSV file of pairs."
                )
        pairs.append(ImagePair(name, before[0], after[0]))
    paired = {path for pair in pairs for path in (pair.before, pair.after)}
    left = [str(path) for paths in images for path in paths if path not in paired]
    if not left:
        return pairs, []
    more = f" and {len(left) - _MAX_NAMED:,} more" if len(left) > _MAX_NAMED else ""
    count = "1 unpaired image was" if len(left) == 1 else f"{len(left):,} unpaired images were"
    return pairs, [f"{count} ignored: {', '.join(left[:_MAX_NAMED])}{more}."]


def _pairs_of_folders(before: Path, after: Path) -> tuple[list[ImagePair], list[str]]:
    images_before = _images(before)
    images_after = _images(after)
    matched = [(name, paths, images_after[name]) for name, paths in images_before.items() if name in images_after]
    if not matched:
        raise DiffcapError(
            f"{before} and {after}: no image has the same name in both; rename the images, or give a CSV file of pairs."
        )
    return _with_note(matched, [*images_before.values(), *images_after.values()])


def _pairs_in_folder(folder: Path) -> tuple[list[ImagePair], list[str]]:
    for table in table_paths(folder):
        if table.is_file():
            return _pairs_in_table(table), []
    for before, after in zip(_BEFORE, _AFTER):
        if (folder / before).is_dir() and (folder / after).is_dir():
            return _pairs_of_folders(folder / before, folder / after)
    images = _images(folder)
    for first, second in _ENDINGS:
        names = {name: name.removesuffix(first) for name in images if name.endswith(first)}
        found = [
            (stem, images[name], images[stem + second])
            for name, stem in names.items()
            if stem + second in images and stem + second != name
        ]
        if found:
            return _with_note(found, images.values())
    raise DiffcapError(
        f"{folder}: no pairs found; add pairs.csv (columns before, after), folders before and after (or A and B) with images of the "
        "same names, or images named X_before and X_after."
    )


def _pairs_in_table(path: Path) -> list[ImagePair]:
    rows: list[tuple[str, dict[str, Any]]] = []
    for where, row in read_rows(path):
        for key in ("before", "after"):
            if not isinstance(row.get(key), str) or is_blank(row[key]):
                raise DiffcapError(f'{where}: "{key}" is missing; every pair needs "before" and "after".')
        if not isinstance(row.get("id"), str | int | float | None):
            raise DiffcapError(f'{where}: "id" is {row["id"]!r:.60}; give a string or a number.')
        rows.append((where, row))
    images = [(row["before"].strip(), row["after"].strip()) for _, row in rows]
    pairs: dict[str, ImagePair] = {}
    for (where, row), (before, after), default_id in zip(rows, images, default_ids(images)):
        name = str("" if row.get("id") is None else row["id"]).strip()
        name = default_id if is_blank(name) else name
        if name in pairs:
            raise DiffcapError(f'{where}: the id "{name}" is duplicated; give each pair a unique "id".')
        pairs[name] = ImagePair(name, existing_path(path.parent / before), existing_path(path.parent / after))
    if not pairs:
        raise DiffcapError(f"{path}: it contains no pair; write one line per pair, with the columns before and after.")
    return list(pairs.values())
