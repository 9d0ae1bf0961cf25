"""WHU-CDC: aerial images of Christchurch with the masks of WHU-CD, five captions for each pair.

    whuCCcaptions.json                    see `diffcap.datasets.karpathy`
    images/train/A/train_000004.png       before; B: after; label: mask of the change; val and test likewise

One sequence of numbers runs over all splits.
"""

from pathlib import Path

from diffcap.datasets.karpathy import LEVIR, notes, read_files
from diffcap.records import ChangePair

__all__ = ["notes", "read"]


def read(folder: Path) -> list[ChangePair]:
    """Read the pairs in the order of the file; `extra["mask"]` is the path of the mask, if there are masks."""
    return read_files(folder, {folder / "whuCCcaptions.json": ""}, LEVIR)
