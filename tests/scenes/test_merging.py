import random

import numpy as np
import pytest
from rasterio.features import rasterize

from diffcap.scenes.tiling import TileCaption, Tiling
from diffcap.scenes.writing import merge


def flood(mask: np.ndarray) -> list[frozenset[tuple[int, int]]]:
    """The connected regions of a mask, pixels that share an edge."""
    left, regions = set(zip(*np.nonzero(mask))), []
    while left:
        region, edge = set(), {left.pop()}
        while edge:
            region |= edge
            edge = {(y + dy, x + dx) for y, x in edge for dy, dx in ((0, 1), (1, 0), (0, -1), (-1, 0))} & left
            left -= edge
        regions.append(frozenset((int(y), int(x)) for y, x in region))
    return regions


@pytest.mark.parametrize("overlap", [0, 4])
@pytest.mark.parametrize("seed", range(4))
def test_changes_are_the_regions_of_a_flood_fill(overlap: int, seed: int) -> None:
    rng, tiling = random.Random(seed), Tiling(70, 50, 16, overlap)
    sentences = ["a road is built", "the trees are gone", None]
    captions = [
        TileCaption(tiling[number], sentence, -rng.random(), rng.random())
        for number in range(len(tiling))
        if (sentence := rng.choice(sentences)) is not None
    ]
    changes = merge(captions)
    assert sum(change.tiles for change in changes) == len(captions)
    for sentence in sentences[:2]:
        mask = np.zeros((50, 70), bool)
        for each in captions:
            x, y, width, height = each.tile
            mask[y : y + height, x : x + width] |= each.caption == sentence
        found = []
        for change in changes:
            if change.caption == sentence:
                area = rasterize([change.polygon], (50, 70)).astype(bool)
                found.append(frozenset((int(y), int(x)) for y, x in zip(*np.nonzero(area))))
                inside = [each for each in captions if each.caption == sentence and area[each.tile.y, each.tile.x]]
                assert change.tiles == len(inside)
                assert change.no_change == min(each.no_change for each in inside)
                assert change.log_probability == max(each.log_probability for each in inside)
        assert sorted(map(sorted, found)) == sorted(map(sorted, flood(mask)))


def test_order_and_windows() -> None:
    tiling = Tiling(64, 32, 16, 0)
    captions = [
        TileCaption(tiling[number], text, -1.0, 0.1) for number, text in ((6, "b"), (3, "a"), (0, "b"), (1, "b"))
    ]
    assert [(change.caption, change.window) for change in merge(captions)] == [
        ("b", (0, 0, 32, 16)),
        ("a", (48, 0, 16, 16)),
        ("b", (32, 16, 16, 16)),
    ]
    assert merge([]) == []
