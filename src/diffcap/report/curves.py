"""Training curves: the values that a run's stages logged, from Lightning's CSV files."""

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from diffcap.run_folder import LOGS, STAGES

Curve = list[tuple[float, float]]
MONITORED = "val/CIDEr-D"

_MOST_POINTS = 240  # of a curve; neighbours are averaged in longer ones, since a screen shows no more


def read_curves(folder: str | Path, stages: Sequence[str] = STAGES) -> dict[str, dict[str, Curve]]:
    """Read every value that a run's stages logged.

    An interrupted run has a file for each session. If two have the same step, the later one counts, since it continued from an
    earlier checkpoint.

    Args:
        folder: the run's, `runs/<dataset>/<method>`. stages: of it, in the order of the training.

    Returns:
        stage -> name ("val/CIDEr-D") -> (optimiser step, value) by step; only stages and names with a number.
    """

    def session(path: Path) -> tuple[int, str]:
        number = path.parent.name.removeprefix("version_")
        return int(number) if number.isdecimal() else -1, path.parent.name

    found = {}
    for stage in stages:
        values: dict[str, dict[float, float]] = {}
        for path in sorted(Path(folder).glob(f"{stage}/{LOGS}/version_*/metrics.csv"), key=session):
            for step, name, value in _rows(path):
                values.setdefault(name, {})[step] = value
        if values:
            found[stage] = {name: sorted(points.items()) for name, points in sorted(values.items())}
    return found


def run_curves(lineages: Iterable[tuple[str | Path, Sequence[str]]]) -> list[Curve]:
    """The validation CIDEr-D of the last stage of each lineage (folder, stages in order) that logged at least two values."""
    curves = []
    for folder, stages in lineages:
        by_stage = read_curves(folder, stages[-1:])
        curve = by_stage.get(stages[-1], {}).get(MONITORED, []) if stages else []
        if len(curve) > 1:
            curves.append(curve)
    return curves


def _rows(path: Path) -> Iterable[tuple[float, str, float]]:
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        for row in csv.DictReader(file):
            step = _number(row.get("step"))
            if step is None:  # a line that was cut off
                continue
            for name, text in row.items():
                value = _number(text)
                if name not in ("step", "epoch", None) and value is not None:
                    yield step, name, value


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text else math.nan
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None


def thinned(curve: Sequence[tuple[float, float]], most: int = _MOST_POINTS) -> Curve:
    """Reduce a curve to at most `most` points, which are means of neighbouring points."""
    size = -(-len(curve) // most) or 1
    parts = [curve[start : start + size] for start in range(0, len(curve), size)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]
