"""Spot-the-Diff and Image-Editing-Request: photos, and JSON lists of sentences that people wrote."""

from pathlib import Path

from diffcap.datasets.checks import check_split, first_file, note_once, read_entries, sentences, text_of
from diffcap.records import SPLITS, ChangePair

_ANNOTATIONS = ("annotations/train.json", "data/annotations/train.json", "train.json")
_IMAGES = ("resized_images", "images", "data/resized_images", "data/images")
_EDITS = {"train": ("train.json",), "val": ("valid.json", "val.json"), "test": ("test.json",)}


def read_spot_the_diff(folder: Path) -> list[ChangePair]:
    """Spot-the-Diff (Jhamtani and Berg-Kirkpatrick, EMNLP 2018): frames of surveillance cameras and written sentences.

        annotations/train.json, val.json, test.json   [{"img_id": "256", "sentences": ["person with umbrella is gone", ...]}, ...]
        resized_images/256.png, 256_2.png             before and after (256_diff.jpg is not read)

    The annotations may also be in `data/annotations/` or in the folder itself, the images in `images/` or in the folder itself. A
    pair has one to three rows, one per annotator. The rows are merged: the pair has all their sentences, in the order of the rows.
    Its id is "256.png", as in the ground truth of the papers. Pairs are sorted by split, then in the order of the file.

    The sentences are not changed, and the 66 empty ones are kept: the released vocabularies and the 1,270 scored pairs have
    them. The protocol decides whether each sentence is a caption or all sentences of a pair are one caption, see
    `diffcap.records.take_changes`.
    """
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


def spot_the_diff_notes(pairs: list[ChangePair]) -> list[str]:
    """The number of rows."""
    rows = {split: sum(len(pair.extra["annotators"]) for pair in pairs if pair.split == split) for split in SPLITS}
    counts = ", ".join(f"{split} {count:,}" for split, count in rows.items())
    return [f"annotators' rows, merged by pair: {counts}"]


def read_image_editing_request(folder: Path) -> list[ChangePair]:
    """Image-Editing-Request (Tan et al., ACL 2019): photos before and after an edit, and the request for the edit.

        train.json, valid.json, test.json   [{"img0": "a.jpg", "img1": "b.jpg", "sents": ["brighten the sky"], "uid": "Reddit_1052"}, ...]
        images/a.jpg, images/b.jpg

    This is the content of the authors' `dataset/adobe/`. The images may also be in the folder itself. A pair is identified by its `uid`,
    because the same two photos occur under several (2,507 distinct image pairs for 3,061 uids in train). The sentences are not changed:
    they have mixed case, punctuation and repeated spaces. Pairs are sorted by split, then in the order of the file.
    """
    images = "images/" if (folder / "images").is_dir() or not any(folder.glob("*.jp*g")) else ""
    pairs: list[ChangePair] = []
    seen: dict[str, str] = {}
    remedy = "put train.json, valid.json and test.json into this folder"
    for split, names in _EDITS.items():
        for where, row in read_entries(first_file(folder, *names), "annotations", remedy):
            uid, before, after = (text_of(row, key, where) for key in ("uid", "img0", "img1"))
            note_once(seen, uid, where, "the uid")
            captions = sentences(row.get("sents"), where, "sents")
            pairs.append(ChangePair(uid, images + before, images + after, captions, split))
    return pairs
