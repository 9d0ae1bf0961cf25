"""The official sizes of datasets, which their authors have published, and the comparison of a user's files with them."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from diffcap.records import SPLITS, ChangePair, JsonDict, is_blank
from diffcap.utils.errors import DiffcapError


class ReleaseSizes(NamedTuple):
    """The official sizes of a dataset. They are numbers of pairs, single images or scenes, depending on what the authors count."""

    unit: str  # plural noun for messages: "pairs", "images" or "scenes"
    num_units: tuple[int, ...]  # in train, val and test; empty if only the sum is published
    counts_scenes: bool = False  # True if a unit is a scene: a pair with a change and a pair without (distractor)
    num_by_change_type: dict[str, int] = {}  # noqa: RUF012  change type -> number of pairs; empty if unknown
    num_classes: int = 0  # number of classes of the images; 0 if the images have no classes
    total_units: int = 0  # the sum, if only this is published; else 0
    num_changed: tuple[int, ...] = ()  # numbers of changed pairs in train, val and test; empty if unknown


_LEVIR_SIZES = ReleaseSizes("pairs", (6_815, 1_333, 1_929), num_changed=(3_407, 667, 964))

# Most sizes were counted in the authors' split files, and CLEVR-Change's change types in its type_mapping.json. Dubai-CC's sizes are from
# tables in papers of other authors. SECOND-CC's authors publish only the sum of the splits, which does not count augmented pairs.
OFFICIAL = {
    "clevr_change": ReleaseSizes(
        "scenes",
        (33_830, 1_988, 3_985),
        counts_scenes=True,
        num_by_change_type={"color": 7_958, "material": 7_963, "add": 7_966, "drop": 7_961, "move": 7_955},
    ),
    "clevr_dc": ReleaseSizes("pairs", (40_800, 2_400, 4_800)),
    "dubai_cc": ReleaseSizes("pairs", (300, 50, 150)),
    "levir_cc": _LEVIR_SIZES,
    "levir_mci": _LEVIR_SIZES,
    "second_cc": ReleaseSizes("pairs", (), total_units=6_041),
    "whu_cdc": ReleaseSizes("pairs", (5_947, 743, 744)),
    "spot_the_diff": ReleaseSizes("pairs", (8_566, 1_493, 1_270)),
    "image_editing_request": ReleaseSizes("pairs", (3_061, 383, 495)),
    "birds2words": ReleaseSizes("pairs", (2_685, 325, 337)),  # smaller if photos are no longer online
    "cub": ReleaseSizes("images", (8_855, 2_933, 0)),  # L2C's split, which is by class (Yan et al., ACL 2021)
    "nabirds": ReleaseSizes("images", (23_929, 0, 24_633), num_classes=555),
}


def compare_sizes(
    dataset: str, pairs: Sequence[ChangePair], folder: Path, has_skipped_pairs: bool = False
) -> JsonDict | None:
    """Compare the sizes of a dataset's splits with the official sizes. Return None if no official sizes are known.

    A folder is "whole" if every split has its official size, and a "part" if a split is smaller and none is larger. In a whole dataset, the
    numbers of pairs with a change and of each change type must equal the official numbers, if these are known. Any other difference raises
    an error, because files of different releases are probably mixed, and then scores cannot be compared with published scores.

    `has_skipped_pairs` is True if pairs with missing images were removed. A scene then counts only if both of its pairs are left.

    Returns:
        {"state": "whole" or "part", "unit", "splits": {split: [found, official]}}, and "total" if only the sum of the splits is known.
    """
    sizes = OFFICIAL.get(dataset)
    if sizes is None:
        return None
    pairs = [pair for pair in pairs if "augmented" not in pair.extra]
    num_found = Counter(pair.split for pair in pairs if not (sizes.counts_scenes and pair.is_distractor))
    if has_skipped_pairs and sizes.counts_scenes:
        num_found &= Counter(pair.split for pair in pairs if pair.is_distractor)  # `&` takes the smaller numbers
    # In IDC-PCL's files, images with classes (NABirds) have other splits than in the official dataset, so only the sum is compared.
    total_units = sizes.total_units or (sum(sizes.num_units) if sizes.num_classes else 0)
    counts = {f"{split} ": (num_found[split], number) for split, number in zip(SPLITS, sizes.num_units)}
    if total_units:
        counts = {"": (num_found.total(), total_units)}  # messages then name no split
    is_whole = all(num_in_folder == num_official for num_in_folder, num_official in counts.values())
    # (what is counted, its number in the folder, its official number) of what must be equal. The word is "train " and so on, or "".
    details = [(f"{word}{sizes.unit}", *numbers) for word, numbers in counts.items() if numbers[0] > numbers[1]]
    if is_whole:
        num_by_kind = Counter((pair.split, pair.is_distractor) for pair in pairs)
        num_by_change_type = Counter(pair.change_type for pair in pairs if pair.change_type)
        classes = {pair.extra["class"] for pair in pairs if "class" in pair.extra}
        for split in SPLITS if sizes.counts_scenes else ():
            details.append((f"{split} distractors", num_by_kind[split, True], num_found[split]))
        for split, number in zip(SPLITS, sizes.num_changed):
            details.append((f"{split} pairs with a change", num_by_kind[split, False], number))
        for change_type, number in sizes.num_by_change_type.items() if num_by_change_type else ():
            details.append((f"changes of type {change_type}", num_by_change_type[change_type], number))
        details.append(("missing or unknown classes", len(classes ^ set(range(sizes.num_classes))), 0))
    for noun, num_in_folder, num_official in details:
        if num_in_folder != num_official:
            raise DiffcapError(
                f"{folder}: has {num_in_folder:,} {noun}, the official {dataset} {num_official:,}; take the files from the authors' "
                "release."
            )
    result: JsonDict = {"state": "whole" if is_whole else "part", "unit": sizes.unit}
    result["splits"] = {split: [num_found[split], number] for split, number in zip(SPLITS, sizes.num_units)}
    return {**result, "total": [num_found.total(), total_units]} if sizes.total_units else result


def count_repetitions(pairs: Sequence[ChangePair]) -> JsonDict:
    """Count the distinct pairs of images of each split, those in more than one split, captions that a pair repeats, and blank captions."""
    splits_of_images: dict[tuple[str, ...], set[str]] = {}
    for pair in pairs:
        splits_of_images.setdefault(pair.images, set()).add(pair.split)
    return {
        "image_pairs": {split: sum(split in splits for splits in splits_of_images.values()) for split in SPLITS},
        "image_pairs_in_two_splits": sum(len(splits) > 1 for splits in splits_of_images.values()),
        "repeated_captions": sum(len(pair.captions) - len(set(pair.captions)) for pair in pairs),
        "blank_captions": sum(is_blank(caption) for pair in pairs for caption in pair.captions),
    }
