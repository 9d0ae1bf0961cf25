"""Localisation scores: is the attention of a word on the change? The dataset must have masks or bounding boxes of the change.

Two scores compare an attention map with a region, which is a mask or a box:

* the pointing game (Zhang et al., "Top-Down Neural Attention by Excitation Backprop", ECCV 2016): is the maximum of the map in
  the region? The score is 1 if the region overlaps the cell of the maximum, else 0. If several cells
  have the maximum, it is the mean over these cells. The overlap replaces the paper's tolerance of 15 pixels.
* the energy-based pointing game (Wang et al., "Score-CAM", CVPR Workshops 2020): which fraction of the map's sum is in the region?
  The value of a cell is distributed evenly over its area.

A mask is averaged over the exact area of each cell: a pixel that lies in two cells is divided between them. "Chance" is the
score of a uniform map. In the energy-based pointing game, it is the fraction of the image that the region covers.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating[Any]]
Mask = npt.NDArray[np.bool_]


class WordAttention(NamedTuple):
    """The attention of one word on one image with a region."""

    name: str  # the word, or its kind such as "color"; scores are averaged by name
    map: Array  # (h, w), values of at least 0
    coverage: Array  # (h, w), fraction of each cell's area in the region, see `box_coverage` and `mask_coverage`


def _overlaps(num_cells: int, edges: Array) -> Array:
    """Divide 0 to 1 into equal cells. Return the fraction of each cell between two neighbouring `edges`: (num_cells, len(edges) - 1)."""
    ends = np.arange(num_cells + 1)[:, None] / num_cells
    upper = np.minimum(ends[1:], edges[1:])
    lower = np.maximum(ends[:-1], edges[:-1])
    return np.clip(upper - lower, 0, None) * num_cells


def box_coverage(grid: tuple[int, int], box: Sequence[float], size: tuple[int, int]) -> Array:
    """Return the fraction of each cell's area that is in a box, clipped at the image's edges: (h, w), the `grid`.

    The box is left, top, right, bottom in pixels of an image of `size` (width, height).
    """
    left, top, right, bottom = (np.array(box) / np.array([*size, *size])).clip(0.0, 1.0)
    rows = _overlaps(grid[0], np.array([top, bottom]))  # (h, 1)
    columns = _overlaps(grid[1], np.array([left, right]))  # (w, 1)
    return np.asarray(rows @ columns.T)


def mask_coverage(grid: tuple[int, int], mask: Mask) -> Array:
    """Return the fraction of each cell's area that is in the mask (H, W), which covers the whole image: (h, w)."""
    height, width = mask.shape
    rows = _overlaps(grid[0], np.arange(height + 1) / height)  # (h, H)
    columns = _overlaps(grid[1], np.arange(width + 1) / width)  # (w, W)
    return np.asarray(rows @ mask @ columns.T)


def localisation(attentions: Iterable[WordAttention]) -> dict[str, dict[str, float]]:
    """Average both scores, and those of a uniform map, over all maps with the same name; maps with sum 0 are skipped.

    Returns:
        name -> {"count": number of maps, "pointing", "pointing_chance", "mass" (energy-based pointing game), "mass_chance"}.
    """
    sums: dict[str, Array] = {}
    for name, map, coverage in attentions:
        total = map.sum()
        if total > 0:
            overlaps = coverage > 0
            pointing, mass = overlaps[map == map.max()].mean(), (map * coverage).sum() / total
            values = [1, pointing, overlaps.mean(), mass, coverage.mean()]
            sums[name] = sums.get(name, 0) + np.array(values)
    keys = ("pointing", "pointing_chance", "mass", "mass_chance")
    averages: dict[str, dict[str, float]] = {}
    for name, (count, *totals) in sums.items():
        averages[name] = {"count": int(count), **{key: float(total / count) for key, total in zip(keys, totals)}}
    return averages
