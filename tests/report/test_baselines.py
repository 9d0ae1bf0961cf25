"""The baselines' captions out of a feature store."""

from pathlib import Path

import numpy as np
import pytest

from diffcap.features.store import FeatureStore
from diffcap.features.writer import StoreWriter
from diffcap.records import ChangePair
from diffcap.report.baselines import MOST_COMMON, NEAREST, baseline_captions, coarse_grid, describe_pairs


def store_of(folder: Path, maps: np.ndarray) -> FeatureStore:
    names = [f"{number}.png" for number in range(len(maps))]
    writer = StoreWriter(folder, names, maps.shape[1:], {"backbone": "toy"})
    writer.write(np.arange(len(maps)), maps)
    writer.finish()
    return FeatureStore.open(folder)


def pair(before: int, after: int, *captions: str) -> ChangePair:
    return ChangePair(f"{before}-{after}", f"{before}.png", f"{after}.png", list(captions), "train")


@pytest.mark.parametrize(
    ("shape", "grid"),
    [((116, 4, 6), (4, 6)), ((2048, 7, 7), (1, 1)), ((1024, 14, 14), (2, 2)), ((5000, 3, 3), (1, 1))],
)
def test_grid_is_as_fine_as_memory_allows(shape: tuple[int, int, int], grid: tuple[int, int]) -> None:
    assert coarse_grid(shape) == grid


def test_pairs_are_described_by_the_averaged_map_and_its_difference(tmp_path: Path) -> None:
    maps = np.random.default_rng(0).normal(size=(5, 1200, 4, 4)).astype(np.float16)
    pairs = [pair(0, 1), pair(2, 3), pair(1, 1)]
    vectors = describe_pairs(store_of(tmp_path / "store", maps), pairs, chunk=2)
    means = maps.astype(np.float64).mean(axis=(2, 3))  # 1200 x 4 x 4 is too large: one cell is left
    for row, (before, after) in enumerate([(0, 1), (2, 3), (1, 1)]):
        first, second = means[before], means[after] - means[before]
        length = np.linalg.norm(second) or 1
        expected = np.concatenate([first / np.linalg.norm(first), second / length])
        np.testing.assert_allclose(vectors[row], expected, atol=2e-4)
    assert vectors.dtype == np.float16


def test_captions_come_from_training_pairs(tmp_path: Path) -> None:
    maps = np.random.default_rng(1).normal(size=(8, 3, 2, 2)).astype(np.float16)
    maps[6], maps[7] = maps[2] * 1.01, maps[3] * 0.99
    train = [pair(0, 1, "a", "same"), pair(2, 3, "b", "same"), pair(4, 5)]
    predictions = baseline_captions(train, [pair(6, 7), pair(0, 1)], store_of(tmp_path / "store", maps))
    assert predictions == {MOST_COMMON: {"6-7": "same", "0-1": "same"}, NEAREST: {"6-7": "b", "0-1": "a"}}
