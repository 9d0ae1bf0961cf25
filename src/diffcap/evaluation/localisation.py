"""Localisation: whether the attention of a word is on the change, for datasets with masks or bounding boxes of it.

Two scores compare an attention map with a region, which is a mask or a box:

* the pointing game (Zhang et al., "Top-Down Neural Attention by Excitation Backprop", ECCV 2016): is the maximum of the map in
  the region? The maps are coarse, so a hit means that the region overlaps the cell of the maximum; this replaces the tolerance of
  15 pixels of the paper.
* the energy-based pointing game (Wang et al., "Score-CAM", CVPR Workshops 2020): which fraction of the map's sum is in the region?
  The value of a cell is distributed evenly over its area.

A mask is averaged over the area of each cell, exactly, also where a cell's edge cuts a pixel. The map itself is not enlarged to the
mask's pixels: bicubic interpolation would move attention into neighbouring cells.

"Chance" is the score of a uniform map. For the second score, it is the share of the image that the region covers.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating[Any]]
Mask = npt.NDArray[np.bool_]
Box = tuple[float, float, float, float]


class WordAttention(NamedTuple):
    """The attention of one word on one image with a region."""

    name: str  # the word, or its kind; scores are averaged by name
    map: Array  # (h, w), not negative
    coverage: Array  # (h, w), fraction of each cell's area in the region, see `box_coverage` and `mask_coverage`


def relative_box(box: Sequence[float], size: tuple[int, int]) -> Box:
    """Convert a box from pixels to fractions of the image's (width, height), clipped at the edges."""
    left, top, right, bottom = (min(1.0, max(0.0, value / length)) for value, length in zip(box, size * 2))
    return left, top, right, bottom


def _overlaps(cells: int, edges: Array) -> Array:
    """Which fraction of each of `cells` equal parts of 0 to 1 is between neighbouring `edges`: (cells, number of edges - 1)."""
    ends = np.arange(cells + 1)[:, None] / cells
    return np.clip(np.minimum(ends[1:], edges[1:]) - np.maximum(ends[:-1], edges[:-1]), 0, None) * cells


@lru_cache(maxsize=1024)  # the maps of all words of a pair have one grid and one box
def box_coverage(grid: tuple[int, int], box: Box) -> Array:
    """Return the fraction of each cell's area that is in the box (fractions of the image's width and height): (h, w), read-only."""
    left, top, right, bottom = box
    fractions = _overlaps(grid[0], np.array([top, bottom])) @ _overlaps(grid[1], np.array([left, right])).T
    fractions.setflags(write=False)
    return fractions


def mask_coverage(grid: tuple[int, int], mask: Mask) -> Array:
    """Return the fraction of each cell's area that is in the mask (H, W), which covers the whole image: (h, w)."""
    rows, columns = (_overlaps(cells, np.arange(size + 1) / size) for cells, size in zip(grid, mask.shape))
    return np.asarray(rows @ mask @ columns.T)


def pointing_score(map: Array, coverage: Array) -> float:
    """Return 1 if the region overlaps the cell with the maximum, else 0; for several maxima, the fraction that it overlaps."""
    return float((coverage > 0)[map == map.max()].mean())


def mass_inside(map: Array, coverage: Array) -> float:
    """Return the fraction of the map's sum that is in the region; NaN if the sum is 0."""
    total = float(map.sum())
    return float((map * coverage).sum()) / total if total > 0 else float("nan")


def localisation(attentions: Iterable[WordAttention]) -> dict[str, dict[str, float]]:
    """Average both scores, and those of a uniform map, over all maps with the same name; maps with sum 0 are skipped."""
    sums: dict[str, Array] = {}
    for name, map, coverage in attentions:
        if not map.sum() > 0:
            continue
        row = np.array(
            [1, pointing_score(map, coverage), (coverage > 0).mean(), mass_inside(map, coverage), coverage.mean()]
        )
        sums[name] = sums[name] + row if name in sums else row
    keys = ("pointing", "pointing_chance", "mass", "mass_chance")
    return {
        name: {"count": int(total[0]), **dict(zip(keys, (total[1:] / total[0]).tolist()))}
        for name, total in sums.items()
    }
