"""Looks for the page: their bytes, whom they are asked of, and whether the words found the changed object."""

import base64
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.report.layouts import captions_of, make_dataset, make_scorer, make_store

from diffcap.evaluation.localisation import box_coverage, mask_coverage, mass_inside, pointing_score, relative_box
from diffcap.records import ChangePair
from diffcap.report.attention import PairAttention, list_attention, matches
from diffcap.report.attention_data import (
    box_regions,
    collect_attention,
    encode_attention,
    extreme_pairs,
    iter_word_attention,
    mask_regions,
)
from diffcap.report.masks import Masks
from diffcap.report.overlay import scale_attention
from diffcap.word_attention import AttentionMaps

BOXES = {"before": [0, 0, 20, 40], "after": [20, 20, 40, 40]}
PAIR = ChangePair("1", "b", "a", ["the red cube moved"], "test", "move", False, {"boxes": BOXES})


def some_maps() -> PairAttention:
    random = np.random.default_rng(0)
    before, after = (random.dirichlet(np.ones(6), 4).reshape(4, 2, 3) for _ in range(2))
    words = ["the", "red", "cube", "moved"]
    return PairAttention(words, before, after, np.roll(np.eye(6), 1, axis=1), PAIR, " ".join(words))


def test_a_packed_look_is_the_strengths_and_the_matches_again() -> None:
    one = some_maps()
    packed = encode_attention(one)
    assert packed["w"] == one.words and packed["g"] == [2, 3]
    maps = [np.frombuffer(base64.b64decode(packed[side]), np.uint8).reshape(4, 2, 3) for side in "ba"]
    for word in range(4):
        expected = scale_attention(one.before[word], one.after[word])
        for side in (0, 1):
            assert maps[side][word] / 255 == pytest.approx(expected[side], abs=0.002)
    assert one.alignment is not None
    found = matches(one.alignment, (2, 3))
    assert len(packed["m"]) == len(found) == 6
    for numbers, match in zip(packed["m"], found):
        assert numbers == [*(round(1000 * x) for x in (*match.start, *match.end, match.weight)), int(match.is_common)]
    assert encode_attention(AttentionMaps([], one.before[:0], one.after[:0], None)) == {
        "w": [],
        "g": [2, 3],
        "b": "",
        "a": "",
        "m": None,
    }


def test_some_maps_counts_in_every_image_that_has_the_object() -> None:
    sizes = {"b": (40, 40), "a": (40, 40)}
    expectation = list(iter_word_attention(some_maps(), box_regions(PAIR, (2, 3), sizes)))
    assert [(kind, one.name) for kind, one in expectation] == 2 * [
        ("other", "the"),
        ("color", "red"),
        ("shape", "cube"),
        ("change", "moved"),
    ]
    assert expectation[0][1].coverage == pytest.approx(np.array([[1, 0.5, 0], [1, 0.5, 0]]))
    assert expectation[4][1].coverage == pytest.approx(np.array([[0, 0, 0], [0, 0.5, 1]]))
    assert (expectation[5][1].map == some_maps().after[1]).all()
    assert list(box_regions(PAIR, (2, 3), {"a": (40, 40)})) == ["after"]  # the size of the first is not known


def test_a_mask_is_the_region_of_both_images(tmp_path: Path) -> None:
    masked = replace(PAIR, extra={"mask": "mask.png"})
    Image.fromarray(np.uint8([[255, 0, 0, 0], [0, 0, 0, 0]])).save(tmp_path / "mask.png")
    masks, sizes = Masks(tmp_path), {"a": (80, 40)}
    found = list(iter_word_attention(some_maps(), mask_regions(masked, (2, 3), sizes, masks)))
    assert [one.name for _, one in found] == 2 * ["the", "red", "cube", "moved"]
    assert all(one.coverage == pytest.approx(np.array([[0.75, 0, 0], [0, 0, 0]])) for _, one in found)
    assert (found[5][1].map == some_maps().after[1]).all()
    Image.new("L", (4, 2)).save(tmp_path / "mask.png")
    assert mask_regions(masked, (2, 3), sizes, masks) == {} and not masks.problems
    assert mask_regions(masked, (2, 3), {}, masks) == {}  # no image can be read


def test_the_ends_are_the_first_of_every_order() -> None:
    one = {str(number): float(number) for number in range(10)}
    two = {str(number): 5.0 for number in range(9)} | {"9": 20.0}
    assert set(extreme_pairs({"one": one}, 2)) == {"0", "1", "8", "9"}
    assert {"0", "9", "8"} <= set(extreme_pairs({"one": one, "two": two}, 2))
    disputed = {"a": 0.0, "b": 3.0, "c": 1.0}, {"a": 0.1, "b": 0.0, "c": 1.0}
    assert "b" in extreme_pairs(dict(zip("xy", disputed)), 1)


def test_a_checkpoint_is_asked_and_measured_on_the_drawn_pairs_alone(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data")
    make_store(tmp_path / "data", dataset.pairs)
    words = sorted({word for pair in dataset.pairs for caption in pair.captions for word in caption.split()})
    checkpoint = make_scorer(tmp_path / "best.ckpt", words)
    predictions = captions_of(dataset)
    test = [pair for pair in dataset.pairs if pair.split == "test"]
    measured = [pair.id for pair in test if not pair.is_distractor][:1]
    sizes = {path: (64, 48) for pair in test for path in (pair.before, pair.after)}
    masks = Masks(dataset.root)
    torch.manual_seed(0)
    found = collect_attention([checkpoint], tmp_path / "data", test, predictions, measured, sizes, masks)
    assert not isinstance(found, str)
    packed, scores = found
    assert list(packed) == [pair.id for pair in test]
    attentions = list_attention([checkpoint], tmp_path / "data", test, predictions)
    assert not isinstance(attentions, str)
    one = next(one for one in attentions if one.pair.id == measured[0])
    assert packed[one.pair.id] == encode_attention(one)
    expected: dict[str, list[tuple[float, float]]] = {}
    for side, maps in (("before", one.before), ("after", one.after)):
        box = one.pair.extra["boxes"].get(side)
        for word, attended in zip(one.words, maps if box else []):
            place = box_coverage((2, 3), relative_box(box, (64, 48)))
            expected.setdefault(word, []).append((pointing_score(attended, place), mass_inside(attended, place)))
    assert scores["words"].keys() == expected.keys()
    for word, pairs in expected.items():
        row = scores["words"][word]
        assert row["count"] == len(pairs)
        assert (row["pointing"], row["mass"]) == pytest.approx(tuple(np.mean(pairs, axis=0)))
    every = scores["kinds"].pop("all words")
    assert sum(row["count"] for row in scores["kinds"].values()) == sum(map(len, expected.values())) == every["count"]
    means = np.mean([pair for pairs in expected.values() for pair in pairs], axis=0)
    assert (every["pointing"], every["mass"]) == pytest.approx(tuple(means))
    assert scores["region"] == "box" and "boxes" not in scores
    assert "not there" in str(
        collect_attention([tmp_path / "none.ckpt"], tmp_path / "data", test, predictions, measured, sizes, masks)
    )


def test_masks_are_measured_before_boxes(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data")
    make_store(tmp_path / "data", dataset.pairs)
    words = sorted({word for pair in dataset.pairs for caption in pair.captions for word in caption.split()})
    checkpoint = make_scorer(tmp_path / "best.ckpt", words, scale=4)
    test = [pair for pair in dataset.pairs if pair.split == "test"]
    mask = np.random.default_rng(0).random((48, 64)) < 0.2
    Image.fromarray(mask).save(dataset.root / "mask.png")
    Image.new("1", (64, 48)).save(dataset.root / "empty.png")
    test = [
        replace(pair, extra={**pair.extra, "mask": "empty.png" if pair.is_distractor else "mask.png"}) for pair in test
    ]
    sizes = {path: (64, 48) for pair in test for path in pair.images}
    captions = captions_of(dataset)
    ids = [pair.id for pair in test]
    found = collect_attention([checkpoint], tmp_path / "data", test, captions, ids, sizes, Masks(dataset.root))
    attentions = list_attention([checkpoint], tmp_path / "data", test, captions)
    assert not isinstance(found, str) and not isinstance(attentions, str)
    scores = found[1]
    coverage = mask_coverage((2, 3), mask)
    maps = [map for one in attentions if not one.pair.is_distractor for side in (one.before, one.after) for map in side]
    row = scores["kinds"]["all words"]
    assert scores["region"] == "mask" and row["count"] == len(maps)
    assert row["mass"] == pytest.approx(np.mean([mass_inside(map, coverage) for map in maps]))
    assert row["mass_chance"] == pytest.approx(mask.mean())
    assert 0 < scores["boxes"]["kinds"]["all words"]["count"] < row["count"]  # an added object is in one image
