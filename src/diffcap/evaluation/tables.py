"""Tables of scores for the terminal and as Markdown. Files hold fractions; tables show them times 100, as the papers do."""

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from diffcap.datasets.no_change import is_no_change, plain_caption
from diffcap.utils.errors import printable
from diffcap.utils.table import Cell, Table

MetricRows = Mapping[str, Mapping[str, float]]  # row name -> metric -> score

SMALL_GROUP = 30  # with fewer pairs, a score's confidence interval is about as wide as the differences between methods
WEIGHTLESS_MARK = " †"
WEIGHTLESS_NOTE = (
    "† CIDEr-D gives no weight to phrases that occur in the references of all pairs of a group. Here, captions and references share no "
    "other phrases. In a group of one pair, or of pairs with equal references, even perfect captions get 0.00. Compare another metric."
)


def is_weightless(scores: Mapping[str, float]) -> bool:
    """Return True if CIDEr-D is 0, that is, if captions and references share no n-gram that has a weight."""
    cider = scores.get("CIDEr-D")
    return cider is not None and abs(cider) < 1e-9


def score_notes(group_scores: Iterable[Mapping[str, float]], pair_counts: Mapping[str, int]) -> list[str]:
    """Return the footnotes of a table: one if CIDEr-D is 0 in any of `group_scores`, and one if there are groups of few pairs."""
    notes = []
    if any(map(is_weightless, group_scores)):
        notes.append(WEIGHTLESS_NOTE)
    if small_groups := [f"{name} {count}" for name, count in pair_counts.items() if 0 < count < SMALL_GROUP]:
        notes.append(
            f"Groups of fewer than {SMALL_GROUP} pairs ({', '.join(small_groups)}): their scores depend strongly on the choice of the "
            "pairs."
        )
    return notes


def caption_notes(captions: Mapping[str, str], references: Mapping[str, Sequence[str]]) -> list[str]:
    """Return notes if captions are empty, or if most pairs have the same caption although many of their references differ."""
    plain_texts = {id: plain_caption(captions[id]) for id in references}
    counts = Counter(plain_texts.values())
    empty = counts.pop("", 0)
    notes = [f"{empty:,} of {len(plain_texts):,} captions are empty."] if empty else []
    common, count = counts.most_common(1)[0] if counts else ("", 0)
    if count > len(plain_texts) / 2:
        common_is_no_change = is_no_change(common)

        def agrees(reference: str) -> bool:
            return plain_caption(reference) == common or (common_is_no_change and is_no_change(reference))

        is_wrong = [plain_texts[id] == common and not any(map(agrees, texts)) for id, texts in references.items()]
        right = count - sum(is_wrong)
        # A captioner that is right about many pairs without change gets no note. Two wrong captions can be chance.
        if sum(is_wrong) > max(2, len(plain_texts) / 10):
            notes.append(
                f'{count:,} of {len(plain_texts):,} captions are "{common}"; the references of {right:,} of these pairs say the same.'
            )
    return notes


def metrics_table(rows: MetricRows, title: str = "", pair_counts: Mapping[str, int] | None = None) -> Table:
    """Return a table with one row per group (or method) and one column per metric; `score_notes` are its footnotes.

    `rows` are for example "groups" of `metrics.json`. `pair_counts`: group -> number of pairs.
    """
    columns = list(dict.fromkeys(metric for scores in rows.values() for metric in scores))
    lines = []
    for name, scores in rows.items():
        texts = {metric: f"{100 * score:.2f}" for metric, score in scores.items()}
        if is_weightless(scores):
            texts["CIDEr-D"] += WEIGHTLESS_MARK
        lines.append(([name], [Cell(texts.get(column, "")) for column in columns]))
    note = "\n".join(["fractions x 100", *score_notes(rows.values(), pair_counts or {})])
    return Table(columns, lines, title=title, note=note)


def validation_line(values: Mapping[str, float]) -> str:
    """Return a line for the log: losses and ranks as they are, then scores (fractions) times 100 with three decimals.

    Example:
        >>> validation_line({"caption_loss": 3.5, "BLEU-4": 0.5, "CIDEr-D": 1.25})
        'caption_loss 3.5000  scores x 100: BLEU-4 50.000  CIDEr-D 125.000'
    """
    score_names = [name for name in values if re.match(r"(BLEU|METEOR|ROUGE|CIDEr|SPICE)|.*(R@|accuracy)", name)]
    parts = [f"{name} {float(value):.4f}" for name, value in values.items() if name not in score_names]
    if score_names:
        scores = [f"{name} {100 * float(values[name]):.3f}" for name in score_names]
        parts.append("scores x 100: " + "  ".join(scores))
    return "  ".join(parts)


def print_table(table: Table) -> None:
    """Print a table, at most 160 characters wide if stdout is no terminal. Brackets are printed, control characters are escaped."""
    from rich.console import Console
    from rich.segment import Segment, Segments

    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, emoji=False)
    segments = [
        Segment("\n".join(map(printable, segment.text.split("\n"))), segment.style)
        for segment in console.render(table.rich())
    ]
    console.print(Segments(segments), end="")


def print_scores(result: Mapping[str, Any], title: str) -> None:
    """Print `result`, the content of a `metrics.json`: tables of the groups' scores, and of word ids and further scores."""
    pair_counts = result["protocol"]["pairs"]
    print_table(metrics_table(result["groups"], f"{title}{result['protocol']['tokenizer']} tokens", pair_counts))
    if "id_tokens" in result:
        id_protocol = result["id_tokens"]["protocol"]
        ids_title = f"{title}protocol {id_protocol['name']}, {id_protocol['vocabulary_size']} ids"
        print_table(metrics_table(result["id_tokens"]["groups"], ids_title, pair_counts))
    for table in further_tables(result, title):
        print_table(table)


def further_tables(result: Mapping[str, Any], title: str) -> list[Table]:
    """Return a table of each score beside n-grams in `result`, the content of a `metrics.json`."""
    tables = []
    for name, further in result.get("further", {}).items():
        groups, lines = further["groups"], []
        for group, scores in groups.items():
            values = [[f"{100 * value:.2f}" for value in mean_and_interval] for mean_and_interval in scores.values()]
            lines.append(([group], [Cell(f"{mean} [{low}, {high}]") for mean, low, high in values]))
        note = "\n".join(["fractions x 100 [95 % interval]", *further["notes"]])
        tables.append(Table([*groups.get("total", ())], lines, title=f"{title}{name}, {further['model']}", note=note))
    return tables
