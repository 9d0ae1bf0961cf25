"""Make the tables of a report from the rows of `table.json`, and their footnotes. Rows have fractions, which tables show x 100.

A group is a set of pairs that are scored together: "total" (all); "semantic" (with a change) and "distractor" (without), or
"change" and "no_change" in datasets with a change flag; a change type ("color"). A word id is a word's index in a vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from diffcap.evaluation.protocols import TYPE_ORDER, remarks
from diffcap.evaluation.tables import WEIGHTLESS_MARK, WEIGHTLESS_NOTE, is_weightless, score_notes
from diffcap.records import NO_CHANGE_GROUPS, RESERVED_CHANGE_TYPES, JsonDict
from diffcap.utils.table import Cell, Table, escape_markdown

SystemRows = Mapping[str, JsonDict]  # system -> row, {group: {metric: fraction}, ...}, see `rows.score_row`
ColumnPaths = Mapping[str, tuple[str, ...]]  # heading -> path of the number in a row

MAIN_COLUMNS: ColumnPaths = {
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
    "change accuracy": ("change", "accuracy"),  # share of captions that rightly say if anything has changed
    "no-change accuracy": ("no_change", "accuracy"),
    "semantic accuracy": ("semantic", "accuracy"),
    "distractor accuracy": ("distractor", "accuracy"),
    "change AUC": ("change_probability", "AUC"),
    "type right": ("slots", "type"),  # "slots": shares of captions with the right change type, object, ...
    "object right": ("slots", "object"),
    "training seconds": ("seconds",),
}
ZERO_SHOT_NOTE = (
    "Without training, a model does not know the style of the references: n-gram scores (BLEU, METEOR, ROUGE-L, CIDEr-D) measure the "
    "style first, and a low score does not show that the captions are wrong."
)
# Rows that show what a score can reach, in the tables of datasets that diffcap renders; they are no systems, and never the best.
LEFT_OUT, ORACLE, TYPICAL = (
    "a reference against the others",
    "oracle, a random sentence",
    "oracle, its most typical sentence",
)
CEILINGS = (LEFT_OUT, ORACLE, TYPICAL)
CEILING_NOTE = (
    "No systems: the oracle knows the scenes and writes sentences as the references are written, with other random seeds. One row has the "
    "first sentence, the other the one most similar to all (CIDEr-D), which shows what a captioner can reach. A reference against the "
    "others: mean over the references, so with one reference fewer than all other rows; references of one pair hardly repeat a sentence."
)
ALL_WORDS = "all words"  # name of the row for words of all kinds
GROUPS = ("total", "semantic", "distractor", "change", "no_change")
# S*m is the mean of BLEU-4, METEOR, ROUGE-L and CIDEr-D.
METRICS = ("BLEU-4", "METEOR", "ROUGE-L", "CIDEr-D", "SPICE", "S*m", "accuracy")


def number_at(row: JsonDict, path: Sequence[str]) -> float | None:
    """Return the number at a path of keys in a row, such as ("total", "CIDEr-D"); None if a key is missing."""
    value: Any = row
    for key in path:
        value = (value or {}).get(key)
    return value


def _cell(row: JsonDict, path: Sequence[str], best: float = 0.0, lowest: float = 0.0) -> Cell:
    """Format the number at `path`, a score x 100 or seconds. Its fraction is 0 for `lowest` and 1 for `best`, or 0 if they are equal."""

    def text(number: float) -> str:
        return f"{number:,.0f}" if path == ("seconds",) else f"{100 * number:.2f}"

    value = number_at(row, path)
    std = number_at(row.get("std", {}), path)
    if value is None:
        return Cell("")
    mark = WEIGHTLESS_MARK if path[-1] == "CIDEr-D" and is_weightless(row[path[0]]) else ""  # CIDEr-D is 0
    fraction = min(1.0, max(0.0, (value - lowest) / (best - lowest))) if best > lowest else 0.0
    is_best = best > 0 and text(value) == text(best)
    return Cell(text(value) + mark, "" if std is None else text(std), fraction, is_best)


def with_weightless_note(table: Table) -> Table:
    """Add the footnote about a CIDEr-D of 0 (captions and references share no phrase that counts) if a cell has its mark."""
    has_mark = any(WEIGHTLESS_MARK in cell.text for _, cells in table.rows for cell in cells)
    return replace(table, note=WEIGHTLESS_NOTE if has_mark else "")


def score_table(rows: SystemRows, paths: ColumnPaths, title: str, has_shades: bool = False) -> Table:
    """Make a line for each system with the numbers at `paths`. Leave out columns without any number.

    The fraction of a cell is the length of its bar or the strength of its shade. It is 0 for a score of 0 or, with `has_shades`, for the
    lowest score of the column, and 1 for the highest score of the column.
    """
    systems = [row for name, row in rows.items() if name not in CEILINGS]
    ranges: dict[str, tuple[float, float]] = {}  # heading -> highest number of the column, and the number of fraction 0
    for heading, path in paths.items():
        values = [value for row in systems if (value := number_at(row, path)) is not None]
        if values:
            is_score = path != ("seconds",)  # seconds have no bar, and no best value
            ranges[heading] = (max(values) if is_score else 0.0, min(values) if has_shades else 0.0)
    lines = []
    for system, row in rows.items():
        cells = [_cell(row, paths[heading], *column_range) for heading, column_range in ranges.items()]
        if len(rows) == 1:  # a single row has no best scores
            cells = [replace(cell, best=False) for cell in cells]
        lines.append(([system], cells))
    return with_weightless_note(Table(list(ranges), lines, title=title))


def system_table(rows: SystemRows, title: str = "overview") -> Table:
    """Make the table of the main scores."""
    return score_table(rows, MAIN_COLUMNS, title)


def metric_table(rows: SystemRows, group: str, title: str) -> Table:
    """Make the table of all metrics of one group."""
    return score_table(rows, {metric: (group, metric) for metric in METRICS}, title)


def score_tabs(rows: SystemRows) -> list[Table]:
    """Make the tabs of the page: the main scores, then all metrics of each of `GROUPS`."""
    tables = [system_table(rows), *(metric_table(rows, group, group) for group in _groups(rows))]
    if len(tables) == 2 and len(tables[1].columns) < 2:  # the only metric is in the first table already
        return tables[:1]
    return tables


def word_id_tabs(rows: SystemRows) -> list[Table]:
    """Make a tab for each of `GROUPS` with scores that compare word ids instead of words; return [] if there are none."""
    rows_of_ids = word_id_rows(rows)
    return [metric_table(rows_of_ids, group, f"{group.replace('_', ' ')}, word ids") for group in _groups(rows_of_ids)]


def _groups(rows: SystemRows) -> list[str]:
    return [group for group in GROUPS if any(group in row for row in rows.values())]


def group_table(rows: SystemRows, title: str = "", min_groups: int = 2) -> Table | None:
    """Make the table of all metrics by group, as in the papers; return None if `rows` have fewer than `min_groups` of the `GROUPS`."""
    groups = _groups(rows)
    if len(groups) < min_groups:
        return None
    metrics = metric_table(rows, "total", "").columns
    lines = []
    for group in groups:
        for index, (system, row) in enumerate(rows.items()):
            cells = [_cell(row, (group, metric)) for metric in metrics]
            lines.append((["" if index else group, system], cells))
    return with_weightless_note(Table(metrics, lines, ["", ""], title))


def ordered_type_groups(groups: set[str]) -> list[str]:
    """Sort change types in the papers' order, then the groups without change ("distractor", "no_change")."""
    other_types = sorted(groups - {*TYPE_ORDER, *NO_CHANGE_GROUPS})
    return [group for group in (*TYPE_ORDER, *other_types, *NO_CHANGE_GROUPS) if group in groups]


def _type_groups(rows: SystemRows) -> list[str]:
    """Return the change types and the groups without change in order; [] if there are no types."""
    keys = {key for row in rows.values() for key in row}
    types = keys - RESERVED_CHANGE_TYPES
    return ordered_type_groups(types | (keys & {*NO_CHANGE_GROUPS})) if types else []


def type_table(rows: SystemRows, title: str = "") -> Table | None:
    """Make the table of CIDEr-D and type accuracy by change type; None if the dataset has no types."""
    type_groups = _type_groups(rows)
    if not type_groups:
        return None
    lines = []
    for system, row in rows.items():
        lines.append(([system, "CIDEr-D"], [_cell(row, (group, "CIDEr-D")) for group in type_groups]))
        if "type_accuracy" in row:
            lines.append((["", "type right"], [_cell(row, ("type_accuracy", group)) for group in type_groups]))
    return with_weightless_note(Table(type_groups, lines, ["", ""], title))


def type_tabs(rows: SystemRows) -> list[Table]:
    """Make a tab per metric, with a column per change type. A cell's shade is 0 for the lowest score of its column, 1 for the highest."""
    type_groups = _type_groups(rows)
    tables = []
    for title in dict.fromkeys(("CIDEr-D", "type right", *METRICS)):
        paths = {group: (group, title) for group in type_groups}
        if title == "type right":
            paths = {group: ("type_accuracy", group) for group in type_groups}
        tables.append(score_table(rows, paths, title, has_shades=True))
    return [table for table in tables if table.columns]


def word_id_rows(rows: SystemRows) -> SystemRows:
    """Return the scores of word ids as rows; {} if they were not computed (only remote-sensing datasets have them)."""
    rows_of_ids = {}
    for system, row in rows.items():
        if "id_tokens" in row:
            rows_of_ids[system] = {**row["id_tokens"], "std": row.get("std", {}).get("id_tokens", {})}
    return rows_of_ids


def word_id_note(id_protocols: Mapping[str, JsonDict]) -> str:
    """Describe each system's vocabulary: its size, and the rule that chose its words. METEOR takes some ids for paraphrases of others."""
    systems: dict[str, list[str]] = {}  # description of a vocabulary -> systems
    for system, protocol in id_protocols.items():
        systems.setdefault(f"{protocol['vocabulary_size']} ids, {protocol['vocabulary']}", []).append(system)
    texts = list(systems)
    if len(systems) > 1:
        texts = [f"{' / '.join(names)}: {text}" for text, names in systems.items()]
    protocol_name = next(iter(id_protocols.values()))["name"]
    return f"Protocol {protocol_name}: scores of word ids. Vocabulary: {'; '.join(texts)}. METEOR depends on the vocabulary."


def localisation_table(localisation: Mapping[str, JsonDict]) -> Table:
    """Make the table of how much attention is on the change, in a mask or box. `localisation`: system -> scores (`collect_attention`)."""
    lines = []
    for system, measured in localisation.items():
        for region, region_scores in ((measured["region"], measured), ("box", measured.get("boxes"))):
            if region_scores:  # "boxes" are only there if "region" is "mask" and the dataset has boxes, too
                word_scores = region_scores["kinds"][ALL_WORDS]
                scores = (word_scores[key] for key in ("pointing", "pointing_chance", "mass", "mass_chance"))
                cells = [Cell(f"{word_scores['count']:,}"), *(Cell(f"{100 * score:.1f}") for score in scores)]
                lines.append(([system, region], cells))
    columns = ["maps", "pointing, %", "uniform", "mass, %", "uniform"]
    return Table(columns, lines, ["", "inside the"], "localisation")


def localisation_tabs(localisation: Mapping[str, JsonDict]) -> dict[str, dict[str, Table]]:
    """Make the tabs of the page: title of the tab -> system -> table by kind of word or by word. Input: as in `localisation_table`."""
    tabs: dict[str, dict[str, Table]] = {}
    for system, measured in localisation.items():
        regions = [("", measured["region"], measured)]
        regions += [("boxes, ", "box", measured["boxes"])] if "boxes" in measured else []
        for prefix, region, region_scores in regions:
            columns = ["maps", "pointing, %", f"mass in the {region}, %"]
            for key, heading, title in (("kinds", "kind", "by kind of word"), ("words", "word", "by word")):
                lines = []
                for name, scores in region_scores[key].items():
                    gauges = [(scores[score], scores[f"{score}_chance"]) for score in ("pointing", "mass")]
                    cells = [Cell(f"{100 * value:.1f}", fraction=value, tick=chance) for value, chance in gauges]
                    lines.append(([name], [Cell(f"{scores['count']:,}"), *cells]))
                table = Table(columns, lines, [heading], f"{system}, {prefix}{title}")
                tabs.setdefault(prefix + title, {})[system] = table
    return tabs


def localisation_note(mask_counts: JsonDict | None) -> str:
    """Explain the scores in `localisation_table`. `mask_counts`: numbers of images that mark the change, see `drawing.mask_counts`."""
    text = (
        "Pointing: share of the words' attention maps whose highest cell overlaps the region. Mass: share of the attention inside "
        "the region. Uniform: the value of uniform attention; for the mass it is the share of the image that the region covers."
    )
    if not mask_counts:
        return text
    left_out = [f"{mask_counts[key]:,} {key}" for key in ("empty", "unreadable") if mask_counts[key]]
    share = f"; they cover {100 * mask_counts['share']:.1f} % of the image on average" if "share" in mask_counts else ""
    text += f" Masks of {mask_counts['pairs']:,} pairs{share}."
    return f"{text} Left out: {' and '.join(left_out)} masks." if left_out else text


def protocol_text(protocol: JsonDict, rows: SystemRows) -> str:
    """Say in one line how the scores were computed."""
    return f"{protocol['dataset']}, {protocol['split']} split, {scoring_text(protocol, rows)}"


def scoring_text(protocol: JsonDict, rows: SystemRows) -> str:
    """Say how the scores were computed, without the dataset and the split."""
    all_counts = {int(row.get("runs", 1)) for row in rows.values()}
    run_counts = sorted(all_counts - {1})
    num_runs = " to ".join(map(str, dict.fromkeys((*run_counts[:1], *run_counts[-1:]))))  # "3", or "2 to 5"
    deviation = f"; mean ± standard deviation over {num_runs} runs" if run_counts else ""
    changes = f"{protocol['changes']} change, " if protocol.get("changes") else ""  # "single" or "multi"
    remark = f" {protocol['remark']}" if protocol.get("remark") else ""  # from the user; `remarks` describe the dataset
    return (
        f"{remarks(protocol)}{changes}{protocol['pairs']['total']:,} pairs, {protocol['tokenizer']} tokens, {decoding_text(protocol)}; "
        f"scores x 100{deviation}.{remark}"
    )


def decoding_text(protocol: JsonDict) -> str:
    """Describe the decoding, the ensembles, and the systems whose captions were read from a file."""
    beams, file_systems, penalty = (protocol.get(key) for key in ("beams", "files", "length_penalty"))
    parts = [] if beams is None else ["greedy decoding" if beams == 1 else f"beam search of {beams}"]
    parts += [f"length penalty {penalty:g}"] if beams != 1 and penalty else []
    parts += [f"{name}: ensemble of {count}" for name, count in protocol.get("ensembles", {}).items()]
    parts += [f"captions read from a file: {' / '.join(file_systems)}"] if file_systems else []
    return ", ".join(parts) or "unknown decoding"


def footnotes(protocol: JsonDict, rows: SystemRows) -> list[str]:
    """Return notes on the scores and the captions, and the model and prompt of each system without training."""
    group_scores = [row[group] for row in rows.values() for group in row if group in protocol["pairs"]]
    texts = score_notes(group_scores, protocol["pairs"])
    texts += [CEILING_NOTE] if ORACLE in rows else []
    texts += [f"{system}: {note}" for system, notes in protocol.get("notes", {}).items() for note in notes]
    if zero_shot := protocol.get("zero_shot"):
        texts += [f"{system}, without training: {zero_shot_text(origin)}." for system, origin in zero_shot.items()]
        texts.append(ZERO_SHOT_NOTE)
    return texts


def zero_shot_text(origin: JsonDict) -> str:
    """Name the base model of a system without training, its commit and prompt, and how many sentences of its answer are kept."""
    commit = f" at commit {origin['revision']}" if origin.get("revision") else ""
    prompt = f', prompt "{origin["prompt"]}"' if origin.get("prompt") else ""
    sentences = f", {origin['sentences']} sentences of the answer" if origin.get("sentences") else ""
    return f"{origin['base']}{commit}{prompt}{sentences}"


def report_text(
    protocol: JsonDict, rows: SystemRows, run_names: Sequence[str], localisation: Any = None, mask_counts: Any = None
) -> str:
    """Return the text of `table.md`. `run_names`: all systems that are not baselines. Other arguments: see the functions above."""
    texts = [protocol_text(protocol, rows), *footnotes(protocol, rows)]
    parts = [system_table(rows).markdown(), *map(escape_markdown, texts)]
    if by_group := group_table(rows):
        parts.append(by_group.markdown())
    if by_ids := group_table(word_id_rows(rows), min_groups=1):
        parts += [escape_markdown(word_id_note(protocol["id_tokens"])), by_ids.markdown()]
    if by_type := type_table({name: rows[name] for name in run_names}):
        parts.append(by_type.markdown())
    if localisation:
        parts += [localisation_table(localisation).markdown(), localisation_note(mask_counts)]
    return "\n\n".join(parts) + "\n"
