"""The page's tables as cells: the number as text, the length of its bar or its shade, and whether it is its column's best."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from diffcap.report.table import COLUMNS, GROUPS, METRICS, Rows, mark_at, number_at, type_groups


@dataclass(frozen=True)
class Cell:
    """One number; `share` from 0 to 1 is the length of its bar, or its shade. `text` is empty if there is no number."""

    text: str
    spread: str = ""
    share: float = 0.0
    best: bool = False


@dataclass(frozen=True)
class Grid:
    """A table: its column headings, and the cells of each system."""

    name: str
    columns: list[str]
    rows: dict[str, list[Cell]]


def score_grids(rows: Rows) -> list[Grid]:
    """Tables of the systems: their main scores, then all metrics of each group."""
    grids = [_grid("overview", COLUMNS, rows)]
    for group in GROUPS:
        if any(group in row for row in rows.values()):
            grids.append(_grid(group, {metric: (group, metric) for metric in METRICS}, rows))
    return grids if len(grids) > 2 else [grids[0], *(grid for grid in grids[1:] if len(grid.columns) > 1)]


def group_grid(name: str, rows: Rows) -> Grid:
    """Table of all metrics on all pairs, for scores by a second protocol."""
    return _grid(name, {metric: ("total", metric) for metric in METRICS}, rows)


def type_grids(rows: Rows) -> list[Grid]:
    """Tables of the systems by change type, one per metric, shaded per column; empty if the dataset has no types."""
    order = type_groups(rows)
    if not order:
        return []
    paths_of = {"CIDEr-D": [(group, "CIDEr-D") for group in order]}
    paths_of["type right"] = [("type_accuracy", group) for group in order]
    paths_of |= {metric: [(group, metric) for group in order] for metric in METRICS if metric != "CIDEr-D"}
    grids = []
    for name, paths in paths_of.items():
        grid = _grid(name, dict(zip(order, paths)), rows)
        if grid.columns:
            grids.append(_shaded(grid, rows, dict(zip(order, paths))))
    return grids


def _text(value: float, path: Sequence[str]) -> str:
    return f"{value:,.0f}" if tuple(path) == ("seconds",) else f"{100 * value:.2f}"


def _grid(name: str, places: Mapping[str, tuple[str, ...]], rows: Rows) -> Grid:
    kept = {
        heading: path
        for heading, path in places.items()
        if any(number_at(row, path) is not None for row in rows.values())
    }
    cells: dict[str, list[Cell]] = {system: [] for system in rows}
    for path in kept.values():
        values = {system: number_at(row, path) for system, row in rows.items()}
        highest = max(value for value in values.values() if value is not None)
        scored = tuple(path) != ("seconds",)
        for system, value in values.items():
            if value is None:
                cells[system].append(Cell(""))
                continue
            std = number_at(rows[system].get("std", {}), path)
            best = scored and len(rows) > 1 and highest > 0 and _text(value, path) == _text(highest, path)
            spread = "" if std is None else _text(std, path)
            share = max(0.0, value / highest) if scored and highest > 0 else 0.0
            mark = mark_at(rows[system], path)
            cells[system].append(Cell(_text(value, path) + mark, spread, round(share, 4), best))
    return Grid(name, list(kept), cells)


def _shaded(grid: Grid, rows: Rows, places: Mapping[str, tuple[str, ...]]) -> Grid:
    """Replace the shares by shades: 0 for the lowest and 1 for the highest number of each column."""
    shades: dict[str, list[float]] = {system: [] for system in rows}
    for column in grid.columns:
        values = {system: number_at(row, places[column]) for system, row in rows.items()}
        known = [value for value in values.values() if value is not None]
        low, high = min(known), max(known)
        for system, value in values.items():
            shade = 0.0 if value is None or high == low else (value - low) / (high - low)
            shades[system].append(round(shade, 4))
    shaded = {
        system: [replace(cell, share=shade) for cell, shade in zip(cells, shades[system])]
        for system, cells in grid.rows.items()
    }
    return Grid(grid.name, grid.columns, shaded)
