"""Tables of scores for the terminal and as Markdown. Files hold fractions; tables show them times 100, as the papers do."""

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from diffcap.datasets.no_change import is_no_change, plain
from diffcap.utils.errors import printable
from diffcap.utils.table import Cell, Table

Rows = Mapping[str, Mapping[str, float]]

SMALL_GROUP = 30  # pairs; below, an interval of a score is about as wide as the differences between methods
MARK = " †"
WEIGHTLESS_NOTE = (
    "† CIDEr-D gives no weight to phrases that occur in the references of all pairs of a group, and captions and references share no "
    "others here. In a group of one pair, or of pairs with equal references, even perfect captions get 0.00. Compare another metric."
)


def is_weightless(scores: Mapping[str, float]) -> bool:
    """Whether CIDEr-D is 0: captions and references share no n-gram that has a weight, see `WEIGHTLESS_NOTE`."""
    cider = scores.get("CIDEr-D")
    return cider is not None and abs(cider) < 1e-9


def score_notes(groups: Iterable[Mapping[str, float]], pairs: Mapping[str, int]) -> list[str]:
    """Notes about a table's groups: `groups` are the scores of each, also of several systems, `pairs` their numbers of pairs."""
    notes = []
    if any(map(is_weightless, groups)):
        notes.append(WEIGHTLESS_NOTE)
    if small := [f"{name} {count}" for name, count in pairs.items() if 0 < count < SMALL_GROUP]:
        notes.append(
            f"Groups of fewer than {SMALL_GROUP} pairs ({', '.join(small)}): their scores depend strongly on the choice of the "
            "pairs."
        )
    return notes


def caption_notes(captions: Mapping[str, str], references: Mapping[str, Sequence[str]]) -> list[str]:
    """Whether captions are empty, or one caption is that of more than half of the pairs although many references say something else."""
    said = {id: plain(captions[id]) for id in references}
    counts = Counter(said.values())
    empty = counts.pop("", 0)
    notes = [f"{empty:,} of {len(said):,} captions are empty."] if empty else []
    common, count = counts.most_common(1)[0] if counts else ("", 0)
    if count > len(said) / 2:
        unchanged = is_no_change(common)
        wrong = sum(
            said[id] == common
            and not any(plain(text) == common or (unchanged and is_no_change(text)) for text in texts)
            for id, texts in references.items()
        )
        if wrong > max(
            2, len(said) / 10
        ):  # not if a captioner is right about many pairs without change; two can be chance
            notes.append(
                f'{count:,} of {len(said):,} captions are "{common}"; the references of {count - wrong:,} of these pairs say the same.'
            )
    return notes


def metrics_table(rows: Rows, title: str = "", pairs: Mapping[str, int] | None = None, corner: str = "") -> Table:
    """A table with one row per group (or method) and one column per metric; footnotes see `score_notes`.

    Args:
        rows: row name -> metric -> score, for example "groups" of `metrics.json`. pairs: group -> number of pairs.
        corner: heading of the first column.
    """
    columns = list(dict.fromkeys(name for scores in rows.values() for name in scores))
    lines = []
    for name, scores in rows.items():
        texts = {metric: f"{100 * score:.2f}" for metric, score in scores.items()}
        if is_weightless(scores):
            texts["CIDEr-D"] += MARK
        lines.append(([name], [Cell(texts.get(column, "")) for column in columns]))
    note = "\n".join(["fractions x 100", *score_notes(rows.values(), pairs or {})])
    return Table(columns, lines, [corner], title, note)


def validation_line(values: Mapping[str, float]) -> str:
    """Return losses and ranks as they are, then scores (fractions) times 100 as in the tables, with one decimal more.

    Example:
        >>> validation_line({"caption_loss": 3.5, "BLEU-4": 0.5, "CIDEr-D": 1.25})
        'caption_loss 3.5000  scores x 100: BLEU-4 50.000  CIDEr-D 125.000'
    """
    scores = [name for name in values if re.match(r"(BLEU|METEOR|ROUGE|CIDEr|SPICE)|.*(R@|accuracy)", name)]
    parts = [f"{name} {float(value):.4f}" for name, value in values.items() if name not in scores]
    shown = [f"{name} {100 * float(values[name]):.3f}" for name in scores]
    return "  ".join([*parts, *([f"scores x 100: {shown[0]}", *shown[1:]] if shown else [])])


def print_table(table: Table) -> None:
    """Print a table, without rich's markup and with control characters escaped; 160 characters wide if not to a terminal."""
    from rich.console import Console
    from rich.segment import Segment, Segments

    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, emoji=False)
    segments = [
        Segment("\n".join(map(printable, segment.text.split("\n"))), segment.style)
        for segment in console.render(table.rich())
    ]
    console.print(Segments(segments), end="")


def print_scores(result: Mapping[str, Any], title: str) -> None:
    """Print the tables of the groups in the content of a `metrics.json`: of its tokens, and of word ids if there are any."""
    pairs = result["protocol"]["pairs"]
    print_table(metrics_table(result["groups"], f"{title}{result['protocol']['tokenizer']} tokens", pairs=pairs))
    if "id_tokens" in result:
        ids = result["id_tokens"]
        described = f"protocol {ids['protocol']['name']}, {ids['protocol']['vocabulary_size']} ids"
        print_table(metrics_table(ids["groups"], f"{title}{described}", pairs=pairs))
