"""The console command `diffcap`: one function a command, its signature the options and its docstring the help."""

import sys
from pathlib import Path
from typing import Any, Literal

from diffcap.console import run


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


COMMANDS: dict[str, Any] = {"score": score}


def _spell_out(arguments: list[str], flags: tuple[str, ...] = ("--json",)) -> list[str]:
    """Let a flag stand alone: jsonargparse wants a value after every option."""
    following = [*arguments[1:], ""]
    return [
        f"{word}=true" if word in flags and after not in ("true", "false") else word
        for word, after in zip(arguments, following)
    ]


def main(arguments: list[str] | None = None) -> None:
    """Run `diffcap COMMAND ...`; `arguments` are those of the process unless given."""
    words = sys.argv[1:] if arguments is None else arguments
    run(COMMANDS, _spell_out(words), as_positional=True, prog="diffcap", description=__doc__.split(":")[0])


if __name__ == "__main__":
    main()
