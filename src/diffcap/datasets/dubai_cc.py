"""Dubai-CC (Hoxha et al., TGRS 2022): Landsat 7 tiles of Dubai from 2000 and 2010, 50 x 50 pixels, five captions for each pair.

    description_jsontr_te_val/Train_Dubai_CC.json, Validation_Dubai_CC.json, Test_Dubai_CC.json    see `diffcap.datasets.karpathy`
    imgs_tiles/RGB/500_2000/<filename>    before
    imgs_tiles/RGB/500_2010/<filename>    after; both are .tif

This is the content of `datasetDubaiCCPublic/`. The JSON files may also be in `captions/`. The sentences have capital first letters,
which are kept. The files have no `changeflag`: a pair has no change if any of its captions is a no-change sentence.
"""

from pathlib import Path

from diffcap.datasets.karpathy import Layout, notes, read_files
from diffcap.records import ChangePair

__all__ = ["NOTES", "notes", "read"]

NOTES = {"change_types": "derived from the captions"}  # printed with every score of a group

_LAYOUT = Layout("imgs_tiles/RGB/500_2000/{name}", "imgs_tiles/RGB/500_2010/{name}")
_CAPTIONS = ("description_jsontr_te_val", "captions")
_SPLITS = {"Train": "train", "Validation": "val", "Test": "test"}


def read(folder: Path) -> list[ChangePair]:
    """Read the pairs, sorted by split, then in the order of the file."""
    captions = next((folder / name for name in _CAPTIONS if (folder / name).is_dir()), folder / _CAPTIONS[0])
    files = {captions / f"{name}_Dubai_CC.json": split for name, split in _SPLITS.items()}
    return read_files(folder, files, _LAYOUT, unchanged_if=any)
