"""`curves.png`: a validation score during the training, a line for each run."""

import math
from collections.abc import Mapping, Sequence

from PIL import Image, ImageDraw

from diffcap.report.curves import Curve
from diffcap.report.drawing import (
    GAP,
    GRAY,
    INK,
    LINE,
    MARGIN,
    SUPERSAMPLING,
    WIDTH,
    axis_step,
    fonts,
    line_height,
    system_colors,
)

_HEIGHT = 260  # of the plot


def draw_curves(systems: Mapping[str, Sequence[Curve]], title: str) -> Image.Image:
    """Draw the chart; the runs of a system (its seeds) have one colour.

    Args:
        systems: name -> curves of (step, fraction); the fractions are shown x 100. title: title of the chart.
    """
    systems = {name: curves for name, curves in systems.items() if curves}
    _, small = fonts()
    line, colors = line_height(small), system_colors(list(systems))
    points = [point for curves in systems.values() for curve in curves for point in curve]
    steps, highest = max(step for step, _ in points), max(1.0, *(100 * value for _, value in points))
    x_step, y_step = axis_step(max(steps, 1)), axis_step(highest)
    ceiling = y_step * math.ceil(highest / y_step - 1e-9)
    left, right = MARGIN + 40, WIDTH - MARGIN - 10
    top = MARGIN + line + GAP
    bottom = top + _HEIGHT
    sheet = Image.new("RGB", (WIDTH, bottom + line * (1 + len(systems)) + 2 * GAP + MARGIN), "white")
    draw = ImageDraw.Draw(sheet)

    def at(step: float, value: float) -> tuple[float, float]:
        return left + (right - left) * step / max(steps, 1), bottom - value / ceiling * _HEIGHT

    draw.text((MARGIN, MARGIN), title, INK, small)
    for number in range(round(ceiling / y_step) + 1):
        y = at(0, number * y_step)[1]
        draw.line([(left, y), (right, y)], GRAY if number == 0 else LINE)
        draw.text((left - GAP, y), f"{number * y_step:g}", GRAY, small, anchor="rm")
    for number in range(int(steps / x_step + 1e-9) + 1):
        draw.text((at(number * x_step, 0)[0], bottom + 4), f"{number * x_step:,.0f}", GRAY, small, anchor="ma")
    lines = Image.new("RGBA", (WIDTH * SUPERSAMPLING, sheet.height * SUPERSAMPLING))
    fine = ImageDraw.Draw(lines)
    for place, (name, curves) in enumerate(systems.items()):
        for curve in curves:
            path = [at(step, 100 * value) for step, value in curve]
            fine.line(
                [(x * SUPERSAMPLING, y * SUPERSAMPLING) for x, y in path],
                colors[name],
                2 * SUPERSAMPLING,
                joint="curve",
            )
        y = bottom + line + GAP + place * line
        draw.rectangle([left, y + line // 2 - 2, left + 10, y + line // 2 + 1], colors[name])
        runs = f" ({len(curves)} runs)" if len(curves) > 1 else ""
        draw.text((left + 16, y), f"{name}{runs}", colors[name], small)
    lines = lines.resize(sheet.size, Image.Resampling.LANCZOS)
    sheet.paste(lines, (0, 0), lines)
    return sheet
