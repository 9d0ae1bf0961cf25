"""Plane geometry of `tiles`: points are (x, y) in pixels of the before image, x to the right and y down, angles in radians."""

import random
from collections.abc import Sequence
from itertools import pairwise
from math import atan2, ceil, cos, dist, hypot, pi, sin

import numpy as np
import numpy.typing as npt

Point = tuple[float, float]
Polygon = tuple[Point, ...]  # corners of a polygon, or points along a line (a road)
Points = npt.NDArray[np.float64]  # (n, 2)


def rectangle(center: Point, angle: float, length: float, width: float) -> Polygon:
    """Return the corners of a rectangle. `length` is its side in the direction `angle`."""
    half_x, half_y = cos(angle) / 2, sin(angle) / 2
    return tuple(
        (center[0] + a * length * half_x - b * width * half_y, center[1] + a * length * half_y + b * width * half_x)
        for a, b in ((-1, -1), (1, -1), (1, 1), (-1, 1))  # signs of the corner along the length and the width
    )


def offset(point: Point, angle: float, distance: float) -> Point:
    """Return the point at a distance from `point` in the direction `angle`."""
    return point[0] + distance * cos(angle), point[1] + distance * sin(angle)


def sample_blob(rng: random.Random, center: Point, radius: float, aspect: float = 1.0, corners: int = 36) -> Polygon:
    """Sample a smooth outline, an ellipse with waves. `radius` is half the longer axis; the shorter one is `aspect` times as long."""
    rotation = rng.uniform(0, pi)
    cosine, sine = cos(rotation), sin(rotation)
    # Frequency, amplitude and phase of each wave.
    (f0, a0, p0), (f1, a1, p1), (f2, a2, p2) = (
        (frequency, rng.uniform(0.02, 0.16) / frequency**0.5, rng.uniform(0, 2 * pi)) for frequency in (2, 3, 5)
    )
    points = []
    for corner in range(corners):
        t = 2 * pi * corner / corners  # angle
        distance = radius * (1 + (a0 * cos(f0 * t + p0) + a1 * cos(f1 * t + p1) + a2 * cos(f2 * t + p2)))
        x, y = distance * cos(t), aspect * distance * sin(t)
        points.append((center[0] + x * cosine - y * sine, center[1] + x * sine + y * cosine))
    return tuple(points)


def bezier_curve(start: Point, control: Point, end: Point, num_points: int = 15) -> Polygon:
    """Return points of a quadratic Bézier curve."""
    fractions = [step / (num_points - 1) for step in range(num_points)]
    weights = [((1 - t) ** 2, 2 * t * (1 - t), t * t) for t in fractions]
    x, y = ([a * p + b * q + c * r for a, b, c in weights] for p, q, r in zip(start, control, end))
    return tuple(zip(x, y))


def points_along(line: Sequence[Point], step: float, start: float = 0.0) -> list[tuple[Point, float]]:
    """Return (point, direction of the line there) every `step` pixels along a line; the first is `start` pixels from the beginning."""
    places, travelled, next_distance = [], 0.0, start
    for (x0, y0), (x1, y1) in pairwise(line):
        length = hypot(x1 - x0, y1 - y0)
        while length > 0 and next_distance <= travelled + length:
            fraction = (next_distance - travelled) / length
            places.append(((x0 + fraction * (x1 - x0), y0 + fraction * (y1 - y0)), atan2(y1 - y0, x1 - x0)))
            next_distance += step
        travelled += length
    return places


def outline_points(polygon: Polygon, step: float = 4.0) -> Points:
    """Return (n, 2) points on the edges of a polygon, at most `step` pixels apart."""
    ends = (*polygon[1:], polygon[0])
    counts = [max(1, ceil(dist(*edge) / step)) for edge in zip(polygon, ends)]
    fraction = np.array([number / count for count in counts for number in range(count)])[:, None]
    return np.repeat(polygon, counts, 0) * (1 - fraction) + np.repeat(ends, counts, 0) * fraction


def distance_to_line(points: Points, line: Sequence[Point]) -> npt.NDArray[np.float64]:
    """Return the distances (n,) of (n, 2) points from the nearest segment of a line."""
    corners = np.array(line)
    starts, directions = corners[:-1], corners[1:] - corners[:-1]
    relative = points[:, None] - starts  # (n, segments, 2)
    fraction = np.clip((relative * directions).sum(-1) / np.maximum((directions * directions).sum(-1), 1e-9), 0, 1)
    difference = relative - fraction[..., None] * directions
    return np.sqrt((difference * difference).sum(-1)).min(1)


def distance_between(first: Points, second: Points) -> float:
    """Return the smallest distance between one of the points (n, 2) and one of the other points (m, 2)."""
    difference = first[:, None] - second
    return float(np.sqrt((difference * difference).sum(-1)).min())


def bounding_box(polygons: Sequence[Polygon]) -> tuple[float, float, float, float]:
    """Return the bounding box (x0, y0, x1, y1) of polygons."""
    xs, ys = zip(*(point for polygon in polygons for point in polygon))
    return min(xs), min(ys), max(xs), max(ys)


def convex_hull(points: Sequence[Point]) -> list[Point]:
    """Return the convex hull (monotone chain, Andrew 1979)."""
    ordered = sorted(set(points))
    hull_points = []
    for sequence in (ordered, ordered[::-1]):
        chain: list[Point] = []
        for x, y in sequence:
            while len(chain) > 1:
                (x0, y0), (x1, y1) = chain[-2:]
                if (x1 - x0) * (y - y0) > (y1 - y0) * (x - x0):
                    break
                chain.pop()
            chain.append((x, y))
        hull_points += chain[:-1]
    return hull_points
