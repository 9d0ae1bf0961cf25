"""The tables of the HTML report as cells: each score as text, the length of its bar (or its shade), and whether it is the best."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from diffcap.report.table import COLUMNS, GROUPS, METRICS, Rows, id_rows, mark_at, number_at, type_groups


@dataclass(frozen=True)
class Cell:
    """One number of a table.

    Attributes:
        text: score x 100, or seconds, with the footnote mark where it applies; empty without a number.
        std: its standard deviation over runs, in the same unit; empty if there is none.
        fraction: length of its bar, or its shade, from 0 to 1.
        best: whether it is the highest score of its column.
    """

    text: str
    std: str = ""
    fraction: float = 0.0
    best: bool = False


@dataclass(frozen=True)
class Grid:
    """A table: its name, its column headings, and system -> cells in the order of the columns."""

    name: str
    columns: list[str]
    rows: dict[str, list[Cell]]


def score_grids(rows: Rows) -> list[Grid]:
    """Tables of scores: "overview" with the main scores, then one with all metrics for each of `GROUPS`.

    Args:
        rows: system -> its row of `table.json`.
    """
    grids = [_grid("overview", COLUMNS, rows)]
    for group in GROUPS:
        if any(group in row for row in rows.values()):
            grids.append(_grid(group, {metric: (group, metric) for metric in METRICS}, rows))
    if len(grids) == 2 and len(grids[1].columns) < 2:  # one metric of one group, which the overview already has
        return grids[:1]
    return grids


def total_grid(name: str, rows: Rows) -> Grid:
    """Table of all metrics over all pairs (group "total"), for example with another tokenizer or other references.

    Args:
        name: title of the table. rows: system -> its row.
    """
    return _grid(name, {metric: ("total", metric) for metric in METRICS}, rows)


def id_grids(rows: Rows) -> list[Grid]:
    """Tables of the metrics of word ids, one for each of `GROUPS`; empty for datasets without the protocol levir_cc."""
    by_ids = id_rows(rows)
    return [
        _grid(f"{group.replace('_', ' ')}, word ids", {metric: (group, metric) for metric in METRICS}, by_ids)
        for group in GROUPS
        if any(group in row for row in by_ids.values())
    ]


def type_grids(rows: Rows) -> list[Grid]:
    """Tables with a column per change type, one for each metric; empty if the dataset has no change types.

    The shade of a cell is its position between the lowest and the highest score of its column.

    Args:
        rows: system -> its row of `table.json`.
    """
    order = type_groups(rows)
    if not order:
        return []
    tables = {"CIDEr-D": {group: (group, "CIDEr-D") for group in order}}
    tables["type right"] = {group: ("type_accuracy", group) for group in order}
    tables |= {metric: {group: (group, metric) for group in order} for metric in METRICS if metric != "CIDEr-D"}
    grids = []
    for name, paths in tables.items():
        grid = _grid(name, paths, rows)
        if grid.columns:
            grids.append(_shaded(grid, rows, paths))
    return grids


def _text(value: float, path: Sequence[str]) -> str:
    """Whole seconds, or a score (a fraction) x 100."""
    return f"{value:,.0f}" if tuple(path) == ("seconds",) else f"{100 * value:.2f}"


def _grid(name: str, paths: Mapping[str, tuple[str, ...]], rows: Rows) -> Grid:
    """Table of the numbers at `paths` (heading -> path in a row); columns without any number are left out."""
    kept = {
        heading: path
        for heading, path in paths.items()
        if any(number_at(row, path) is not None for row in rows.values())
    }
    cells: dict[str, list[Cell]] = {system: [] for system in rows}
    for path in kept.values():
        values = {system: number_at(row, path) for system, row in rows.items()}
        highest = max(value for value in values.values() if value is not None)
        is_score = tuple(path) != ("seconds",)  # seconds have no bar and no best
        for system, value in values.items():
            if value is None:
                cells[system].append(Cell(""))
                continue
            std = number_at(rows[system].get("std", {}), path)
            best = is_score and len(rows) > 1 and highest > 0 and _text(value, path) == _text(highest, path)
            std_text = "" if std is None else _text(std, path)
            fraction = max(0.0, value / highest) if is_score and highest > 0 else 0.0
            mark = mark_at(rows[system], path)
            cells[system].append(Cell(_text(value, path) + mark, std_text, fraction, best))
    return Grid(name, list(kept), cells)


def _shaded(grid: Grid, rows: Rows, paths: Mapping[str, tuple[str, ...]]) -> Grid:
    """Replace the fractions by shades: 0 for the lowest and 1 for the highest number of each column."""
    shades: dict[str, list[float]] = {system: [] for system in rows}
    for column in grid.columns:
        values = {system: number_at(row, paths[column]) for system, row in rows.items()}
        known = [value for value in values.values() if value is not None]
        low, high = min(known), max(known)
        for system, value in values.items():
            shade = 0.0 if value is None or high == low else (value - low) / (high - low)
            shades[system].append(shade)
    shaded = {
        system: [replace(cell, fraction=shade) for cell, shade in zip(cells, shades[system])]
        for system, cells in grid.rows.items()
    }
    return Grid(grid.name, grid.columns, shaded)
