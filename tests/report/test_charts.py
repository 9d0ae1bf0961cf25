"""Training curves of CSV files; charts with tooltips and colours in the page, and a PNG file each."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from diffcap.report.charts import (
    BASELINE_COLORS,
    COLORS,
    Chart,
    curve_chart,
    is_score,
    read_curves,
    run_curves,
    thin_out,
    viewpoint_charts,
    write_curves,
    write_viewpoint,
)
from diffcap.report.rows import Run

STRAIGHT = [(0.0, 0.0), (500.0, 0.5), (1000.0, 1.0)]
ODD = "_<one> $x$ $\\frac{ \u65e5"


def tooltips(chart: Chart) -> dict[str, tuple[float, float]]:
    """Text of each tooltip -> coordinates of its point."""
    found = re.findall(r'<use x="([\d.]+)" y="([\d.]+)"[^>]*><title>([^<]*)</title>', chart.svg)
    return {unescape(text): (float(x), float(y)) for x, y, text in found}


def height_of(chart: Chart, label: str) -> float:
    """y of the gridline with a label."""
    pattern = r'<path d="M [\d.]+ ([\d.]+) (?:(?!<path).)*>' + label + "</text>"
    return float(re.findall(pattern, chart.svg, re.DOTALL)[0])


def bins(*counts: Mapping[str, int]) -> list[dict[str, Any]]:
    return [{"low": 0.1 * n, "high": 0.1 * n + 0.1, "pairs": count} for n, count in enumerate(counts)]


def viewpoint(*values: float, std: float = 0.0) -> list[dict[str, Any]]:
    spread = {"std": {"CIDEr-D": {"total": std}}} if std else {}
    return [{"CIDEr-D": {"total": value}, **spread} for value in values]


def near(path: Path, color: str) -> np.ndarray:
    rgb = [int(color[place : place + 2], 16) for place in (1, 3, 5)]
    return np.abs(np.asarray(Image.open(path).convert("RGB")).astype(int) - rgb).sum(-1) < 60


def test_the_points_of_a_curve_have_their_values_as_tooltips() -> None:
    chart = curve_chart("val/CIDEr-D", [(ODD, COLORS[2], STRAIGHT), ("two", COLORS[0], [(1000.0, 0.25)])])
    found = tooltips(chart)
    expected = {f"{ODD}, step {step:,}: {value}" for step, value in ((0, 0), (500, 50), (1000, 100))}
    assert set(found) == {*expected, "two, step 1,000: 25"}
    low, middle, high = (found[f"{ODD}, step {step:,}: {value}"] for step, value in ((0, 0), (500, 50), (1000, 100)))
    assert (low[1], high[1]) == (height_of(chart, "0"), height_of(chart, "100"))
    assert middle == pytest.approx(np.mean([low, high], 0), abs=0.01)
    assert chart.title == "val/CIDEr-D x 100" and is_score("val/BLEU-4") and not is_score("val/caption_loss")
    label = re.findall(r'aria-label="([^"]*)"', chart.svg)
    assert unescape(label[0]) == f"val/CIDEr-D by step: {ODD} ends at 100; two ends at 25"
    many = curve_chart("train/loss", [("one", COLORS[0], [(float(n), 1.0) for n in range(100)])])
    assert not tooltips(many)


def test_an_svg_asks_for_nothing_and_has_the_colours_of_the_page() -> None:
    svg = curve_chart("train/loss", [("one", COLORS[1], [(1.0, 3.0), (2.0, 5.0)])]).svg
    assert set(re.findall(r"https?://[^\"' ]+", svg)) == {"http://www.w3.org/2000/svg"}
    assert "<style" not in svg and "<metadata" not in svg
    colors = set(re.findall(r"(?:fill|stroke): ([^;\"]+)", svg))
    mixed = f"color-mix(in srgb, {COLORS[1]} var(--color-share), white)"
    assert colors == {"none", mixed, "var(--muted)", "var(--line)", "var(--card)"}


def test_an_axis_begins_at_zero_where_the_values_are_far_from_constant() -> None:
    def labels(*values: float, title: str = "train/loss") -> list[str]:
        chart = curve_chart(title, [("one", COLORS[0], list(enumerate(values)))])
        return re.findall(r"text-anchor: end[^>]*>([^<]*)</text>", chart.svg)[1:]  # without the axis' name

    assert float(labels(3.0, 5.0)[0]) == 3
    assert labels(1.0, 5.0)[0] == "0" and labels(0.9, 1.0, title="val/CIDEr-D")[0] == "0"
    assert labels(0.0, 0.0, title="val/CIDEr-D")[-1] == "1.0" and len(labels(0.001, 0.001)) > 1


def test_charts_by_viewpoint_leave_out_what_a_bin_lacks() -> None:
    rows = viewpoint(0.5, 1.0, std=0.1)
    rows[0]["CIDEr-D"]["semantic"] = rows[0]["std"]["CIDEr-D"]["semantic"] = 0.5
    del rows[1]["std"]
    scores = {"bins": bins({"total": 7, "semantic": 7}, {"total": 8}), "systems": {ODD: rows}}
    (chart,) = viewpoint_charts(scores, {ODD: COLORS[0]})
    assert chart.title == "CIDEr-D x 100, all pairs"
    heights = {text: y for text, (_, y) in tooltips(chart).items()}
    low, high = f"{ODD}, IoU 0.00 to 0.10: 50.0 ± 10.0", f"{ODD}, IoU 0.10 to 0.20: 100.0"
    assert heights == {low: pytest.approx((heights[high] + height_of(chart, "0")) / 2), high: height_of(chart, "100")}
    assert all(f">{count}</text>" in chart.svg for count in (7, 8)) and "from 50.0 to 100.0" in chart.svg


def test_the_sheet_by_viewpoint_has_lines_and_whiskers(tmp_path: Path) -> None:
    def draw(name: str, std: float) -> Path:
        systems = {"base": viewpoint(0.1, 0.2, 0.3), ODD: viewpoint(0.0, 0.5, 1.0, std=std)}
        write_viewpoint(tmp_path / name, {"bins": bins(*[{"total": 7}] * 3), "systems": systems}, ["base"])
        return tmp_path / name

    still, chart = draw("still.png", 0.0), draw("chart.png", 0.2)
    assert Image.open(chart).width == 900 and near(chart, BASELINE_COLORS[0]).sum() > 500
    assert near(chart, COLORS[0]).sum() > near(still, COLORS[0]).sum() + 100 > 500


def test_the_sheet_of_curves_has_each_system_where_its_scores_are(tmp_path: Path) -> None:
    """Of two constant curves, the higher one is above the lower one, at the heights of its tick."""
    curves = {"high": [[(0, 2.0), (100, 2.0)]] * 2, "none": [], ODD: [[(0, 1.0), (100, 1.0)]]}
    write_curves(tmp_path / "curves.png", curves)
    high, low = (np.flatnonzero(near(tmp_path / "curves.png", color)[:300, 500]).mean() for color in COLORS[:2])
    axis = np.flatnonzero(near(tmp_path / "curves.png", "#e1e1e1")[:, 500]).max()
    assert high < low < axis and (axis - high) / (axis - low) == pytest.approx(2, abs=0.05)


def test_the_style_of_the_user_does_not_count_and_matplotlib_is_imported_for_a_chart_only(tmp_path: Path) -> None:
    (tmp_path / "matplotlibrc").write_text("font.size: 40\nlines.linewidth: 9\ntext.usetex: True\n")
    curves = [["one", COLORS[0], STRAIGHT]]
    program = (
        "import sys; from diffcap.report.charts import curve_chart; "
        f"assert 'matplotlib' not in sys.modules; print(curve_chart('train/loss', {json.dumps(curves)}).svg)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == curve_chart("train/loss", [("one", COLORS[0], STRAIGHT)]).svg.strip()


def log(folder: Path, stage: str, version: str, text: str) -> None:
    path = folder / stage / "logs" / version / "metrics.csv"
    path.parent.mkdir(parents=True)
    path.write_text(text)


def test_a_run_that_went_on_has_one_curve(tmp_path: Path) -> None:
    log(tmp_path, "finetune", "version_0", "epoch,step,train/loss,val/CIDEr-D\n0,10,4.0,\n0,20,3.0,0.5\n0,30,9.0,\n")
    log(tmp_path, "finetune", "version_10", "epoch,step,train/loss,val/CIDEr-D\n,40,1.0,0.75\n0,50,nan,\n0,6")
    log(tmp_path, "finetune", "version_9", "epoch,step,train/loss\n0,30,2.0\n0,40,8.0\n,,5.0\n0,45,fire\n")
    log(tmp_path, "pretrain", "version_0", "epoch,step,train/MLM\n0,5,6.5\n")
    log(tmp_path, "eval", "version_0", "epoch,step,train/loss\n0,5,6.5\n")
    curves = read_curves(tmp_path)
    assert curves == {
        "pretrain": {"train/MLM": [(5, 6.5)]},
        "finetune": {"train/loss": [(10, 4), (20, 3), (30, 2), (40, 1)], "val/CIDEr-D": [(20, 0.5), (40, 0.75)]},
    }
    assert read_curves(tmp_path / "nowhere") == {}


def test_a_long_curve_is_averaged() -> None:
    curve = [(float(step), float(step)) for step in range(1000)]
    short = thin_out(curve, 100)
    assert len(short) == 100 and short[0] == (4.5, 4.5) and short[-1] == (994.5, 994.5)
    assert thin_out(curve[:50], 100) == curve[:50] and thin_out([], 100) == []


def test_the_curves_of_runs_are_those_of_their_last_stage(tmp_path: Path) -> None:
    rows = "step,train/loss,val/CIDEr-D\n" + "".join(f"{step},1.5,{step / 100}\n" for step in (10, 20, 30))
    log(tmp_path / "a", "pretrain", "version_0", rows)
    log(tmp_path / "a", "finetune", "version_0", rows.replace("30,1.5,0.3", "40,1.5,0.6"))
    log(tmp_path / "b", "finetune", "version_0", "step,val/CIDEr-D\n10,0.5\n")  # one validation is no curve
    runs = [Run(tmp_path, {}, {}, [tmp_path / name / "finetune/best.ckpt"]) for name in "abc"]
    assert run_curves(runs) == [[(10.0, 0.1), (20.0, 0.2), (40.0, 0.6)]]
