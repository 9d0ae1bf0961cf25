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


def caption(
    before: str,
    after: str | None = None,
    checkpoint: str | None = None,
    beam: int = 1,
    length_penalty: float = 0.0,
    heatmap: str | None = None,
    json: bool = False,
    batch_size: int = 16,
    device: str = "auto",
    backbone_weights: str | None = None,
) -> None:
    """Say what changed between two pictures: diffcap caption BEFORE AFTER; or of many pairs: a folder, or a CSV of pairs.

    Args:
        before: The picture before the change, in any format that Pillow reads; or a folder with pairs.csv, with folders
            before and after, or with pictures X_before and X_after; or a .csv, .tsv or .jsonl file with columns before, after
            and, if you like, id.
        after: The picture after it, which may stand right behind the first; with two folders, pictures of the same name.
        checkpoint: best.ckpt of a captioner, a folder of `diffcap export` or `diffcap import`, or user/name on the Hugging
            Face hub; by default the small captioner of rendered blocks scenes that ships with diffcap.
        beam: Width of the search; 1 takes the most likely word at every place, 5 tries more and lists what else was found.
        length_penalty: Sums of log-probabilities are divided by words to this power when beams are compared.
        heatmap: PNG file for both images and where each word looked; for many pairs a folder.
        json: Print JSON: one object for a pair, a line a pair for many.
        batch_size: Pairs at once.
        device: cpu, cuda, or auto.
        backbone_weights: File of the backbone's weights, where there is no network to download them.
    """
    from diffcap.commands.caption import run as run_caption

    run_caption(before, after, checkpoint, beam, length_penalty, heatmap, json, batch_size, device, backbone_weights)


COMMANDS: dict[str, Any] = {"score": score, "caption": caption}
_SECOND = {"caption": "--after"}  # commands that take a second word without an option's name


def _spell_out(arguments: list[str], flags: tuple[str, ...] = ("--json",)) -> list[str]:
    """Put into jsonargparse's form what people write: flags alone, words joined with hyphens, a second name alone."""
    command = next((word for word in arguments if not word.startswith("-")), "")
    words: list[str] = []
    plain, value_follows = (
        0,
        False,
    )  # words that are no option's name or value; whether the next one is an option's value
    following = [*arguments[1:], ""]
    for word, after in zip(arguments, following):
        if value_follows:
            value_follows = False
        elif word.startswith("--"):
            name, equals, value = word.partition("=")
            word = name.replace("-", "_").replace("__", "--", 1) + equals + value
            if name in flags and not equals and after not in ("true", "false"):
                word = f"{word}=true"
            else:
                value_follows = not equals and name != "--help"
        elif not word.startswith("-"):
            plain += 1
            if plain == 3 and command in _SECOND:
                word = f"{_SECOND[command]}={word}"
        words.append(word)
    return words


def main(arguments: list[str] | None = None) -> None:
    """Run `diffcap COMMAND ...`; `arguments` are those of the process unless given."""
    words = sys.argv[1:] if arguments is None else arguments
    run(COMMANDS, _spell_out(words), as_positional=True, prog="diffcap", description=__doc__.split(":")[0])


if __name__ == "__main__":
    main()
