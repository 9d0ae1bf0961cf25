"""Localisation: whether the attention of a word is on the changed object, for datasets with its bounding box.

Two scores compare an attention map with a box:

* the pointing game (Zhang et al., "Top-Down Neural Attention by Excitation Backprop", ECCV 2016): is the maximum of the map in
  the box? The maps are coarse, so a hit means that the box overlaps the cell of the maximum; this replaces the tolerance of 15
  pixels of the paper.
* the energy-based pointing game (Wang et al., "Score-CAM", CVPR Workshops 2020): which fraction of the map's sum is in the box?
  The value of a cell is distributed evenly over its area.

The scores of a uniform map ("chance") are always reported as well.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating[Any]]
Box = tuple[float, float, float, float]


class WordAttention(NamedTuple):
    """The attention of one word on one image that shows the changed object.

    Attributes:
        name: the word, or its kind; scores are averaged by name.
        map: (h, w), not negative. box: left, top, right, bottom as fractions of the image's width and height.
    """

    name: str
    map: Array
    box: Box


def relative_box(box: Sequence[float], size: tuple[int, int]) -> Box:
    """Convert a box from pixels to fractions of the image's (width, height), clipped at the edges.

    Example:
        >>> relative_box((10, 0, 30, 60), (40, 50))
        (0.25, 0.0, 0.75, 1.0)
    """
    width, height = size
    left, top, right, bottom = (
        min(1.0, max(0.0, value / length)) for value, length in zip(box, (width, height, width, height))
    )
    return left, top, right, bottom


@lru_cache(maxsize=1024)  # the maps of all words of a pair have one grid and one box
def cell_coverage(grid: tuple[int, int], box: Box) -> Array:
    """Return the fraction of each cell's area that is in the box, (h, w), read-only.

    Example:
        >>> cell_coverage((2, 2), (0.25, 0.0, 0.75, 0.5))
        array([[0.5, 0.5],
               [0. , 0. ]])
    """
    height, width = grid
    left, top, right, bottom = box

    def overlap(count: int, low: float, high: float) -> Array:
        edges = np.arange(count + 1) / count
        return np.clip(np.minimum(edges[1:], high) - np.maximum(edges[:-1], low), 0, None) * count

    fractions = np.outer(overlap(height, top, bottom), overlap(width, left, right))
    fractions.setflags(write=False)
    return fractions


def pointing_score(map: Array, box: Box) -> float:
    """Return 1 if the box overlaps the cell with the maximum, else 0; for several maxima, the fraction that it overlaps.

    Example:
        >>> pointing_score(np.array([[0.1, 0.7], [0.1, 0.1]]), (0.6, 0.1, 0.9, 0.4))
        1.0
    """
    overlaps = cell_coverage((map.shape[0], map.shape[1]), box) > 0
    return float(overlaps[map == map.max()].mean())


def mass_in_box(map: Array, box: Box) -> float:
    """Return the fraction of the map's sum that is in the box; NaN if the sum is 0.

    Example:
        >>> round(mass_in_box(np.array([[0.1, 0.7], [0.1, 0.1]]), (0.5, 0.0, 1.0, 0.25)), 3)
        0.35
    """
    total = float(map.sum())
    return float((map * cell_coverage((map.shape[0], map.shape[1]), box)).sum()) / total if total > 0 else float("nan")


def localisation(attentions: Iterable[WordAttention]) -> dict[str, dict[str, float]]:
    """Average both scores over all attention maps with the same name; maps with sum 0 are skipped.

    Args:
        attentions: attention of words.

    Returns:
        name -> {"count": number of maps, "pointing", "pointing_chance", "mass", "mass_chance": means, fractions}, in the
        order of the first maps. "chance" is the score of a uniform map.

    Example:
        >>> attention = WordAttention("cube", np.array([[0.1, 0.7], [0.1, 0.1]]), (0.5, 0.0, 1.0, 0.5))
        >>> scores = localisation([attention])["cube"]
        >>> {key: round(value, 3) for key, value in scores.items()}
        {'count': 1, 'pointing': 1.0, 'pointing_chance': 0.25, 'mass': 0.7, 'mass_chance': 0.25}
    """
    sums: dict[str, Array] = {}
    for name, map, box in attentions:
        if not map.sum() > 0:
            continue
        uniform = cell_coverage((map.shape[0], map.shape[1]), box)
        row = np.array([1, pointing_score(map, box), (uniform > 0).mean(), mass_in_box(map, box), uniform.mean()])
        sums[name] = sums[name] + row if name in sums else row
    keys = ("pointing", "pointing_chance", "mass", "mass_chance")
    return {
        name: {"count": int(total[0]), **dict(zip(keys, (total[1:] / total[0]).tolist()))}
        for name, total in sums.items()
    }
