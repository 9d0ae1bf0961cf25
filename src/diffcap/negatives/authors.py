"""IDC-PCL's own hard negatives, `<split>_neg_tfidf6.json`, as they come with its preprocessed data: JSON lines, a line a pair.

    {"img1": "CLEVR_default_000123", "img2": "CLEVR_semantic_000123", "sentences": [...], "neg_samples": [six sentences]}
    {"img": "Black_Footed_Albatross_0046_18", "sentences": [...], "neg_samples": [...]}   of CUB

The same negatives serve every caption of the pair. By which of the paper's recipes each was made is said nowhere; the file's name
speaks of TF-IDF, so all of them are noted as retrieved.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from diffcap.datasets.checks import sentences
from diffcap.errors import DiffcapError
from diffcap.negatives.corpus import tokenised
from diffcap.negatives.file import CaptionNegatives, Negative
from diffcap.records import ChangePair, read_json_lines

_EXTENSIONS = (".png", ".jpg", ".jpeg")


def authors_negatives(path: Path, pairs: Sequence[ChangePair]) -> Iterator[CaptionNegatives]:
    """The file's negatives for every caption of `pairs` that it has a sentence for.

    Raises:
        DiffcapError: a line is malformed or has another number of negatives than the first; or no caption of `pairs` is in it.
    """
    known = {tuple(_stem(image) for image in pair.images): pair for pair in pairs}
    count, found = 0, 0
    for where, row in read_json_lines(path, "hard negatives"):
        negatives = sentences(row.get("neg_samples"), where, "neg_samples")
        count = count or len(negatives)
        if not negatives or len(negatives) != count:
            raise DiffcapError(
                f"{where}: {len(negatives)} negatives, the first line has {count}; fetch the file again."
            )
        told = {tokenised(sentence) for sentence in sentences(row.get("sentences"), where, "sentences")}
        pair = known.get(_images(row, where))
        if pair is None:
            continue  # a part of the dataset: its photo is gone, say
        wrong = [Negative("retrieve", tokenised(text)) for text in negatives]
        for caption in pair.captions:
            if tokenised(caption) in told:
                found += 1
                yield CaptionNegatives(pair.id, caption, wrong)
    if not found:
        raise DiffcapError(
            f"{path}: none of its sentences is a caption of these pairs; take the file of the dataset's own split."
        )


def _images(row: dict[str, Any], where: str) -> tuple[str, ...]:
    names = [row["img"]] if "img" in row else [row.get("img1"), row.get("img2")]
    if not all(isinstance(name, str) and name for name in names):
        raise DiffcapError(f'{where}: needs "img1" and "img2", or "img" (strings), found {row!r:.60}; fix that line.')
    return tuple(_stem(str(name)) for name in names)


def _stem(name: str) -> str:
    """An image's name without folder and extension."""
    path = PurePosixPath(name)
    return path.stem if path.suffix.lower() in _EXTENSIONS else path.name
