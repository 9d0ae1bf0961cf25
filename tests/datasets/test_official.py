import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.datasets.layouts import write_clevr_change

from diffcap.datasets import describe, read_pairs
from diffcap.datasets.official import OFFICIAL, ReleaseSizes, compare_sizes, count_repetitions
from diffcap.records import ChangePair
from diffcap.utils.errors import DiffcapError


def pairs_of(**counts: int) -> Iterator[ChangePair]:
    for split, count in counts.items():
        for number in range(count):
            yield ChangePair(f"{split}{number}", f"{split}{number}", f"{split}{number}_2", ["a"], split)


def test_whole_part_and_too_much() -> None:
    folder = Path("folder")
    whole = list(pairs_of(train=3_061, val=383, test=495))
    assert compare_sizes("image_editing_request", whole, folder) == {
        "state": "whole", "unit": "pairs", "splits": {"train": [3061, 3061], "val": [383, 383], "test": [495, 495]},
    }  # fmt: skip
    part = compare_sizes("image_editing_request", whole[1:], folder)
    assert part is not None and part["state"] == "part" and part["splits"]["train"] == [3060, 3061]
    moved = [*whole[1:], replace(whole[0], split="test")]  # as many in all
    with pytest.raises(DiffcapError, match="has 496 test pairs, the official image_editing_request 495"):
        compare_sizes("image_editing_request", moved, folder)
    assert compare_sizes("desk", whole, folder) is None


def test_only_the_sum_of_the_splits_is_known() -> None:
    """SECOND-CC, with and without augmented views of the training pairs."""
    pairs = [*pairs_of(train=4_000, val=814, test=1_227)]
    views = [replace(pair, id=f"{pair.id}_view", extra={"augmented": True}) for pair in pairs[:10]]
    for given in (pairs, [*pairs, *views]):
        found = compare_sizes("second_cc", given, Path("folder"))
        assert found == {"state": "whole", "unit": "pairs", "splits": {}, "total": [6_041, 6_041]}
    part = compare_sizes("second_cc", [*pairs[:5], *views], Path("folder"))
    assert part is not None and part["state"] == "part" and part["total"] == [5, 6_041]
    with pytest.raises(DiffcapError, match="has 6,042 pairs, the official second_cc 6,041; take the files from"):
        compare_sizes("second_cc", [*pairs, replace(views[0], extra={})], Path("folder"))


def test_a_whole_levir_cc_has_its_pairs_with_a_change() -> None:
    changed = {"train": 3_407, "val": 667, "test": 964}
    pairs = [
        replace(pair, is_distractor=int(pair.id.removeprefix(pair.split)) >= changed[pair.split])
        for pair in pairs_of(train=6_815, val=1_333, test=1_929)
    ]
    for dataset in ("levir_cc", "levir_mci"):
        found = compare_sizes(dataset, pairs, Path("folder"))
        assert found is not None and found["state"] == "whole"
    pairs[-1] = replace(pairs[-1], is_distractor=False)
    with pytest.raises(DiffcapError, match="has 965 test pairs with a change, the official levir_cc 964"):
        compare_sizes("levir_cc", pairs, Path("folder"))
    part = compare_sizes("levir_cc", pairs[1:], Path("folder"))
    assert part is not None and part["state"] == "part"


def test_a_whole_dataset_has_its_distractors_and_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ReleaseSizes("scenes", (2, 1, 1), True, num_by_change_type={"color": 2, "add": 2})
    monkeypatch.setitem(OFFICIAL, "clevr_change", small)
    pairs = read_pairs("clevr_change", write_clevr_change(tmp_path, [0, 1], [2], [3]))
    assert describe("clevr_change", pairs, tmp_path)["official"]["state"] == "whole"
    with pytest.raises(DiffcapError, match="has 0 val distractors, the official clevr_change 1"):
        compare_sizes("clevr_change", [pair for pair in pairs if pair.id != "000002.png_n"], tmp_path)
    missing = [pair for pair in pairs if pair.id not in ("000002.png_n", "000000.png")]  # some have no type any more
    found = compare_sizes("clevr_change", missing, tmp_path, has_skipped_pairs=True)
    assert found is not None and found["state"] == "part"
    assert found["splits"] == {"train": [1, 2], "val": [0, 1], "test": [1, 1]}
    kinds = json.loads((tmp_path / "type_mapping.json").read_text())
    (tmp_path / "type_mapping.json").write_text(json.dumps({"color": kinds["color"] + kinds["add"]}))
    with pytest.raises(DiffcapError, match="has 4 changes of type color, the official clevr_change 2"):
        compare_sizes("clevr_change", read_pairs("clevr_change", tmp_path), tmp_path)


@pytest.mark.parametrize(("first", "classes", "fault"), [(0, 555, 0), (0, 554, 1), (1, 555, 2)])
def test_single_images_and_their_classes(first: int, classes: int, fault: int) -> None:
    images = [
        ChangePair(f"{split}{n}", f"{split}{n}", None, [], split, extra={"class": first + n % classes})
        for split, count in (("train", 23_929), ("test", 24_633))
        for n in range(count)
    ]
    if fault:
        with pytest.raises(DiffcapError, match=f"has {fault} missing or unknown classes, the official nabirds 0"):
            compare_sizes("nabirds", images, Path("birds"))
        return
    for given, state in ((images, "whole"), (images[:7], "part")):
        found = compare_sizes("nabirds", given, Path("birds"))
        assert found is not None and found["state"] == state and found["unit"] == "images"
    with pytest.raises(DiffcapError, match="has 2,934 val images, the official cub 2,933"):
        compare_sizes("cub", [*pairs_of(train=8_854, val=2_934)], Path("cub"))


def test_what_stands_twice_is_counted() -> None:
    pairs = [*pairs_of(train=2, test=1)]
    pairs += [replace(pairs[0], id="again", captions=["b", "b", " "]), replace(pairs[0], id="there", split="test")]
    assert count_repetitions(pairs) == {
        "image_pairs": {"train": 2, "val": 0, "test": 2}, "image_pairs_in_two_splits": 1, "repeated_captions": 1, "blank_captions": 1,
    }  # fmt: skip
