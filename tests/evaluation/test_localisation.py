"""Pointing game and mass inside the box, against loops over pixels."""

import math

import numpy as np
import pytest

from diffcap.evaluation.localisation import (
    WordAttention,
    cell_coverage,
    localisation,
    mass_in_box,
    pointing_score,
    relative_box,
)

FINE = 24  # pixels along a cell's side in the loops


def naive_coverage(grid: tuple[int, int], box: tuple[float, ...]) -> np.ndarray:
    """Count pixels; exact where the box's edges are pixel edges."""
    height, width = grid
    inside = np.zeros(grid)
    for y in range(height * FINE):
        for x in range(width * FINE):
            at = (x + 0.5) / (width * FINE), (y + 0.5) / (height * FINE)
            if box[0] < at[0] < box[2] and box[1] < at[1] < box[3]:
                inside[y // FINE, x // FINE] += 1 / FINE**2
    return inside


@pytest.mark.parametrize("seed", range(4))
def test_scores_are_those_of_a_loop_over_pixels(seed: int) -> None:
    random = np.random.default_rng(seed)
    grid = (3, 4)
    x0, x1 = sorted(random.choice(4 * FINE + 1, 2, replace=False))
    y0, y1 = sorted(random.choice(3 * FINE + 1, 2, replace=False))
    box = relative_box((x0, y0, x1, y1), (4 * FINE, 3 * FINE))
    map = random.random(grid)
    expected = naive_coverage(grid, box)
    assert cell_coverage(grid, box) == pytest.approx(expected)
    mass = hits = 0.0
    for row in range(3):
        for column in range(4):
            mass += map[row, column] * expected[row, column]
            hits += map[row, column] == map.max() and expected[row, column] > 0
    assert mass_in_box(map, box) == pytest.approx(mass / map.sum())
    assert pointing_score(map, box) == hits


def test_a_box_smaller_than_a_cell_is_hit_by_its_cell_alone() -> None:
    box = relative_box((30, 10, 34, 14), (40, 20))  # in the last of four cells of 10 x 20 pixels
    map = np.array([[0.0, 0.1, 0.2, 0.7]])
    assert pointing_score(map, box) == 1 and pointing_score(map[:, ::-1], box) == 0
    assert mass_in_box(map, box) == pytest.approx(0.7 * 16 / 200)


def test_an_even_look_scores_chance_and_equal_heights_share_the_hit() -> None:
    box = (0.0, 0.0, 0.5, 0.5)
    even = np.full((4, 4), 1 / 16)
    row = localisation([WordAttention("the", even, box)])["the"]
    assert row["pointing"] == row["pointing_chance"] == 1 / 4 and row["mass"] == row["mass_chance"] == 1 / 4
    two = np.zeros((4, 4))
    two[0, 0] = two[3, 3] = 0.5
    assert pointing_score(two, box) == 0.5 and mass_in_box(two, box) == 0.5


def test_names_are_counted_apart_and_an_empty_map_nowhere() -> None:
    box = (0.0, 0.0, 0.5, 1.0)
    left, right = np.array([[0.9, 0.1]]), np.array([[0.2, 0.8]])
    rows = localisation(
        [WordAttention("cube", left, box), WordAttention("red", right, box), WordAttention("cube", right, box)]
    )
    assert list(rows) == ["cube", "red"] and rows["cube"]["count"] == 2
    assert rows["cube"]["pointing"] == 0.5 and rows["cube"]["mass"] == pytest.approx(0.55)
    assert rows["red"]["mass_chance"] == 0.5
    empty = np.zeros((1, 2))
    assert localisation([WordAttention("a", empty, box)]) == {} and math.isnan(mass_in_box(empty, box))


def test_a_box_over_the_edge_is_cut() -> None:
    assert relative_box((-5, 10, 50, 20), (40, 20)) == (0.0, 0.5, 1.0, 1.0)
