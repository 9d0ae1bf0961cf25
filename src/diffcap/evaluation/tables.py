"""Tables of scores for the terminal and as Markdown. Files hold fractions; tables show them times 100, as the papers do."""

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
    """Return a rich table with one row per group (or method) and one column per metric.

    Args:
        rows: row name -> metric -> score, for example "groups" of `metrics.json`.
        title: of the table.
        digits: decimal places of the scores times 100.
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
    """Print a table; if the output is not a terminal, it is 160 characters wide.

    Names are printed unchanged: rich's markup is disabled, and control characters are escaped.
    """
    from rich.console import Console
    from rich.segment import Segment, Segments

    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, emoji=False)
    segments = [
        Segment("\n".join(map(printable, segment.text.split("\n"))), segment.style) for segment in console.render(table)
    ]
    console.print(Segments(segments), end="")


def markdown_table(rows: Rows, corner: str = "", digits: int = 2) -> str:
    """Return the table as Markdown, without a final line break.

    Args:
        rows, digits: see `metrics_table`. corner: heading of the first column.

    Example:
        >>> print(markdown_table({"total": {"BLEU-4": 0.5, "CIDEr-D": 1.25}}, "group"))
        | group | BLEU-4 | CIDEr-D |
        | --- | ---: | ---: |
        | total | 50.00 | 125.00 |
    """
    columns = _columns(rows)
    lines = [[corner, *columns], ["---", *["---:"] * len(columns)]]
    lines += [[name, *(_cell(scores.get(column), digits) for column in columns)] for name, scores in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
