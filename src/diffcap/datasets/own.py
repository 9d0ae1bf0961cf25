"""A dataset of your own: a folder with a `pairs.jsonl` or `pairs.csv` (`diffcap.datasets.pairs`), or with one JSON file in
Karpathy's form (`diffcap.datasets.karpathy`).

The images of a JSON file are in `images/<split>/A` (before) and `images/<split>/B` (after), or in such folders without `images` or
without `<split>`, where <split> is the `filepath` of an entry, by default its split. Masks of the change, if there are any, are in
`label` beside `A`.
"""

from pathlib import Path

from diffcap.datasets import karpathy, pairs
from diffcap.datasets.karpathy import LEVIR, Layout, read_files
from diffcap.datasets.registry import datasets
from diffcap.records import ChangePair, read_json
from diffcap.utils.errors import DiffcapError

_HOMES = ("{folder}/", "images/", "")
_REMEDY = 'write pairs.jsonl, one JSON object per line: {"before": "a.png", "after": "b.png", "captions": ["..."]}'
LAYOUTS = (LEVIR, *(Layout(f"{home}A/{{name}}", f"{home}B/{{name}}", f"{home}label/{{name}}") for home in _HOMES))


def read(folder: Path) -> list[ChangePair]:
    """Read the pairs in the order of the file."""
    files = _json_files(folder)
    names = ", ".join(path.name for path in files)
    table = next((folder / name for name in pairs.FILES if (folder / name).is_file()), None)
    if table:
        if files:
            raise DiffcapError(f"{folder}: has both {table.name} and {names}; keep one of the two formats.")
        return pairs.read(table)
    if len(files) > 1:
        raise DiffcapError(f"{folder}: has several JSON files with images ({names}); keep one of them.")
    # Without such a file, a single JSON file is the one that was meant: reading it tells what is wrong with it.
    files = files or sorted(folder.glob("*.json"))
    if len(files) != 1:
        raise DiffcapError(
            f"{folder}: no pairs.jsonl there, which one's own dataset needs, no pairs.csv and no JSON file of images; "
            f"{_REMEDY}, or choose a dataset that has a reader ({', '.join(sorted(datasets()))})."
        )
    (path,) = files
    if isinstance(read_json(path), list):
        raise DiffcapError(f"{path}: a JSON list, which is not read; {_REMEDY}.")
    return read_files(folder, {path: ""}, *LAYOUTS)


def notes(pairs_: list[ChangePair]) -> list[str]:
    """Remarks on the files, see `karpathy.notes` and `pairs.notes`."""
    return [*karpathy.notes(pairs_), *pairs.notes(pairs_)]


def _json_files(folder: Path) -> list[Path]:
    """The JSON files with a list of images, except those in COCO's form, which may be beside a `pairs.jsonl`."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            value = read_json(path)
        except DiffcapError:
            continue
        if isinstance(value, dict) and isinstance(value.get("images"), list) and "annotations" not in value:
            found.append(path)
    return found
