"""Image-Editing-Request (Tan et al., ACL 2019): photographs before and after an edit, and the request for it.

    train.json, valid.json, test.json   [{"img0": "a.jpg", "img1": "b.jpg", "sents": ["brighten the sky", ...], "uid": "Reddit_1052"}, ...]
    images/a.jpg, images/b.jpg

as they lie in the authors' `dataset/adobe/`; the images may also lie in the folder itself. A pair is known by its `uid`: the same
two photographs stand under several (2,507 different image pairs for 3,061 uids in train). Sentences stay as people typed them, in
mixed case, with punctuation and runs of blanks; each vocabulary and each scorer has its own way with that.
"""

from pathlib import Path
from typing import Any

from diffcap.datasets.checks import note_once, sentences
from diffcap.errors import DiffcapError
from diffcap.records import ChangePair, read_json

FILES = {"train": ("train.json",), "val": ("valid.json", "val.json"), "test": ("test.json",)}


def read(folder: Path) -> list[ChangePair]:
    """A pair for every `uid`, by split, then in the order of the file.

    Raises:
        DiffcapError: a file is missing or malformed, or a uid stands twice.
    """
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
            uid, first, second, told = _row(row, where)
            note_once(seen, uid, where, "the uid")
            pairs.append(ChangePair(uid, images + first, images + second, told, split))
    return pairs


def _row(row: Any, where: str) -> tuple[str, str, str, list[str]]:
    row = row if isinstance(row, dict) else {}
    texts = [row.get(key) for key in ("uid", "img0", "img1")]
    if not all(isinstance(text, str) and text for text in texts):
        raise DiffcapError(f'{where}: needs "uid", "img0" and "img1" (strings), found {row!r:.60}; fix it.')
    return str(texts[0]), str(texts[1]), str(texts[2]), sentences(row.get("sents"), where, "sents")
