"""Changes: neighbouring tiles with the same sentence become one polygon."""

from collections.abc import Iterable
from dataclasses import dataclass

import shapely

from diffcap.scenes.captioning import TileCaption


@dataclass(frozen=True)
class Change:
    """A change in a scene.

    Attributes:
        polygon: union of its tiles, in pixels (x to the right, y down).
        tiles: their number. no_change: the lowest probability of no change of a tile.
        log_probability: natural logarithm of the caption's probability, the highest of a tile.
    """

    caption: str
    polygon: shapely.Polygon
    tiles: int
    no_change: float
    log_probability: float

    @property
    def window(self) -> tuple[int, int, int, int]:
        """The bounding box in pixels: left column, upper row, width, height."""
        left, top, right, bottom = map(round, self.polygon.bounds)
        return left, top, right - left, bottom - top


def merge(captions: Iterable[TileCaption]) -> list[Change]:
    """Unite tiles with the same sentence that overlap or share an edge; sorted from the top to the bottom, then left to right.

    Example:
        >>> from diffcap.scenes.tiling import Tile
        >>> captions = [TileCaption(Tile(x, 0, 8, 8), "a road is built", -1.0, 0.1) for x in (0, 8, 24)]
        >>> [(change.window, change.tiles) for change in merge(captions)]
        [((0, 0, 16, 8), 2), ((24, 0, 8, 8), 1)]
    """
    by_sentence: dict[str, list[TileCaption]] = {}
    for each in captions:
        by_sentence.setdefault(each.caption, []).append(each)
    changes: list[Change] = []
    for caption, group in by_sentence.items():
        tiles = [each.tile for each in group]
        union = shapely.union_all([shapely.box(x, y, x + width, y + height) for x, y, width, height in tiles])
        parts = shapely.get_parts(union)
        centers = [shapely.Point(x + width / 2, y + height / 2) for x, y, width, height in tiles]
        members: list[list[TileCaption]] = [[] for _ in parts]
        for number, part in shapely.STRtree(parts).query(centers, predicate="within").T:
            members[part].append(group[number])
        changes += [
            Change(
                caption,
                shapely.simplify(part, 0),
                len(own),
                min(each.no_change for each in own),
                max(each.log_probability for each in own),
            )
            for part, own in zip(parts, members)
        ]
    return sorted(changes, key=lambda change: (change.window[1], change.window[0], change.caption))
