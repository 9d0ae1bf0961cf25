"""Scenes and changes of `tiles`, checked on rasters that the tests draw themselves."""

from functools import cache

import numpy as np
import pytest
from PIL import Image, ImageDraw

from diffcap.worlds.tiles.changes import CHANGES, MIN_MARGIN, location_of, sample_pair
from diffcap.worlds.tiles.render import change_mask

CHANGED = range(0, 96, 2)


@cache
def pair_of(number):
    return sample_pair(number, seed=3)


def raster(*, polygons=(), lines=()):
    """Pixels of polygons and of (line, width); an outer margin of 40 pixels is cut off."""
    image = Image.new("L", (336, 336))
    draw = ImageDraw.Draw(image)
    for polygon in polygons:
        draw.polygon([(x + 40, y + 40) for x, y in polygon], fill=1)
    for line, width in lines:
        draw.line([(x + 40, y + 40) for x, y in line], fill=1, width=round(width), joint="curve")
    return np.array(image)[40:296, 40:296].astype(bool)


@pytest.mark.parametrize("state", ["before", "after"])
def test_houses_overlap_nothing(state):
    total = 0
    for number in CHANGED:
        scene = getattr(pair_of(number), state)
        houses = [raster(polygons=[house.footprint]) for house in scene.houses]
        others = raster(
            polygons=scene.ponds, lines=[(road.line, road.width) for road in (*scene.roads, *scene.rivers)]
        ) | raster(polygons=[zone.polygon for zone in scene.zones if zone.surface in ("parking", "forest")])
        crowns = [tree for tree in scene.trees if min(tree.center) > 0]
        new_roads = raster(lines=[(road.line, road.width) for road in pair_of(number).change.present.roads])
        rivers = raster(polygons=scene.ponds, lines=[(river.line, river.width) for river in scene.rivers])
        assert not (new_roads & rivers).any()
        total += len(houses)
        count = sum(house.astype(int) for house in houses) if houses else np.zeros((256, 256))
        assert count.max() <= 1, number
        assert not (others & (count > 0)).any(), number
        for tree in crowns:
            x, y = (min(255, int(value)) for value in tree.center)
            assert not count[y, x], (number, "a tree on a house")
    assert total > 200


def test_changed_objects_are_visible_inside_and_uncovered():
    for number in CHANGED:
        pair = pair_of(number)
        change, mask = pair.change, change_mask(pair.change, pair.after)
        assert (mask > 0).sum() > 100
        if change.noun != "road":
            y, x = np.nonzero(mask)
            assert min(x.min(), y.min()) >= MIN_MARGIN - 1 and max(x.max(), y.max()) <= 256 - MIN_MARGIN + 1
        unchanged = pair.before if not change.is_in_before else pair.after
        covering = (
            [*(house.footprint for house in unchanged.houses), *unchanged.ponds] if not change.absent.zones else []
        )
        covered = raster(polygons=[polygon for polygon in covering if polygon not in change.present.ponds])
        assert not (covered & (mask > 0)).any(), number


def test_only_the_change_differs():
    for number in CHANGED:
        pair = pair_of(number)
        change = pair.change
        assert change.change_type == CHANGES[number // 2 % 8]
        for name in vars(pair.before):
            before, after = getattr(pair.before, name), getattr(pair.after, name)
            gone = [thing for thing in before if thing not in after]
            new = [thing for thing in after if thing not in before]
            with_objects, without = (gone, new) if change.is_in_before else (new, gone)
            assert with_objects == getattr(change.present, name) and without == getattr(change.absent, name)
    for number in range(1, 32, 2):
        pair = pair_of(number)
        assert pair.change is None and pair.before == pair.after


def test_a_pair_depends_on_its_number_and_seed():
    assert sample_pair(6, seed=3) == pair_of(6)
    assert sample_pair(6, seed=4) != pair_of(6)


@pytest.mark.parametrize(
    "box, place",
    [
        ((10, 10, 40, 40), "top left corner"),
        ((60, 60, 100, 100), "top left"),
        ((216, 200, 250, 250), "bottom right corner"),
        ((10, 100, 60, 150), "left"),
        ((100, 200, 150, 240), "bottom"),
        ((110, 110, 150, 150), "middle"),
        ((10, 10, 250, 250), ""),
    ],
)
def test_location(box, place):
    assert location_of(box) == place
