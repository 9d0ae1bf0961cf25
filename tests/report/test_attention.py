"""Attention maps of runs: whose maps they are, their encoding, and whether the words found the changed object."""

import base64
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.report.layouts import captions_of, make_dataset, make_scorer, make_store, write_checkpoint, write_store
from tests.test_pair_captioner import make

from diffcap.change import AttentionMaps, attention_of
from diffcap.checkpoints.loading import load
from diffcap.evaluation.localisation import WordAttention, box_coverage, localisation
from diffcap.methods.pcl.model import PCL
from diffcap.models.captioner import Captioner
from diffcap.records import ChangePair, Dataset
from diffcap.report.attention import (
    NoAttentionError,
    box_regions,
    collect_attention,
    encode_attention,
    extreme_pairs,
    iter_attention,
    iter_word_attention,
    mask_regions,
)
from diffcap.report.drawing import Masks
from diffcap.report.heatmaps import scale_attention, strongest_matches
from diffcap.utils.errors import DiffcapError

BOXES = {"before": [0, 0, 20, 40], "after": [20, 20, 40, 40]}
PAIR = ChangePair("1", "b", "a", ["the red cube moved"], "test", "move", False, {"boxes": BOXES})


def some_maps() -> AttentionMaps:
    random = np.random.default_rng(0)
    before, after = (random.dirichlet(np.ones(6), 4).reshape(4, 2, 3) for _ in range(2))
    words = ["the", "red", "cube", "moved"]
    return AttentionMaps(words, before, after, np.roll(np.eye(6), 1, axis=1))


def test_encoded_maps_are_the_strengths_and_the_matches_again() -> None:
    one = some_maps()
    packed = encode_attention(one)
    assert packed["w"] == one.words and packed["g"] == [2, 3]
    maps = [np.frombuffer(base64.b64decode(packed[side]), np.uint8).reshape(4, 2, 3) for side in "ba"]
    for word in range(4):
        expected = scale_attention(one.before[word], one.after[word])
        for side in (0, 1):
            assert maps[side][word] / 255 == pytest.approx(expected[side], abs=0.002)
    assert one.alignment is not None
    found = strongest_matches(one.alignment, (2, 3))
    assert len(packed["m"]) == len(found) == 6
    for numbers, match in zip(packed["m"], found):
        assert numbers == [*(round(1000 * x) for x in (*match.start, *match.end, match.weight)), int(match[3])]
    empty = encode_attention(AttentionMaps([], one.before[:0], one.after[:0], None))
    assert empty == {"w": [], "g": [2, 3], "b": "", "a": "", "m": None}


def test_words_count_in_every_image_that_has_the_region(tmp_path: Path) -> None:
    sizes = {"b": (40, 40), "a": (40, 40)}
    found = list(iter_word_attention(some_maps(), box_regions(PAIR, (2, 3), sizes)))
    kinds = [("other", "the"), ("color", "red"), ("shape", "cube"), ("change", "moved")]
    assert [(kind, one.name) for kind, one in found] == 2 * kinds
    assert found[0][1].coverage == pytest.approx(np.array([[1, 0.5, 0], [1, 0.5, 0]]))
    assert found[4][1].coverage == pytest.approx(np.array([[0, 0, 0], [0, 0.5, 1]]))
    assert (found[5][1].map == some_maps().after[1]).all()
    assert list(box_regions(PAIR, (2, 3), {"a": (40, 40)})) == ["after"]  # the size of the first is not known
    masked = replace(PAIR, extra={"mask": "mask.png"})
    Image.fromarray(np.uint8([[255, 0, 0, 0], [0, 0, 0, 0]])).save(tmp_path / "mask.png")
    masks, sizes = Masks(tmp_path), {"a": (80, 40)}
    regions = mask_regions(masked, (2, 3), sizes, masks)
    assert list(regions) == ["before", "after"]
    assert all(region == pytest.approx(np.array([[0.75, 0, 0], [0, 0, 0]])) for region in regions.values())
    Image.new("L", (4, 2)).save(tmp_path / "mask.png")
    assert mask_regions(masked, (2, 3), sizes, masks) == {} and not masks.problems
    assert mask_regions(masked, (2, 3), {}, masks) == {}  # no image can be read


def test_extreme_pairs_are_the_lowest_the_highest_and_those_where_systems_differ_most() -> None:
    one = {str(number): float(number) for number in range(10)}
    assert set(extreme_pairs({"one": one}, 2)) == {"0", "1", "8", "9"}
    disputed = {"x": {"a": 0.0, "b": 3.0, "c": 1.0, "d": 9.0}, "y": {"a": 0.1, "b": 0.0, "c": 1.0, "d": 9.0}}
    assert set(extreme_pairs(disputed, 1)) == {"a", "b", "d"}


def test_a_checkpoint_is_asked_for_the_words_of_its_own_caption(tmp_path: Path) -> None:
    maps = np.random.default_rng(0).normal(size=(2, 5, 2, 3)).astype(np.float16)
    write_store(tmp_path / "features/toy", ["a.png", "b.png"], maps)
    words = [",", "a", "cube", "red", "vanished"]
    path = make_scorer(tmp_path / "best.ckpt", words, (5, 2, 3))
    pair = ChangePair("1", "a.png", "b.png", ["red , cube vanished"], "test")
    ((_, found),) = iter_attention([path], tmp_path, [pair], {"1": "red , cube vanished"})
    assert found.words == ["red", ",", "cube", "vanished"]
    captioner = load(path).captioner
    features = torch.from_numpy(maps).float()
    tokens = torch.tensor([[2, 7, 4, 6, 8]])  # START, then the words in the order of the vocabulary after four specials
    with torch.no_grad():
        expected = captioner.attention(features[:1], features[1:], tokens)
    # the map of "," stands at the position of "red"
    np.testing.assert_allclose(found.before[1], expected.before[0, 1], atol=1e-6)
    np.testing.assert_allclose(found.after, expected.after[0, :4], atol=1e-6)
    assert found.before.shape == (4, 2, 3) and found.alignment is not None and found.alignment.shape == (6, 6)
    ((_, twice),) = iter_attention([path, path], tmp_path, [pair], {"1": "red , cube vanished"})
    np.testing.assert_allclose(twice.before, found.before, atol=1e-6)
    assert twice.words == found.words and twice.alignment is not None
    other = make_scorer(tmp_path / "other.ckpt", words, (6, 2, 3))
    with pytest.raises(DiffcapError, match=r"shape \[5, 2, 3\], the captioner was trained on \[6, 2, 3\]"):
        next(iter_attention([other], tmp_path, [pair], {"1": "red"}))


def test_a_word_of_several_tokens_has_the_mean_of_their_maps(tmp_path: Path) -> None:
    caption = "the cyan cube vanished"
    checkpoint = load(make(tmp_path / "best.ckpt", "clip4idc", [caption]))
    tokens = checkpoint.vocabulary.encode(caption, 12)
    assert len(tokens) - 2 == 5  # without start and end; "cy" and "an" are two
    images = torch.randint(0, 256, (2, 1, *checkpoint.features["shape"])).float()
    found = attention_of(checkpoint.captioner, checkpoint.vocabulary, *images, tokens)
    with torch.no_grad():
        maps = checkpoint.captioner.attention(*images, torch.tensor([tokens[:-1]]))
    assert found.words == caption.split(" ")
    for attended, of_tokens in ((found.before, maps.before[0].numpy()), (found.after, maps.after[0].numpy())):
        expected = [of_tokens[0], of_tokens[1:3].mean(0), of_tokens[3], of_tokens[4]]
        np.testing.assert_allclose(attended, np.stack(expected), atol=1e-6)


def test_runs_without_maps_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pcl = PCL(vocabulary_size=8, feature_channels=5, width=16, heads=2, ffn=16)
    write_checkpoint(tmp_path / "pcl.ckpt", "pcl", pcl, ["a", "b"], (5, 2, 3))
    monkeypatch.setattr(PCL, "attention", Captioner.attention)  # as of a method without maps
    members = [make_scorer(tmp_path / f"{width}.ckpt", ["a", "b"], (5, 2, width)) for width in (3, 4)]
    for paths, reason in (
        ([], "it has no checkpoint, because it is a file with captions"),
        ([tmp_path / "best.ckpt"], "best.ckpt is not there"),
        ([tmp_path / "pcl.ckpt"], "pcl has no attention maps"),
        (members, "attention maps of different sizes"),
    ):
        with pytest.raises(NoAttentionError, match=reason):
            next(iter_attention(paths, tmp_path, [], {}))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Dataset, Path]:
    """A dataset with features, and a checkpoint in its folder."""
    folder = tmp_path_factory.mktemp("data")
    dataset = make_dataset(folder)
    make_store(folder, dataset.pairs)
    words = sorted({word for pair in dataset.pairs for caption in pair.captions for word in caption.split()})
    return dataset, make_scorer(folder / "best.ckpt", words, scale=4)


def test_localisation_is_measured_on_the_drawn_pairs_alone(trained: tuple[Dataset, Path]) -> None:
    dataset, checkpoint = trained
    predictions = captions_of(dataset)
    test = [pair for pair in dataset.pairs if pair.split == "test"]
    measured = [pair.id for pair in test if not pair.is_distractor][:1]
    sizes = {path: (64, 48) for pair in test for path in (pair.before, pair.after)}
    masks = Masks(dataset.root)
    found = collect_attention([checkpoint], checkpoint.parent, test, predictions, measured, sizes, masks)
    packed, scores = found
    assert list(packed) == [pair.id for pair in test]
    maps_of = iter_attention([checkpoint], checkpoint.parent, test, predictions)
    pair, one = next((pair, maps) for pair, maps in maps_of if pair.id == measured[0])
    assert packed[pair.id] == encode_attention(one)
    expected: dict[str, list[tuple[float, float]]] = {}
    for side, maps in (("before", one.before), ("after", one.after)):
        box = pair.extra["boxes"].get(side)
        for word, attended in zip(one.words, maps if box else []):
            place = box_coverage((2, 3), box, (64, 48))
            row = localisation([WordAttention(word, attended, place)])[word]
            expected.setdefault(word, []).append((row["pointing"], row["mass"]))
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
