"""Readers: official files in, manifest records out; one file a dataset.

A reader is a module with one function, `read(folder) -> list[ChangePair]`: every pair of the dataset, in an order that
depends on the files' content alone, image paths relative to `folder`. It does not look at the images; the data stage
does (`diffcap.datasets.images`). A new dataset is a new file here and one line in `READERS`.
"""

from importlib import import_module
from pathlib import Path

from diffcap.errors import DiffcapError
from diffcap.records import ChangePair

READERS = {
    "birds2words": "diffcap.datasets.birds2words",
    "blocks": "diffcap.datasets.clevr_change",  # rendered in the official layout
    "blocks_cub": "diffcap.datasets.cub",  # so are the stand-ins for the two datasets of single images
    "blocks_nabirds": "diffcap.datasets.nabirds",
    "clevr_change": "diffcap.datasets.clevr_change",
    "cub": "diffcap.datasets.cub",
    "nabirds": "diffcap.datasets.nabirds",
}
OWN = "diffcap.datasets.pairs"  # any other name is one's own dataset, described by a `pairs.jsonl`


def read_pairs(dataset: str, folder: str | Path) -> list[ChangePair]:
    """Read the official files of `dataset` in `folder`, and check what no dataset may break.

    Args:
        dataset: a name in `READERS`, or any other name for one's own dataset (`diffcap.datasets.pairs`).
        folder: where the dataset's files are.

    Raises:
        DiffcapError: the folder or a file is missing or malformed, there is no pair, an id stands twice, or a training
            pair has no caption.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DiffcapError(f"{folder}: no such folder; give the one that holds the files of {dataset}.")
    if dataset not in READERS and not (folder / "pairs.jsonl").is_file():
        raise DiffcapError(
            f"{folder}: no pairs.jsonl there, which one's own dataset needs; write one, or choose a dataset that has a "
            f"reader ({', '.join(sorted(READERS))})."
        )
    pairs: list[ChangePair] = import_module(READERS.get(dataset, OWN)).read(folder)
    _check(pairs, folder)
    return pairs


def _check(pairs: list[ChangePair], folder: Path) -> None:
    if not pairs:
        raise DiffcapError(f"{folder}: the files there name no pair; check that they are whole.")
    seen: dict[str, str] = {}
    for pair in pairs:
        if pair.id in seen:
            raise DiffcapError(
                f"{folder}: id {pair.id!r} stands twice (in {seen[pair.id]} and {pair.split}); keep one of the two pairs."
            )
        seen[pair.id] = pair.split
        if pair.split == "train" and not pair.captions and "class" not in pair.extra:
            raise DiffcapError(f"{folder}: the training pair {pair.id!r} has no caption; give it one or take it out.")
        if not all(caption.strip() for caption in pair.captions):
            raise DiffcapError(f"{folder}: the pair {pair.id!r} has a blank caption; fill it or take it out.")
