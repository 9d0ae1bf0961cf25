from itertools import pairwise

import numpy as np
import pytest

from diffcap.scenes.tiling import Tiling
from diffcap.utils.errors import DiffcapError


@pytest.mark.parametrize(
    "width, height, size, overlap", [(600, 500, 256, 64), (256, 257, 256, 0), (100, 700, 128, 127), (90, 70, 100, 10)]
)
def test_tiles_cover_every_pixel_and_stay_inside(width: int, height: int, size: int, overlap: int) -> None:
    tiling = Tiling(width, height, size, overlap)
    seen = np.zeros((height, width), int)
    for number in range(len(tiling)):
        x, y, tile_width, tile_height = tiling[number]
        assert (tile_width, tile_height) == (min(size, width), min(size, height))
        assert x + tile_width <= width and y + tile_height <= height
        seen[y : y + tile_height, x : x + tile_width] += 1
    assert seen.all()
    columns = sorted({tiling[number].x for number in range(len(tiling))})
    assert all(second - first <= size - overlap for first, second in pairwise(columns))


@pytest.mark.parametrize(
    "size, overlap, option", [(4, 0, "--tile"), (5000, 0, "--tile"), (64, 64, "--overlap"), (64, -1, "--overlap")]
)
def test_sizes_that_make_no_sense(size: int, overlap: int, option: str) -> None:
    with pytest.raises(DiffcapError, match=f"^{option} is "):
        Tiling(600, 600, size, overlap)
