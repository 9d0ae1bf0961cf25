"""The results table of `table.json` for the terminal and as Markdown. Files hold fractions; tables show them x 100."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from diffcap.evaluation.protocols import TYPE_ORDER, remarks
from diffcap.evaluation.tables import MARK, WEIGHTLESS_NOTE, escape_markdown, is_weightless, score_notes
from diffcap.records import NO_CHANGE_GROUPS

if TYPE_CHECKING:
    from rich.table import Table

Rows = Mapping[str, Mapping[str, Any]]
Lines = list[list[str]]

# heading -> path of the number in a row
COLUMNS = {
    "BLEU-4": ("total", "BLEU-4"),
    "METEOR": ("total", "METEOR"),
    "ROUGE-L": ("total", "ROUGE-L"),
    "CIDEr-D": ("total", "CIDEr-D"),
    "SPICE": ("total", "SPICE"),
    "CIDEr-D semantic": ("semantic", "CIDEr-D"),
    "CIDEr-D distractor": ("distractor", "CIDEr-D"),
    "CIDEr-D change": ("change", "CIDEr-D"),
    "CIDEr-D no change": ("no_change", "CIDEr-D"),
    "S*m": ("total", "S*m"),
    "change accuracy": ("change", "accuracy"),
    "no-change accuracy": ("no_change", "accuracy"),
    "semantic accuracy": ("semantic", "accuracy"),
    "distractor accuracy": ("distractor", "accuracy"),
    "type right": ("slots", "type"),
    "object right": ("slots", "object"),
    "training seconds": ("seconds",),
}
ZERO_SHOT_NOTE = (
    "Without training, a model does not know the style of the references: n-gram scores (BLEU, METEOR, ROUGE-L, CIDEr-D) measure the "
    "style first, and a low score does not show that the captions are wrong."
)
ALL_WORDS = "all words"  # of the attention maps, in localisation
GROUPS = ("total", "semantic", "distractor", "change", "no_change")
METRICS = ("BLEU-4", "METEOR", "ROUGE-L", "CIDEr-D", "SPICE", "S*m", "accuracy")
_NOT_GROUPS = ("slots", "type_accuracy", "id_tokens", "seconds", "steps", "std", "runs")


def number_at(row: Mapping[str, Any], path: Sequence[str]) -> float | None:
    """The number at a path of a row, such as ("total", "CIDEr-D"); None if there is none."""
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
    """The footnote mark of the number at a path of a row, see `is_weightless`; "" for most."""
    return MARK if path[-1] == "CIDEr-D" and is_weightless(row[path[0]]) else ""


def system_lines(rows: Rows, spread: str = " ± ") -> Lines:
    """Table of the main scores: headings, then a line per system. Columns without any number are left out."""
    columns = {
        name: path for name, path in COLUMNS.items() if any(number_at(row, path) is not None for row in rows.values())
    }
    return [
        ["", *columns],
        *([name, *(_cell(row, path, spread) for path in columns.values())] for name, row in rows.items()),
    ]


def type_groups(rows: Rows) -> list[str]:
    """The change types in the order of the papers, then the group without change; empty if there are no types."""
    every = {name for row in rows.values() for name in row}
    names = every - {*_NOT_GROUPS, *GROUPS}
    if not names:
        return []
    unchanged = (name for name in NO_CHANGE_GROUPS if name in every)
    return [*(name for name in TYPE_ORDER if name in names), *sorted(names - set(TYPE_ORDER)), *unchanged]


def type_lines(rows: Rows, spread: str = " ± ") -> Lines:
    """Table of CIDEr-D and the accuracy of the change type, by change type; empty if the dataset has no types."""
    order = type_groups(rows)
    if not order:
        return []
    lines = [["", "", *order]]
    for name, row in rows.items():
        lines.append([name, "CIDEr-D", *(_cell(row, (group, "CIDEr-D"), spread) for group in order)])
        if "type_accuracy" in row:
            lines.append(["", "type right", *(_cell(row, ("type_accuracy", group), spread) for group in order)])
    return lines


def group_lines(rows: Rows, spread: str = " ± ", least: int = 2) -> Lines:
    """Table of the metrics on all pairs, on changes and on pairs without change, as in the papers.

    The result is [] if the dataset has fewer groups than `least`. A metric that no run has is left out.
    """
    groups = [group for group in GROUPS if any(group in row for row in rows.values())]
    if len(groups) < least:
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


def id_rows(rows: Rows) -> Rows:
    """The scores of word ids (protocol levir_cc) as rows, of the systems that have them; none on other datasets."""
    return {
        name: {**row["id_tokens"], "std": row.get("std", {}).get("id_tokens", {})}
        for name, row in rows.items()
        if "id_tokens" in row
    }


def id_note(vocabularies: Mapping[str, Mapping[str, Any]]) -> str:
    """What the scores of word ids were computed with.

    Args:
        vocabularies: system -> "id_tokens"."protocol" of its `metrics.json`.
    """
    systems: dict[str, list[str]] = {}
    for name, one in vocabularies.items():
        systems.setdefault(f"{one['vocabulary_size']} ids, {one['vocabulary']}", []).append(name)
    rules = "; ".join(f"{' / '.join(names)}: {rule}" if len(systems) > 1 else rule for rule, names in systems.items())
    return f"Protocol levir_cc: scores of word ids. Vocabulary: {rules}. METEOR depends on the vocabulary."


def localisation_lines(localisation: Mapping[str, Mapping[str, Any]]) -> Lines:
    """Table of the pointing game and the attention inside the masks or boxes, for all words; see `evaluation.localisation`.

    Args:
        localisation: system -> result of `attention_data.collect_attention`.
    """
    lines = [["", "inside the", "maps", "pointing, %", "uniform", "mass, %", "uniform"]]
    for name, one in localisation.items():
        for region, tables in ((one["region"], one), ("box", one.get("boxes"))):
            if tables:
                row = tables["kinds"][ALL_WORDS]
                scores = (row[key] for key in ("pointing", "pointing_chance", "mass", "mass_chance"))
                lines.append([name, region, f"{row['count']:,}", *(f"{100 * score:.1f}" for score in scores)])
    return lines


def localisation_note(masks: Mapping[str, Any] | None) -> str:
    """What was measured, in a few sentences.

    Args:
        masks: see `masks.mask_counts`; None for a dataset without masks.
    """
    text = (
        "Pointing: share of the words' attention maps whose highest cell overlaps the region. Mass: share of the attention inside "
        "the region. Uniform: the value of uniform attention; for the mass it is the share of the image that the region covers."
    )
    if not masks:
        return text
    left_out = [f"{masks[key]:,} {key}" for key in ("empty", "unreadable") if masks[key]]
    covered = f"; they cover {100 * masks['share']:.1f} % of the image on average" if "share" in masks else ""
    text += f" Masks of {masks['pairs']:,} pairs{covered}."
    return f"{text} Left out: {' and '.join(left_out)} masks." if left_out else text


def rich_table(lines: Lines, title: str, words: int = 1) -> "Table":
    """Lines as a rich table with its footnote; `words` is the number of leading text columns. Headings break at spaces."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    if any(MARK in cell for line in lines[1:] for cell in line[words:]):
        table.caption, table.caption_justify = WEIGHTLESS_NOTE, "left"
    for number, heading in enumerate(lines[0]):
        text = heading.replace(" ", "\n") if number >= words else heading
        table.add_column(text, justify="left" if number < words else "right", no_wrap=number >= words)
    for line in lines[1:]:
        table.add_row(*line)
    return table


def markdown(lines: Lines, words: int = 1) -> str:
    """Lines as a Markdown table, without a final line break. Names, which users choose, are escaped."""
    rule = [*["---"] * words, *["---:"] * (len(lines[0]) - words)]
    body = [[*map(escape_markdown, line[:words]), *line[words:]] for line in lines[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in [list(map(escape_markdown, lines[0])), rule, *body])


def caption_of(protocol: Mapping[str, Any], rows: Rows) -> str:
    """How the numbers were computed, in one line."""
    return f"{protocol['dataset']}, {protocol['split']} split, {scoring_of(protocol, rows)}"


def scoring_of(protocol: Mapping[str, Any], rows: Rows) -> str:
    """`caption_of` without the dataset and the split."""
    seeds = sorted({count for row in rows.values() if (count := int(row.get("runs", 1))) > 1})
    counts = " to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1])))) if seeds else ""
    changes = f"{protocol['changes']} change, " if protocol.get("changes") else ""
    several = f"; mean ± standard deviation over {counts} runs" if seeds else ""
    remark = f" {protocol['remark']}" if protocol.get("remark") else ""
    return (
        f"{remarks(protocol)}{changes}{protocol['pairs']['total']:,} pairs, {protocol['tokenizer']} tokens, {decoding_of(protocol)}; "
        f"scores x 100{several}.{remark}"
    )


def decoding_of(protocol: Mapping[str, Any]) -> str:
    """How the captions were decoded, which systems are ensembles (`protocol["ensembles"]`, system -> members), and which captions
    were read from a file (`protocol["files"]`)."""
    beams, files, penalty = (protocol.get(name) for name in ("beams", "files", "length_penalty"))
    known = [] if beams is None else ["greedy decoding" if beams == 1 else f"beam search of {beams}"]
    known += [f"length penalty {penalty:g}"] if beams != 1 and penalty else []
    known += [f"{name}: ensemble of {count}" for name, count in protocol.get("ensembles", {}).items()]
    known += [f"captions read from a file: {' / '.join(files)}"] if files else []
    return ", ".join(known) or "unknown decoding"


def notes_of(protocol: Mapping[str, Any], rows: Rows) -> list[str]:
    """Footnotes of the table, see `score_notes`, `caption_notes`, `features_note` and `zero_shot_notes`."""
    groups = [row[name] for row in rows.values() for name in row if name in protocol["pairs"]]
    of_captions = [f"{name}: {note}" for name, notes in protocol.get("notes", {}).items() for note in notes]
    untrained = zero_shot_notes(protocol.get("zero_shot") or {})
    return [*score_notes(groups, protocol["pairs"]), *of_captions, *untrained]


def zero_shot_notes(systems: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The model and the prompt of each row without training, and how to read their scores; nothing if there is no such row.

    Args:
        systems: row -> see `rows.zero_shot_origin`.
    """
    if not systems:
        return []
    notes = [f"{name}, without training: {zero_shot_text(one)}." for name, one in systems.items()]
    return [*notes, ZERO_SHOT_NOTE]


def zero_shot_text(origin: Mapping[str, Any]) -> str:
    """Base model, commit and prompt of a model without training, for a sentence."""
    commit = f" at commit {origin['revision']}" if origin.get("revision") else ""
    prompt = f', prompt "{origin["prompt"]}"' if origin.get("prompt") else ""
    sentences = f", {origin['sentences']} sentences of the answer" if origin.get("sentences") else ""
    return f"{origin['base']}{commit}{prompt}{sentences}"


def report_text(
    protocol: Mapping[str, Any],
    rows: Rows,
    runs: Sequence[str],
    localisation: Mapping[str, Mapping[str, Any]] | None = None,
    masks: Mapping[str, Any] | None = None,
) -> str:
    """The content of `table.md`: the main scores, all metrics by group and of word ids, the runs by change type, and localisation.

    Args:
        localisation, masks: see `localisation_lines` and `localisation_note`.
    """
    texts = [caption_of(protocol, rows), *notes_of(protocol, rows)]
    parts = [markdown(system_lines(rows)), *map(escape_markdown, texts)]
    by_group = group_lines(rows)
    if by_group:
        parts.append(markdown(by_group, words=2))
    by_ids = id_rows(rows)
    if by_ids:
        parts += [escape_markdown(id_note(protocol["id_tokens"])), markdown(group_lines(by_ids, least=1), words=2)]
    by_type = type_lines({name: rows[name] for name in runs})
    if by_type:
        parts.append(markdown(by_type, words=2))
    if localisation:
        parts += [markdown(localisation_lines(localisation), words=2), localisation_note(masks)]
    return "\n\n".join(parts) + "\n"
