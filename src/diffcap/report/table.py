"""The tables of a report from the rows of `table.json`, and their notes. Files contain fractions; tables show them x 100."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from diffcap.evaluation.protocols import TYPE_ORDER, remarks
from diffcap.evaluation.tables import WEIGHTLESS_MARK, WEIGHTLESS_NOTE, is_weightless, score_notes
from diffcap.records import NO_CHANGE_GROUPS
from diffcap.utils.table import Cell, Table, escape_markdown

Section = Mapping[str, Any]  # an object of a JSON file
Rows = Mapping[str, Section]  # name of a system -> its row
Paths = Mapping[str, tuple[str, ...]]

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
ALL_WORDS = "all words"  # the kind that contains every word, in localisation
GROUPS = ("total", "semantic", "distractor", "change", "no_change")
METRICS = ("BLEU-4", "METEOR", "ROUGE-L", "CIDEr-D", "SPICE", "S*m", "accuracy")
_NOT_GROUPS = ("slots", "type_accuracy", "id_tokens", "seconds", "steps", "std", "runs")


def number_at(row: Section, path: Sequence[str]) -> float | None:
    """The number at a path of a row, such as ("total", "CIDEr-D"); None if there is none."""
    value: Any = row
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _cell(row: Section, path: Sequence[str], highest: float = 0.0) -> Cell:
    """Format a score x 100, or seconds. `highest` of its column sets the length of the bar and the best score; 0 for neither."""

    def text(number: float) -> str:
        return f"{number:,.0f}" if path == ("seconds",) else f"{100 * number:.2f}"

    value = number_at(row, path)
    std = number_at(row.get("std", {}), path)
    if value is None:
        return Cell("")
    mark = WEIGHTLESS_MARK if path[-1] == "CIDEr-D" and is_weightless(row[path[0]]) else ""
    fraction = max(0.0, value / highest) if highest > 0 else 0.0
    best = highest > 0 and text(value) == text(highest)
    return Cell(text(value) + mark, "" if std is None else text(std), fraction, best)


def with_note(table: Table) -> Table:
    """Add the footnote of `WEIGHTLESS_MARK` to a table that has the mark."""
    has_mark = any(WEIGHTLESS_MARK in cell.text for _, cells in table.rows for cell in cells)
    return replace(table, note=WEIGHTLESS_NOTE if has_mark else "")


def score_table(rows: Rows, paths: Paths, title: str) -> Table:
    """Make a line for each system with the numbers at `paths` (heading -> path in a row). Leave out columns without any number."""
    highest: dict[str, float] = {}
    for heading, path in paths.items():
        values = [value for row in rows.values() if (value := number_at(row, path)) is not None]
        if values:
            highest[heading] = max(values) if path != ("seconds",) else 0.0
    lines = []
    for system, row in rows.items():
        cells = [_cell(row, paths[heading], best_score) for heading, best_score in highest.items()]
        if len(rows) == 1:  # a single row has no best scores
            cells = [replace(cell, best=False) for cell in cells]
        lines.append(([system], cells))
    return with_note(Table(list(highest), lines, title=title))


def system_table(rows: Rows, title: str = "overview") -> Table:
    """Make the table of the main scores."""
    return score_table(rows, COLUMNS, title)


def metric_table(rows: Rows, group: str, title: str) -> Table:
    """Make the table of all metrics of one group."""
    return score_table(rows, {metric: (group, metric) for metric in METRICS}, title)


def score_tabs(rows: Rows) -> list[Table]:
    """Make the tabs of the page: the main scores, then all metrics of each of `GROUPS`."""
    tables = [system_table(rows), *(metric_table(rows, group, group) for group in _groups(rows))]
    if len(tables) == 2 and len(tables[1].columns) < 2:  # one metric of one group, which the first table already has
        return tables[:1]
    return tables


def id_tabs(rows: Rows) -> list[Table]:
    """Make the tabs with the metrics of word ids, one for each of `GROUPS`; [] for datasets without the protocol levir_cc."""
    scores = id_rows(rows)
    return [metric_table(scores, group, f"{group.replace('_', ' ')}, word ids") for group in _groups(scores)]


def _groups(rows: Rows) -> list[str]:
    return [group for group in GROUPS if any(group in row for row in rows.values())]


def group_table(rows: Rows, title: str = "", min_groups: int = 2) -> Table | None:
    """Make the table of the metrics of all `GROUPS`, as in the papers; None if there are fewer than `min_groups`."""
    groups = _groups(rows)
    if len(groups) < min_groups:
        return None
    metrics = metric_table(rows, "total", "").columns
    lines = []
    for group in groups:
        for number, (system, row) in enumerate(rows.items()):
            cells = [_cell(row, (group, metric)) for metric in metrics]
            lines.append((["" if number else group, system], cells))
    return with_note(Table(metrics, lines, ["", ""], title))


def ordered_kinds(kinds: set[str]) -> list[str]:
    """Sort change types in the papers' order, then the groups without change."""
    others = sorted(kinds - {*TYPE_ORDER, *NO_CHANGE_GROUPS})
    return [kind for kind in (*TYPE_ORDER, *others, *NO_CHANGE_GROUPS) if kind in kinds]


def _type_groups(rows: Rows) -> list[str]:
    """Return the change types and the groups without change (see `ordered_kinds`); [] if there are no types."""
    keys = {key for row in rows.values() for key in row}
    types = keys - {*_NOT_GROUPS, *GROUPS}
    return ordered_kinds(types | (keys & {*NO_CHANGE_GROUPS})) if types else []


def type_table(rows: Rows, title: str = "") -> Table | None:
    """Make the table of CIDEr-D and type accuracy by change type; None if the dataset has no types."""
    order = _type_groups(rows)
    if not order:
        return None
    lines = []
    for system, row in rows.items():
        lines.append(([system, "CIDEr-D"], [_cell(row, (group, "CIDEr-D")) for group in order]))
        if "type_accuracy" in row:
            lines.append((["", "type right"], [_cell(row, ("type_accuracy", group)) for group in order]))
    return with_note(Table(order, lines, ["", ""], title))


def type_tabs(rows: Rows) -> list[Table]:
    """Make a tab by change type for each metric, with shades from the lowest (0) to the highest (1) score of a column."""
    order = _type_groups(rows)
    paths = {"CIDEr-D": {group: (group, "CIDEr-D") for group in order}}
    paths["type right"] = {group: ("type_accuracy", group) for group in order}
    paths |= {metric: {group: (group, metric) for group in order} for metric in METRICS if metric != "CIDEr-D"}
    tables = []
    for metric, metric_paths in paths.items():
        table = score_table(rows, metric_paths, metric)
        columns = [_shaded(column) for column in zip(*(cells for _, cells in table.rows))]
        lines = [(texts, cells) for (texts, _), cells in zip(table.rows, zip(*columns))]
        tables += [replace(table, rows=lines)] if table.columns else []
    return tables


def _shaded(column: Sequence[Cell]) -> list[Cell]:
    fractions = [cell.fraction for cell in column if cell.text]
    low = min(fractions)
    span = max(fractions) - low
    return [replace(cell, fraction=(cell.fraction - low) / span if cell.text and span else 0.0) for cell in column]


def id_rows(rows: Rows) -> Rows:
    """Return the scores of word ids (protocol levir_cc) as rows; {} for other datasets."""
    scores = {}
    for name, row in rows.items():
        if "id_tokens" in row:
            scores[name] = {**row["id_tokens"], "std": row.get("std", {}).get("id_tokens", {})}
    return scores


def id_note(vocabularies: Rows) -> str:
    """Describe the vocabularies of the scores of word ids: system -> "id_tokens"."protocol" of its `metrics.json`."""
    systems: dict[str, list[str]] = {}  # description of a vocabulary -> systems
    for name, protocol in vocabularies.items():
        systems.setdefault(f"{protocol['vocabulary_size']} ids, {protocol['vocabulary']}", []).append(name)
    texts = list(systems)
    if len(systems) > 1:
        texts = [f"{' / '.join(names)}: {text}" for text, names in systems.items()]
    protocol_name = next(iter(vocabularies.values()))["name"]
    return f"Protocol {protocol_name}: scores of word ids. Vocabulary: {'; '.join(texts)}. METEOR depends on the vocabulary."


def localisation_table(localisation: Rows) -> Table:
    """Make the table of the localisation (see `attention.collect_attention`) of each system, for all words."""
    lines = []
    for name, measured in localisation.items():
        for region, scores_by_kind in ((measured["region"], measured), ("box", measured.get("boxes"))):
            if scores_by_kind:
                row = scores_by_kind["kinds"][ALL_WORDS]
                scores = (row[key] for key in ("pointing", "pointing_chance", "mass", "mass_chance"))
                cells = [Cell(f"{row['count']:,}"), *(Cell(f"{100 * score:.1f}") for score in scores)]
                lines.append(([name, region], cells))
    columns = ["maps", "pointing, %", "uniform", "mass, %", "uniform"]
    return Table(columns, lines, ["", "inside the"], "localisation")


def localisation_note(masks: Section | None) -> str:
    """Explain the scores of the localisation; `masks` see `drawing.mask_counts`."""
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


def caption_of(protocol: Section, rows: Rows) -> str:
    """Say in one line how the scores were computed."""
    return f"{protocol['dataset']}, {protocol['split']} split, {scoring_of(protocol, rows)}"


def scoring_of(protocol: Section, rows: Rows) -> str:
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


def decoding_of(protocol: Section) -> str:
    """Describe the decoding, the ensembles, and the systems whose captions were read from a file."""
    beams, files, penalty = (protocol.get(name) for name in ("beams", "files", "length_penalty"))
    parts = [] if beams is None else ["greedy decoding" if beams == 1 else f"beam search of {beams}"]
    parts += [f"length penalty {penalty:g}"] if beams != 1 and penalty else []
    parts += [f"{name}: ensemble of {count}" for name, count in protocol.get("ensembles", {}).items()]
    parts += [f"captions read from a file: {' / '.join(files)}"] if files else []
    return ", ".join(parts) or "unknown decoding"


def notes_of(protocol: Section, rows: Rows) -> list[str]:
    """Return the footnotes: on the scores and the captions, and the model and prompt of each row without training."""
    groups = [row[name] for row in rows.values() for name in row if name in protocol["pairs"]]
    footnotes = score_notes(groups, protocol["pairs"])
    footnotes += [f"{name}: {note}" for name, notes in protocol.get("notes", {}).items() for note in notes]
    if zero_shot := protocol.get("zero_shot"):
        footnotes += [f"{name}, without training: {zero_shot_text(origin)}." for name, origin in zero_shot.items()]
        footnotes.append(ZERO_SHOT_NOTE)
    return footnotes


def zero_shot_text(origin: Section) -> str:
    """Name the base model, commit and prompt of a model without training, for a sentence."""
    commit = f" at commit {origin['revision']}" if origin.get("revision") else ""
    prompt = f', prompt "{origin["prompt"]}"' if origin.get("prompt") else ""
    sentences = f", {origin['sentences']} sentences of the answer" if origin.get("sentences") else ""
    return f"{origin['base']}{commit}{prompt}{sentences}"


def report_text(
    protocol: Section, rows: Rows, runs: Sequence[str], localisation: Rows | None = None, masks: Section | None = None
) -> str:
    """Write the content of `table.md`: main scores, all metrics by group and of word ids, scores by change type, localisation."""
    texts = [caption_of(protocol, rows), *notes_of(protocol, rows)]
    parts = [system_table(rows).markdown(), *map(escape_markdown, texts)]
    if by_group := group_table(rows):
        parts.append(by_group.markdown())
    if by_ids := group_table(id_rows(rows), min_groups=1):
        parts += [escape_markdown(id_note(protocol["id_tokens"])), by_ids.markdown()]
    if by_type := type_table({name: rows[name] for name in runs}):
        parts.append(by_type.markdown())
    if localisation:
        parts += [localisation_table(localisation).markdown(), localisation_note(masks)]
    return "\n\n".join(parts) + "\n"
