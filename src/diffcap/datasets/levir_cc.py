"""LEVIR-CC (Liu et al., TGRS 2022): Google Earth images, 0.5 m per pixel, five captions for each pair.

    LevirCCcaptions.json                  see `diffcap.datasets.karpathy`
    images/train/A/train_000001.png       before; B: after; val and test likewise

The numbers in the names have gaps. Two versions of the file exist; the first one has no `changeflag`. The five captions of every pair
without change are the same five sentences, so that the derived flag is the released one.
"""

from pathlib import Path

from diffcap.datasets.checks import first_file
from diffcap.datasets.karpathy import LEVIR, notes, read_files
from diffcap.records import ChangePair

__all__ = ["notes", "read"]

FILES = ("LevirCCcaptions.json", "LevirCCcaptions_v1.json")


def read(folder: Path, all_masks: bool = False) -> list[ChangePair]:
    """Read the pairs in the order of the file; `all_masks`: see `karpathy.read_files`."""
    return read_files(folder, {first_file(folder, *FILES): ""}, LEVIR, all_masks=all_masks)
