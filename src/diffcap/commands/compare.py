"""`diffcap compare`: compare two evaluated runs, or other systems' captions."""

from pathlib import Path
from textwrap import wrap
from typing import Literal

from diffcap.utils.console import echo, print_json
from diffcap.utils.errors import DiffcapError

_MAX_SAMPLES = 100_000  # the ends of a 95 % interval then vary by 0.2 % of its width between seeds


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
    from diffcap.evaluation.bootstrap import compare as bootstrap
    from diffcap.evaluation.captions import unavailable_metrics
    from diffcap.evaluation.tables import print_table
    from diffcap.records import write_json, write_text
    from diffcap.report import comparison as report
    from diffcap.utils.provenance import provenance

    a, b = report.read_both(run_a, run_b, folder)
    report.check_same_pairs(a, b)
    scored_by = [tokenizer or run.metrics["protocol"]["tokenizer"] for run in (a, b)]
    if len(set(scored_by)) > 1:
        raise DiffcapError(
            f"{run_a} was scored with the tokenizer {scored_by[0]}, {run_b} with {scored_by[1]}; give --tokenizer."
        )
    groups = report.groups_for(a, folder)
    metrics = [name for name in a.metrics["protocol"]["metrics"] if name in b.metrics["protocol"]["metrics"]]
    if not metrics:
        raise DiffcapError(f"{run_a} and {run_b} have no metric in common; evaluate both with the same --metrics.")
    missing = unavailable_metrics(metrics)
    if len(missing) == len(metrics):
        reason = next(iter(missing.values()))
        raise DiffcapError(f"{run_a} and {run_b} have no metric in common that can be computed: {reason}.")
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
        "settings": report.different_settings(a, b),
        "protocol": protocol,
        "groups": result["groups"],
        "wins": result["wins"],
        "largest": report.largest_differences(result, a, b, groups, pairs),
        "provenance": provenance(runs=[run.metrics.get("provenance") for run in (a, b)], unavailable=missing),
    }
    if out is not None and out.suffix == ".md":
        write_text(out, report.comparison_text(found))
    elif out is not None:
        write_json(out, found)
    if json:
        print_json(found)
        return
    print_table(report.metric_table(found))
    echo(*wrap(report.methodology_note(found), 100), "")
    print_table(report.win_table(found))
    for row in found["largest"]:
        echo(*report.pair_lines(row), "")
