"""CLEVR-Change (Park et al., ICCV 2019), and other datasets in its layout (`blocks`).

    images/CLEVR_default_000123.png       before
    sc_images/CLEVR_semantic_000123.png   after a change
    nsc_images/CLEVR_nonsemantic_000123.png  distractor: the same scene from another viewpoint
    change_captions.json, no_change_captions.json   "CLEVR_default_000123.png" -> list of sentences
    splits.json                           {"train": [123, ...], "val": [...], "test": [...]}
    type_mapping.json                     {"color": ["000123.png", ...], ...}, optional
    scenes.json                           optional, see `_extras`

Files are matched by their number, not by their position in a listing: the released dataset has 39,803 of 40,000 numbers.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from diffcap.datasets import pcl_lines
from diffcap.datasets.checks import sentences
from diffcap.records import SPLITS, ChangePair, read_json
from diffcap.utils.errors import DiffcapError

_REMEDY = "unpack the whole dataset into this folder"


def read(folder: Path) -> list[ChangePair]:
    """Read the pairs of the official layout, or of IDC-PCL's JSON lines (`pcl_lines`).

    Each scene gives two pairs: the change "000123.png" and the distractor "000123.png_n". They are sorted by split, then by
    number.

    Raises:
        DiffcapError: a JSON file is missing or malformed, or a number in `splits.json` has no captions.
    """
    kinds = _change_types(folder / "type_mapping.json")
    if pcl_lines.is_there(folder):
        return pcl_lines.read(folder, kinds)
    changed = _captions(folder / "change_captions.json")
    unchanged = _captions(folder / "no_change_captions.json")
    splits = read_splits(folder / "splits.json")
    extras = _extras(folder / "scenes.json")
    for captions, name in ((changed, "change_captions.json"), (unchanged, "no_change_captions.json")):
        _require_captions((number for numbers in splits.values() for number in numbers), captions, folder, name)
    pairs = []
    for split, numbers in splits.items():
        for number in sorted(numbers):
            file = f"{number:06d}.png"
            before, key = f"images/CLEVR_default_{file}", f"CLEVR_default_{file}"
            change, distractor = extras.get(file, ({}, {}))
            after = f"sc_images/CLEVR_semantic_{file}"
            pairs.append(ChangePair(file, before, after, changed[key], split, kinds.get(file), extra=change))
            after = f"nsc_images/CLEVR_nonsemantic_{file}"
            pairs.append(ChangePair(f"{file}_n", before, after, unchanged[key], split, None, True, distractor))
    return pairs


def _captions(path: Path) -> dict[str, list[str]]:
    return {key: sentences(value, str(path), key) for key, value in _object(path, "captions").items()}


def read_splits(path: Path) -> dict[str, list[int]]:
    """Read split -> numbers of its images.

    Raises:
        DiffcapError: the file is missing or malformed, or a number is duplicated.
    """
    splits = _object(path, "splits")
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
    """File name -> change type; empty if there is no such file."""
    kinds: dict[str, str] = {}
    for kind, files in (_object(path, "change types") if path.is_file() else {}).items():
        if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
            raise DiffcapError(f'{path}: "{kind}" must be a list of file names; fix or fetch the file again.')
        for file in files:
            if kinds.setdefault(file, kind) != kind:
                raise DiffcapError(f"{path}: {file!r} is listed under {kinds[file]!r} and under {kind!r}; keep one.")
    return kinds


def _extras(path: Path) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """File name -> `ChangePair.extra` of (the change pair, the distractor pair), from `scenes.json`; empty without the file.

    A scene is `{"boxes", "viewpoint_iou", "viewpoint_iou_distractor", "changed"}` under "000123.png"; all keys are optional.
    """
    extras = {}
    for file, scene in (_object(path, "scenes") if path.is_file() else {}).items():
        if not isinstance(scene, dict):
            raise DiffcapError(f'{path}: "{file}" must be an object, found {scene!r:.60}; fix it.')
        change = {key: scene[key] for key in ("boxes", "viewpoint_iou", "changed") if key in scene}
        iou = "viewpoint_iou_distractor"
        extras[file] = change, ({"viewpoint_iou": scene[iou]} if iou in scene else {})
    return extras


def _require_captions(numbers: Iterable[int], captions: dict[str, list[str]], folder: Path, name: str) -> None:
    numbers = list(numbers)
    without = [key for number in numbers if (key := f"CLEVR_default_{number:06d}.png") not in captions]
    if without:
        raise DiffcapError(
            f"{folder / name}: no captions for {len(without)} of the {len(numbers)} ids in splits.json (first "
            f"{', '.join(without[:3])}); fetch both files from the same release."
        )


def _object(path: Path, what: str) -> dict[str, Any]:
    value = read_json(path, what, _REMEDY)
    if not isinstance(value, dict):
        raise DiffcapError(f"{path}: expected a JSON object, found {type(value).__name__}; fetch it again.")
    return value
