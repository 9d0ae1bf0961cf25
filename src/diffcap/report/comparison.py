"""`diffcap compare`: compare two evaluated runs, or other systems' captions; and the table of `make accuracy`."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import wrap
from typing import Any, Literal

from diffcap.evaluation.bootstrap import compare as bootstrap
from diffcap.evaluation.captions import unavailable_metrics
from diffcap.evaluation.coco import PREDICTION_SUFFIXES, read_other_predictions, read_predictions, read_references
from diffcap.evaluation.protocols import groups_of, remarks
from diffcap.evaluation.tables import WEIGHTLESS_MARK, is_weightless, print_table, score_notes
from diffcap.record import flat
from diffcap.records import ChangePair, file_hash, read_dataset, read_json, take_changes, write_json, write_text
from diffcap.report.rows import Row, default_protocol, mean_row, read_metrics, score_row, training
from diffcap.report.table import system_table, type_table, with_note
from diffcap.run_folder import GROUPS, PREDICTIONS, REFERENCES, UNSCORED, evaluated_checkpoints, find_evaluation
from diffcap.utils.console import echo, print_json
from diffcap.utils.errors import DiffcapError, printable
from diffcap.utils.provenance import provenance
from diffcap.utils.settings import read_settings
from diffcap.utils.table import Cell, Table, escape_markdown

Result = Mapping[str, Any]  # a section of a JSON file
_DECODING = ("beams", "length_penalty", "ensemble")
_MAX_SAMPLES = 100_000  # the ends of a 95 % interval then vary by 0.2 % of its width between seeds
_RESULTS = ("tokenizer", "metrics", "pairs")  # entries of a protocol that are not settings of the evaluation
_ORIGINS = ("method", "seed", "step", "features", "prompt", "sentences", "max_length")  # entries of "provenance"


def compare(
    run_a: str,
    run_b: str,
    samples: int = 1000,
    seed: int = 0,
    level: float = 0.95,
    pairs: int = 10,
    folder: Path | None = None,
    tokenizer: Literal["ptb", "raw"] | None = None,
    json: bool = False,
    out: Path | None = None,
) -> None:
    """Compare two evaluated runs: paired bootstrap intervals of every metric, wins and losses, and the largest differences.

    Args:
        run_a: Folder of a run, whose eval folder is used, or of an evaluation, such as runs/blocks/scorer/reinforce-eval; or a
            .json or .jsonl file with another system's captions of the same pairs, as FILE or NAME=FILE (see `score`).
        run_b: The second run, evaluation or file; differences are B - A.
        samples: Number of bootstrap samples of the test pairs, at most 100,000.
        seed: Seed of the bootstrap samples, 0 or more.
        level: Confidence level of the intervals; 0.95 is the middle 95 % of the samples.
        pairs: Number of pairs to show, those with the largest differences.
        folder: Folder of the dataset; needed for two files, which are compared on its test split, and for the change types of
            runs that an earlier version evaluated.
        tokenizer: Tokenizer of the metrics; by default the one that the runs were scored with.
        json: Print the result as JSON.
        out: File to write as well: Markdown if its name ends in .md, JSON otherwise.
    """
    if not 1 <= samples <= _MAX_SAMPLES:
        raise DiffcapError(f"--samples is {samples}; give 1 to {_MAX_SAMPLES:,}.")
    if not 0 < level < 1:
        raise DiffcapError(f"--level is {level}; give a number between 0 and 1, such as 0.95.")
    for name, number in {"seed": seed, "pairs": pairs}.items():
        if number < 0:
            raise DiffcapError(f"--{name} is {number}; it must be at least 0.")
    a, b = read_both(run_a, run_b, folder)
    check_same_pairs(a, b)
    scored_by = [tokenizer or run.metrics["protocol"]["tokenizer"] for run in (a, b)]
    if len(set(scored_by)) > 1:
        raise DiffcapError(
            f"{run_a} was scored with the tokenizer {scored_by[0]}, {run_b} with {scored_by[1]}; give --tokenizer."
        )
    groups = a.groups if folder is None else groups_of(pairs_of(a, folder))
    metrics = [name for name in a.metrics["protocol"]["metrics"] if name in b.metrics["protocol"]["metrics"]]
    if not metrics:
        raise DiffcapError(f"{run_a} and {run_b} have no metric in common; evaluate both with the same --metrics.")
    missing = unavailable_metrics(metrics)
    result = bootstrap(a.predictions, b.predictions, a.references, groups, scored_by[0], metrics, samples, seed, level)
    protocol = {
        **{key: value for key, value in b.metrics["protocol"].items() if key in ("official", "change_types")},
        "tokenizer": scored_by[0],
        "metrics": [name for name in metrics if name not in missing],
        "pairs": {name: len(ids) for name, ids in groups.items()},
        "samples": samples,
        "seed": seed,
        "level": level,
    }
    found = {
        "runs": {"a": a.title, "b": b.title},
        "settings": different_settings(a, b),
        "protocol": protocol,
        "groups": result["groups"],
        "wins": result["wins"],
        "largest": largest_differences(result, a, b, groups, pairs),
        "provenance": provenance(runs=[run.metrics.get("provenance") for run in (a, b)], unavailable=missing),
    }
    if out is not None and out.suffix == ".md":
        write_text(out, comparison_text(found))
    elif out is not None:
        write_json(out, found)
    if json:
        print_json(found)
        return
    print_table(metric_table(found))
    echo(*wrap(methodology_note(found), 100), "")
    print_table(win_table(found))
    for row in found["largest"]:
        echo(*pair_lines(row), "")


@dataclass(frozen=True)
class EvaluationResult:
    """Files of an evaluation, or the captions of another system beside the references of one."""

    folder: Path  # of another system, the file with its captions
    metrics: dict[str, Any]  # content of metrics.json
    predictions: dict[str, str]  # id -> caption
    references: dict[str, list[str]]  # id -> captions
    groups: dict[str, list[str]]  # name -> ids
    title: str = ""


def read_both(run_a: str, run_b: str, folder: str | Path | None) -> tuple[EvaluationResult, EvaluationResult]:
    """Read two evaluations, or files with captions of the same pairs: FILE or NAME=FILE; two files on the test split in `folder`."""
    files = {text: file for text in (run_a, run_b) if (file := _named_file(text))}
    runs = {text: read_evaluation(text) for text in (run_a, run_b) if text not in files}
    if runs:
        scored = next(iter(runs.values()))
        where = f"the evaluation {scored.folder}"
        unscored = scored.folder / UNSCORED
        known = [*scored.references, *(read_predictions(unscored) if unscored.is_file() else [])]
    elif folder is None:
        raise DiffcapError(f"{run_a} and {run_b} are two files of captions; give --folder, the folder of the dataset.")
    else:
        dataset = read_dataset(folder)
        protocol = default_protocol(dataset, "test")
        where = f"{dataset.name}'s test split"
        split = [pair for pair in dataset.pairs if pair.split == "test"]
        known = [pair.id for pair in split]
        pairs = take_changes([pair for pair in split if pair.captions], protocol.get("changes"))
        references = {pair.id: pair.captions for pair in pairs}
        scored = EvaluationResult(Path(folder), {"protocol": protocol}, {}, references, groups_of(pairs))
    for text, (name, path) in files.items():
        predictions = read_other_predictions(path, scored.references, known, where)
        metrics = {**scored.metrics, "provenance": {"file": str(path), "sha256": file_hash(path)}}
        runs[text] = replace(scored, folder=path, title=name or str(path), predictions=predictions, metrics=metrics)
    return runs[run_a], runs[run_b]


def _named_file(text: str) -> tuple[str, Path] | None:
    """Split FILE or NAME=FILE into name and path; None for the folder of a run."""
    path = Path(text)
    if not path.is_file() and path.suffix.lower() not in PREDICTION_SUFFIXES:
        return None
    name, equals, file = text.partition("=")
    return (name, Path(file)) if equals and not path.is_file() else ("", path)


def read_evaluation(run: str | Path) -> EvaluationResult:
    """Read a run's folder, or the folder of one of its evaluations."""
    folder = find_evaluation(run)
    metrics = read_metrics(folder)
    predictions = read_predictions(folder / PREDICTIONS)
    references = read_references(folder / REFERENCES)
    groups = read_json(folder / GROUPS, "groups", "run `make eval` again")
    return EvaluationResult(folder, metrics, predictions, references, groups, str(folder))


def check_same_pairs(a: EvaluationResult, b: EvaluationResult) -> None:
    """Check that two runs were scored on the same pairs with the same references."""
    for run, other in ((a, b), (b, a)):
        missing_ids = [id for id in run.references if id not in other.references]
        if missing_ids:
            raise DiffcapError(
                f"{other.folder} lacks {len(missing_ids):,} of the pairs of {run.folder} (first {missing_ids[0]!r}); evaluate both on "
                "the same split of one dataset."
            )
    for id, captions in a.references.items():
        if b.references[id] != captions:
            runs = f"{a.folder} and {b.folder}"
            raise DiffcapError(
                f"{runs} have different references (first at {id!r}); evaluate both on the same manifest."
            )


def different_settings(a: EvaluationResult, b: EvaluationResult) -> dict[str, list[Any]]:
    """Return the settings of metrics.json that differ: name -> [value of a, value of b]; None for a value that is not recorded.

    For two runs of one method, the settings of their trainings in config.yaml ("model.lr") are compared, too. The settings of another
    system's file are unknown.
    """
    if any("file" in run.metrics["provenance"] for run in (a, b)):
        return {}
    settings_a, settings_b = (
        {key: value for key, value in run.metrics["protocol"].items() if key not in _RESULTS}
        | {key: run.metrics["provenance"].get(key) for key in _ORIGINS}
        for run in (a, b)
    )
    training_a, training_b = _training_settings(a), _training_settings(b)
    if settings_a["method"] == settings_b["method"] and training_a and training_b:
        settings_a |= training_a
        settings_b |= training_b
    values = {key: [settings_a.get(key), settings_b.get(key)] for key in settings_a | settings_b}
    return {key: [value_a, value_b] for key, (value_a, value_b) in values.items() if value_a != value_b}


def _training_settings(run: EvaluationResult) -> dict[str, Any]:
    """Read the training settings of the (first) evaluated checkpoint, as {"model.lr": 0.001}; {} without its config.yaml."""
    configs = [path.parent / "config.yaml" for path in evaluated_checkpoints(run.folder, run.metrics)[:1]]
    content = read_settings(configs[0]) or {} if configs and configs[0].is_file() else {}
    return flat({part: content.get(part) for part in ("trainer", "model", "data")})


def pairs_of(evaluated: EvaluationResult, folder: str | Path) -> list[ChangePair]:
    """Return the scored pairs, from the manifest of their dataset."""
    pairs = {pair.id: pair for pair in read_dataset(folder).pairs}
    missing = [id for id in evaluated.references if id not in pairs]
    if missing:
        lack = f"its manifest lacks {len(missing):,} of the runs' pairs (first {missing[0]!r})"
        raise DiffcapError(f"{folder}: {lack}; give the folder of the dataset that they were evaluated on.")
    return [pairs[id] for id in evaluated.references]


def largest_differences(
    result: Result, a: EvaluationResult, b: EvaluationResult, groups: Mapping[str, Sequence[str]], count: int
) -> list[dict[str, Any]]:
    """Return the pairs with the largest differences of CIDEr-D, with their smallest group, both captions and the references."""
    smallest_groups: dict[str, str] = {}  # id -> group
    for name in sorted(groups, key=lambda name: -len(groups[name])):
        smallest_groups |= dict.fromkeys(groups[name], name)
    order = sorted(result["scores"].items(), key=lambda item: -abs(item[1][1] - item[1][0]))
    rows = []
    for id, (score_a, score_b) in order[:count]:
        if score_a != score_b:
            captions = {"a": a.predictions[id], "b": b.predictions[id]}
            scores = {"a_score": score_a, "b_score": score_b}
            rows.append({"id": id, "group": smallest_groups[id], **captions, **scores, "references": a.references[id]})
    return rows


def metric_table(result: Result) -> Table:
    """Make the table of every metric of every group: scores of A and B, their difference, its interval, and P(B better)."""
    lines = []
    for group, metrics in result["groups"].items():
        for number, (metric, row) in enumerate(metrics.items()):
            low, high = map(signed_percent, row["interval"])
            difference = signed_percent(row["difference"])
            # A difference below the printed precision can exclude 0 in every draw: BLEU-4 of captions without any match is about 1e-9.
            is_significant = difference != "0.00" and not row["interval"][0] <= 0 <= row["interval"][1]
            numbers = []
            for key in "ab":
                score, first, last = (f"{100 * value:.2f}" for value in (row[key], *row[f"{key}_interval"]))
                has_weight = metric != "CIDEr-D" or not is_weightless({name: of[key] for name, of in metrics.items()})
                numbers.append(f"{score}{'' if has_weight else WEIGHTLESS_MARK} [{first}, {last}]")
            numbers += [
                difference + (" *" if is_significant else ""),
                f"[{low}, {high}]",
                "-" if low == high == "0.00" else f"{100 * row['b_better']:.1f} %",
            ]
            lines.append((["" if number else group, metric], [Cell(text) for text in numbers]))
    title = f"A: {result['runs']['a']}\nB: {result['runs']['b']}"
    return with_note(Table(["A", "B", "B-A", "interval", "B ahead"], lines, ["", ""], title))


def signed_percent(value: float) -> str:
    """Format a difference x 100 with its sign and two decimals: "+1.25", or "0.00" if it rounds to zero."""
    rounded = round(100 * value, 2)
    return f"{rounded:+.2f}" if rounded else "0.00"


def win_table(result: Result) -> Table:
    """Count the pairs of each group on which B's caption scores higher than, equal to and lower than A's."""
    lines = []
    for name, row in result["wins"].items():
        counts = (sum(row.values()), row["b"], row["tie"], row["a"])
        lines.append(([name], [Cell(f"{count:,}") for count in counts]))
    title = "pairs on which B's caption scores higher, equal, lower"
    return Table(["pairs", "B wins", "ties", "B loses"], lines, title=title)


def methodology_note(result: Result) -> str:
    """Explain how the scores were computed, and which settings differ."""
    protocol = result["protocol"]
    different = ", ".join(f"{name} {a} / {b}" for name, (a, b) in result["settings"].items())
    scores = []
    for metrics in result["groups"].values():
        for key in "ab":
            scores.append({metric: row[key] for metric, row in metrics.items()})
    return (
        f"{remarks(protocol)}{protocol['pairs']['total']:,} pairs, {protocol['tokenizer']} tokens, scores x 100. In brackets: the middle "
        f"{100 * protocol['level']:g} % of {protocol['samples']:,} draws of the pairs with replacement, the same for both "
        f"(seed {protocol['seed']}); * if that of the difference excludes 0. CIDEr-D keeps the document frequencies "
        "of the whole group in every draw. Wins are by each pair's CIDEr-D with the document frequencies of all pairs."
        + "".join(f" {note}" for note in score_notes(scores, protocol["pairs"]))
        + (f" Settings that differ, A / B: {different}." if different else "")
    )


def pair_lines(row: Result) -> list[str]:
    """Format one pair with both captions and its references."""
    return [
        f"{row['id']} ({row['group']})",
        *(f"  {name.upper()} {100 * row[f'{name}_score']:8.2f}  {row[name]}" for name in "ab"),
        *(f"  reference  {caption}" for caption in row["references"]),
    ]


def comparison_text(result: Result) -> str:
    """Format the comparison as Markdown."""
    parts = [
        escape_markdown(f"A is {result['runs']['a']}, B is {result['runs']['b']}."),
        metric_table(result).markdown(),
        escape_markdown(methodology_note(result)),
        win_table(result).markdown(),
        *(["The pairs where they differ most:"] if result["largest"] else []),
        *("\n".join(["```", *map(printable, pair_lines(row)), "```"]) for row in result["largest"]),
    ]
    return "\n\n".join(parts) + "\n"


def accuracy_table(folder: str | Path, rows: Mapping[str, Sequence[Path]], out: str | Path) -> None:
    """Print and write the table of evaluations, one per seed in a row; the other rows are compared with the first."""
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
    protocols = {name: group[0].metrics["protocol"] for name, group in read.items()}
    decoding = {name: {key: one.get(key) for key in _DECODING} for name, one in protocols.items()}
    common = {key: value for key, value in first.metrics["protocol"].items() if key not in _DECODING}
    protocol = {**common, "seeds": max(map(len, read.values())), "decoding": decoding}
    notes = provenance(runs={name: [one.metrics["provenance"] for one in group] for name, group in read.items()})
    target = Path(out)
    write_json(target / "table.json", {"protocol": protocol, "rows": merged, "gains": gains, "provenance": notes})
    several = protocol["seeds"] > 1
    seeds = f"; mean ± standard deviation of {protocol['seeds']} seeds, whose ensemble is one system" if several else ""
    caption = (
        f"{protocol['dataset']}, {protocol['split']} split, {protocol['pairs']['total']:,} pairs, {protocol['tokenizer']} "
        f"tokens; scores x 100{seeds}. Training seconds are the sum over all trainings of a row."
    )
    parts = [system_table(merged).markdown(), caption, gain_table(gains).markdown()]
    if types := type_table(merged):
        parts.append(types.markdown())
    write_text(target / "table.md", "\n\n".join(parts) + "\n")
    print_table(system_table(merged, f"{protocol['dataset']} {protocol['split']}"))
    print_table(gain_table(gains))
    print(caption)
    print(f"{target / 'table.json'}, table.md")


def gains_over_first(rows: Mapping[str, Sequence[Result]]) -> dict[str, dict[str, Any]]:
    """Subtract the first row from each row, seed by seed, or its mean from an ensemble: name -> metric -> "mean", "std", "of"."""
    first, *others = rows
    table: dict[str, dict[str, Any]] = {}
    for name in others:
        table[name] = {}
        for metric in rows[first][0]["total"]:
            baseline = [row["total"][metric] for row in rows[first]]
            scores = [row["total"][metric] for row in rows[name]]
            gains = [scores[0] - statistics.fmean(baseline)]
            if len(scores) == len(baseline):
                gains = [score - base for base, score in zip(baseline, scores)]
            std = statistics.stdev(gains) if len(gains) > 1 else None
            table[name][metric] = {"mean": statistics.fmean(gains), "std": std, "of": gains}
    return table


def gain_table(gains: Mapping[str, Result]) -> Table:
    """Make the table of the gains."""
    metrics = list(next(iter(gains.values())))

    def cell(gain: Result) -> Cell:
        std = "" if gain["std"] is None else f"{100 * gain['std']:.2f}"
        return Cell(f"{round(100 * gain['mean'], 2) + 0.0:+.2f}", std)  # + 0.0: no -0.00

    lines = [([name], [cell(row[metric]) for metric in metrics]) for name, row in gains.items()]
    return Table(metrics, lines, ["gained over greedy"], "gained over the first row")
