"""Pointing game and mass inside a box or a mask, against divided pixels."""

import numpy as np
import pytest

from diffcap.evaluation.localisation import WordAttention, box_coverage, localisation, mask_coverage


def scores_of(map: np.ndarray, coverage: np.ndarray) -> tuple[float, float]:
    """Pointing score and mass inside of one map."""
    row = localisation([WordAttention("the", map, coverage)])["the"]
    return row["pointing"], row["mass"]


@pytest.mark.parametrize(("grid", "size"), [((3, 4), (6, 8)), ((3, 4), (5, 7)), ((7, 5), (4, 3)), ((2, 2), (2, 2))])
def test_scores_of_a_mask_are_those_of_its_pixels_divided_at_the_edges_of_cells(
    grid: tuple[int, int], size: tuple[int, int]
) -> None:
    random = np.random.default_rng(0)
    mask = random.random(size) < 0.3
    map = random.random(grid)
    divided = np.kron(mask, np.ones(grid))  # each pixel in grid[0] x grid[1] parts, of which each is in one cell
    parts = divided.reshape(grid[0], size[0], grid[1], size[1]).mean((1, 3))
    coverage = mask_coverage(grid, mask)
    assert coverage == pytest.approx(parts)
    hits = parts[map == map.max()] > 0
    assert scores_of(map, coverage) == pytest.approx((hits.mean(), (map * parts).sum() / map.sum()))
    scores = localisation([WordAttention("the", np.ones(grid), coverage)])["the"]
    assert scores["mass"] == pytest.approx(mask.mean()) and scores["mass_chance"] == pytest.approx(mask.mean())


@pytest.mark.parametrize("seed", range(4))
def test_a_box_is_a_rectangular_mask(seed: int) -> None:
    random = np.random.default_rng(seed)
    x0, x1 = sorted(random.choice(37, 2, replace=False).tolist())
    y0, y1 = sorted(random.choice(25, 2, replace=False).tolist())
    mask = np.zeros((24, 36), bool)
    mask[y0:y1, x0:x1] = True
    for grid in ((3, 4), (5, 7)):
        assert box_coverage(grid, (x0, y0, x1, y1), (36, 24)) == pytest.approx(mask_coverage(grid, mask))
    assert box_coverage((2, 1), (-5, 10, 50, 25), (40, 20)).tolist() == [[0], [1]]  # cut at the image's edge


def test_an_even_look_scores_chance_and_equal_heights_share_the_hit() -> None:
    coverage = box_coverage((4, 4), (0, 0, 8, 8), (16, 16))
    even = np.full((4, 4), 1 / 16)
    row = localisation([WordAttention("the", even, coverage)])["the"]
    assert row["pointing"] == row["pointing_chance"] == 1 / 4 and row["mass"] == row["mass_chance"] == 1 / 4
    two = np.zeros((4, 4))
    two[0, 0] = two[3, 3] = 0.5
    assert scores_of(two, coverage) == (0.5, 0.5)


def test_names_are_counted_apart_and_an_empty_map_nowhere() -> None:
    half = np.array([[1.0, 0.0]])
    left, right = np.array([[0.9, 0.1]]), np.array([[0.2, 0.8]])
    rows = localisation(
        [WordAttention("cube", left, half), WordAttention("red", right, half), WordAttention("cube", right, half)]
    )
    assert list(rows) == ["cube", "red"] and rows["cube"]["count"] == 2
    assert rows["cube"]["pointing"] == 0.5 and rows["cube"]["mass"] == pytest.approx(0.55)
    assert rows["red"]["mass_chance"] == 0.5
    empty = np.zeros((1, 2))
    assert localisation([WordAttention("a", empty, half)]) == {}
