"""The official sizes of the released datasets, and the comparison of a folder with them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diffcap.records import SPLITS, ChangePair, is_blank
from diffcap.utils.errors import DiffcapError


class ReleaseSizes(NamedTuple):
    """The sizes of a released dataset."""

    unit: str  # what is counted ("pairs")
    splits: dict[str, int]  # split -> number of units
    scenes: bool = False  # each unit is a scene with a change pair and a distractor pair; only change pairs are counted
    types: dict[str, int] = {}  # noqa: RUF012  change type -> pairs in all splits; empty if unknown; never changed
    classes: int = 0  # of images; 0 if there are none
    total: int = 0  # units of all splits, where the authors do not publish `splits`, which is empty then
    changed: dict[str, int] = {}  # noqa: RUF012  split -> pairs with a change; empty if unknown; never changed


def _splits(train: int, val: int, test: int) -> dict[str, int]:
    return dict(zip(SPLITS, (train, val, test)))


_LEVIR = ReleaseSizes("pairs", _splits(6_815, 1_333, 1_929), changed=_splits(3_407, 667, 964))

# Counted in the released split files (CLEVR-Change's also in its type_mapping.json); Dubai-CC's are from other papers' tables.
# SECOND-CC's authors publish the sum of the splits only, without augmented views; another repository counts 1,227 test pairs.
OFFICIAL = {
    "clevr_change": ReleaseSizes(
        "scenes",
        _splits(33_830, 1_988, 3_985),
        scenes=True,
        types={"color": 7_958, "material": 7_963, "add": 7_966, "drop": 7_961, "move": 7_955},
    ),
    "clevr_dc": ReleaseSizes("pairs", _splits(40_800, 2_400, 4_800)),
    "dubai_cc": ReleaseSizes("pairs", _splits(300, 50, 150)),
    "levir_cc": _LEVIR,
    "levir_mci": _LEVIR,
    "second_cc": ReleaseSizes("pairs", {}, total=6_041),
    "whu_cdc": ReleaseSizes("pairs", _splits(5_947, 743, 744)),
    "spot_the_diff": ReleaseSizes("pairs", _splits(8_566, 1_493, 1_270)),
    "image_editing_request": ReleaseSizes("pairs", _splits(3_061, 383, 495)),
    "birds2words": ReleaseSizes("pairs", _splits(2_685, 325, 337)),  # a "part" if photos are no longer online
    "cub": ReleaseSizes("images", _splits(8_855, 2_933, 0)),  # L2C's split, which is by class (Yan et al., ACL 2021)
    "nabirds": ReleaseSizes("images", _splits(23_929, 0, 24_633), classes=555),
}


def compare(
    dataset: str, pairs: Sequence[ChangePair], folder: Path, has_skipped_pairs: bool = False
) -> dict[str, Any] | None:
    """Compare the sizes of a dataset's splits with the official ones; None if no official size is known.

    A folder is "whole" if every split has its official size, and a "part" if a split is smaller and none is larger. A whole dataset
    must also have the official number of pairs of each change type, and of pairs with a change, if it is known. Any other difference is
    an error: files of different releases are mixed, so the scores cannot be compared with published ones. `has_skipped_pairs`: pairs
    with missing images were removed from `pairs`; then only scenes with both pairs count.

    Returns:
        {"state": "whole" or "part", "unit", "splits": split -> [found, official]}, and "total": [found, official] where only it is known.
    """
    sizes = OFFICIAL.get(dataset)
    if sizes is None:
        return None
    pairs = [pair for pair in pairs if "augmented" not in pair.extra]
    found = Counter(pair.split for pair in pairs if not (sizes.scenes and pair.is_distractor))
    if has_skipped_pairs and sizes.scenes:
        found &= Counter(pair.split for pair in pairs if pair.is_distractor)  # the smaller number of each split
    # Images with classes are never scored, and IDC-PCL's format of them has no splits.
    total = sizes.total or (sum(sizes.splits.values()) if sizes.classes else 0)
    numbers = {"": (found.total(), total)} if total else {f"{key} ": (found[key], n) for key, n in sizes.splits.items()}
    for split, (number, official) in numbers.items():
        if number > official:
            raise DiffcapError(
                f"{folder}: has {number:,} {split}{sizes.unit}, the official {dataset} {official:,}; take the files from the "
                "authors' release."
            )
    whole = all(number == official for number, official in numbers.values())
    for what, number, official in _details(sizes, pairs, found) if whole else ():
        if number != official:
            raise DiffcapError(
                f"{folder}: has {number:,} {what}, the whole {dataset} {official:,}; take the files from the authors' release."
            )
    result: dict[str, Any] = {"state": "whole" if whole else "part", "unit": sizes.unit}
    result["splits"] = {split: [found[split], official] for split, official in sizes.splits.items()}
    return {**result, "total": [found.total(), total]} if sizes.total else result


def _details(sizes: ReleaseSizes, pairs: Sequence[ChangePair], found: Counter[str]) -> Iterator[tuple[str, int, int]]:
    """What is counted in a whole dataset besides its units, how many there are, and the official number."""
    kinds = Counter((pair.split, pair.is_distractor) for pair in pairs)
    types = Counter(pair.change_type for pair in pairs if pair.change_type)
    classes = {pair.extra["class"] for pair in pairs if "class" in pair.extra}
    for split in SPLITS if sizes.scenes else ():
        yield f"{split} distractors", kinds[split, True], found[split]
    for split, official in sizes.changed.items():
        yield f"{split} pairs with a change", kinds[split, False], official
    for kind, official in sizes.types.items() if types else ():
        yield f"changes of type {kind}", types[kind], official
    yield "missing or unknown classes", len(classes ^ set(range(sizes.classes))), 0


def repetitions(pairs: Sequence[ChangePair]) -> dict[str, Any]:
    """Count distinct (before, after) of each split, those in more than one split, repeated captions of a pair, and blank captions."""
    images: dict[tuple[str, str | None], set[str]] = {}
    for pair in pairs:
        images.setdefault((pair.before, pair.after), set()).add(pair.split)
    return {
        "image_pairs": {split: sum(split in splits for splits in images.values()) for split in SPLITS},
        "image_pairs_in_two_splits": sum(len(splits) > 1 for splits in images.values()),
        "repeated_captions": sum(len(pair.captions) - len(set(pair.captions)) for pair in pairs),
        "blank_captions": sum(is_blank(caption) for pair in pairs for caption in pair.captions),
    }
