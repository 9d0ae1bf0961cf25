"""Read IDC-PCL's released hard negatives, `<split>_neg_tfidf6.json`: JSON lines, one line per pair.

    {"img1": "CLEVR_default_000123", "img2": "CLEVR_semantic_000123", "sentences": [...], "neg_samples": [six sentences]}
    {"img": "Black_Footed_Albatross_0046_18", "sentences": [...], "neg_samples": [...]}   (CUB)

All captions of a pair have the same negatives. The files do not say how each negative was made. Because of the "tfidf" in the
file name, all of them get the kind "retrieve".
"""

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from diffcap.datasets.checks import sentences
from diffcap.negatives.file import CaptionNegatives, Negative
from diffcap.negatives.words import normalize_caption
from diffcap.records import ChangePair, read_json_lines
from diffcap.utils.errors import DiffcapError

_EXTENSIONS = (".png", ".jpg", ".jpeg")


def authors_negatives(path: Path, pairs: Sequence[ChangePair]) -> Iterator[CaptionNegatives]:
    """Yield the negatives of every caption of `pairs` that occurs in the file."""
    known = {tuple(_stem(image) for image in pair.images): pair for pair in pairs}
    count, found = 0, 0
    for where, row in read_json_lines(path, "hard negatives"):
        negatives = sentences(row.get("neg_samples"), where, "neg_samples")
        count = count or len(negatives)
        if not negatives or len(negatives) != count:
            raise DiffcapError(
                f"{where}: {len(negatives)} negatives, but the first line has {count}; download the file again."
            )
        captions = {normalize_caption(sentence) for sentence in sentences(row.get("sentences"), where, "sentences")}
        pair = known.get(_images(row, where))
        if pair is None:
            continue  # the dataset can be incomplete, for example if a photo is no longer online
        shared = [Negative("retrieve", normalize_caption(text)) for text in negatives]
        for caption in pair.captions:
            if normalize_caption(caption) in captions:
                found += 1
                yield CaptionNegatives(pair.id, caption, shared)
    if not found:
        raise DiffcapError(
            f"{path}: none of its sentences is a caption of these pairs; use the file of the same dataset and split."
        )


def _images(row: dict[str, Any], where: str) -> tuple[str, ...]:
    names = [row["img"]] if "img" in row else [row.get("img1"), row.get("img2")]
    if not all(isinstance(name, str) and name for name in names):
        raise DiffcapError(f'{where}: needs "img1" and "img2", or "img" (strings), found {row!r:.60}; fix that line.')
    return tuple(_stem(str(name)) for name in names)


def _stem(name: str) -> str:
    """Return an image's name without folder and extension."""
    path = PurePosixPath(name)
    return path.stem if path.suffix.lower() in _EXTENSIONS else path.name
