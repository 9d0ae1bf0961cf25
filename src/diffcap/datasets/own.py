"""A dataset of your own: a folder with a `pairs.jsonl` (`diffcap.datasets.pairs`), or with one JSON file in Karpathy's form
(`diffcap.datasets.karpathy`).

The images of a JSON file are in `images/<split>/A` (before) and `images/<split>/B` (after), or in such folders without `images` or
without `<split>`, where <split> is the `filepath` of an entry, by default its split. Masks of the change, if there are any, are in
`label` beside `A`.
"""

from pathlib import Path

from diffcap.datasets import pairs
from diffcap.datasets.karpathy import LEVIR, Layout, notes, read_files
from diffcap.records import ChangePair, read_json
from diffcap.utils.errors import DiffcapError

__all__ = ["notes", "read"]

_HOMES = ("{folder}/", "images/", "")
LAYOUTS = (LEVIR, *(Layout(f"{home}A/{{name}}", f"{home}B/{{name}}", f"{home}label/{{name}}") for home in _HOMES))


def read(folder: Path) -> list[ChangePair]:
    """Read the pairs in the order of the file.

    Raises:
        DiffcapError: the folder has no such file or several, or the file is malformed.
    """
    files = _json_files(folder)
    names = ", ".join(path.name for path in files)
    if (folder / "pairs.jsonl").is_file():
        if files:
            raise DiffcapError(f"{folder}: has both pairs.jsonl and {names}; keep one of the two formats.")
        return pairs.read(folder)
    if len(files) > 1:
        raise DiffcapError(f"{folder}: has several JSON files with images ({names}); keep one of them.")
    # Without such a file, a single JSON file is the one that was meant: reading it tells what is wrong with it.
    files = files or sorted(folder.glob("*.json"))
    if len(files) != 1:
        raise DiffcapError(
            f"{folder}: no pairs.jsonl there, which one's own dataset needs, and no JSON file of images; write one."
        )
    (path,) = files
    return read_files(folder, {path: ""}, *LAYOUTS)


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
