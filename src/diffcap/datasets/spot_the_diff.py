"""Spot-the-Diff (Jhamtani and Berg-Kirkpatrick, EMNLP 2018): frames of surveillance cameras and written sentences.

    annotations/train.json, val.json, test.json   [{"img_id": "256", "sentences": ["person with umbrella is gone", ...]}, ...]
    resized_images/256.png, 256_2.png             before and after (256_diff.jpg is not read)

The annotations may also be in `data/annotations/` or in the folder itself, the images in `images/` or in the folder itself. A
pair has one to three rows, one per annotator. The rows are merged: the pair has all their sentences, in the order of the rows.
Its id is "256.png", as in the ground truth of the papers.

The sentences are not changed, and the 66 empty ones are kept: the released vocabularies and the 1,270 scored pairs have
them. The protocol decides whether each sentence is a caption or all sentences of a pair are one caption, see
`diffcap.records.take_changes`.
"""

from pathlib import Path
from typing import Any

from diffcap.datasets.checks import sentences
from diffcap.records import SPLITS, ChangePair, read_json
from diffcap.utils.errors import DiffcapError

BLANK_CAPTIONS = True  # 7 of the 1,270 test pairs have only blank captions
NOTES = {"changes": "single"}  # the protocol if the configuration sets none

_ANNOTATIONS = ("annotations", "data/annotations", "")
_IMAGES = ("resized_images", "images", "data/resized_images", "data/images")


def read(folder: Path) -> list[ChangePair]:
    """Read one pair per `img_id`, sorted by split, then in the order of the file."""
    annotations = next(
        (folder / name for name in _ANNOTATIONS if (folder / name / "train.json").is_file()), folder / "annotations"
    )
    in_folder = any(folder.glob("*_2.png"))
    images = "" if in_folder else next((f"{name}/" for name in _IMAGES if (folder / name).is_dir()), f"{_IMAGES[0]}/")
    pairs: dict[str, ChangePair] = {}
    for split in SPLITS:
        path = annotations / f"{split}.json"
        rows = read_json(path, "annotations", "put train.json, val.json and test.json into annotations/")
        if not isinstance(rows, list):
            raise DiffcapError(f"{path}: expected a list of annotations, found {type(rows).__name__}; fetch it again.")
        for number, row in enumerate(rows, 1):
            image, captions = _row(row, f"{path}, entry {number}")
            pair = pairs.get(image)
            if pair is None:
                before, after = f"{images}{image}.png", f"{images}{image}_2.png"
                pair = pairs[image] = ChangePair(f"{image}.png", before, after, [], split, extra={"annotators": []})
            if pair.split != split:
                raise DiffcapError(
                    f"{path}, entry {number}: the pair {image!r} is in {split} here and in {pair.split} before; keep one."
                )
            pair.captions.extend(captions)
            pair.extra["annotators"].append(len(captions))
    return list(pairs.values())


def _row(row: Any, where: str) -> tuple[str, list[str]]:
    image, captions = (row.get("img_id"), row.get("sentences")) if isinstance(row, dict) else (None, None)
    if not isinstance(image, str) or not image or not isinstance(captions, list) or not captions:
        raise DiffcapError(f'{where}: needs an "img_id" and a list of "sentences", found {row!r:.60}; fix it.')
    return image, sentences(captions, where, "sentences")


def notes(pairs: list[ChangePair]) -> list[str]:
    """Return remarks on the files, which the data stage prints and stores."""
    rows = {split: sum(len(pair.extra["annotators"]) for pair in pairs if pair.split == split) for split in SPLITS}
    counts = ", ".join(f"{split} {count:,}" for split, count in rows.items())
    return [f"annotators' rows, merged by pair: {counts}"]
