"""The console command `diffcap`: one function a command, its signature the options and its docstring the help."""

import sys
from pathlib import Path
from typing import Any, Literal

from diffcap.console import run
from diffcap.errors import DiffcapError


def score(predictions: Path, references: Path, tokenizer: Literal["ptb", "raw"] = "ptb", json: bool = False) -> None:
    """Score a file of captions: BLEU-1..4, METEOR, ROUGE-L, CIDEr-D, and SPICE where its jars are.

    Args:
        predictions: COCO results file, a list of {"image_id", "caption"}; one caption for every id of the references.
        references: COCO captions file, {"annotations": [{"image_id", "caption"}, ...]}.
        tokenizer: ptb lower-cases, splits words and drops punctuation, as most papers do; raw splits at blanks only.
        json: Print what metrics.json would hold, fractions, instead of a table.
    """
    from diffcap import __version__
    from diffcap.evaluation.captions import ALL_METRICS, check_ids, score_captions, unavailable_metrics
    from diffcap.evaluation.coco import read_predictions, read_references
    from diffcap.evaluation.tables import metrics_table, print_table
    from diffcap.records import file_hash

    said, truth = read_predictions(predictions), read_references(references)
    check_ids(said, truth, where=f"{predictions} against {references}: ")
    scores = score_captions(said, truth, tokenizer)
    missing = unavailable_metrics(ALL_METRICS)
    if json:
        from json import dumps

        files = {"predictions": predictions, "references": references}
        result = {
            "protocol": {"tokenizer": tokenizer, "metrics": list(scores), "pairs": {"total": len(truth)}},
            "groups": {"total": scores},
            "provenance": {
                "diffcap": __version__,
                **{name: {"file": str(path), "sha256": file_hash(path)} for name, path in files.items()},
                **({"unavailable": missing} if missing else {}),
            },
        }
        print(dumps(result, indent=2, ensure_ascii=False))
        return
    print_table(metrics_table({"total": scores}, f"{predictions.name}: {len(truth):,} pairs, {tokenizer} tokens"))
    for name, remedy in missing.items():
        print(f"{name} is unavailable: {remedy}.")


def compare(
    run_a: Path,
    run_b: Path,
    samples: int = 1000,
    seed: int = 0,
    level: float = 0.95,
    pairs: int = 10,
    folder: Path | None = None,
    tokenizer: Literal["ptb", "raw"] | None = None,
    json: bool = False,
    out: Path | None = None,
) -> None:
    """Compare two evaluated runs: paired bootstrap intervals of every metric, wins and losses, where they differ most.

    Args:
        run_a: folder of a run, or of one of its evaluations (with predictions.json, references.json and metrics.json).
        run_b: the other one; differences are B - A.
        samples: draws of the test pairs with replacement.
        seed: of the draws.
        level: of the intervals; 0.95 is the middle 95 % of the draws.
        pairs: how many of the pairs where the two differ most are shown.
        folder: the dataset's folder, for the change types of runs that were evaluated by an earlier version.
        tokenizer: of the metrics; the one that the runs were scored with by default.
        json: print everything as JSON.
        out: file to write, too: JSON, or Markdown where its name ends in .md.
    """
    if samples < 1 or not 0 < level < 1:
        raise DiffcapError(f"--samples is {samples} and --level is {level}; give at least 1, and between 0 and 1.")
    from diffcap.evaluation.bootstrap import compare as bootstrap
    from diffcap.evaluation.captions import unavailable_metrics
    from diffcap.evaluation.tables import print_table
    from diffcap.provenance import provenance
    from diffcap.records import write_json, write_text
    from diffcap.report import comparison as report
    from diffcap.report.table import rich_table

    a, b = report.read_evaluated(run_a), report.read_evaluated(run_b)
    report.check_same_pairs(a, b)
    scored_by = [tokenizer or run.metrics["protocol"]["tokenizer"] for run in (a, b)]
    if len(set(scored_by)) > 1:
        raise DiffcapError(f"{run_a} was scored by {scored_by[0]} tokens, {run_b} by {scored_by[1]}; give --tokenizer.")
    groups = report.groups_for(a, b, folder)
    metrics = [name for name in a.metrics["protocol"]["metrics"] if name in b.metrics["protocol"]["metrics"]]
    missing = unavailable_metrics(metrics)
    result = bootstrap(a.predictions, b.predictions, a.references, groups, scored_by[0], metrics, samples, seed, level)
    protocol = {
        "tokenizer": scored_by[0],
        "metrics": [name for name in metrics if name not in missing],
        "pairs": {name: len(ids) for name, ids in groups.items()},
        "samples": samples,
        "seed": seed,
        "level": level,
    }
    found = {
        "runs": {"a": str(a.folder), "b": str(b.folder)},
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
        from json import dumps

        print(dumps(found, indent=2, ensure_ascii=False))
        return
    print_table(rich_table(report.metric_lines(found), f"A: {a.folder}\nB: {b.folder}", words=2))
    print(f"{report.explained(found)}\n")
    print_table(rich_table(report.win_lines(found), "pairs on which B's caption scores higher, as high, lower"))
    print("\n\n".join(map(report.pair_text, found["largest"])))


def average(checkpoints: list[Path], out: Path = Path("averaged.ckpt")) -> None:
    """Average the weights of several checkpoints of one model into a new one.

    Args:
        checkpoints: files, or a training run's folder, which stands for the checkpoints that `--run.keep` has kept in it
            and its last.ckpt.
        out: the new checkpoint, which every command takes that takes the others.
    """
    from diffcap.combining import average as write_average

    steps = write_average(checkpoints, out)
    print(f"{out}: the mean of {len(steps)} checkpoints, of steps {', '.join(f'{step:,}' for step in steps)}")


COMMANDS: dict[str, Any] = {"score": score, "compare": compare, "average": average}


def _spell_out(arguments: list[str], flags: tuple[str, ...] = ("--json",)) -> list[str]:
    """Let a flag stand alone: jsonargparse wants a value after every option."""
    following = [*arguments[1:], ""]
    return [
        f"{word}=true" if word in flags and after not in ("true", "false") else word
        for word, after in zip(arguments, following)
    ]


def _gathered(arguments: list[str]) -> list[str]:
    """Let `average` take any number of files: jsonargparse wants a list as one word."""
    if arguments[:1] != ["average"]:
        return arguments
    files: list[str] = []
    rest: list[str] = []
    words = iter(arguments[1:])
    for word in words:
        if word == "--out":
            rest += [word, next(words, "")]
        else:
            (rest if word.startswith("-") else files).append(word)
    from json import dumps

    return ["average", *([dumps(files)] if files else []), *rest]


def main(arguments: list[str] | None = None) -> None:
    """Run `diffcap COMMAND ...`; `arguments` are those of the process unless given."""
    words = sys.argv[1:] if arguments is None else arguments
    run(COMMANDS, _gathered(_spell_out(words)), as_positional=True, prog="diffcap", description=__doc__.split(":")[0])


if __name__ == "__main__":
    main()
