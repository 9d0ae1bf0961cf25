"""Read training data in the forms of other programs as rows of `pairs.jsonl`, which `diffcap.datasets.pairs` reads.

* A JSON list of rows like those of `pairs.jsonl`.
* `metadata.jsonl` of Hugging Face's `imagefolder`, in the dataset's folder or in a folder for each split. Paths are relative to the file:
      {"before_file_name": "a.png", "after_file_name": "b.png", "captions": ["the cup is gone"]}
* Messages of LLaMA-Factory and ms-swift, a JSON list or JSON lines, with one caption in each row:
      {"messages": [{"role": "user", "content": "<image><image>What changed?"}, {"role": "assistant", "content": "the cup is gone"}],
       "images": ["a.png", "b.png"]}
  Or `conversations` with "from" ("human", "gpt") and "value". Rows with equal images become one pair with several captions.
"""

from pathlib import Path, PurePosixPath
from typing import Any

from diffcap.datasets.checks import PlacedRow, Row, read_entries
from diffcap.records import read_json_lines
from diffcap.utils.errors import DiffcapError

METADATA = "metadata.jsonl"
_OUTPUTS = ("manifest.jsonl", "negatives.jsonl", "tags.jsonl", "audit.jsonl")  # files that diffcap writes
# Name of a file or folder -> split.
_SPLITS = {"train": "train", "val": "val", "validation": "val", "valid": "val", "dev": "val", "test": "test"}
_MESSAGE_KEYS = {"messages": ("role", "content"), "conversations": ("from", "value")}  # list of turns -> keys of a turn
_ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
_IMAGE = "<image>"


def find_lists(folder: Path, json_lists: list[Path]) -> list[Path]:
    """Return the files of a folder that list pairs in one of these forms: one file, or one for each split.

    `json_lists` has the JSON files whose content is a list.
    """
    files = [path for name in ("", *_SPLITS) if (path := folder / name / METADATA).is_file()]
    if files:
        return files
    files = [*json_lists, *(file for file in sorted(folder.glob("*.jsonl")) if file.name not in _OUTPUTS)]
    if len(files) > 1 and not all(file.stem in _SPLITS for file in files):
        names = ", ".join(file.name for file in files)
        raise DiffcapError(
            f"{folder}: has several lists of pairs ({names}); keep one, or name them train, val and test."
        )
    return files


def read_lists(folder: Path, files: list[Path]) -> list[PlacedRow]:
    """Return the rows of the files of `find_lists`. The names of the files, or of their folders, are splits, except a lone "train"."""
    rows: list[PlacedRow] = []
    row_of_images: dict[tuple[Any, ...], Row] = {}  # of messages
    for file in files:
        location = file.parent.relative_to(folder)
        name = location.name if file.name == METADATA else file.stem
        split = _SPLITS.get(name) if name != "train" or len(files) > 1 else None  # the reader divides a lone "train"
        rows_of_file = read_json_lines(file) if file.suffix == ".jsonl" else read_entries(file, "pairs", "correct it")
        for place, entry in rows_of_file:
            has_messages = not _MESSAGE_KEYS.keys().isdisjoint(entry)
            row = _row_of_messages(entry, place) if has_messages else _plain_row(entry, location)
            if split:
                row = {"split": split, **row}
            key = (str(row.get("split")), *(PurePosixPath(str(row.get(side))) for side in ("before", "after")))
            if has_messages and key in row_of_images:
                row_of_images[key]["captions"] += row["captions"]
                continue
            row_of_images[key] = row
            rows.append((place, row))
    return rows


def _plain_row(entry: Row, folder: Path) -> Row:
    """Convert a row without messages. Paths of metadata.jsonl are relative to `folder`, which is relative to the dataset's folder."""
    row = dict(entry)
    for key in ("before", "after"):
        if isinstance(path := row.pop(f"{key}_file_name", None), str):
            row[key] = (folder / path).as_posix()  # the reader of the rows refuses a path with ".."
    key = next((key for key in ("captions", "caption", "text") if key in row), "")
    if key:
        row["captions"] = [row.pop(key)] if isinstance(row[key], str) else row.pop(key)
    return row


def _row_of_messages(entry: Row, place: str) -> Row:
    """Convert a row of messages: a question with two images, and its answer, which is the caption."""
    key = next(key for key in _MESSAGE_KEYS if key in entry)
    role_key, text_key = _MESSAGE_KEYS[key]
    try:
        turns = [(_ROLES.get(str(turn[role_key])), turn[text_key]) for turn in entry[key]]
    except (KeyError, TypeError):
        raise DiffcapError(
            f'{place}: "{key}" must be a list of objects with "{role_key}" and "{text_key}"; correct it.'
        ) from None
    turns = [(role, text) for role, text in turns if role != "system"]
    if [role for role, _ in turns] != ["user", "assistant"]:
        raise DiffcapError(
            f'{place}: "{key}" must be one question of the user and one answer, found {len(turns)} turns.'
        )
    (_, question), (_, answer) = turns
    images = entry.get("images", entry.get("image"))
    num_marks = str(question).count(_IMAGE)
    if isinstance(question, list):  # parts of a question, in which the images are
        images = [part.get("image") for part in question if isinstance(part, dict) and part.get("type") == "image"]
        num_marks = len(images)
    images = images if isinstance(images, list) else []
    images = [image.get("path") if isinstance(image, dict) else image for image in images]
    if len(images) != 2 or num_marks != 2:
        raise DiffcapError(
            f"{place}: a pair has 2 images and 2 marks {_IMAGE} in the question, found {len(images)} images and {num_marks} marks."
        )
    if not isinstance(answer, str):
        raise DiffcapError(f"{place}: the answer must be a text, found {answer!r:.60}.")
    other = {name: value for name, value in entry.items() if name in ("id", "split", "change_type", "is_distractor")}
    return {**other, "before": images[0], "after": images[1], "captions": [answer.strip()]}
