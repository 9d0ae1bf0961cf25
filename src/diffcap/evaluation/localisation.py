"""Localisation: whether a word looked at the changed object, where the dataset knows its box.

Two questions of a map and a box: is the map's highest place in the box (the pointing game of Zhang et al., "Top-Down Neural
Attention by Excitation Backprop", ECCV 2016), and how much of the map is (the energy-based one of Wang et al., "Score-CAM",
CVPR Workshops 2020). Maps are coarse, objects small: a place hits where its cell touches the box, which stands for the
pixels of tolerance of the original game, and a cell's mass is spread evenly over it. What a look at random would score is
always given beside.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating[Any]]
Box = tuple[float, float, float, float]


class Looked(NamedTuple):
    """How a word looked at one image in which the changed object stands.

    Attributes:
        name: what to count it under: the word, or its kind.
        map: (h, w), not negative. box: left, top, right, bottom in parts of the image's width and height.
    """

    name: str
    map: Array
    box: Box


def box_in_parts(box: Sequence[float], size: tuple[int, int]) -> Box:
    """A box in pixels as parts of an image's (width, height), cut at its edges."""
    width, height = size
    left, top, right, bottom = (
        min(1.0, max(0.0, value / whole)) for value, whole in zip(box, (width, height, width, height))
    )
    return left, top, right, bottom


@lru_cache(maxsize=1024)  # the maps of all words of a pair have one grid and one box
def coverage(grid: tuple[int, int], box: Box) -> Array:
    """(h, w), not to be changed: the share of each cell's area that lies in the box."""
    height, width = grid
    left, top, right, bottom = box

    def along(count: int, low: float, high: float) -> Array:
        edges = np.arange(count + 1) / count
        return np.clip(np.minimum(edges[1:], high) - np.maximum(edges[:-1], low), 0, None) * count

    shares = np.outer(along(height, top, bottom), along(width, left, right))
    shares.setflags(write=False)
    return shares


def pointing(map: Array, box: Box) -> float:
    """1 where the map's highest cell touches the box, 0 where it does not; of several highest cells, the share that do."""
    touched = coverage((map.shape[0], map.shape[1]), box) > 0
    return float(touched[map == map.max()].mean())


def mass_inside(map: Array, box: Box) -> float:
    """The share of the map's mass that lies in the box; NaN for a map without any."""
    total = float(map.sum())
    return float((map * coverage((map.shape[0], map.shape[1]), box)).sum()) / total if total > 0 else float("nan")


def localisation(looks: Iterable[Looked]) -> dict[str, dict[str, float]]:
    """Both scores by name, over all looks of that name; a map without mass counts nowhere.

    Returns:
        name -> {"looks": number, "pointing", "pointing_chance", "mass", "mass_chance": means, fractions}, in the order in
        which the names came. Chance is an even map's score.
    """
    sums: dict[str, Array] = {}
    for name, map, box in looks:
        if not map.sum() > 0:
            continue
        covered = coverage((map.shape[0], map.shape[1]), box)
        row = np.array([1, pointing(map, box), (covered > 0).mean(), mass_inside(map, box), covered.mean()])
        sums[name] = sums[name] + row if name in sums else row
    keys = ("pointing", "pointing_chance", "mass", "mass_chance")
    return {
        name: {"looks": int(total[0]), **dict(zip(keys, (total[1:] / total[0]).tolist()))}
        for name, total in sums.items()
    }
