"""Compare two evaluated runs or other systems' captions (`diffcap compare`), and write the table of `make accuracy`."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import wrap
from typing import Any, Literal

from diffcap.evaluation.bootstrap import compare as bootstrap
from diffcap.evaluation.captions import unavailable_metrics
from diffcap.evaluation.coco import read_other_predictions, read_predictions, read_references
from diffcap.evaluation.protocols import groups_of, remarks
from diffcap.evaluation.tables import WEIGHTLESS_MARK, further_tables, is_weightless, print_table, score_notes
from diffcap.record import flat
from diffcap.records import (
    ChangePair,
    JsonDict,
    file_hash,
    read_dataset,
    read_json,
    take_changes,
    write_json,
    write_text,
)
from diffcap.report.rows import Groups, Run, default_protocol, mean_row, read_run, run_row
from diffcap.report.table import system_table, type_table, with_weightless_note
from diffcap.run_folder import GROUPS, REFERENCES, UNSCORED, find_evaluation
from diffcap.utils.console import echo, print_json
from diffcap.utils.errors import DiffcapError, printable
from diffcap.utils.provenance import provenance
from diffcap.utils.settings import read_settings
from diffcap.utils.table import Cell, Table, escape_markdown

_DECODING_KEYS = ("beams", "length_penalty", "ensemble")  # entries of "protocol" that may differ between the rows
_MAX_SAMPLES = 100_000  # with these, the seed changes the ends of a 95 % interval by only 0.2 % of its width
_SCORING_KEYS = ("tokenizer", "metrics", "pairs")  # entries of "protocol" that do not change the captions
_ORIGIN_KEYS = ("method", "seed", "step", "features", "prompt", "sentences", "max_length")  # in "provenance"


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
        run_a: Folder of a run, such as runs/blocks/scorer, or of one of its evaluations, such as runs/blocks/scorer/reinforce-eval. Or
            FILE or NAME=FILE: a .json or .jsonl file with another system's captions of the same pairs, as for `score`.
        run_b: The second folder or file; differences are B - A.
        samples: Number of bootstrap samples of the test pairs, at most 100,000.
        seed: Seed of the bootstrap samples, 0 or more.
        level: Confidence level of the intervals; 0.95 is the middle 95 % of the samples.
        pairs: Number of pairs with the largest differences to show.
        folder: Folder of the dataset. Two files need it, because they are compared on its test split. For runs that an earlier version
            evaluated, the change types are read from this folder.
        tokenizer: Tokenizer of the metrics; by default the tokenizer of the runs' evaluations.
        json: Print the result as JSON.
        out: File to which the result is written, too: as Markdown if its name ends in .md, else as JSON.
    """
    if not 1 <= samples <= _MAX_SAMPLES:
        raise DiffcapError(f"--samples is {samples}; give 1 to {_MAX_SAMPLES:,}.")
    if not 0 < level < 1:
        raise DiffcapError(f"--level is {level}; give a number between 0 and 1, such as 0.95.")
    for option, number in {"seed": seed, "pairs": pairs}.items():
        if number < 0:
            raise DiffcapError(f"--{option} is {number}; it must be at least 0.")
    a, b = read_both(run_a, run_b, folder)
    check_same_scoring(a, b, any_tokenizer=tokenizer is not None)
    tokenizer = tokenizer or a.metrics["protocol"]["tokenizer"]
    groups = a.groups if folder is None else groups_of(pairs_of(a, folder))
    metrics = [name for name in a.metrics["protocol"]["metrics"] if name in b.metrics["protocol"]["metrics"]]
    if not metrics:
        raise DiffcapError(f"{run_a} and {run_b} have no metric in common; evaluate both with the same --metrics.")
    unavailable = unavailable_metrics(metrics)
    scores = bootstrap(a.predictions, b.predictions, a.references, groups, tokenizer, metrics, samples, seed, level)
    protocol = {
        **{key: value for key, value in b.metrics["protocol"].items() if key in ("official", "change_types")},
        "tokenizer": tokenizer,
        "metrics": list(next(iter(scores["groups"].values()))),
        "pairs": {name: len(ids) for name, ids in groups.items()},
        "samples": samples,
        "seed": seed,
        "level": level,
    }
    result = {
        "runs": {"a": a.title, "b": b.title},
        "settings": different_settings(a, b),
        "protocol": protocol,
        "groups": scores["groups"],
        "wins": scores["wins"],
        "largest": largest_differences(scores["scores"], a, b, groups, pairs),
        "provenance": provenance(runs=[run.metrics.get("provenance") for run in (a, b)], unavailable=unavailable),
    }
    if out is not None and out.suffix == ".md":
        write_text(out, comparison_text(result))
    elif out is not None:
        write_json(out, result)
    if json:
        print_json(result)
        return
    print_table(metric_table(result))
    echo(*wrap(methodology_note(result), 100), "")
    print_table(win_table(result))
    for run in (a, b):
        for further_table in further_tables(run.metrics, f"{run.title}: "):
            print_table(further_table)
    for pair in result["largest"]:
        echo(*pair_lines(pair), "")


@dataclass(frozen=True, kw_only=True)
class ScoredRun(Run):
    """An evaluated run with its references. The captions of another system have those and the groups of the run in the comparison."""

    references: dict[str, list[str]]  # id -> captions
    groups: dict[str, list[str]]  # name of a group of pairs ("total", "color") -> ids
    title: str = ""


def read_both(run_a: str, run_b: str, dataset_folder: str | Path | None) -> tuple[ScoredRun, ScoredRun]:
    """Read two runs, or files of captions (FILE or NAME=FILE). Two files must have captions of the test split in `dataset_folder`."""
    caption_files: dict[str, tuple[str, Path]] = {}  # argument -> name and path
    for argument in (run_a, run_b):
        path = Path(argument)
        if path.is_file() or path.suffix.lower() in (".json", ".jsonl"):
            name, equals_sign, file = argument.partition("=")
            caption_files[argument] = (name, Path(file)) if equals_sign and not path.is_file() else ("", path)
    runs = {argument: read_evaluation(argument) for argument in (run_a, run_b) if argument not in caption_files}
    if runs:
        reference_run = next(iter(runs.values()))
        pairs_title = f"the evaluation {reference_run.path}"
        unscored_file = reference_run.path / UNSCORED  # captions of pairs without references
        known_ids = [*reference_run.references, *(read_predictions(unscored_file) if unscored_file.is_file() else [])]
    elif dataset_folder is None:
        raise DiffcapError(f"{run_a} and {run_b} are two files of captions; give --folder, the folder of the dataset.")
    else:
        dataset = read_dataset(dataset_folder)
        protocol = default_protocol(dataset, "test")
        pairs_title = f"{dataset.name}'s test split"
        split_pairs = [pair for pair in dataset.pairs if pair.split == "test"]
        known_ids = [pair.id for pair in split_pairs]
        pairs = take_changes([pair for pair in split_pairs if pair.captions], protocol.get("changes"))
        references = {pair.id: pair.captions for pair in pairs}
        scoring: dict[str, Any] = {"references": references, "groups": groups_of(pairs)}
        reference_run = ScoredRun(Path(dataset_folder), {"protocol": protocol}, {}, **scoring)
    for argument, (name, path) in caption_files.items():
        captions = read_other_predictions(path, reference_run.references, known_ids, pairs_title)
        provenance_entry = {"file": str(path), "sha256": file_hash(path)}
        metrics = {"protocol": reference_run.metrics["protocol"], "provenance": provenance_entry}
        run = replace(reference_run, path=path, predictions=captions, metrics=metrics, checkpoints=())
        runs[argument] = replace(run, title=name or str(path))
    return runs[run_a], runs[run_b]


def read_evaluation(path: str | Path) -> ScoredRun:
    """Read a run from its folder, or from the folder of one of its evaluations."""
    folder = find_evaluation(path)
    run = read_run(folder)
    references = read_references(folder / REFERENCES)
    groups = read_json(folder / GROUPS, "groups", "run `make eval` again")
    return ScoredRun(**vars(run), references=references, groups=groups, title=str(folder))


def check_same_scoring(a: ScoredRun, b: ScoredRun, any_tokenizer: bool = False) -> None:
    """Check that two runs were scored on the same pairs with the same references and, unless `any_tokenizer`, the same tokenizer."""
    for run, other in ((a, b), (b, a)):
        missing_ids = [id for id in run.references if id not in other.references]
        if missing_ids:
            raise DiffcapError(
                f"{other.path} lacks {len(missing_ids):,} of the pairs of {run.path} (first {missing_ids[0]!r}); evaluate both on "
                "the same split of one dataset."
            )
    for id, captions in a.references.items():
        if b.references[id] != captions:
            runs = f"{a.path} and {b.path}"
            raise DiffcapError(
                f"{runs} have different references (first at {id!r}); evaluate both on the same manifest."
            )
    tokenizers = [run.metrics["protocol"]["tokenizer"] for run in (a, b)]
    if not any_tokenizer and tokenizers[0] != tokenizers[1]:
        raise DiffcapError(
            f"{a.path} was scored with the tokenizer {tokenizers[0]}, {b.path} with {tokenizers[1]}; evaluate both with the same "
            "--tokenizer, or compare them with --tokenizer."
        )


def different_settings(a: ScoredRun, b: ScoredRun) -> dict[str, list[Any]]:
    """Return the settings in metrics.json that differ, as name -> [value of a, value of b]. A value that is not recorded is None.

    For two runs of one method, the settings of their trainings in config.yaml ("model.lr") are compared, too. If `a` or `b` is another
    system's file, its settings are unknown, and the result is {}.
    """
    if any("file" in run.metrics["provenance"] for run in (a, b)):
        return {}
    settings_a, settings_b = (
        {key: value for key, value in run.metrics["protocol"].items() if key not in _SCORING_KEYS}
        | {key: run.metrics["provenance"].get(key) for key in _ORIGIN_KEYS}
        for run in (a, b)
    )
    training_a, training_b = _training_settings(a), _training_settings(b)
    if settings_a["method"] == settings_b["method"] and training_a and training_b:
        settings_a |= training_a
        settings_b |= training_b
    values = {key: [settings_a.get(key), settings_b.get(key)] for key in settings_a | settings_b}
    return {key: [value_a, value_b] for key, (value_a, value_b) in values.items() if value_a != value_b}


def _training_settings(run: ScoredRun) -> JsonDict:
    """Read config.yaml of the training of the first evaluated checkpoint, as {"model.lr": 0.001}; {} if the file is missing."""
    configs = [path.parent / "config.yaml" for path in run.checkpoints[:1]]
    content = read_settings(configs[0]) or {} if configs and configs[0].is_file() else {}
    return flat({part: content.get(part) for part in ("trainer", "model", "data")})


def pairs_of(run: ScoredRun, dataset_folder: str | Path) -> list[ChangePair]:
    """Return the scored pairs, from the manifest of their dataset."""
    pairs = {pair.id: pair for pair in read_dataset(dataset_folder).pairs}
    missing_ids = [id for id in run.references if id not in pairs]
    if missing_ids:
        problem = f"its manifest lacks {len(missing_ids):,} of the runs' pairs (first {missing_ids[0]!r})"
        raise DiffcapError(f"{dataset_folder}: {problem}; give the folder of the dataset that they were evaluated on.")
    return [pairs[id] for id in run.references]


def largest_differences(
    scores: Mapping[str, Sequence[float]], a: ScoredRun, b: ScoredRun, groups: Groups, count: int
) -> list[JsonDict]:
    """Describe the pairs whose `scores` (id -> CIDEr-D of A and B) differ most. The entry "group" is the smallest group of the pair."""
    smallest_groups: dict[str, str] = {}  # id -> group
    for group in sorted(groups, key=lambda group: -len(groups[group])):
        smallest_groups |= dict.fromkeys(groups[group], group)
    order = sorted(scores, key=lambda id: -abs(scores[id][1] - scores[id][0]))
    entries = []
    for id in order[:count]:
        score_a, score_b = scores[id]
        if score_a != score_b:
            entry = {"id": id, "group": smallest_groups[id], "a": a.predictions[id], "b": b.predictions[id]}
            entries.append({**entry, "a_score": score_a, "b_score": score_b, "references": a.references[id]})
    return entries


def metric_table(result: JsonDict) -> Table:
    """Make a table with a line per group and metric: A, B, B - A, the interval of B - A, and the share of samples in which B is better."""
    lines = []
    for group, metrics in result["groups"].items():
        for index, (metric, scores) in enumerate(metrics.items()):
            low, high = map(signed_percent, scores["interval"])
            difference = signed_percent(scores["difference"])
            # The interval of a difference that is printed as 0.00 can exclude 0: BLEU-4 of captions without any match is about 1e-9.
            is_significant = difference != "0.00" and not scores["interval"][0] <= 0 <= scores["interval"][1]
            texts = []
            for run in "ab":
                score, first, last = (f"{100 * value:.2f}" for value in (scores[run], *scores[f"{run}_interval"]))
                run_scores = {name: metric_scores[run] for name, metric_scores in metrics.items()}
                mark = WEIGHTLESS_MARK if metric == "CIDEr-D" and is_weightless(run_scores) else ""  # CIDEr-D is 0
                texts.append(f"{score}{mark} [{first}, {last}]")
            texts += [
                difference + (" *" if is_significant else ""),
                f"[{low}, {high}]",
                "-" if low == high == "0.00" else f"{100 * scores['b_better']:.1f} %",
            ]
            lines.append((["" if index else group, metric], list(map(Cell, texts))))
    title = f"A: {result['runs']['a']}\nB: {result['runs']['b']}"
    return with_weightless_note(Table(["A", "B", "B-A", "interval", "B ahead"], lines, ["", ""], title))


def signed_percent(value: float) -> str:
    """Format a difference x 100 with its sign and two decimals: "+1.25", or "0.00" if it rounds to zero."""
    rounded = round(100 * value, 2)
    return f"{rounded:+.2f}" if rounded else "0.00"


def win_table(result: JsonDict) -> Table:
    """Count the pairs of each group on which B's caption scores higher than, equal to and lower than A's."""
    lines = []
    for group, wins in result["wins"].items():
        counts = (sum(wins.values()), wins["b"], wins["tie"], wins["a"])
        lines.append(([group], [Cell(f"{count:,}") for count in counts]))
    title = "pairs on which B's caption scores higher, equal, lower"
    return Table(["pairs", "B wins", "ties", "B loses"], lines, title=title)


def methodology_note(result: JsonDict) -> str:
    """Explain how the scores were computed, and which settings differ."""
    protocol = result["protocol"]
    settings = ", ".join(f"{name} {value_a} / {value_b}" for name, (value_a, value_b) in result["settings"].items())
    group_scores = []
    for metrics in result["groups"].values():
        for run in "ab":
            group_scores.append({metric: scores[run] for metric, scores in metrics.items()})
    return (
        f"{remarks(protocol)}{protocol['pairs']['total']:,} pairs, {protocol['tokenizer']} tokens, scores x 100. In brackets: the middle "
        f"{100 * protocol['level']:g} % of {protocol['samples']:,} draws of the pairs with replacement, the same for both "
        f"(seed {protocol['seed']}); * marks a difference whose interval excludes 0. CIDEr-D keeps the document frequencies "
        "of the whole group in every draw. Wins are by each pair's CIDEr-D with the document frequencies of all pairs."
        + "".join(f" {note}" for note in score_notes(group_scores, protocol["pairs"]))
        + (f" Settings that differ, A / B: {settings}." if settings else "")
    )


def pair_lines(pair: JsonDict) -> list[str]:
    """Format one of the `largest_differences`: a pair with both captions and its references."""
    return [
        f"{pair['id']} ({pair['group']})",
        *(f"  {run.upper()} {100 * pair[f'{run}_score']:8.2f}  {pair[run]}" for run in "ab"),
        *(f"  reference  {caption}" for caption in pair["references"]),
    ]


def comparison_text(result: JsonDict) -> str:
    """Format the comparison as Markdown."""
    parts = [
        escape_markdown(f"A is {result['runs']['a']}, B is {result['runs']['b']}."),
        metric_table(result).markdown(),
        escape_markdown(methodology_note(result)),
        win_table(result).markdown(),
        *(["The pairs where they differ most:"] if result["largest"] else []),
        *("\n".join(["```", *map(printable, pair_lines(pair)), "```"]) for pair in result["largest"]),
    ]
    return "\n\n".join(parts) + "\n"


def accuracy_table(dataset_folder: str | Path, row_folders: Mapping[str, Sequence[Path]], out: str | Path) -> None:
    """Print the scores of some rows and their gains over the first row; write table.json and table.md to `out`.

    `row_folders`: name of a row -> folder of an evaluation for each seed.
    """
    runs = {name: [read_evaluation(path) for path in paths] for name, paths in row_folders.items()}
    first_run = next(iter(runs.values()))[0]
    for seed_runs in runs.values():
        for run in seed_runs:
            check_same_scoring(first_run, run)
    pairs = pairs_of(first_run, dataset_folder)
    seed_rows = {name: [run_row(run, pairs) for run in seed_runs] for name, seed_runs in runs.items()}
    rows = {name: mean_row(system_rows) for name, system_rows in seed_rows.items()}
    gains = gains_over_first(seed_rows)
    protocols = {name: seed_runs[0].metrics["protocol"] for name, seed_runs in runs.items()}
    decoding = {name: {key: protocol.get(key) for key in _DECODING_KEYS} for name, protocol in protocols.items()}
    common = {key: value for key, value in first_run.metrics["protocol"].items() if key not in _DECODING_KEYS}
    num_seeds = max(map(len, runs.values()))
    protocol = {**common, "seeds": num_seeds, "decoding": decoding}
    origins = {name: [run.metrics["provenance"] for run in seed_runs] for name, seed_runs in runs.items()}
    table_file = Path(out) / "table.json"
    write_json(table_file, {"protocol": protocol, "rows": rows, "gains": gains, "provenance": provenance(runs=origins)})
    seeds = f"; mean ± standard deviation of {num_seeds} seeds, whose ensemble is one system" if num_seeds > 1 else ""
    note = (
        f"{protocol['dataset']}, {protocol['split']} split, {protocol['pairs']['total']:,} pairs, {protocol['tokenizer']} "
        f"tokens; scores x 100{seeds}. Training seconds are the sum over all trainings of a row."
    )
    parts = [system_table(rows).markdown(), note, gain_table(gains).markdown()]
    if by_type := type_table(rows):
        parts.append(by_type.markdown())
    write_text(table_file.with_suffix(".md"), "\n\n".join(parts) + "\n")
    print_table(system_table(rows, f"{protocol['dataset']} {protocol['split']}"))
    print_table(gain_table(gains))
    print(note)
    print(f"{table_file}, table.md")


def gains_over_first(seed_rows: Mapping[str, Sequence[JsonDict]]) -> dict[str, JsonDict]:
    """Return the gains over the first system, as name -> metric -> {"of": the gain of each seed, "mean", "std"}."""
    first, *others = seed_rows
    all_gains: dict[str, JsonDict] = {}
    for name in others:
        all_gains[name] = {}
        for metric in seed_rows[first][0]["total"]:
            first_scores = [row["total"][metric] for row in seed_rows[first]]
            scores = [row["total"][metric] for row in seed_rows[name]]
            gains = [scores[0] - statistics.fmean(first_scores)]  # an ensemble has only one score and one gain
            if len(scores) == len(first_scores):
                gains = [score - first_score for first_score, score in zip(first_scores, scores)]
            std = statistics.stdev(gains) if len(gains) > 1 else None
            all_gains[name][metric] = {"mean": statistics.fmean(gains), "std": std, "of": gains}
    return all_gains


def gain_table(gains: Mapping[str, JsonDict]) -> Table:
    """Make a table of the gains that `gains_over_first` returns. In `make accuracy`, the first row is greedy decoding."""
    metrics = list(next(iter(gains.values())))

    def cell(gain: JsonDict) -> Cell:
        std = "" if gain["std"] is None else f"{100 * gain['std']:.2f}"
        return Cell(f"{round(100 * gain['mean'], 2) + 0.0:+.2f}", std)  # + 0.0 turns -0.0 into 0.0

    lines = []
    for name, by_metric in gains.items():
        lines.append(([name], [cell(by_metric[metric]) for metric in metrics]))
    return Table(metrics, lines, ["gained over greedy"], "gained over the first row")
