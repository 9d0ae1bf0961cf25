"""Draw the charts of a report with matplotlib, as SVG for the page and as PNG files. Read the curves from Lightning's CSV files.

matplotlib is imported only where a chart is drawn, because it takes 0.5 s and 74 MB.
"""

import csv
import io
import json
import math
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.etree import ElementTree

from markupsafe import Markup

from diffcap.records import JsonDict
from diffcap.report.drawing import write_png
from diffcap.report.rows import Run
from diffcap.run_folder import LOGS, TRAINING_STAGES, training_lineage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = list[tuple[float, float]]  # (optimiser step, value)
VALIDATION_SCORE = "val/CIDEr-D"  # curves.png shows this logged value
# Colours of systems, by Okabe and Ito: colour-blind readers can distinguish them.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#111111", "#f0e442")
BASELINE_COLORS = ("#969696", "#5a5a5a")
_TEXT_COLOR, _LINE_COLOR, _MARKER_EDGE_COLOR = "#777777", "#e1e1e1", "#ffffff"
_STYLE: dict[str, Any] = {
    "font.size": 8,
    "font.sans-serif": ["DejaVu Sans"],
    "text.color": _TEXT_COLOR,
    "text.parse_math": False,  # names may have dollar signs
    "axes.titlecolor": "#1e1e1e",
    "axes.titlelocation": "left",
    "axes.titlesize": "medium",
    "axes.labelcolor": _TEXT_COLOR,
    "xtick.color": _TEXT_COLOR,
    "ytick.color": _TEXT_COLOR,
    "axes.edgecolor": _LINE_COLOR,
    "grid.color": _LINE_COLOR,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.autolimit_mode": "round_numbers",  # the axes end at a tick
    "axes.xmargin": 0,
    "axes.ymargin": 0,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.markersize": 5,
    "lines.markeredgecolor": _MARKER_EDGE_COLOR,
    "figure.constrained_layout.h_pad": 0.12,
    "figure.constrained_layout.w_pad": 0.12,
    "figure.subplot.left": 0.11,
    "figure.subplot.right": 0.97,
    "figure.subplot.top": 0.95,
    "figure.subplot.bottom": 0.2,
    "svg.fonttype": "none",  # text elements, not outlines of letters
    "svg.hashsalt": "diffcap",  # equal charts give equal files
}
_PAGE_CHART_SIZE, _PNG_WIDTH = (4.2, 2.36), 9.0  # inches
_MAX_POINTS = 240  # longer curves are averaged to this number of points, because a screen shows no more
_MAX_MARKERS = 24  # a curve of more points is drawn without markers
# Colours of `_STYLE` -> CSS variables of the page
_THEME_COLORS = {_TEXT_COLOR: "var(--muted)", _LINE_COLOR: "var(--line)", _MARKER_EDGE_COLOR: "var(--card)"}
_SVG_NAMESPACE = "{http://www.w3.org/2000/svg}"
# Charts of scores by viewpoint IoU (1 for equal camera positions), from viewpoint.json: title -> (key of the score, group of pairs)
_VIEWPOINT_CHARTS = {
    "CIDEr-D x 100, all pairs": ("CIDEr-D", "total"),
    "CIDEr-D x 100, changes": ("CIDEr-D", "semantic"),
    "CIDEr-D x 100, distractors": ("CIDEr-D", "distractor"),
    "right change types, %": ("type_accuracy", "total"),
}


def read_curves(run_folder: str | Path, stages: Sequence[str] = TRAINING_STAGES) -> dict[str, dict[str, Curve]]:
    """Read every value that a run's stages logged: stage -> name ("val/CIDEr-D") -> curve.

    A run that was interrupted has a CSV file for each start. If two files have a value for the same step, that of the later file is used.
    """
    stage_curves = {}
    for stage in stages:
        values: dict[str, dict[float, float]] = {}
        paths = Path(run_folder).glob(f"{stage}/{LOGS}/version_*/metrics.csv")
        for path in sorted(paths, key=lambda path: (len(path.parent.name), path.parent.name)):  # version_2, version_10
            with path.open(encoding="utf-8", errors="replace", newline="") as file:
                for line in csv.DictReader(file):
                    step = _parse_number(line.get("step"))
                    for name in line.keys() - {"step", "epoch", None}:
                        value = _parse_number(line[name])
                        if step is not None and value is not None:  # a line that was cut off has no step
                            values.setdefault(name, {})[step] = value
        if values:
            stage_curves[stage] = {name: sorted(points.items()) for name, points in sorted(values.items())}
    return stage_curves


def _parse_number(text: str | None) -> float | None:
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def run_curves(runs: Sequence[Run]) -> list[Curve]:
    """Return the curve of validation CIDEr-D of the stage that wrote each checkpoint. Curves with a single point are left out."""
    lineages = [training_lineage(path) for run in runs for path in run.checkpoints]
    logged_values = [read_curves(folder, stages[-1:]).get(stages[-1], {}) for folder, stages in lineages]
    curves = [values.get(VALIDATION_SCORE, []) for values in logged_values]
    return [curve for curve in curves if len(curve) > 1]


def thin_out(curve: Sequence[tuple[float, float]], max_points: int = _MAX_POINTS) -> Curve:
    """Reduce a curve to at most `max_points` points, which are means of neighbouring points."""
    num_merged = max(1, math.ceil(len(curve) / max_points))
    chunks = (zip(*curve[start : start + num_merged]) for start in range(0, len(curve), num_merged))
    return [(fmean(steps), fmean(values)) for steps, values in chunks]


class Chart(NamedTuple):
    """A chart of the page."""

    title: str
    svg: Markup


def system_colors(names: Sequence[str], baselines: Collection[str] = ()) -> dict[str, str]:
    """Choose a colour for each system; colours repeat if there are more systems than colours."""
    grays, colors = cycle(BASELINE_COLORS), cycle(COLORS)
    return {name: next(grays if name in baselines else colors) for name in names}


def is_score(title: str) -> bool:
    """Return True if a logged value ("val/CIDEr-D") is a caption score, which is a fraction and is shown x 100."""
    name = title.rpartition("/")[2]
    return name.startswith(("BLEU", "METEOR", "ROUGE", "CIDEr", "SPICE"))


def curve_chart(title: str, curves: Sequence[tuple[str, str, Curve]]) -> Chart:
    """Draw the logged value `title` by optimiser step. A curve is (system, its colour, points), one or more per system."""
    with _figure(*_PAGE_CHART_SIZE) as (figure, (axes,)):
        last_values = _draw_curves(axes, title, curves)
        summary = "; ".join(f"{name} ends at {value:.4g}" for name, value in last_values)
        return Chart(title + (" x 100" if is_score(title) else ""), _svg(figure, f"{title} by step: {summary}"))


def write_curves(path: Path, systems: Mapping[str, Sequence[Curve]]) -> None:
    """Write `curves.png`: the validation CIDEr-D by training step. The runs of a system (its seeds) have one colour."""
    colors = system_colors([name for name, curves in systems.items() if curves])
    with _figure(_PNG_WIDTH, 3.2 + 0.2 * len(colors), layout="constrained") as (figure, (axes,)):
        curves = [(name, colors[name], curve) for name in colors for curve in systems[name]]
        _draw_curves(axes, VALIDATION_SCORE, curves)
        axes.set_title("validation CIDEr-D x 100, by training step")
        lines = {str(line.get_label()): line for line in axes.lines}
        labels = [f"{name} ({len(systems[name])} runs)" if len(systems[name]) > 1 else name for name in lines]
        figure.legend(list(lines.values()), labels, loc="outside lower left", frameon=False, labelcolor="linecolor")
        write_png(path, figure.savefig)


def _draw_curves(axes: "Axes", title: str, curves: Sequence[tuple[str, str, Curve]]) -> list[tuple[str, float]]:
    """Draw a line for each (system, its colour, points). Return the system and the last value of each line."""
    factor = 100.0 if is_score(title) else 1.0
    scaled_curves = []
    for name, color, curve in curves:
        scaled = [(step, factor * value) for step, value in thin_out(curve)]
        tooltips = [f"{name}, step {step:,.0f}: {value:.4g}" for step, value in scaled]
        _add_line(axes, name, color, scaled, tooltips if len(scaled) <= _MAX_MARKERS else [])
        scaled_curves.append((name, scaled))
    values = [value for _, curve in scaled_curves for _, value in curve]
    low, high = min(values), max(values)
    if is_score(title):
        low, high = 0.0, max(1.0, high)
    elif 0 < low < 0.5 * high:
        low = 0.0
    axes.set_ylim(axes.yaxis.get_major_locator().view_limits(low, high))
    axes.set_xlim(0, max(step for _, curve in scaled_curves for step, _ in curve) or 1)
    axes.set_xlabel("optimiser steps", loc="right")
    axes.locator_params(axis="x", integer=True)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    return [(name, curve[-1][1]) for name, curve in scaled_curves]


def viewpoint_charts(scores: JsonDict, colors: Mapping[str, str]) -> list[Chart]:
    """Draw the content of viewpoint.json for the page. A chart is left out if a bin (pairs of similar viewpoint IoU) lacks its score."""
    charts = []
    for title, (key, group) in _complete_charts(scores).items():
        with _figure(*_PAGE_CHART_SIZE) as (figure, (axes,)):
            means = _draw_viewpoint(axes, scores, key, group, colors)
            summary = "; ".join(f"{name} from {values[0]:.1f} to {values[-1]:.1f}" for name, values in means.items())
            charts.append(Chart(title, _svg(figure, f"{title}, from different to similar viewpoints: {summary}")))
    return charts


def write_viewpoint(path: Path, scores: JsonDict, baselines: Collection[str] = ()) -> None:
    """Write `viewpoint.png`: the charts of the group "total", with their values below. The lines of the baselines are gray."""
    colors = system_colors(list(scores["systems"]), baselines)
    charts = {title: (key, group) for title, (key, group) in _complete_charts(scores).items() if group == "total"}
    height = len(charts) * (3.2 + 0.2 * len(colors))
    with _figure(_PNG_WIDTH, height, len(charts), layout="constrained") as (figure, all_axes):
        for axes, (title, (key, group)) in zip(all_axes, charts.items()):
            _draw_viewpoint(axes, scores, key, group, colors)
            axes.set(title=title, xlabel="")
            _add_text(axes, "viewpoint IoU\npairs", -0.5, -4, _TEXT_COLOR)
            for index, (name, bin_scores) in enumerate(scores["systems"].items()):
                offset = -28 - 12 * index  # below the two lines of the tick labels
                _add_text(axes, name if len(name) < 40 else f"{name[:36]}...", -0.5, offset, colors[name])
                for column, one_bin in enumerate(bin_scores):
                    _, _, text = _mean_and_std(one_bin, key, group)
                    _add_text(axes, text, column, offset, colors[name], "center")
        explanation = (
            "by the viewpoint IoU of the pairs, from different to similar; each bin is scored as a separate corpus"
        )
        figure.supxlabel(explanation, fontsize="medium")
        write_png(path, figure.savefig)


def _add_text(axes: "Axes", text: str, x: float, offset: float, color: str, align: str = "right") -> None:
    """Write a text at the coordinate `x` of the axes, `offset` points above their lower edge."""
    axes.annotate(
        text,
        (x, 0),
        (0, offset),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        color=color,
        horizontalalignment=align,
        verticalalignment="top",
    )


def _complete_charts(scores: JsonDict) -> dict[str, tuple[str, str]]:
    """Return the entries of `_VIEWPOINT_CHARTS` whose score every bin of every system has."""
    all_bins = [one_bin for bin_scores in scores["systems"].values() for one_bin in bin_scores]
    return {
        title: (key, group)
        for title, (key, group) in _VIEWPOINT_CHARTS.items()
        if all(group in one_bin.get(key, {}) for one_bin in all_bins)
    }


def _mean_and_std(one_bin: JsonDict, key: str, group: str) -> tuple[float, float, str]:
    """Return a score of a bin x 100, its standard deviation (0 for one run), and both as text."""
    mean = 100 * one_bin[key][group]
    if not one_bin.get("std"):
        return mean, 0.0, f"{mean:.1f}"
    std = 100 * one_bin["std"][key][group]
    return mean, std, f"{mean:.1f} ± {std:.1f}"


def _draw_viewpoint(
    axes: "Axes", scores: JsonDict, key: str, group: str, colors: Mapping[str, str]
) -> dict[str, list[float]]:
    """Draw a line with error bars over the bins for each system. Return the means x 100."""
    means = {}
    limits = [f"{one_bin['low']:.2f} to {one_bin['high']:.2f}" for one_bin in scores["bins"]]
    for index, (name, bin_scores) in enumerate(scores["systems"].items()):
        means[name], stds, texts = map(list, zip(*(_mean_and_std(one_bin, key, group) for one_bin in bin_scores)))
        shift = 0.03 * (index - (len(colors) - 1) / 2)  # points of equal height do not overlap
        positions = [bin_index + shift for bin_index in range(len(limits))]
        tooltips = [f"{name}, IoU {bin_limits}: {text}" for bin_limits, text in zip(limits, texts)]
        _add_line(axes, name, colors[name], list(zip(positions, means[name])), tooltips)
        if any(stds):
            axes.errorbar(positions, means[name], stds, fmt="none", ecolor=colors[name], capsize=3)
    axes.set_ylim(axes.yaxis.get_major_locator().view_limits(0, max(1.0, axes.dataLim.y1)))
    axes.set_xlim(-0.5, len(limits) - 0.5)
    counts = [one_bin["pairs"].get(group, 0) for one_bin in scores["bins"]]
    axes.set_xticks(range(len(limits)), [f"{bin_limits}\n{count:,}" for bin_limits, count in zip(limits, counts)])
    axes.set_xlabel("viewpoint IoU, pairs", loc="right")
    return means


@contextmanager
def _figure(width: float, height: float, charts: int = 1, **options: Any) -> Iterator[tuple["Figure", list["Axes"]]]:
    """Make a figure of a size in inches, with `charts` charts. Save it inside the `with` block, because the block sets the style."""
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context(["default", _STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a name in another script
        figure = Figure((width, height), **options)
        all_axes = figure.subplots(charts, squeeze=False)[:, 0].tolist()
        for axes in all_axes:
            axes.locator_params(nbins=8, steps=[1, 2, 5, 10])
        yield figure, all_axes


def _add_line(
    axes: "Axes", name: str, color: str, points: Sequence[tuple[float, float]], tooltips: Sequence[str]
) -> None:
    """Add a line. Its points have markers if there are tooltips. The tooltips become the line's id, where `_svg` reads them."""
    marker = "o" if tooltips else ""
    axes.plot(*zip(*points), color=color, marker=marker, label=name, gid=json.dumps(tooltips), clip_on=False)


def _svg(figure: "Figure", summary: str) -> Markup:
    """Return a figure as an SVG element with the page's colours and tooltips; `summary` is for screen readers."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", transparent=True)
    root = ElementTree.fromstring(file.getvalue())
    for parent in (root, *root.findall(f"{_SVG_NAMESPACE}defs")):
        for child in [*parent.findall(f"{_SVG_NAMESPACE}metadata"), *parent.findall(f"{_SVG_NAMESPACE}style")]:
            parent.remove(child)  # a style element would apply to the whole page
    for svg_group in root.iter(f"{_SVG_NAMESPACE}g"):
        id = svg_group.attrib.pop("id", "")
        tooltips = json.loads(id) if id.startswith("[") else ()  # `_add_line` makes this id
        for tooltip, marker in zip(tooltips, svg_group.iter(f"{_SVG_NAMESPACE}use")):
            ElementTree.SubElement(marker, f"{_SVG_NAMESPACE}title").text = tooltip

    def theme_color(match: re.Match[str]) -> str:  # the dark theme of the page mixes other colours with white
        return _THEME_COLORS.get(match[0], f"color-mix(in srgb, {match[0]} var(--color-share), white)")

    for element in root.iter():
        for attribute in [name for name in element.attrib if name.endswith("}href")]:
            element.set("href", element.attrib.pop(attribute))
        if "style" in element.attrib:
            element.set("style", re.sub(r"#[0-9a-f]{6}", theme_color, element.attrib["style"]))
    root.attrib |= {"role": "img", "aria-label": summary}
    ElementTree.register_namespace("", _SVG_NAMESPACE.strip("{}"))
    return Markup(ElementTree.tostring(root, encoding="unicode"))
