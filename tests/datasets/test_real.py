"""The official files' own counts: pytest tests/datasets/test_real.py --real-dir DIR, of whatever datasets DIR has."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from diffcap.datasets import describe, read_pairs
from diffcap.datasets.no_change import is_no_change
from diffcap.records import SPLITS, ChangePair, take_changes
from diffcap.text.vocabulary import build_vocabulary, tokenize_rcc


@pytest.fixture
def folder_of(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    def find(name: str) -> Path:
        folder = request.config.getoption("--real-dir")
        if folder is None or not (Path(folder) / name).is_dir():
            pytest.skip(f"give --real-dir with {name}")
        return Path(folder) / name

    return find


def counts(pairs: list[ChangePair]) -> dict[str, tuple[int, int]]:
    return {
        split: (len(ours), sum(len(pair.captions) for pair in ours))
        for split in SPLITS
        for ours in [[pair for pair in pairs if pair.split == split]]
    }


def words(pairs: list[ChangePair], min_count: int) -> int:
    """Size of the authors' vocabulary, its four special tokens included."""
    train = (caption for pair in pairs if pair.split == "train" for caption in pair.captions)
    return len(build_vocabulary(train, min_count, "rcc"))


def longest(pairs: list[ChangePair]) -> int:
    """Positions that the longest caption of all splits needs, START and END included."""
    return 2 + max(len(tokenize_rcc(caption)) for pair in pairs for caption in pair.captions)


# Pairs and captions of the whole datasets, by split.
COUNTS = {
    "spot_the_diff": {"train": (8_566, 17_676), "val": (1_493, 3_310), "test": (1_270, 2_107)},
    "image_editing_request": {"train": (3_061, 3_061), "val": (383, 1_149), "test": (495, 1_485)},
    "birds2words": {"train": (2_685, 12_890), "val": (325, 1_556), "test": (337, 1_604)},
    "levir_cc": {"train": (6_815, 34_075), "val": (1_333, 6_665), "test": (1_929, 9_645)},
    "levir_mci": {"train": (6_815, 34_075), "val": (1_333, 6_665), "test": (1_929, 9_645)},
    "whu_cdc": {"train": (5_947, 29_735), "val": (743, 3_715), "test": (744, 3_720)},
    "dubai_cc": {"train": (300, 1_500), "val": (50, 250), "test": (150, 750)},
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts(folder_of: Callable[[str], Path], name: str) -> None:
    folder = folder_of(name)
    pairs = read_pairs(name, folder)
    assert counts(pairs) == COUNTS[name]
    assert describe(name, pairs, folder)["official"]["state"] == "whole"


def test_spot_the_diff(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("spot_the_diff")
    pairs = read_pairs("spot_the_diff", folder)
    output = describe("spot_the_diff", pairs, folder)
    assert output["repetitions"]["image_pairs_in_two_splits"] == 0 and output["repetitions"]["blank_captions"] == 66
    assert output["notes"] == ["annotators' rows, merged by pair: train 9,524, val 1,634, test 1,404"]
    assert (words(pairs, 1), words(pairs, 5), longest(pairs)) == (2_059, 743, 58)
    assert words(take_changes(pairs, "multi"), 1) + 1 == 2_033  # and <SEP>


def test_image_editing_request(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("image_editing_request")
    pairs = read_pairs("image_editing_request", folder)
    repetitions = describe("image_editing_request", pairs, folder)["repetitions"]
    assert repetitions["image_pairs"] == {"train": 2_507, "val": 357, "test": 446}
    assert repetitions["image_pairs_in_two_splits"] == 56
    assert (words(pairs, 1), longest(pairs)) == (2_459, 62)


def test_birds2words(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("birds2words")
    pairs = read_pairs("birds2words", folder)
    assert describe("birds2words", pairs, folder)["repetitions"]["repeated_captions"] == 34
    train = [caption.split(" ") for pair in pairs if pair.split == "train" for caption in pair.captions]
    assert [len(build_vocabulary(train, least).words) for least in (1, 2)] == [2_630, 1_653]


def test_clevr_change_whole(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """The official ids and types, with a caption put for each."""
    folder = folder_of("clevr_change")
    for name in ("splits", "type_mapping"):
        (tmp_path / f"{name}.json").write_bytes((folder / f"official_{name}.json").read_bytes())
    ids = [number for group in json.loads((tmp_path / "splits.json").read_text()).values() for number in group]
    for name in ("change_captions", "no_change_captions"):
        (tmp_path / f"{name}.json").write_text(json.dumps({f"CLEVR_default_{n:06d}.png": ["a"] for n in ids}))
    pairs = read_pairs("clevr_change", tmp_path)
    assert counts(pairs) == {"train": (67_660, 67_660), "val": (3_976, 3_976), "test": (7_970, 7_970)}
    assert describe("clevr_change", pairs, tmp_path)["official"]["state"] == "whole"
    kinds = Counter(pair.change_type for pair in pairs if pair.split == "test" and pair.change_type)
    assert kinds == dict.fromkeys(("color", "material", "add", "drop", "move"), 797)


@pytest.mark.parametrize("name", ["levir_cc", "levir_mci"])
def test_levir_cc(folder_of: Callable[[str], Path], name: str) -> None:
    pairs = read_pairs(name, folder_of(name))
    changed = Counter(pair.split for pair in pairs if not pair.is_distractor)
    assert changed == {"train": 3_407, "val": 667, "test": 964}
    assert sum(len(set(pair.captions)) < 5 for pair in pairs) == 77
    captions = {split: [text for pair in pairs if pair.split == split for text in pair.captions] for split in SPLITS}
    assert len({text for texts in captions.values() for text in texts}) == 19_266
    train = [caption.split(" ") for caption in captions["train"]]
    sizes = [4 + len(build_vocabulary(train, least).words) for least in (1, 2, 3, 4, 5, 6)]  # with four special tokens
    assert sizes == [859, 638, 529, 472, 436, 404]
    longest_words = {split: max(len(text.split()) for text in texts) for split, texts in captions.items()}
    assert longest_words == {"train": 39, "val": 30, "test": 28}
    assert all(all(map(is_no_change, pair.captions)) for pair in pairs if pair.is_distractor)
    assert not any(any(map(is_no_change, pair.captions)) for pair in pairs if not pair.is_distractor)


def test_second_cc(folder_of: Callable[[str], Path]) -> None:
    pairs = read_pairs("second_cc", folder_of("second_cc"))
    assert len(pairs) == 6_041 and sum(len(pair.captions) for pair in pairs) == 30_205
    assert counts(pairs)["test"][0] == 1_227  # from another repository
