"""LEVIR-MCI (Liu et al., TGRS 2024): the pairs and captions of LEVIR-CC, with a mask of the change for each pair.

    LevirCCcaptions.json, images/train/A, images/train/B, ...    as in LEVIR-CC
    images/train/label/train_000001.png                          mask; 0: nothing, 128: road, 255: building

A mask may disagree with `changeflag`, which belongs to the captions; `diffcap audit` lists such pairs.
"""

from pathlib import Path

from diffcap.datasets import levir_cc
from diffcap.datasets.karpathy import notes
from diffcap.records import ChangePair
from diffcap.utils.errors import DiffcapError

__all__ = ["notes", "read"]


def read(folder: Path) -> list[ChangePair]:
    """Read the pairs in the order of the file; `extra["mask"]` is the path of the mask."""
    pairs = levir_cc.read(folder, all_masks=True)
    without = next((pair for pair in pairs if "mask" not in pair.extra), None)
    if without:
        raise DiffcapError(
            f"{folder}: the {without.split} images have no folder label, which holds the masks of LEVIR-MCI; fetch it, or read the "
            "folder as DATASET=levir_cc."
        )
    return pairs
