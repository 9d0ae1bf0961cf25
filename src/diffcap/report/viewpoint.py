"""`viewpoint.json` and `viewpoint.png`: scores by the similarity of the two viewpoints, after Park, Darrell and Rohrbach
("Robust Change Captioning", ICCV 2019) have it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from diffcap.evaluation.captions import score_tokens, tokenize_together
from diffcap.evaluation.protocols import groups_of
from diffcap.evaluation.slots import slot_accuracy
from diffcap.evaluation.tokenize import Tokenizer
from diffcap.records import ChangePair
from diffcap.report.drawing import (
    GAP,
    GRAY,
    INK,
    LINE,
    MARGIN,
    SUPERSAMPLING,
    WIDTH,
    Color,
    axis_step,
    fonts,
    line_height,
    system_colors,
)
from diffcap.report.rows import Row, mean_row

KEY = "viewpoint_iou"
_GROUPS = ("total", "semantic", "distractor")
_PANELS = {"CIDEr-D": "CIDEr-D x 100", "type_accuracy": "right change types, %"}
_PLOT_HEIGHT = 220


@dataclass(frozen=True)
class Bin:
    """Pairs whose viewpoint IoU lies in `low` to `high`, both included."""

    low: float
    high: float
    pairs: list[ChangePair]


def quantile_bins(pairs: Sequence[ChangePair], count: int) -> list[Bin]:
    """Divide the pairs with a viewpoint IoU into bins of about equal size, from different to similar viewpoints.

    Pairs of equal IoU are in one bin, so there may be fewer bins than `count`.

    Returns:
        Bins that are not empty; no bins if no pair has an IoU, or all have the same.
    """
    known = [pair for pair in pairs if isinstance(pair.extra.get(KEY), int | float)]
    known.sort(key=lambda pair: pair.extra[KEY])
    values = np.array([pair.extra[KEY] for pair in known], dtype=float)
    if len(np.unique(values)) < 2:
        return []
    count = min(count, len(known))
    wanted = [round(len(known) * number / count) for number in range(1, count)]
    # A cut between equal values moves to the nearer end of these values.
    ends = [(np.searchsorted(values, values[cut]), np.searchsorted(values, values[cut], "right")) for cut in wanted]
    cuts = {int(min(end, key=lambda place: abs(place - cut))) for end, cut in zip(ends, wanted)}
    edges = sorted({0, *cuts, len(known)})
    return [Bin(float(values[first]), float(values[last - 1]), known[first:last]) for first, last in pairwise(edges)]


def score_bins(
    predictions: Mapping[str, str],
    bins: Sequence[Bin],
    hypotheses: Mapping[str, str],
    references: Mapping[str, list[str]],
) -> list[Row]:
    """Score one system's captions, each bin as a corpus with document frequencies of its own.

    Args:
        predictions: id -> caption, for at least the bins' pairs. hypotheses: the same captions as tokens.
        references: id -> tokens of each reference.

    Returns:
        A row for each bin: {"CIDEr-D": group -> fraction}, with the groups total and, where both occur, semantic and
        distractor; and "type_accuracy" for the same groups if the dataset has the attributes of its changed objects.
    """
    groups_by_bin = [_groups(part) for part in bins]
    named = {f"{number} {name}": ids for number, groups in enumerate(groups_by_bin) for name, ids in groups.items()}
    pairs = {pair.id: pair for part in bins for pair in part.pairs}
    scores = score_tokens({id: hypotheses[id] for id in pairs}, references, named, ["CIDEr-D"])
    has_object_labels = any("changed" in pair.extra for pair in pairs.values())
    rows: list[Row] = []
    for number, groups in enumerate(groups_by_bin):
        row: Row = {"CIDEr-D": {name: scores[f"{number} {name}"]["CIDEr-D"] for name in groups}}
        if has_object_labels:
            row["type_accuracy"] = {
                name: slot_accuracy(predictions, [pairs[id] for id in ids])["type"] for name, ids in groups.items()
            }
        rows.append(row)
    return rows


def viewpoint_scores(
    systems: Mapping[str, Sequence[Mapping[str, str]]], bins: Sequence[Bin], tokenizer: Tokenizer
) -> dict[str, Any]:
    """The content of `viewpoint.json`: the bins with their numbers of pairs, and each system's rows.

    Args:
        systems: name -> captions by id, one mapping for each seed; several give mean and "std", as `mean_row` has it.
    """
    references = {pair.id: pair.captions for part in bins for pair in part.pairs}
    seeds = {f"{number} {name}": run for name, runs in systems.items() for number, run in enumerate(runs)}
    hypotheses, tokens = tokenize_together(seeds, references, tokenizer)
    scored = {key: score_bins(run, bins, hypotheses[key], tokens) for key, run in seeds.items()}
    rows = {name: [scored[f"{number} {name}"] for number in range(len(runs))] for name, runs in systems.items()}
    return {
        "bins": [
            {"low": part.low, "high": part.high, "pairs": {name: len(ids) for name, ids in _groups(part).items()}}
            for part in bins
        ],
        "systems": {name: [mean_row(of_bin) for of_bin in zip(*runs)] for name, runs in rows.items()},
    }


def _groups(part: Bin) -> dict[str, list[str]]:
    return {name: ids for name, ids in groups_of(part.pairs).items() if name in _GROUPS}


def draw_viewpoint(scores: Mapping[str, Any], baselines: Sequence[str] = ()) -> Image.Image:
    """Draw the chart: a panel for CIDEr-D and, if available, one for the accuracy of the change type; over all pairs.

    Args:
        scores: what `viewpoint_scores` returns.
        baselines: names of the systems to draw in gray.
    """
    systems = scores["systems"]
    colors = system_colors(list(systems), baselines)
    panels = [key for key in _PANELS if all(key in row for rows in systems.values() for row in rows)]
    _, small = fonts()
    line = line_height(small)
    height = line + GAP + _PLOT_HEIGHT + 3 * GAP + line * (2 + len(systems)) + 3 * GAP
    sheet = Image.new("RGB", (WIDTH, 2 * MARGIN + height * len(panels) + line), "white")
    for number, key in enumerate(panels):
        _panel(sheet, MARGIN + number * height, key, scores, colors)
    text = "by the viewpoint IoU of the pairs, from different to similar; each bin is scored as a corpus of its own"
    ImageDraw.Draw(sheet).text((MARGIN, MARGIN + height * len(panels)), text, GRAY, small)
    return sheet


def _panel(sheet: Image.Image, top: int, key: str, scores: Mapping[str, Any], colors: Mapping[str, Color]) -> None:
    """One chart, `top` pixels down: title, axes, a line for each system, and its values below its points."""
    _, small = fonts()
    draw, line = ImageDraw.Draw(sheet), line_height(small)
    left = min(320, MARGIN + 24 + max(round(small.getlength(name)) for name in ("viewpoint IoU", *colors)))
    means = {name: [100 * row[key]["total"] for row in rows] for name, rows in scores["systems"].items()}
    stds = {
        name: [100 * row["std"][key]["total"] if "std" in row else None for row in rows]
        for name, rows in scores["systems"].items()
    }
    highest = max(mean + (std or 0) for name in colors for mean, std in zip(means[name], stds[name]))
    step = axis_step(max(highest, 1.0))
    ceiling = step * math.ceil(max(highest, 1.0) / step - 1e-9)
    first, last = top + line + GAP, top + line + GAP + _PLOT_HEIGHT
    column = (WIDTH - MARGIN - left) / len(scores["bins"])

    def x_of(number: int) -> float:
        return left + column * (number + 0.5)

    def y_of(value: float) -> float:
        return last - value / ceiling * _PLOT_HEIGHT

    draw.text((MARGIN, top), _PANELS[key], INK, small)
    for number in range(round(ceiling / step) + 1):
        y = y_of(number * step)
        draw.line([(left, y), (WIDTH - MARGIN, y)], GRAY if number == 0 else LINE)
        draw.text((left - GAP, y), f"{number * step:g}", GRAY, small, anchor="rm")
    below = last + GAP
    draw.text((MARGIN, below), "viewpoint IoU", INK, small)
    draw.text((MARGIN, below + line), "pairs", GRAY, small)
    for number, part in enumerate(scores["bins"]):
        draw.text((x_of(number), below), f"{part['low']:.2f} to {part['high']:.2f}", INK, small, anchor="ma")
        draw.text((x_of(number), below + line), f"{part['pairs']['total']:,}", GRAY, small, anchor="ma")
    below += 2 * line + GAP

    lines = Image.new("RGBA", (WIDTH * SUPERSAMPLING, (_PLOT_HEIGHT + 2 * line) * SUPERSAMPLING))
    fine = ImageDraw.Draw(lines)
    for place, (name, color) in enumerate(colors.items()):
        aside = 4 * (place - (len(colors) - 1) / 2)  # points of equal height do not overlap

        def at(number: int, value: float, aside: float = aside) -> tuple[float, float]:
            return (x_of(number) + aside) * SUPERSAMPLING, (y_of(value) - first + line) * SUPERSAMPLING

        points = [at(number, value) for number, value in enumerate(means[name])]
        fine.line(points, color, 2 * SUPERSAMPLING, joint="curve")
        for number, (x, y) in enumerate(points):
            size, std = 3.5 * SUPERSAMPLING, stds[name][number]
            fine.ellipse([x - size, y - size, x + size, y + size], color)
            if std is not None:
                low, high = (at(number, means[name][number] + sign * std)[1] for sign in (-1, 1))
                fine.line([(x, low), (x, high)], color, round(1.5 * SUPERSAMPLING))
                for end in (low, high):
                    fine.line([(x - size, end), (x + size, end)], color, round(1.5 * SUPERSAMPLING))
        y = below + place * line
        draw.rectangle([MARGIN, y + line // 2 - 2, MARGIN + 10, y + line // 2 + 1], color)
        draw.text((MARGIN + 16, y), _shortened(name, left - MARGIN - 24), color, small)
        for number, mean in enumerate(means[name]):
            std = stds[name][number]
            text = f"{mean:.1f}" + (f" ± {std:.1f}" if std is not None else "")
            draw.text((x_of(number), y), text, color, small, anchor="ma")
    lines = lines.resize((WIDTH, _PLOT_HEIGHT + 2 * line), Image.Resampling.LANCZOS)
    sheet.paste(lines, (0, first - line), lines)


def _shortened(name: str, width: int) -> str:
    _, small = fonts()
    if small.getlength(name) <= width:
        return name
    return next(f"{name[:end]}..." for end in range(len(name), -1, -1) if small.getlength(f"{name[:end]}...") <= width)
