"""Plane geometry of `tiles`: points are (x, y) in pixels of the before image, x to the right and y down, angles in radians."""

import itertools
import math
import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Point = tuple[float, float]
Polygon = tuple[Point, ...]


def rectangle(center: Point, angle: float, length: float, width: float) -> Polygon:
    """Return the corners of a rectangle whose length runs in the direction `angle`."""
    ux, uy = math.cos(angle) / 2, math.sin(angle) / 2
    return tuple(
        (center[0] + a * length * ux - b * width * uy, center[1] + a * length * uy + b * width * ux)
        for a, b in ((-1, -1), (1, -1), (1, 1), (-1, 1))
    )


def offset(point: Point, angle: float, distance: float) -> Point:
    """Return the point at a distance from another one."""
    return point[0] + distance * math.cos(angle), point[1] + distance * math.sin(angle)


def blob(rng: random.Random, center: Point, radius: float, ratio: float = 1.0, corners: int = 36) -> Polygon:
    """Sample a smooth closed outline; `radius` is the mean of the longer axis, `ratio` that of the shorter to the longer axis."""
    turn = rng.uniform(0, math.pi)
    cosine, sine = math.cos(turn), math.sin(turn)
    (k0, s0, p0), (k1, s1, p1), (k2, s2, p2) = (
        (k, rng.uniform(0.02, 0.16) / k**0.5, rng.uniform(0, 2 * math.pi)) for k in (2, 3, 5)
    )
    points = []
    for i in range(corners):
        t = 2 * math.pi * i / corners
        r = radius * (1 + (s0 * math.cos(k0 * t + p0) + s1 * math.cos(k1 * t + p1) + s2 * math.cos(k2 * t + p2)))
        x, y = r * math.cos(t), ratio * r * math.sin(t)
        points.append((center[0] + x * cosine - y * sine, center[1] + x * sine + y * cosine))
    return tuple(points)


def curve(start: Point, control: Point, end: Point, points: int = 15) -> Polygon:
    """Return points of a quadratic Bézier curve."""
    steps = [i / (points - 1) for i in range(points)]
    return tuple(
        (
            (1 - t) ** 2 * start[0] + 2 * t * (1 - t) * control[0] + t * t * end[0],
            (1 - t) ** 2 * start[1] + 2 * t * (1 - t) * control[1] + t * t * end[1],
        )
        for t in steps
    )


def along(line: Sequence[Point], step: float, start: float = 0.0) -> list[tuple[Point, float]]:
    """Return (point, direction) every `step` pixels of a line, from the distance `start` on."""
    points, travelled, target = [], 0.0, start
    for (x0, y0), (x1, y1) in itertools.pairwise(line):
        length = math.hypot(x1 - x0, y1 - y0)
        while length > 0 and target <= travelled + length:
            t = (target - travelled) / length
            points.append(((x0 + t * (x1 - x0), y0 + t * (y1 - y0)), math.atan2(y1 - y0, x1 - x0)))
            target += step
        travelled += length
    return points


def outline(polygon: Polygon, step: float = 4.0) -> npt.NDArray[np.float64]:
    """Return (n, 2) points on the edges of a polygon, at most `step` pixels apart."""
    following = (*polygon[1:], polygon[0])
    counts = [max(1, math.ceil(math.hypot(x1 - x0, y1 - y0) / step)) for (x0, y0), (x1, y1) in zip(polygon, following)]
    t = np.array([k / count for count in counts for k in range(count)])[:, None]
    return np.repeat(polygon, counts, 0) * (1 - t) + np.repeat(following, counts, 0) * t


def distance_to_line(points: npt.NDArray[np.float64], line: Sequence[Point]) -> npt.NDArray[np.float64]:
    """Return the distances (n,) of (n, 2) points from the nearest segment of a line."""
    ends = np.array(line)
    a, d = ends[:-1], ends[1:] - ends[:-1]
    relative = points[:, None] - a  # (n, segments, 2)
    t = np.clip((relative * d).sum(-1) / np.maximum((d * d).sum(-1), 1e-9), 0, 1)
    gap = relative - t[..., None] * d
    return np.sqrt((gap * gap).sum(-1)).min(1)


def distance_between(first: npt.NDArray[np.float64], second: npt.NDArray[np.float64]) -> float:
    """Return the smallest distance of two sets of points, (n, 2) and (m, 2)."""
    gap = first[:, None] - second
    return float(np.sqrt((gap * gap).sum(-1)).min())


def bounds(polygons: Sequence[Polygon]) -> tuple[float, float, float, float]:
    """Return the bounding box (x0, y0, x1, y1) of polygons."""
    xs, ys = zip(*(point for polygon in polygons for point in polygon))
    return min(xs), min(ys), max(xs), max(ys)


def hull(points: Sequence[Point]) -> list[Point]:
    """Return the convex hull (monotone chain, Andrew 1979)."""
    ordered = sorted(set(points))
    halves = []
    for sequence in (ordered, ordered[::-1]):
        chain: list[Point] = []
        for x, y in sequence:
            while len(chain) > 1:
                (x0, y0), (x1, y1) = chain[-2:]
                if (x1 - x0) * (y - y0) > (y1 - y0) * (x - x0):
                    break
                chain.pop()
            chain.append((x, y))
        halves += chain[:-1]
    return halves
