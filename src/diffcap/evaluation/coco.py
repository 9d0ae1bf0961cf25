"""Read and write predictions and references as COCO caption files, which other evaluation programs can read."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diffcap.records import read_json, write_json
from diffcap.utils.errors import DiffcapError


def write_predictions(path: str | Path, predictions: Mapping[str, str]) -> None:
    """Write `predictions.json`, a COCO results file: [{"image_id", "caption"}]."""
    write_json(path, [{"image_id": id, "caption": caption} for id, caption in predictions.items()])


def write_references(path: str | Path, references: Mapping[str, Sequence[str]]) -> None:
    """Write `references.json`, a COCO captions file with string image ids; annotation ids count from 1."""
    captions = [(id, caption) for id, group in references.items() for caption in group]
    write_json(
        path,
        {
            "info": {},
            "licenses": [],
            "type": "captions",
            "images": [{"id": id, "filename": id} for id in references],
            "annotations": [
                {"id": number, "image_id": id, "caption": caption} for number, (id, caption) in enumerate(captions, 1)
            ],
        },
    )


def _rows(path: str | Path, entries: Any, name: str) -> Iterable[tuple[str, str]]:
    if not isinstance(entries, list):
        raise DiffcapError(
            f"{path}: {name} must be a list, found {type(entries).__name__}; see the COCO caption format."
        )
    if not entries:
        raise DiffcapError(f"{path}: {name} is empty; write the captions first.")
    for number, row in enumerate(entries, 1):
        if not isinstance(row, dict):
            raise DiffcapError(f"{path}: entry {number} of {name} is {row!r:.60}, not an object; fix it.")
        id, caption = row.get("image_id"), row.get("caption")
        if not isinstance(id, str | int) or isinstance(id, bool) or not isinstance(caption, str):
            raise DiffcapError(
                f'{path}: entry {number} of {name} needs "image_id" and "caption", found {row!r:.80}; fix it.'
            )
        yield str(id), caption


def read_predictions(path: str | Path) -> dict[str, str]:
    """Read a COCO results file: id -> caption. Ids are converted to strings.

    Raises:
        DiffcapError: the file is missing, empty or malformed, or an id is duplicated.
    """
    predictions: dict[str, str] = {}
    duplicates: dict[str, None] = {}
    for id, caption in _rows(path, read_json(path, "predictions file"), "the list of predictions"):
        if id in predictions:
            duplicates[id] = None
        predictions[id] = caption
    if duplicates:
        names = ", ".join(map(repr, list(duplicates)[:3])) + (", ..." if len(duplicates) > 3 else "")
        raise DiffcapError(f"{path}: {len(duplicates):,} ids have more than one prediction ({names}); keep one per id.")
    return predictions


def read_references(path: str | Path) -> dict[str, list[str]]:
    """Read a COCO captions file: id -> captions in the order of the file. Only "annotations" is read.

    Raises:
        DiffcapError: the file is missing, empty or malformed.
    """
    content = read_json(path, "references file")
    if not isinstance(content, dict) or "annotations" not in content:
        raise DiffcapError(f'{path}: the key "annotations" is missing; give a COCO captions file as the references.')
    references: dict[str, list[str]] = {}
    for id, caption in _rows(path, content["annotations"], '"annotations"'):
        references.setdefault(id, []).append(caption)
    return references
