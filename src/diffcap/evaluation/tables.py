"""Scores as a table to print and as Markdown. Files hold fractions; tables show them times 100, as the papers do."""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from diffcap.errors import printable

if TYPE_CHECKING:
    from rich.table import Table

Rows = Mapping[str, Mapping[str, float]]


def _columns(rows: Rows) -> list[str]:
    return list(dict.fromkeys(name for scores in rows.values() for name in scores))


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f}"


def metrics_table(rows: Rows, title: str = "", digits: int = 2) -> "Table":
    """A rich table of groups (or methods) by metrics.

    Args:
        rows: row name -> metric -> fraction, such as `metrics.json`'s "groups".
        title: stands above it.
        digits: after the point, of a hundredfold score.
    """
    from rich import box
    from rich.table import Table

    table = Table(title=title or None, box=box.SIMPLE_HEAD, pad_edge=False, caption="fractions x 100")
    columns = _columns(rows)
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for name, scores in rows.items():
        table.add_row(name, *(_cell(scores.get(column), digits) for column in columns))
    return table


def print_table(table: "Table") -> None:
    """Print a table whole: a pipe or a log file has no width of its own, so it gets enough.

    Names in it are printed as they are: rich's markup is off, and control characters are escaped.
    """
    from rich.console import Console
    from rich.segment import Segment, Segments

    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, emoji=False)
    shown = [
        Segment("\n".join(map(printable, segment.text.split("\n"))), segment.style) for segment in console.render(table)
    ]
    console.print(Segments(shown), end="")


def markdown_table(rows: Rows, corner: str = "", digits: int = 2) -> str:
    """The same table in Markdown, without a final line break; `corner` heads the first column."""
    columns = _columns(rows)
    lines = [[corner, *columns], ["---", *["---:"] * len(columns)]]
    lines += [[name, *(_cell(scores.get(column), digits) for column in columns)] for name, scores in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
