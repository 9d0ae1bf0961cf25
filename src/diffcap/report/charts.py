"""Line charts of the page: coordinates, paths and ticks, which the template writes as SVG."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diffcap.report.curves import Curve, thinned
from diffcap.report.drawing import axis_step

WIDTH, HEIGHT = 420, 236
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 12, 44
_MAX_DOTS = 24  # a curve of more points is drawn without dots


@dataclass(frozen=True)
class Dot:
    """A point of a line with its tooltip; `spread` is half the height of its error bar, 0 for none."""

    x: float
    y: float
    text: str
    spread: float = 0.0


@dataclass(frozen=True)
class Line:
    """One system's line: the system's number, the path in SVG syntax, and its points if they are few."""

    name: str
    system: int
    path: str
    dots: list[Dot]


@dataclass(frozen=True)
class Chart:
    """A chart of `WIDTH` by `HEIGHT`; ticks are (position, label)."""

    title: str
    axis: str
    summary: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    lines: list[Line]
    x_sublabels: list[tuple[float, str]]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT
    right: int = WIDTH - _RIGHT
    bottom: int = HEIGHT - _BOTTOM


def _ticks(low: float, high: float) -> list[float]:
    step = axis_step(high - low)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _x_of(value: float, low: float, high: float) -> float:
    return round(_LEFT + (value - low) / (high - low) * (WIDTH - _LEFT - _RIGHT), 1)


def _y_of(value: float, low: float, high: float) -> float:
    return round(HEIGHT - _BOTTOM - (value - low) / (high - low) * (HEIGHT - _BOTTOM - _TOP), 1)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points)


def curve_chart(title: str, curves: Sequence[tuple[str, int, Curve]]) -> Chart:
    """A value against the optimiser's steps.

    Args:
        title: name of the logged value; scores are fractions and are shown x 100.
        curves: (name, system's number, points), one per seed of a system; not empty.
    """
    factor = 100.0 if is_score(title) else 1.0
    thin = [(name, system, [(x, factor * y) for x, y in thinned(curve)]) for name, system, curve in curves]
    every = [y for _, _, curve in thin for _, y in curve]
    low, high = min(every), max(every)
    if low > 0 and (is_score(title) or low < 0.5 * high):
        low = 0.0
    y_ticks = _ticks(low, high if high > low else low + (abs(low) or 1.0))
    steps = max(x for _, _, curve in thin for x, _ in curve) or 1.0
    x_ticks = [step for step in _ticks(0, steps) if step <= steps * 1.0001]
    lines = []
    for name, system, curve in thin:
        points = [(_x_of(x, 0, steps), _y_of(y, y_ticks[0], y_ticks[-1])) for x, y in curve]
        dots = [
            Dot(*place, f"{name}, step {x:,.0f}: {y:.4g}")
            for place, (x, y) in zip(points if len(points) <= _MAX_DOTS else [], curve)
        ]
        lines.append(Line(name, system, _path(points), dots))
    last = "; ".join(f"{name} ends at {curve[-1][1]:.4g}" for name, _, curve in thin)
    return Chart(
        title + (" x 100" if factor > 1 else ""),
        "optimiser steps",
        f"{title} by step: {last}",
        [(_x_of(step, 0, steps), f"{step:,.0f}") for step in x_ticks],
        [(_y_of(value, y_ticks[0], y_ticks[-1]), f"{value:,.6g}") for value in y_ticks],
        lines,
        [],
    )


def is_score(title: str) -> bool:
    """Whether a logged value is a caption score, a fraction that is shown x 100."""
    return title.rsplit("/", 1)[-1].split("-")[0] in ("BLEU", "METEOR", "ROUGE", "CIDEr", "SPICE")


# Charts of viewpoint.json: title -> (key, group)
_PANELS = {
    "CIDEr-D x 100, all pairs": ("CIDEr-D", "total"),
    "CIDEr-D x 100, changes": ("CIDEr-D", "semantic"),
    "CIDEr-D x 100, distractors": ("CIDEr-D", "distractor"),
    "right change types, %": ("type_accuracy", "total"),
}


def viewpoint_charts(scores: Mapping[str, Any], numbers: Mapping[str, int]) -> list[Chart]:
    """The charts of the result of `viewpoint.viewpoint_scores`, without those that a bin has no number for.

    Args:
        scores: that result. numbers: each system's number, which decides its colour.
    """
    return [
        _by_viewpoint(title, key, group, scores, numbers)
        for title, (key, group) in _PANELS.items()
        if all(group in row.get(key, {}) for rows in scores["systems"].values() for row in rows)
    ]


def _by_viewpoint(title: str, key: str, group: str, scores: Mapping[str, Any], numbers: Mapping[str, int]) -> Chart:
    bins = scores["bins"]
    means = {name: [100 * row[key][group] for row in rows] for name, rows in scores["systems"].items()}
    stds = {
        name: [100 * row["std"][key][group] if "std" in row else 0.0 for row in rows]
        for name, rows in scores["systems"].items()
    }
    highest = max(mean + std for name in means for mean, std in zip(means[name], stds[name]))
    y_ticks = _ticks(0.0, max(highest, 1.0))
    lines = []
    for name, values in means.items():
        places = [
            (_x_of(number + 0.5, 0, len(bins)), _y_of(value, 0.0, y_ticks[-1])) for number, value in enumerate(values)
        ]
        dots = []
        for part, place, value, std in zip(bins, places, values, stds[name]):
            spread = f" ± {std:.1f}" if std else ""
            text = f"{name}, IoU {part['low']:.2f} to {part['high']:.2f}: {value:.1f}{spread}"
            dots.append(Dot(*place, text, round(std / y_ticks[-1] * (HEIGHT - _BOTTOM - _TOP), 1)))
        lines.append(Line(name, numbers[name], _path(places), dots))
    ends = "; ".join(f"{name} from {values[0]:.1f} to {values[-1]:.1f}" for name, values in means.items())
    centers = [_x_of(number + 0.5, 0, len(bins)) for number in range(len(bins))]
    return Chart(
        title,
        "viewpoint IoU, pairs",
        f"{title}, from different to similar viewpoints: {ends}",
        [(x, f"{part['low']:.2f} to {part['high']:.2f}") for x, part in zip(centers, bins)],
        [(_y_of(value, 0.0, y_ticks[-1]), f"{value:g}") for value in y_ticks],
        lines,
        [(x, f"{part['pairs'].get(group, 0):,}") for x, part in zip(centers, bins)],
    )
