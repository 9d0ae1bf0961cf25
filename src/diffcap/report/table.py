"""The results table: `table.json`'s rows for the terminal and as Markdown. Files hold fractions; tables show them x 100."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from diffcap.evaluation.protocols import TYPE_ORDER, remarks
from diffcap.evaluation.tables import MARK, is_weightless, score_notes

if TYPE_CHECKING:
    from rich.table import Table

Rows = Mapping[str, Mapping[str, Any]]
Lines = list[list[str]]

# heading -> where the number stands in a row
COLUMNS = {
    "BLEU-4": ("total", "BLEU-4"),
    "METEOR": ("total", "METEOR"),
    "ROUGE-L": ("total", "ROUGE-L"),
    "CIDEr-D": ("total", "CIDEr-D"),
    "SPICE": ("total", "SPICE"),
    "CIDEr-D semantic": ("semantic", "CIDEr-D"),
    "CIDEr-D distractor": ("distractor", "CIDEr-D"),
    "type right": ("slots", "type"),
    "object right": ("slots", "object"),
    "training seconds": ("seconds",),
}
GROUPS = ("total", "semantic", "distractor")
METRICS = ("BLEU-4", "METEOR", "ROUGE-L", "CIDEr-D", "SPICE")
_NOT_GROUPS = ("slots", "type_accuracy", "seconds", "steps", "std", "runs")


def number_at(row: Mapping[str, Any], path: Sequence[str]) -> float | None:
    """The number at a place of a row, such as ("total", "CIDEr-D"); None where it has none."""
    value: Any = row
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _cell(row: Mapping[str, Any], path: Sequence[str], spread: str) -> str:
    value, std = number_at(row, path), number_at(row.get("std", {}), path)
    if value is None:
        return "-"
    shown: Callable[[float], str] = (lambda x: f"{x:,.0f}") if path == ("seconds",) else (lambda x: f"{100 * x:.2f}")
    return shown(value) + mark_at(row, path) + (f"{spread}{shown(std)}" if std is not None else "")


def mark_at(row: Mapping[str, Any], path: Sequence[str]) -> str:
    """The footnote mark behind the number at a place of a row, see `is_weightless`; mostly ""."""
    return MARK if path[-1] == "CIDEr-D" and is_weightless(row[path[0]]) else ""


def system_lines(rows: Rows, spread: str = " ± ") -> Lines:
    """Systems by scores, as text: first the headings, then a line a system. Columns that no row has are left out."""
    columns = {
        name: path for name, path in COLUMNS.items() if any(number_at(row, path) is not None for row in rows.values())
    }
    return [
        ["", *columns],
        *([name, *(_cell(row, path, spread) for path in columns.values())] for name, row in rows.items()),
    ]


def type_groups(rows: Rows) -> list[str]:
    """The groups that change types form, in the order of the papers, then the distractors; none where there are no types."""
    names = {name for row in rows.values() for name in row} - {*_NOT_GROUPS, *GROUPS}
    if not names:
        return []
    return [*(name for name in TYPE_ORDER if name in names), *sorted(names - set(TYPE_ORDER)), "distractor"]


def type_lines(rows: Rows, spread: str = " ± ") -> Lines:
    """CIDEr-D and the share of right change types, by change type; empty where the dataset has no types."""
    order = type_groups(rows)
    if not order:
        return []
    lines = [["", "", *order]]
    for name, row in rows.items():
        lines.append([name, "CIDEr-D", *(_cell(row, (group, "CIDEr-D"), spread) for group in order)])
        if "type_accuracy" in row:
            lines.append(["", "type right", *(_cell(row, ("type_accuracy", group), spread) for group in order)])
    return lines


def group_lines(rows: Rows, spread: str = " ± ") -> Lines:
    """The five metrics on all pairs, changes alone and distractors alone, as the papers' tables have them.

    Empty where the dataset has one group only; a metric that no row has is left out.
    """
    groups = [group for group in GROUPS if any(group in row for row in rows.values())]
    if len(groups) < 2:
        return []
    metrics = [name for name in METRICS if any(number_at(row, ("total", name)) is not None for row in rows.values())]
    return [
        ["", "", *metrics],
        *(
            [group if first == 0 else "", name, *(_cell(row, (group, metric), spread) for metric in metrics)]
            for group in groups
            for first, (name, row) in enumerate(rows.items())
        ),
    ]


def rich_table(lines: Lines, title: str, words: int = 1) -> "Table":
    """Lines as a rich table; `words` is the number of line_height columns that hold words. Headings break at blanks."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for number, heading in enumerate(lines[0]):
        text = heading.replace(" ", "\n") if number >= words else heading
        table.add_column(text, justify="left" if number < words else "right", no_wrap=number >= words)
    for line in lines[1:]:
        table.add_row(*line)
    return table


def markdown(lines: Lines, words: int = 1) -> str:
    """Lines as a Markdown table, without a final line break."""
    rule = [*["---"] * words, *["---:"] * (len(lines[0]) - words)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]])


def caption_of(protocol: Mapping[str, Any], rows: Rows) -> str:
    """One sentence on how the numbers came about."""
    return f"{protocol['dataset']}, {protocol['split']} split, {scoring_of(protocol, rows)}"


def scoring_of(protocol: Mapping[str, Any], rows: Rows) -> str:
    """What `caption_of` says after the dataset and the split."""
    seeds = sorted({int(row.get("runs", 1)) for row in rows.values()})
    decoding = "greedy decoding" if protocol.get("beams") == 1 else f"beam search of {protocol.get('beams')}"
    changes = f"{protocol['changes']} change, " if protocol.get("changes") else ""
    several = f"; mean ± standard deviation over {seeds[-1]} runs" if seeds and seeds[-1] > 1 else ""
    groups = (row[name] for row in rows.values() for name in row if name in protocol["pairs"])
    notes = [*([protocol["remark"]] if protocol.get("remark") else []), *score_notes(groups, protocol["pairs"])]
    return (
        f"{remarks(protocol)}{changes}{protocol['pairs']['total']:,} pairs, {protocol['tokenizer']} tokens, {decoding}; "
        f"scores x 100{several}.{''.join(f' {note}' for note in notes)}"
    )


def report_text(protocol: Mapping[str, Any], rows: Rows, runs: Sequence[str]) -> str:
    """What `table.md` holds: the systems, then all metrics by group, then the runs by change type."""
    parts = [markdown(system_lines(rows)), caption_of(protocol, rows)]
    by_group = group_lines(rows)
    if by_group:
        parts.append(markdown(by_group, words=2))
    by_type = type_lines({name: rows[name] for name in runs})
    if by_type:
        parts.append(markdown(by_type, words=2))
    return "\n\n".join(parts) + "\n"
