"""SECOND-CC (Karaca et al., JSTARS 2025): images of 0.3 to 3 m per pixel, five captions for each pair.

    SECOND-CC-AUG.json                    see `diffcap.datasets.karpathy`
    train/rgb/A, train/rgb/B              before, after; val and test likewise
    train/sem/A, train/sem/B              semantic maps as colour images; not read

The file has the 6,041 pairs and augmented views of the training pairs, whose names contain `_random_augment`. The augmented views are
left out unless they are asked for; val and test never have them.
"""

from pathlib import Path, PurePosixPath

from diffcap.datasets import karpathy
from diffcap.datasets.karpathy import Layout, read_files
from diffcap.records import ChangePair

AUGMENTED = True  # `read` has this option

_LAYOUT = Layout("{folder}/rgb/A/{name}", "{folder}/rgb/B/{name}")


def read(folder: Path, augmented: bool = False) -> list[ChangePair]:
    """Read the pairs in the order of the file; `augmented`: also the augmented training views, which have `extra["augmented"]`."""
    pairs = []
    for pair in read_files(folder, {folder / "SECOND-CC-AUG.json": ""}, _LAYOUT):
        if "_random_augment" not in PurePosixPath(pair.before).name:
            pairs.append(pair)
        elif augmented and pair.split == "train":
            pair.extra["augmented"] = True
            pairs.append(pair)
    return pairs


def notes(pairs: list[ChangePair]) -> list[str]:
    """Remarks on the files, which the data stage prints and stores."""
    views = sum("augmented" in pair.extra for pair in pairs)
    return [*([f"{views:,} augmented training views"] if views else []), *karpathy.notes(pairs)]
