"""Image-Editing-Request (Tan et al., ACL 2019): photos before and after an edit, and the request for the edit.

    train.json, valid.json, test.json   [{"img0": "a.jpg", "img1": "b.jpg", "sents": ["brighten the sky", ...], "uid": "Reddit_1052"}, ...]
    images/a.jpg, images/b.jpg

This is the content of the authors' `dataset/adobe/`. The images may also be in the folder itself. A pair is identified by its `uid`,
because the same two photos occur under several (2,507 distinct image pairs for 3,061 uids in train). The sentences are not changed:
they have mixed case, punctuation and repeated spaces.
"""

from pathlib import Path
from typing import Any

from diffcap.datasets.checks import note_once, sentences
from diffcap.records import ChangePair, read_json
from diffcap.utils.errors import DiffcapError

FILES = {"train": ("train.json",), "val": ("valid.json", "val.json"), "test": ("test.json",)}


def read(folder: Path) -> list[ChangePair]:
    """Read one pair per `uid`, sorted by split, then in the order of the file."""
    images = "images/" if (folder / "images").is_dir() or not any(folder.glob("*.jp*g")) else ""
    pairs: list[ChangePair] = []
    seen: dict[str, str] = {}
    for split, names in FILES.items():
        path = next((folder / name for name in names if (folder / name).is_file()), folder / names[0])
        rows = read_json(path, "annotations", "put train.json, valid.json and test.json into this folder")
        if not isinstance(rows, list):
            raise DiffcapError(f"{path}: expected a list of requests, found {type(rows).__name__}; fetch it again.")
        for number, row in enumerate(rows, 1):
            where = f"{path}, entry {number}"
            uid, before, after, captions = _row(row, where)
            note_once(seen, uid, where, "the uid")
            pairs.append(ChangePair(uid, images + before, images + after, captions, split))
    return pairs


def _row(row: Any, where: str) -> tuple[str, str, str, list[str]]:
    row = row if isinstance(row, dict) else {}
    texts = [row.get(key) for key in ("uid", "img0", "img1")]
    if not all(isinstance(text, str) and text for text in texts):
        raise DiffcapError(f'{where}: needs "uid", "img0" and "img1" (strings), found {row!r:.60}; fix it.')
    return str(texts[0]), str(texts[1]), str(texts[2]), sentences(row.get("sents"), where, "sents")
