"""Captions of the two baselines without training, from a manifest and, for the second, a feature store."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import adaptive_avg_pool2d

from diffcap.evaluation.baselines import Array, most_common_captions, nearest_captions, pair_vectors
from diffcap.features.store import FeatureStore
from diffcap.records import ChangePair

MOST_COMMON, NEAREST = "most common training caption", "nearest neighbour's caption"
# Values per image. Maps of the `blocks` backbone (107 x 4 x 6) are kept; maps of 2048 x 7 x 7 would take 24 GB for the 60,000
# training pairs of CLEVR-Change.
MAX_VALUES = 4096


def coarse_grid(shape: tuple[int, int, int], max_values: int = MAX_VALUES) -> tuple[int, int]:
    """Height and width that a (C, H, W) map is pooled to, so that it has about `max_values` values or fewer.

    Channels are not pooled: with more channels than `max_values`, the grid is 1 x 1.
    """
    channels, height, width = shape
    scale = min(1.0, math.sqrt(max_values / (channels * height * width)))
    return max(1, int(height * scale)), max(1, int(width * scale))


def describe_pairs(store: FeatureStore, pairs: Sequence[ChangePair], chunk: int = 256) -> Array:
    """One vector per pair, see `pair_vectors`, of maps pooled to a coarse grid.

    Args:
        store: features of every image of the N pairs. chunk: number of pairs to read at once.

    Returns:
        (N, 2D) float16: 230 MB for 20,000 pairs of the embedded dataset.
    """
    before, after = (store.rows([getattr(pair, side) for pair in pairs]) for side in ("before", "after"))
    grid = coarse_grid(store.shape)

    def maps(rows: np.ndarray[Any, np.dtype[np.int64]]) -> Array:
        return adaptive_avg_pool2d(torch.from_numpy(store.read(rows)).float(), grid).numpy()

    vectors = np.empty((len(pairs), 2 * store.shape[0] * grid[0] * grid[1]), dtype=np.float16)
    for start in range(0, len(pairs), chunk):
        part = slice(start, start + chunk)
        vectors[part] = pair_vectors(maps(before[part]), maps(after[part]))
    return vectors


def baseline_captions(
    train: Sequence[ChangePair], test: Sequence[ChangePair], store: FeatureStore | None
) -> dict[str, dict[str, str]]:
    """Caption the test pairs twice without a model.

    Returns:
        {`MOST_COMMON`: id -> caption, `NEAREST`: id -> caption}; the second only with features.
    """
    captioned = [pair for pair in train if pair.captions]
    common = most_common_captions(captioned, test)
    if store is None:
        return {MOST_COMMON: common}
    nearest = nearest_captions(captioned, describe_pairs(store, captioned), test, describe_pairs(store, test))
    return {MOST_COMMON: common, NEAREST: nearest}
