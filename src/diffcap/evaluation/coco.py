"""Read and write predictions and references as COCO caption files; predictions are also read from simpler files."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from diffcap.records import is_blank, read_json, read_json_lines, write_json
from diffcap.utils.errors import DiffcapError

PREDICTION_SUFFIXES = (".json", ".jsonl")


def write_predictions(path: str | Path, predictions: Mapping[str, str]) -> None:
    """Write `predictions.json`, a COCO results file: [{"image_id", "caption"}]."""
    write_json(path, [{"image_id": id, "caption": caption} for id, caption in predictions.items()])


def write_references(path: str | Path, references: Mapping[str, Sequence[str]]) -> None:
    """Write `references.json`, a COCO captions file with string image ids; annotation ids count from 1."""
    captions = [(id, caption) for id, group in references.items() for caption in group]
    content = {
        "info": {},
        "licenses": [],
        "type": "captions",
        "images": [{"id": id, "filename": id} for id in references],
        "annotations": [{"id": n, "image_id": id, "caption": caption} for n, (id, caption) in enumerate(captions, 1)],
    }
    write_json(path, content)


def _entries(path: str | Path, entries: Any, name: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(entries, list):
        found = type(entries).__name__
        raise DiffcapError(f"{path}: {name} must be a list, found {found}; see the COCO caption format.")
    for number, row in enumerate(entries, 1):
        if not isinstance(row, dict):
            raise DiffcapError(f"{path}: entry {number} of {name} is {row!r:.60}, not an object; fix it.")
        yield f"{path}: entry {number} of {name}", row


def _id_and_caption(where: str, row: Mapping[str, Any], key: str = "image_id") -> tuple[str, str]:
    id, caption = row.get(key), row.get("caption")
    if not isinstance(id, str | int) or isinstance(id, bool) or not isinstance(caption, str):
        raise DiffcapError(f'{where} needs "{key}" and "caption", found {row!r:.80}; fix it.')
    return str(id), caption


def _prediction_entries(path: Path) -> Iterator[tuple[str, Any]]:
    """The entries of a predictions file in any of its forms, each with its place in the file for messages."""
    what, remedy = "predictions file", "give a .json file, or a .jsonl file with an object per line"
    if path.suffix.lower() == ".jsonl":
        yield from read_json_lines(path, what, remedy)
        return
    content = read_json(path, what, remedy, object_type=tuple)
    if isinstance(content, tuple):  # (id, caption) pairs of an object
        content = [{"id": id, "caption": caption} for id, caption in content]
    elif isinstance(content, list):
        content = [dict(row) if isinstance(row, tuple) else row for row in content]
    yield from _entries(path, content, "the predictions")


def read_predictions(path: str | Path) -> dict[str, str]:
    """Read captions: id -> caption. Ids are converted to strings.

    | file | content |
    |---|---|
    | .json | a COCO results file, [{"image_id", "caption"}, ...]; or an object {id: caption} |
    | .jsonl | an object {"id", "caption"} per line; other keys are ignored |

    "id" can be "image_id" everywhere.
    """
    found: list[tuple[str, str]] = []
    for where, row in _prediction_entries(Path(path)):
        found.append(_id_and_caption(where, row, "id" if "id" in row and "image_id" not in row else "image_id"))
    counts = Counter(id for id, _ in found)
    if duplicates := [id for id, count in counts.items() if count > 1]:
        names = ", ".join(map(repr, duplicates[:3])) + (", ..." if len(duplicates) > 3 else "")
        raise DiffcapError(f"{path}: {len(duplicates):,} ids have more than one prediction ({names}); keep one per id.")
    if not found:
        raise DiffcapError(f"{path}: contains no caption; write the captions first.")
    return dict(found)


def read_other_predictions(
    path: str | Path, scored: Collection[str], split: Collection[str], name: str
) -> dict[str, str]:
    """Read the captions that another system wrote for the pairs of a split, in the order of `scored`, with single spaces.

    Args:
        scored: ids of the pairs with references, each of which needs a caption.
        split: ids of all pairs of the split, called `name` in messages; captions of pairs that are not scored are ignored.
    """
    captions = read_predictions(path)
    known = set(split)
    if unknown := [id for id in captions if id not in known]:
        raise DiffcapError(
            f"{path}: {len(unknown):,} of {len(captions):,} ids are not in {name} (first {unknown[0]!r}; an id there is "
            f"{next(iter(scored))!r}); use the ids of manifest.jsonl."
        )
    if missing := [id for id in scored if id not in captions]:
        raise DiffcapError(
            f"{path}: {len(missing):,} of the {len(scored):,} pairs of {name} have no caption (first {missing[0]!r}); caption "
            "every pair, because scores of a part cannot be compared."
        )
    if blank := [id for id in scored if is_blank(captions[id])]:
        raise DiffcapError(
            f"{path}: {len(blank):,} of the {len(scored):,} captions are empty (first that of {blank[0]!r}); caption these pairs "
            "again."
        )
    return {id: " ".join(captions[id].split()) for id in scored}


def read_references(path: str | Path) -> dict[str, list[str]]:
    """Read a COCO captions file: id -> captions in the order of the file. Only "annotations" is read."""
    content = read_json(path, "references file")
    if not isinstance(content, dict) or "annotations" not in content:
        raise DiffcapError(f'{path}: the key "annotations" is missing; give a COCO captions file as the references.')
    references: dict[str, list[str]] = {}
    for where, row in _entries(path, content["annotations"], '"annotations"'):
        id, caption = _id_and_caption(where, row)
        references.setdefault(id, []).append(caption)
    if not references:
        raise DiffcapError(f'{path}: "annotations" is empty; write the references first.')
    return references
