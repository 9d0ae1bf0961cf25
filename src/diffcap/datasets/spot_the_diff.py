"""Spot-the-Diff (Jhamtani and Berg-Kirkpatrick, EMNLP 2018): frames of surveillance cameras, and sentences that people wrote.

    annotations/train.json, val.json, test.json   [{"img_id": "256", "sentences": ["person with umbrella is gone", ...]}, ...]
    resized_images/256.png, 256_2.png             before and after (256_diff.jpg, beside them, is not read)

The annotations may also lie in `data/annotations/` or in the folder itself, the images in `images/` or in the folder itself. A
pair has one to three rows, one an annotator: they are one pair here, with all their sentences in the order of the rows. Its id
is "256.png", as in the ground truth that the papers score against.

Sentences stay as they are, empty ones (66 in the official files) too: the released vocabularies and the 1,270 scored pairs have
them. Whether a sentence is a caption of its own or all of a pair are one is the protocol's matter, see
`diffcap.records.take_changes`.
"""

from pathlib import Path
from typing import Any

from diffcap.datasets.checks import sentences
from diffcap.errors import DiffcapError
from diffcap.records import SPLITS, ChangePair, read_json

BLANK_CAPTIONS = True  # 7 of the 1,270 test pairs have no other
NOTES = {"changes": "single"}  # the protocol of a score whose configuration names none

_ANNOTATIONS = ("annotations", "data/annotations", "")
_IMAGES = ("resized_images", "images", "data/resized_images", "data/images")


def read(folder: Path) -> list[ChangePair]:
    """A pair for every `img_id`, by split, then in the order of the file.

    Raises:
        DiffcapError: an annotation file is missing or malformed, or a pair stands in two splits.
    """
    place = next(
        (folder / name for name in _ANNOTATIONS if (folder / name / "train.json").is_file()), folder / "annotations"
    )
    here = any(folder.glob("*_2.png"))
    images = "" if here else next((f"{name}/" for name in _IMAGES if (folder / name).is_dir()), f"{_IMAGES[0]}/")
    pairs: dict[str, ChangePair] = {}
    for split in SPLITS:
        path = place / f"{split}.json"
        rows = read_json(path, "annotations", "put train.json, val.json and test.json into annotations/")
        if not isinstance(rows, list):
            raise DiffcapError(f"{path}: expected a list of annotations, found {type(rows).__name__}; fetch it again.")
        for number, row in enumerate(rows, 1):
            image, told = _row(row, f"{path}, entry {number}")
            pair = pairs.get(image)
            if pair is None:
                before, after = f"{images}{image}.png", f"{images}{image}_2.png"
                pair = pairs[image] = ChangePair(f"{image}.png", before, after, [], split, extra={"annotators": []})
            if pair.split != split:
                raise DiffcapError(
                    f"{path}, entry {number}: the pair {image!r} is in {split} here and in {pair.split} before; keep one."
                )
            pair.captions.extend(told)
            pair.extra["annotators"].append(len(told))
    return list(pairs.values())


def _row(row: Any, where: str) -> tuple[str, list[str]]:
    image, told = (row.get("img_id"), row.get("sentences")) if isinstance(row, dict) else (None, None)
    if not isinstance(image, str) or not image or not isinstance(told, list) or not told:
        raise DiffcapError(f'{where}: needs an "img_id" and a list of "sentences", found {row!r:.60}; fix it.')
    return image, sentences(told, where, "sentences")


def notes(pairs: list[ChangePair]) -> list[str]:
    """What the data stage says of the files."""
    rows = {split: sum(len(pair.extra["annotators"]) for pair in pairs if pair.split == split) for split in SPLITS}
    said = ", ".join(f"{split} {count:,}" for split, count in rows.items())
    return [f"annotators' rows, merged by pair: {said}"]
