"""Read and write predictions and references as COCO caption files; predictions are also read from simpler files."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from diffcap.evaluation.captions import first_ids
from diffcap.records import is_blank, read_json, read_json_lines, write_json
from diffcap.utils.errors import DiffcapError


def write_predictions(path: str | Path, predictions: Mapping[str, str]) -> None:
    """Write `predictions.json`, a COCO results file: [{"image_id", "caption"}]."""
    write_json(path, [{"image_id": id, "caption": caption} for id, caption in predictions.items()])


def write_references(path: str | Path, references: Mapping[str, Sequence[str]]) -> None:
    """Write `references.json`, a COCO captions file with string image ids; annotation ids count from 1."""
    pairs = [(id, caption) for id, captions in references.items() for caption in captions]
    annotations = [{"id": n, "image_id": id, "caption": caption} for n, (id, caption) in enumerate(pairs, 1)]
    content = {
        "info": {},
        "licenses": [],
        "type": "captions",
        "images": [{"id": id, "filename": id} for id in references],
        "annotations": annotations,
    }
    write_json(path, content)


def _check_entries(path: str | Path, entries: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Check that `entries` is a list of objects. Yield each object after the text that names its place in messages."""
    if not isinstance(entries, list):
        found_type = type(entries).__name__
        raise DiffcapError(f"{path}: {name} must be a list, found {found_type}; see the COCO caption format.")
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict):
            raise DiffcapError(f"{path}: entry {number} of {name} is {entry!r:.60}, not an object; fix it.")
        yield f"{path}: entry {number} of {name}", entry


def _id_and_caption(place: str, entry: Mapping[str, Any], id_key: str = "image_id") -> tuple[str, str]:
    id, caption = entry.get(id_key), entry.get("caption")
    if not isinstance(id, str | int) or isinstance(id, bool) or not isinstance(caption, str):
        raise DiffcapError(f'{place} needs "{id_key}" and "caption", found {entry!r:.80}; fix it.')
    return str(id), caption


def read_predictions(path: str | Path) -> dict[str, str]:
    """Read captions: id -> caption. Ids are converted to strings.

    A .json file has a list of {"image_id", "caption"}, or an object {id: caption}. A .jsonl file has {"id", "caption"} on each line. Both
    can use "id" or "image_id", and other keys are ignored.
    """
    title, remedy = "predictions file", "give a .json file, or a .jsonl file with an object per line"
    if Path(path).suffix.lower() == ".jsonl":
        entries = read_json_lines(Path(path), title, remedy)
    else:
        # JSON objects are read as tuples of (key, value), so that a repeated id is found.
        content = read_json(Path(path), title, remedy, object_type=tuple)
        if isinstance(content, tuple):  # an object {id: caption}
            content = [{"id": id, "caption": caption} for id, caption in content]
        elif isinstance(content, list):
            content = [dict(entry) if isinstance(entry, tuple) else entry for entry in content]
        entries = _check_entries(Path(path), content, "the predictions")
    predictions: list[tuple[str, str]] = []
    for place, entry in entries:
        id_key = "id" if "id" in entry and "image_id" not in entry else "image_id"
        predictions.append(_id_and_caption(place, entry, id_key))
    counts = Counter(id for id, _ in predictions)
    if duplicate_ids := [id for id, count in counts.items() if count > 1]:
        raise DiffcapError(
            f"{path}: {len(duplicate_ids):,} ids have more than one prediction ({first_ids(duplicate_ids)}); keep one per id."
        )
    return dict(predictions)


def read_other_predictions(
    path: str | Path, scored_ids: Collection[str], split_ids: Collection[str], split_name: str
) -> dict[str, str]:
    """Read the captions that another system wrote for the pairs of a split. White space becomes single spaces.

    `scored_ids` are the pairs with references, in the order of the result; each needs a caption. The captions of other `split_ids`
    are ignored. `split_name` is for messages, for example "the test split of blocks".
    """
    captions = read_predictions(path)
    known_ids = set(split_ids)
    if unknown_ids := [id for id in captions if id not in known_ids]:
        raise DiffcapError(
            f"{path}: {len(unknown_ids):,} of {len(captions):,} ids are not in {split_name} (first {unknown_ids[0]!r}; an id there is "
            f"{next(iter(scored_ids))!r}); use the ids of manifest.jsonl."
        )
    if missing_ids := [id for id in scored_ids if id not in captions]:
        raise DiffcapError(
            f"{path}: {len(missing_ids):,} of the {len(scored_ids):,} pairs of {split_name} have no caption (first {missing_ids[0]!r}); "
            "caption every pair, because scores of a part cannot be compared."
        )
    if blank_ids := [id for id in scored_ids if is_blank(captions[id])]:
        raise DiffcapError(
            f"{path}: {len(blank_ids):,} of the {len(scored_ids):,} captions are empty (first that of {blank_ids[0]!r}); caption these "
            "pairs again."
        )
    return {id: " ".join(captions[id].split()) for id in scored_ids}


def read_references(path: str | Path) -> dict[str, list[str]]:
    """Read a COCO captions file: id -> captions in the order of the file. Only "annotations" is read."""
    content = read_json(path, "references file")
    if not isinstance(content, dict) or "annotations" not in content:
        raise DiffcapError(f'{path}: the key "annotations" is missing; give a COCO captions file as the references.')
    references: dict[str, list[str]] = {}
    for place, entry in _check_entries(path, content["annotations"], '"annotations"'):
        id, caption = _id_and_caption(place, entry)
        references.setdefault(id, []).append(caption)
    return references
