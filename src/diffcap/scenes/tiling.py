"""Tiles of equal size that cover a raster, and their captions."""

from typing import NamedTuple

from diffcap.utils.errors import DiffcapError

MAX_TILE = 4096  # pixels; a batch of larger tiles would need gigabytes
TILE, OVERLAP = 256, 64  # defaults: the image size of LEVIR-CC, and a quarter of it


class Tile(NamedTuple):
    """A part of a raster in pixels: its left column, upper row, width and height."""

    x: int
    y: int
    width: int
    height: int


class TileCaption(NamedTuple):
    """The caption of a tile."""

    tile: Tile
    caption: str
    log_probability: float  # of the sentence, see `Caption`
    no_change: float  # probability that nothing has changed, see `captioning.no_change_probability`


class Tiling:
    """The tiles of a raster, numbered row by row.

    The last tile of a row or column is shifted inside, so that it overlaps more. If the raster is smaller than a tile, the tile is
    cut at its border.

    Args:
        width, height: of the raster. size: side of a tile. overlap: of neighbouring tiles. All in pixels.

    Example:
        >>> tiling = Tiling(600, 200, size=256, overlap=64)
        >>> [tiling[number] for number in range(len(tiling))]
        [Tile(x=0, y=0, width=256, height=200), Tile(x=192, y=0, width=256, height=200), Tile(x=344, y=0, width=256, height=200)]
    """

    def __init__(self, width: int, height: int, size: int = TILE, overlap: int = OVERLAP) -> None:
        if not 8 <= size <= MAX_TILE:
            raise DiffcapError(f"--tile is {size}; give 8 to {MAX_TILE:,} pixels.")
        if not 0 <= overlap < size:
            raise DiffcapError(f"--overlap is {overlap}; give 0 to {size - 1} pixels, less than --tile.")
        self.size = size
        self._columns, self._rows = _starts(width, size, overlap), _starts(height, size, overlap)
        self._width, self._height = min(size, width), min(size, height)

    def __len__(self) -> int:
        return len(self._columns) * len(self._rows)

    def __getitem__(self, number: int) -> Tile:
        row, column = divmod(number, len(self._columns))
        return Tile(self._columns[column], self._rows[row], self._width, self._height)


def _starts(length: int, size: int, overlap: int) -> list[int]:
    return [*range(0, length - size, size - overlap), max(0, length - size)]
