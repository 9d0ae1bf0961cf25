"""Which pictures a command line means: two of them, two folders, a folder of pairs, or a table of pairs."""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diffcap.datasets.pairs import default_ids
from diffcap.records import is_blank, read_json_lines
from diffcap.utils.errors import DiffcapError

_TABLES = (".csv", ".tsv", ".jsonl")
_BEFORE, _AFTER = ("before", "bef", "images"), ("after", "aft", "sc_images")
_ENDINGS = (("_before", "_after"), ("-before", "-after"), ("_1", "_2"), ("", "_2"))  # the last: Spot-the-Diff
_PICTURES = {
    f".{kind}"
    for kind in ("bmp", "gif", "jpg", "jpeg", "png", "tif", "tiff", "webp", "avif", "jp2", "ppm", "pgm", "tga")
}


_NAMED = 3  # pictures without a partner that a note names


class PicturePair(NamedTuple):
    """Two pictures, and what the pair is called."""

    id: str
    before: Path
    after: Path


def find_pairs(before: str, after: str | None = None) -> tuple[list[PicturePair], list[str]]:
    """The pairs that one or two arguments name, no two of one id; and a sentence about the pictures that have no partner.

    The id of a pair without one is the name of its file: see `default_ids`. The pictures of a folder are sorted with their numbers in
    order (2 before 10); the pairs of a table keep its order.

    | arguments | pairs |
    |---|---|
    | two pictures | that one |
    | two folders | pictures of the same name, whatever their ending |
    | a folder | its `pairs.csv` or `pairs.jsonl`; else its folders `before` and `after`; else `X_before.*` with `X_after.*` |
    | a `.csv`, `.tsv` or `.jsonl` file | its columns "before", "after" and, if there, "id"; paths relative to the file |

    Raises:
        DiffcapError: there are none, it is not clear which belong together, or a table is malformed. Whether the pictures
            are there is not looked at.
    """
    first = Path(before)
    if after is not None:
        second = Path(after)
        if first.is_dir() != second.is_dir() and first.exists() and second.exists():
            raise DiffcapError(
                f"{before} and {after}: one is a folder and one is not; give two pictures, or two folders."
            )
        return _same_names(first, second) if first.is_dir() else ([PicturePair(first.stem, first, second)], [])
    if first.is_dir():
        return _of_folder(first)
    if first.suffix.lower() in _TABLES:
        return _of_table(first), []
    if not first.exists():
        raise DiffcapError(f"{before}: nothing there; give BEFORE and AFTER, a folder of pairs, or a table of pairs.")
    raise DiffcapError(
        f"{before}: one picture alone; give the one after the change, too: diffcap caption BEFORE AFTER."
    )


Pictures = dict[str, list[Path]]


def _pictures(folder: Path) -> Pictures:
    """Files of a folder that look like pictures, by name without ending, in natural order."""
    found: Pictures = {}
    for path in sorted(folder.iterdir(), key=_natural):
        if path.suffix.lower() in _PICTURES and path.is_file():
            found.setdefault(path.stem, []).append(path)
    return found


def _natural(path: Path) -> tuple[list[tuple[int, str]], str]:
    """Sort key: the numbers in a name count as numbers, so that 2.png comes before 10.png."""
    parts = re.split(r"([0-9]+)", path.name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts], path.name


def _pair(name: str, before: Sequence[Path], after: Sequence[Path]) -> PicturePair:
    for side in (before, after):
        if len(side) > 1:
            raise DiffcapError(
                f"{side[0]} and {side[1].name}: which of them belongs to the pair {name} is not clear; move one away, or "
                "give a CSV."
            )
    return PicturePair(name, before[0], after[0])


def _alone(pictures: Iterable[Path], pairs: Sequence[PicturePair]) -> list[str]:
    paired = {path for pair in pairs for path in (pair.before, pair.after)}
    left = [str(path) for path in pictures if path not in paired]
    if not left:
        return []
    more = f" and {len(left) - _NAMED:,} more" if len(left) > _NAMED else ""
    have = "1 picture has" if len(left) == 1 else f"{len(left):,} pictures have"
    return [f"{have} no partner, left out: {', '.join(left[:_NAMED])}{more}."]


def _same_names(before: Path, after: Path) -> tuple[list[PicturePair], list[str]]:
    first, second = _pictures(before), _pictures(after)
    pairs = [_pair(name, paths, second[name]) for name, paths in first.items() if name in second]
    if not pairs:
        raise DiffcapError(
            f"{before} and {after}: no picture has the same name in both; name them alike, or give a CSV."
        )
    return pairs, _alone((path for side in (first, second) for paths in side.values() for path in paths), pairs)


def _of_folder(folder: Path) -> tuple[list[PicturePair], list[str]]:
    for ending in _TABLES:
        if (folder / f"pairs{ending}").is_file():
            return _of_table(folder / f"pairs{ending}"), []
    for before, after in zip(_BEFORE, _AFTER):
        if (folder / before).is_dir() and (folder / after).is_dir():
            return _same_names(folder / before, folder / after)
    found = _pictures(folder)
    for first, second in _ENDINGS:
        pairs = [
            _pair(name.removesuffix(first), paths, found[other])
            for name, paths in found.items()
            if name.endswith(first) and (other := name.removesuffix(first) + second) in found and other != name
        ]
        if pairs:
            return pairs, _alone((path for paths in found.values() for path in paths), pairs)
    raise DiffcapError(
        f"{folder}: no pairs found; put pairs.csv there (columns before, after), folders before and after with pictures of "
        "the same names, or pictures named X_before and X_after."
    )


def _of_table(path: Path) -> list[PicturePair]:
    rows: Iterable[tuple[str, dict[str, Any]]]
    rows = read_json_lines(path, "table of pairs") if path.suffix.lower() == ".jsonl" else _csv_rows(path)
    checked: list[tuple[str, dict[str, Any]]] = []
    for where, row in rows:
        for key in ("before", "after"):
            if not isinstance(row.get(key), str) or is_blank(row[key]):
                raise DiffcapError(f'{where}: "{key}" is missing; every pair needs "before" and "after".')
        id = row.get("id")
        if not isinstance(id, str | int | float | None):
            raise DiffcapError(f'{where}: "id" is {id!r:.60}; give a string or a number.')
        checked.append((where, row))
    images = [(row["before"].strip(), row["after"].strip()) for _, row in checked]
    pairs: dict[str, PicturePair] = {}
    for (where, row), (before, after), default_id in zip(checked, images, default_ids(images)):
        name = str("" if row.get("id") is None else row["id"]).strip()
        name = default_id if is_blank(name) else name
        if name in pairs:
            raise DiffcapError(f'{where}: another pair is called "{name}", too; give each an "id" of its own.')
        pairs[name] = PicturePair(name, path.parent / before, path.parent / after)
    if not pairs:
        raise DiffcapError(f"{path}: no pairs in it; write a line a pair, with columns before and after.")
    return list(pairs.values())


def _csv_rows(path: Path) -> Iterable[tuple[str, dict[str, str]]]:
    if not path.is_file():
        raise DiffcapError(f"{path}: no table of pairs there; check the path.")
    try:
        text = path.read_text(encoding="utf-8-sig")
        if "\0" in text:
            raise ValueError("it holds a NUL character")
    except (ValueError, OSError) as error:
        raise DiffcapError(
            f"{path}: not a table of UTF-8 text ({' '.join(str(error).split())[:80]}); save it as UTF-8."
        ) from None
    try:
        if path.suffix.lower() == ".tsv":
            dialect: type[csv.Dialect] | csv.Dialect = csv.excel_tab
        else:
            dialect = csv.excel if "," in text.partition("\n")[0] else csv.Sniffer().sniff(text[:4096], ",;\t")
        reader = csv.reader(io.StringIO(text), dialect, strict=True)
        lines = [(reader.line_num, cells) for cells in reader]
    except csv.Error as error:
        raise DiffcapError(f"{path}: not a CSV table ({error}); separate columns with commas.") from None
    first = [cell.strip() for cell in lines[0][1]] if lines else []
    head = [name.lower() for name in first]
    if "before" in head and "after" in head:
        del lines[0]
    elif len(first) == 2 and all(re.search(r"\.\w+$", cell) for cell in first):
        head = ["before", "after"]  # two columns of pictures, without names
    else:
        raise DiffcapError(f'{path}: its first line must name the columns, among them "before" and "after".')
    twice = next((name for name in ("before", "after", "id") if head.count(name) > 1), None)
    if twice:
        raise DiffcapError(f'{path}, line 1: {head.count(twice)} columns are called "{twice}"; keep one of them.')
    for number, cells in lines:
        if any(cell.strip() for cell in cells[len(head) :]):
            raise DiffcapError(
                f"{path}, line {number}: {len(cells)} cells for {len(head)} columns; put quotes around a path with a comma."
            )
        if any(cell.strip() for cell in cells):
            yield f"{path}, line {number}", dict(zip(head, cells))
