"""The table of `make accuracy`: decoding methods and further training, compared with greedy decoding of the same runs."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diffcap.evaluation.tables import print_table
from diffcap.records import write_json, write_text
from diffcap.report.comparison import check_same_pairs, pairs_of, read_evaluation
from diffcap.report.rows import Row, mean_row, score_row, training
from diffcap.report.table import system_table, type_table
from diffcap.run_folder import evaluated_checkpoints
from diffcap.utils.errors import DiffcapError
from diffcap.utils.provenance import provenance
from diffcap.utils.table import Cell, Table

_DECODING = ("beams", "length_penalty", "ensemble")


def accuracy_table(folder: str | Path, rows: Mapping[str, Sequence[Path]], out: str | Path) -> None:
    """Collect the evaluations, print and write the table: table.json and table.md.

    Args:
        folder: data/<dataset>.
        rows: name -> folders of its evaluations, one per seed; the others are compared with the first row.
        out: folder of the table.
    """
    read = {name: [read_evaluation(path) for path in paths] for name, paths in rows.items()}
    first = next(iter(read.values()))[0]
    for group in read.values():
        for evaluated in group:
            check_same_pairs(first, evaluated)
            tokenizers = [run.metrics["protocol"]["tokenizer"] for run in (first, evaluated)]
            if tokenizers[0] != tokenizers[1]:
                raise DiffcapError(
                    f"{first.folder} was scored with the tokenizer {tokenizers[0]}, {evaluated.folder} with {tokenizers[1]}; "
                    "evaluate both again with the same --tokenizer."
                )
    pairs = pairs_of(first, folder)
    single: dict[str, list[Row]] = {name: [] for name in read}
    for name, group in read.items():
        for one in group:
            row = score_row(one.metrics, one.predictions, pairs)
            single[name].append(row | training(evaluated_checkpoints(one.folder, one.metrics)))
    merged = {name: mean_row(group) for name, group in single.items()}
    gains = gains_over_first(single)
    decoding = {name: {key: group[0].metrics["protocol"].get(key) for key in _DECODING} for name, group in read.items()}
    common = {key: value for key, value in first.metrics["protocol"].items() if key not in _DECODING}
    protocol = {**common, "seeds": max(map(len, read.values())), "decoding": decoding}
    notes = provenance(runs={name: [one.metrics["provenance"] for one in group] for name, group in read.items()})
    target = Path(out)
    write_json(target / "table.json", {"protocol": protocol, "rows": merged, "gains": gains, "provenance": notes})
    parts = [system_table(merged).markdown(), caption(protocol), gain_table(gains).markdown()]
    if types := type_table(merged):
        parts.append(types.markdown())
    write_text(target / "table.md", "\n\n".join(parts) + "\n")
    print_table(system_table(merged, f"{protocol['dataset']} {protocol['split']}"))
    print_table(gain_table(gains))
    print(caption(protocol))
    print(f"{target / 'table.json'}, table.md")


def gains_over_first(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Differences of each row from the first, seed by seed: metric -> {"mean", "std" (None of one), "of": differences}.

    A row of one number (an ensemble) is compared with the first row's mean.
    """
    names = list(rows)
    base = rows[names[0]]
    found: dict[str, dict[str, Any]] = {}
    for name in names[1:]:
        found[name] = {}
        for metric in base[0]["total"]:
            before = [row["total"][metric] for row in base]
            after = [row["total"][metric] for row in rows[name]]
            paired = len(after) == len(before)
            gains = [b - a for a, b in zip(before, after)] if paired else [after[0] - statistics.fmean(before)]
            spread = statistics.stdev(gains) if len(gains) > 1 else None
            found[name][metric] = {"mean": statistics.fmean(gains), "std": spread, "of": gains}
    return found


def gain_table(gains: Mapping[str, Mapping[str, Any]]) -> Table:
    """The gains, in the order of the metrics."""
    metrics = list(next(iter(gains.values())))

    def cell(gain: Mapping[str, Any]) -> Cell:
        std = "" if gain["std"] is None else f"{100 * gain['std']:.2f}"
        return Cell(f"{round(100 * gain['mean'], 2) + 0.0:+.2f}", std)  # + 0.0: no -0.00

    lines = [([name], [cell(row[metric]) for metric in metrics]) for name, row in gains.items()]
    return Table(metrics, lines, ["gained over greedy"], "gained over the first row")


def caption(protocol: Mapping[str, Any]) -> str:
    """How the numbers were computed, in two sentences."""
    several = protocol["seeds"] > 1
    seeds = f"; mean ± standard deviation of {protocol['seeds']} seeds, whose ensemble is one system" if several else ""
    return (
        f"{protocol['dataset']}, {protocol['split']} split, {protocol['pairs']['total']:,} pairs, {protocol['tokenizer']} "
        f"tokens; scores x 100{seeds}. Training seconds are the sum over all trainings of a row."
    )
