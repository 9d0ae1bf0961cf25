"""Training curves out of Lightning's CSV files, and the charts drawn of them."""

import re
from pathlib import Path

import numpy as np
import pytest

from diffcap.report.charts import HEIGHT, WIDTH, curve_chart, is_score, viewpoint_charts
from diffcap.report.curve_picture import draw_curves
from diffcap.report.curves import read_curves, run_curves, thinned
from diffcap.report.drawing import COLORS


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
    short = thinned(curve, 100)
    assert len(short) == 100 and short[0] == (4.5, 4.5) and short[-1] == (994.5, 994.5)
    assert thinned(curve[:50], 100) == curve[:50] and thinned([], 100) == []


def points(path: str) -> list[tuple[float, float]]:
    numbers = [float(number) for number in re.findall(r"-?[\d.]+", path)]
    return list(zip(numbers[::2], numbers[1::2]))


def test_a_line_runs_from_its_first_value_to_its_last_on_the_ticks() -> None:
    chart = curve_chart(
        "val/CIDEr-D", [("one", 2, [(0.0, 0.0), (500.0, 0.5), (1000.0, 1.0)]), ("two", 0, [(1000.0, 0.25)])]
    )
    up, across = {label: y for y, label in chart.y_ticks}, {label: x for x, label in chart.x_ticks}
    middle = (across["0"] + across["1,000"]) / 2, (up["0"] + up["100"]) / 2
    expected = [(across["0"], up["0"]), middle, (across["1,000"], up["100"])]
    assert np.array(points(chart.lines[0].path)) == pytest.approx(np.array(expected), abs=0.1)
    assert chart.lines[0].system == 2 and chart.lines[0].dots[-1].text == "one, step 1,000: 100"
    assert chart.summary == "val/CIDEr-D by step: one ends at 100; two ends at 25"
    assert all(0 < x < WIDTH and 0 < y < HEIGHT for line in chart.lines for x, y in points(line.path))
    flat = curve_chart("lr-Adam", [("one", 0, [(10.0, 0.001), (20.0, 0.001)])])
    assert len({y for _, y in points(flat.lines[0].path)}) == 1
    below = curve_chart("train/loss", [("one", 0, [(1.0, -3.0), (2.0, 5.0)])])
    assert points(below.lines[0].path)[0][1] > dict(map(reversed, below.y_ticks))["0"]
    assert is_score("val/BLEU-4") and not is_score("val/caption_loss")


def test_charts_by_viewpoint_leave_out_what_a_bin_lacks() -> None:
    bins = [
        {"low": 0.1, "high": 0.4, "pairs": {"total": 7, "semantic": 7}},
        {"low": 0.5, "high": 0.9, "pairs": {"total": 8}},
    ]
    rows = [
        {"CIDEr-D": {"total": 0.5, "semantic": 0.5}, "std": {"CIDEr-D": {"total": 0.1, "semantic": 0.1}}},
        {"CIDEr-D": {"total": 1.0}},
    ]
    charts = viewpoint_charts({"bins": bins, "systems": {"one": rows}}, {"one": 3})
    assert [chart.title for chart in charts] == ["CIDEr-D x 100, all pairs"]
    line, up = charts[0].lines[0], {label: y for y, label in charts[0].y_ticks}
    assert line.system == 3 and [y for _, y in points(line.path)] == [(up["0"] + up["100"]) / 2, up["100"]]
    assert line.dots[0].text == "one, IoU 0.10 to 0.40: 50.0 ± 10.0" and line.dots[1].spread == 0
    assert line.dots[0].spread == pytest.approx((up["0"] - up["100"]) / 10, abs=0.1)
    assert [label for _, label in charts[0].x_sublabels] == ["7", "8"]


def test_the_curves_of_runs_are_those_of_their_last_stage(tmp_path: Path) -> None:
    rows = "step,train/loss,val/CIDEr-D\n" + "".join(f"{step},1.5,{step / 100}\n" for step in (10, 20, 30))
    log(tmp_path / "a", "pretrain", "version_0", rows)
    log(tmp_path / "a", "finetune", "version_0", rows.replace("30,1.5,0.3", "40,1.5,0.6"))
    log(tmp_path / "b", "finetune", "version_0", "step,val/CIDEr-D\n10,0.5\n")  # one validation is no curve
    found = run_curves(
        [(tmp_path / "a", ("pretrain", "finetune")), (tmp_path / "b", ("finetune",)), (tmp_path / "c", ())]
    )
    assert found == [[(10.0, 0.1), (20.0, 0.2), (40.0, 0.6)]]


def test_the_picture_of_curves_has_each_system_where_its_scores_are() -> None:
    """Of two constant curves, the higher one is above the lower one, at the heights of its tick."""
    sheet = np.array(
        draw_curves({"high": [[(0, 2.0), (100, 2.0)]], "none": [], "low": [[(0, 1.0), (100, 1.0)]]}, "title")
    )
    column = sheet[:, 500].astype(int)
    high, low = (np.flatnonzero((np.abs(column - np.array(color)) < 40).all(1)).mean() for color in COLORS[:2])
    axis = np.flatnonzero((column == 120).all(1)).max()
    assert high < low < axis and (axis - high) / (axis - low) == pytest.approx(2, abs=0.05)
