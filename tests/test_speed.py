"""The benchmarks of speed: what they say about the results of two checkouts."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.commands import ROOT, run

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "benchmarks")  # as for a script
    BENCHMARK = runpy.run_path(str(ROOT / "benchmarks/methods.py"))


def row(**results: Any) -> dict[str, Any]:
    return {"precision": "float32", **results}


@pytest.mark.parametrize(
    ("ours", "other", "equal", "difference"),
    [
        (row(check=[100.0, 2.0]), row(check=[100.01, 2.0]), True, 1e-4),
        (row(check=[100.0, 2.0]), row(check=[100.0, 2.02]), False, 1e-2),
        (row(check=[100.0], precision="bf16"), row(check=[101.0], precision="bf16"), True, 1e-2),
        (row(check=[float("nan")]), row(check=[1.0]), False, 1.0),
        (row(words=[[1, 2], [3, 4]]), row(words=[[1, 2], [3, 4]]), True, 0.0),
        (row(words=[[1, 2], [3, 4]]), row(words=[[1, 2], [3, 5]]), False, 0.5),
    ],
)
def test_results_are_equal_within_the_tolerance_of_their_precision(
    ours: dict, other: dict, equal: bool, difference: float
) -> None:
    found = BENCHMARK["comparison"](ours, other)
    assert found["equal"] is equal and found["difference"] == pytest.approx(difference, rel=0.02)


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "equal numbers"), (1.01, "**not equal** numbers")])
def test_another_checkout_is_compared_by_its_results_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float, verdict: str
) -> None:
    (tmp_path / "before/benchmarks").mkdir(parents=True)
    (tmp_path / "before/benchmarks/cases.py").touch()

    def measured(case: dict[str, Any], checkout: Path | None = None) -> dict[str, Any]:
        numbers = {"items_per_s": 2.0, "seconds": [1.0], "peak_mb": 9.0, "libraries_mb": 3.0, "threads": 1}
        return {**numbers, "gflop": 1.0, "check": [7.0, 5.0 * (factor if checkout else 1.0)]}

    monkeypatch.setitem(BENCHMARK["methods"].__globals__, "measured", measured)
    out, against = tmp_path / "out.json", str(tmp_path / "before")
    BENCHMARK["methods"](str(out), methods=["pcl"], kinds=["MLM"], against=against)
    (ratio,) = json.loads(out.read_text())["ratios"]
    assert ratio["forms"] == "now / before" and ratio["results"]["equal"] is (factor == 1.0)
    assert ratio["results"]["tolerance"] == 1e-3
    assert f"| IDC-PCL, MLM, batch 16 | {verdict} |" in out.with_suffix(".md").read_text()


def test_the_durations_of_short_trainings_follow_from_the_benchmark() -> None:
    cases = (line.split(" | ") for line in (ROOT / "benchmarks/results.md").read_text().splitlines())
    rates = {case[0].removeprefix("| "): float(case[1]) for case in cases if len(case) >= 5 and case[1][0].isdigit()}
    settings = yaml.safe_load((ROOT / "configs/trainer/short.yaml").read_text())
    pairs = settings["trainer"]["max_steps"] * settings["data"]["batch_size"]
    section = (ROOT / "docs/train.md").read_text().partition("## How long a training takes")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.endswith(" |") and "---" not in line]
    assert len(rows) == 9 and f"{pairs:,} pairs" in section
    for _, case, rate, hours in rows[1:]:
        assert float(rate) == rates[case] and hours == f"{pairs / rates[case] / 3600:.1f}", case


@pytest.mark.thorough
def test_the_loader_is_timed_cold_and_warm_at_the_batch_size_of_the_settings(tmp_path: Path) -> None:
    options = ["--small=true", "--methods=[scorer]", "--workers=[0,1]", "--batches=2", "--out=loading.json"]
    done = run([sys.executable, str(ROOT / "benchmarks/loading.py"), *options], tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "loading.json").read_text())["cases"]
    assert [(row["workers"], row["store"]) for row in rows] == [(0, "cold"), (0, "warm"), (1, "cold"), (1, "warm")]
    assert {row["batch_size"] for row in rows} == {128}
    assert {row["bytes"] for row in rows} == {3 * 128 * 8 * 2 * 2 * 2}  # three images of a scene, float16
    assert all(row["batches_per_s"] > 0 and row["core_s_per_batch"] >= 0 for row in rows)
    assert [row["store"] for row in rows if "wait_s" in row] == ["warm", "warm"]
    assert "**tiny features: the numbers mean nothing**" in (tmp_path / "loading.md").read_text()
