"""CLEVR-Change (Park et al., ICCV 2019), and datasets in its layout, as `diffcap.worlds.blocks` writes it.

    images/CLEVR_default_000123.png       before
    sc_images/CLEVR_semantic_000123.png   after a change
    nsc_images/CLEVR_nonsemantic_000123.png  distractor: the same scene from another viewpoint
    change_captions.json, no_change_captions.json   "CLEVR_default_000123.png" -> list of sentences
    splits.json                           {"train": [123, ...], "val": [...], "test": [...]}
    type_mapping.json                     {"color": ["000123.png", ...], ...}, optional
    scenes.json                           optional, see `diffcap.worlds.blocks.write`

Files are matched by their number, not by their position in a listing: the released dataset has 39,803 of 40,000 numbers.
"""

from pathlib import Path
from typing import Any

from diffcap.datasets import pcl_lines
from diffcap.datasets.checks import read_object, sentences
from diffcap.records import SPLITS, ChangePair
from diffcap.utils.errors import DiffcapError

_REMEDY = "extract the whole dataset into this folder"


def read(folder: Path) -> list[ChangePair]:
    """Read the pairs of the official layout, or of the JSON lines that IDC-PCL's authors publish (`pcl_lines`).

    Each scene gives two pairs: the change "000123.png" and the distractor "000123.png_n". They are sorted by split, then by
    number.
    """
    change_types = _change_types(folder / "type_mapping.json")
    if pcl_lines.has_layout(folder):
        return pcl_lines.read(folder, change_types)
    changed = _captions(folder / "change_captions.json")
    unchanged = _captions(folder / "no_change_captions.json")
    splits = read_splits(folder / "splits.json")
    extras = _extras(folder / "scenes.json")
    names = [f"CLEVR_default_{number:06d}.png" for numbers in splits.values() for number in numbers]
    for captions, file in ((changed, "change_captions.json"), (unchanged, "no_change_captions.json")):
        without = [name for name in names if name not in captions]
        if without:
            raise DiffcapError(
                f"{folder / file}: no captions for {len(without)} of the {len(names)} numbers in splits.json (first "
                f"{', '.join(without[:3])}); fetch both files from the same release."
            )
    pairs = []
    for split, numbers in splits.items():
        for number in sorted(numbers):
            file = f"{number:06d}.png"
            before, key = f"images/CLEVR_default_{file}", f"CLEVR_default_{file}"
            change_extra, distractor_extra = extras.get(file, ({}, {}))
            after, change_type = f"sc_images/CLEVR_semantic_{file}", change_types.get(file)
            change = ChangePair(file, before, after, changed[key], split, change_type, extra=change_extra)
            after = f"nsc_images/CLEVR_nonsemantic_{file}"
            distractor = ChangePair(
                f"{file}_n", before, after, unchanged[key], split, is_distractor=True, extra=distractor_extra
            )
            pairs += [change, distractor]
    return pairs


def _captions(path: Path) -> dict[str, list[str]]:
    return {key: sentences(value, str(path), key) for key, value in read_object(path, "captions", _REMEDY).items()}


def read_splits(path: Path) -> dict[str, list[int]]:
    """The numbers of each split's images, in the file's order: {"train": [123, ...], "val": [...], "test": [...]}."""
    splits = read_object(path, "splits", _REMEDY)
    split_of: dict[int, str] = {}
    for split in SPLITS:
        if not isinstance(splits.get(split), list):
            raise DiffcapError(f'{path}: "{split}" must be a list of numbers; fix or fetch the file again.')
        for number in splits[split]:
            if type(number) is not int or number < 0:
                raise DiffcapError(f'{path}: "{split}" holds {number!r:.60}, not the number of an image; fix it.')
            if number in split_of:
                raise DiffcapError(
                    f"{path}: {number} is duplicated (in {split_of[number]} and {split}); keep it in one split."
                )
            split_of[number] = split
    return {split: splits[split] for split in SPLITS}


def _change_types(path: Path) -> dict[str, str]:
    """The change type of each image ("000123.png" -> "color"); empty if `path` does not exist."""
    change_types: dict[str, str] = {}
    for change_type, files in (read_object(path, "change types") if path.is_file() else {}).items():
        if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
            raise DiffcapError(f'{path}: "{change_type}" must be a list of file names; fix or fetch the file again.')
        for file in files:
            first = change_types.setdefault(file, change_type)
            if first != change_type:
                raise DiffcapError(f"{path}: {file!r} is listed under {first!r} and under {change_type!r}; keep one.")
    return change_types


def _extras(path: Path) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """`ChangePair.extra` of the change pair and of the distractor pair of each image; empty if `path` does not exist.

    `scenes.json` maps "000123.png" to {"boxes", "viewpoint_iou", "viewpoint_iou_distractor", "changed"}, all optional; their
    meaning is described in `diffcap.worlds.blocks.write`, which writes the file.
    """
    extras = {}
    for file, scene in (read_object(path, "scenes") if path.is_file() else {}).items():
        if not isinstance(scene, dict):
            raise DiffcapError(f'{path}: "{file}" must be an object, found {scene!r:.60}; fix it.')
        change = {key: scene[key] for key in ("boxes", "viewpoint_iou", "changed") if key in scene}
        key = "viewpoint_iou_distractor"
        extras[file] = change, ({"viewpoint_iou": scene[key]} if key in scene else {})
    return extras
