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

from diffcap.datasets.checks import check_split, first_file, read_entries, sentences, text_of
from diffcap.records import SPLITS, ChangePair

BLANK_CAPTIONS = True  # 7 of the 1,270 test pairs have only blank captions
NOTES = {"changes": "single"}  # the protocol if the configuration sets none

_ANNOTATIONS = ("annotations/train.json", "data/annotations/train.json", "train.json")
_IMAGES = ("resized_images", "images", "data/resized_images", "data/images")


def read(folder: Path) -> list[ChangePair]:
    """Read one pair per `img_id`, sorted by split, then in the order of the file."""
    annotations = first_file(folder, *_ANNOTATIONS).parent
    in_folder = any(folder.glob("*_2.png"))
    images = "" if in_folder else next((f"{name}/" for name in _IMAGES if (folder / name).is_dir()), f"{_IMAGES[0]}/")
    pairs: dict[str, ChangePair] = {}
    for split in SPLITS:
        path = annotations / f"{split}.json"
        for where, row in read_entries(path, "annotations", "put train.json, val.json and test.json into annotations/"):
            image, captions = text_of(row, "img_id", where), sentences(row.get("sentences"), where, "sentences")
            before, after = f"{images}{image}.png", f"{images}{image}_2.png"
            new = ChangePair(f"{image}.png", before, after, [], split, extra={"annotators": []})
            pair = pairs.setdefault(image, new)
            check_split(pair, split, where)
            pair.captions.extend(captions)
            pair.extra["annotators"].append(len(captions))
    return list(pairs.values())


def notes(pairs: list[ChangePair]) -> list[str]:
    """Return remarks on the files, which the data stage prints and stores."""
    rows = {split: sum(len(pair.extra["annotators"]) for pair in pairs if pair.split == split) for split in SPLITS}
    counts = ", ".join(f"{split} {count:,}" for split, count in rows.items())
    return [f"annotators' rows, merged by pair: {counts}"]
