import math
import random
from dataclasses import replace

import numpy as np
import pytest

from diffcap.worlds.tiles.render import render, sample_dates, to_image
from diffcap.worlds.tiles.scenes import House, Layer
from diffcap.worlds.tiles.write import render_pair

PLAIN = sample_dates(random.Random(0), 0.0)[0]  # no noise, haze, or misregistration
HOUSE = House((128, 128), 0.0, 30, 20, 10, roof=5, has_gable=False)


def difference(first, second):
    """Largest difference of the three channels at every pixel."""
    return np.abs(first.astype(int) - second).max(2)


def test_without_jitter_only_the_change_and_its_shadow_differ():
    for number in range(16):
        found = render_pair(number, seed=2, jitter=0)
        differs = difference(*found.images) > 0
        if found.pair.change is None:
            assert not differs.any() and not found.mask.any()
            continue
        y, x = np.nonzero(found.mask)
        near = np.zeros_like(differs)
        for dy in range(-28, 29, 4):  # shadows and the shores of ponds
            for dx in range(-28, 29, 4):
                near[np.clip(y + dy, 0, 255), np.clip(x + dx, 0, 255)] = True
        assert differs.any() and not (differs & ~near).any(), number
        assert differs[found.mask > 0].mean() > 0.8


def test_pixel_differencing_does_not_find_the_changes():
    scores = {True: [], False: []}
    for number in range(48):
        found = render_pair(number, seed=2)
        scores[found.pair.change is not None].append(difference(*found.images).mean())
    threshold = np.median(scores[True] + scores[False])
    accuracy = (np.mean(np.array(scores[True]) > threshold) + np.mean(np.array(scores[False]) <= threshold)) / 2
    assert accuracy < 0.75
    assert min(scores[False]) > 3


def test_boxes_are_around_the_mask_in_the_grid_of_their_image():
    for number in range(0, 32, 2):
        plain, found = render_pair(number, seed=2, jitter=0), render_pair(number, seed=2)
        y, x = np.nonzero(plain.mask)
        side = "before" if plain.pair.change.is_in_before else "after"
        assert plain.boxes[side] == [x.min(), y.min(), x.max() + 1, y.max() + 1]
        assert np.array_equal(plain.mask, found.mask)
        for key in ("before", "after"):
            assert (plain.boxes[key] is None) == (found.boxes[key] is None) == (key != side)
        assert max(abs(a - b) for a, b in zip(plain.boxes[side], found.boxes[side])) <= 8


@pytest.mark.parametrize(
    "rotation, shift", [(0.0, (3.0, -2.0)), (math.radians(2), (0.0, 0.0)), (math.radians(-1), (1.5, 2.5))]
)
def test_an_object_is_where_to_image_says(rotation, shift):
    house = replace(HOUSE, center=(60.0, 190.0))
    date = replace(PLAIN, rotation=rotation, shift=shift)
    differs = difference(render(Layer(houses=[house]), date, (0, 0)), render(Layer(), date, (0, 0)))
    bright = render(Layer(houses=[house]), date, (0, 0)).min(2) > 175  # the white roof
    y, x = np.nonzero(bright & (differs > 20))
    assert np.allclose((x.mean() + 0.5, y.mean() + 0.5), to_image(house.center, date), atol=0.6)


@pytest.mark.parametrize("azimuth", [0.0, 1.2, 2.5, 4.0])
@pytest.mark.parametrize("elevation", [30, 55])
def test_shadows_follow_the_sun(azimuth, elevation):
    date = replace(PLAIN, azimuth=azimuth, elevation=math.radians(elevation))
    empty, built = (render(Layer(houses=houses), date, (5, 5)).astype(int).sum(2) for houses in ([], [HOUSE]))
    tip = HOUSE.height / math.tan(date.elevation)
    for distance, is_dark in ((0.6 * tip, True), (tip + 3, False)):
        # from the middle of the edge of the footprint in the direction of the shadow
        reach = min(15 / max(1e-9, abs(math.cos(azimuth))), 10 / max(1e-9, abs(math.sin(azimuth))))
        x, y = (int(128 + (reach + distance) * f(azimuth)) for f in (math.cos, math.sin))
        ratio = built[y - 1 : y + 2, x - 1 : x + 2].mean() / empty[y - 1 : y + 2, x - 1 : x + 2].mean()
        assert (ratio < 0.75) == is_dark, (distance, ratio)
