"""Image-Editing-Request (Tan et al., ACL 2019): photos before and after an edit, and the request for the edit.

    train.json, valid.json, test.json   [{"img0": "a.jpg", "img1": "b.jpg", "sents": ["brighten the sky", ...], "uid": "Reddit_1052"}, ...]
    images/a.jpg, images/b.jpg

This is the content of the authors' `dataset/adobe/`. The images may also be in the folder itself. A pair is identified by its `uid`,
because the same two photos occur under several (2,507 distinct image pairs for 3,061 uids in train). The sentences are not changed:
they have mixed case, punctuation and repeated spaces.
"""

from pathlib import Path

from diffcap.datasets.checks import first_file, note_once, read_entries, sentences, text_of
from diffcap.records import ChangePair

FILES = {"train": ("train.json",), "val": ("valid.json", "val.json"), "test": ("test.json",)}


def read(folder: Path) -> list[ChangePair]:
    """Read one pair per `uid`, sorted by split, then in the order of the file."""
    images = "images/" if (folder / "images").is_dir() or not any(folder.glob("*.jp*g")) else ""
    pairs: list[ChangePair] = []
    seen: dict[str, str] = {}
    remedy = "put train.json, valid.json and test.json into this folder"
    for split, names in FILES.items():
        for where, row in read_entries(first_file(folder, *names), "annotations", remedy):
            uid, before, after = (text_of(row, key, where) for key in ("uid", "img0", "img1"))
            note_once(seen, uid, where, "the uid")
            captions = sentences(row.get("sents"), where, "sents")
            pairs.append(ChangePair(uid, images + before, images + after, captions, split))
    return pairs
