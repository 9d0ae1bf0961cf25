"""The official sizes of the released datasets, and the comparison of a folder with them.

A folder is "whole" if every split has its official size, and a "part" if a split is smaller and none is larger. A whole dataset
must also have the official number of pairs of each change type, and of pairs with a change, if it is known. A split that is larger is
an error: files of different releases are mixed, so the scores cannot be compared with published ones.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diffcap.records import SPLITS, ChangePair, is_blank
from diffcap.utils.errors import DiffcapError


class Sizes(NamedTuple):
    """The sizes of a released dataset.

    Attributes:
        unit: what is counted ("pairs"). splits: split -> number of units.
        scenes: whether each unit is a scene with a change pair and a distractor pair; only the change pairs are counted.
        total: units of all splits, where the authors do not publish `splits`, which is empty then.
        types: change type -> pairs in all splits; empty if unknown. classes: number of image classes; 0 if there are none.
        changed: split -> pairs with a change; empty if unknown.
    """

    unit: str
    splits: dict[str, int]
    scenes: bool = False
    types: dict[str, int] = {}  # noqa: RUF012  never changed
    classes: int = 0
    total: int = 0
    changed: dict[str, int] = {}  # noqa: RUF012  never changed


def _splits(train: int, val: int, test: int) -> dict[str, int]:
    return dict(zip(SPLITS, (train, val, test)))


_LEVIR = Sizes("pairs", _splits(6_815, 1_333, 1_929), changed=_splits(3_407, 667, 964))

# Counted in the released split files (CLEVR-Change's also in its type_mapping.json); Dubai-CC's are from other papers' tables.
# SECOND-CC's authors publish the sum of the splits only, without augmented views; another repository counts 1,227 test pairs.
OFFICIAL = {
    "clevr_change": Sizes(
        "scenes",
        _splits(33_830, 1_988, 3_985),
        scenes=True,
        types={"color": 7_958, "material": 7_963, "add": 7_966, "drop": 7_961, "move": 7_955},
    ),
    "clevr_dc": Sizes("pairs", _splits(40_800, 2_400, 4_800)),
    "dubai_cc": Sizes("pairs", _splits(300, 50, 150)),
    "levir_cc": _LEVIR,
    "levir_mci": _LEVIR,
    "second_cc": Sizes("pairs", {}, total=6_041),
    "whu_cdc": Sizes("pairs", _splits(5_947, 743, 744)),
    "spot_the_diff": Sizes("pairs", _splits(8_566, 1_493, 1_270)),
    "image_editing_request": Sizes("pairs", _splits(3_061, 383, 495)),
    "birds2words": Sizes("pairs", _splits(2_685, 325, 337)),  # a "part" if photos are no longer online
    "cub": Sizes("images", _splits(8_855, 2_933, 0)),  # L2C's split, which is by class (Yan et al., ACL 2021)
    "nabirds": Sizes("images", _splits(23_929, 0, 24_633), classes=555),
}


def compare(dataset: str, pairs: Sequence[ChangePair], folder: Path, left_out: bool = False) -> dict[str, Any] | None:
    """Compare the sizes of a dataset's splits with the official ones.

    Args:
        dataset: name, see `OFFICIAL`. pairs: all pairs. folder: of the files, for messages.
        left_out: whether pairs with missing images were removed from `pairs`; then only scenes with both pairs count.

    Returns:
        {"state": "whole" or "part", "unit", "splits": split -> [found, official]}, with "total": [found, official] where only the sum
        of the splits is known; None if no official size is known.
    """
    sizes = OFFICIAL.get(dataset)
    if sizes is None:
        return None
    if sizes.total:
        return _compare_total(dataset, sizes, sum("augmented" not in pair.extra for pair in pairs), folder)
    found = Counter(pair.split for pair in pairs if not (sizes.scenes and pair.is_distractor))
    distractors = Counter(pair.split for pair in pairs if pair.is_distractor)
    if left_out and sizes.scenes:
        found &= distractors  # the smaller number of each split
    if sizes.classes and found.total() > sum(sizes.splits.values()):
        raise DiffcapError(
            f"{folder}: has {found.total():,} images, the official {dataset} {sum(sizes.splits.values()):,}; fetch its lists again."
        )
    for split, official in sizes.splits.items():
        if found[split] > official and not sizes.classes:
            raise DiffcapError(
                f"{folder}: its {split} split has {found[split]:,} {sizes.unit}, the official one of {dataset} has "
                f"{official:,}; take the split file from the authors' release."
            )
    whole = all(found[split] == official for split, official in sizes.splits.items())
    # Images with classes are never scored, and IDC-PCL's format of them has no splits.
    whole = whole or bool(sizes.classes and found.total() == sum(sizes.splits.values()))
    if whole and sizes.scenes:
        lacking = next((split for split in SPLITS if distractors[split] != found[split]), None)
        if lacking:
            raise DiffcapError(
                f"{folder}: its {lacking} split has {found[lacking]:,} changes and {distractors[lacking]:,} distractors; "
                "every scene needs both: fetch the files again."
            )
    changed = Counter(pair.split for pair in pairs if not pair.is_distractor)
    for split, official in sizes.changed.items() if whole else ():
        if changed[split] != official:
            raise DiffcapError(
                f"{folder}: its {split} split has {changed[split]:,} pairs with a change, the official one of {dataset} has "
                f"{official:,}; take the file of captions from the authors' release."
            )
    kinds = Counter(pair.change_type for pair in pairs if pair.change_type)
    if whole and kinds:
        for kind, official in sizes.types.items():
            if kinds[kind] != official:
                raise DiffcapError(
                    f"{folder}: {kinds[kind]:,} changes of type {kind}, the whole {dataset} has {official:,}; take "
                    "type_mapping.json from the authors' release."
                )
    classes = {pair.extra["class"] for pair in pairs if "class" in pair.extra}
    if whole and classes != set(range(sizes.classes)):
        raise DiffcapError(
            f"{folder}: its images have {len(classes):,} classes up to number {max(classes, default=0):,}, those of the whole "
            f"{dataset} {sizes.classes:,} from number 0; fetch its lists again."
        )
    return {
        "state": "whole" if whole else "part",
        "unit": sizes.unit,
        "splits": {split: [found[split], official] for split, official in sizes.splits.items()},
    }


def _compare_total(dataset: str, sizes: Sizes, found: int, folder: Path) -> dict[str, Any]:
    if found > sizes.total:
        raise DiffcapError(
            f"{folder}: has {found:,} {sizes.unit}, the official {dataset} {sizes.total:,}; take the files from the authors' release."
        )
    state = "whole" if found == sizes.total else "part"
    return {"state": state, "unit": sizes.unit, "splits": {}, "total": [found, sizes.total]}


def repetitions(pairs: Sequence[ChangePair]) -> dict[str, Any]:
    """Count duplicates and blank captions.

    Returns:
        "image_pairs": split -> number of distinct (before, after). "image_pairs_in_two_splits": how many of them are in more
        than one split. "repeated_captions": number of captions that occur again in the same pair. "blank_captions": number
        of captions without a visible character.
    """
    images: dict[tuple[str, str | None], set[str]] = {}
    for pair in pairs:
        images.setdefault((pair.before, pair.after), set()).add(pair.split)
    return {
        "image_pairs": {split: sum(split in splits for splits in images.values()) for split in SPLITS},
        "image_pairs_in_two_splits": sum(len(splits) > 1 for splits in images.values()),
        "repeated_captions": sum(len(pair.captions) - len(set(pair.captions)) for pair in pairs),
        "blank_captions": sum(is_blank(caption) for pair in pairs for caption in pair.captions),
    }
