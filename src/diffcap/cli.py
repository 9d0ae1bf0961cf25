"""The console command `diffcap`: one function a command, its signature the options and its docstring the help."""

import sys
from pathlib import Path
from typing import Any, Literal

from diffcap import __version__
from diffcap.experiment import Experiment, parse
from diffcap.pipeline import STAGES
from diffcap.pipeline import main as run_stage_program
from diffcap.utils.command_line import Form, spelled_out
from diffcap.utils.console import OneLineErrorParser, echo, print_json, run
from diffcap.utils.errors import plain_errors

DESCRIPTION = f"Image difference captioning. The stages of an experiment are commands, too: {', '.join(STAGES)}."


def score(predictions: Path, references: Path, tokenizer: Literal["ptb", "raw"] = "ptb", json: bool = False) -> None:
    """Score a file of captions: BLEU-1..4, METEOR, ROUGE-L, CIDEr-D, and SPICE where its jars are.

    Args:
        predictions: COCO results file, a list of {"image_id", "caption"}; one caption for every id of the references.
        references: COCO captions file, {"annotations": [{"image_id", "caption"}, ...]}.
        tokenizer: ptb lower-cases, splits words and drops punctuation, as most papers do; raw splits at blanks only.
        json: Print what metrics.json would hold, fractions, instead of a table.
    """
    from diffcap.evaluation.captions import ALL_METRICS, check_ids, score_captions, unavailable_metrics
    from diffcap.evaluation.coco import read_predictions, read_references
    from diffcap.evaluation.tables import metrics_table, print_table
    from diffcap.records import file_hash

    said, truth = read_predictions(predictions), read_references(references)
    check_ids(said, truth, where=f"{predictions} against {references}: ")
    scores = score_captions(said, truth, tokenizer)
    missing = unavailable_metrics(ALL_METRICS)
    if json:
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
        print_json(result)
        return
    title = f"{predictions.name}: {len(truth):,} pairs, {tokenizer} tokens"
    print_table(metrics_table({"total": scores}, title, pairs={"total": len(truth)}))
    for name, remedy in missing.items():
        echo(f"{name} is unavailable: {remedy}.")


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
        run_a: folder of a run, which stands for its eval, or of any evaluation, such as runs/blocks/scorer/reinforce-eval.
        run_b: the other one; differences are B - A.
        samples: draws of the test pairs with replacement, at most 100,000.
        seed: of the draws, 0 or more.
        level: of the intervals; 0.95 is the middle 95 % of the draws.
        pairs: how many of the pairs where the two differ most are shown.
        folder: the dataset's folder, for the change types of runs that were evaluated by an earlier version.
        tokenizer: of the metrics; the one that the runs were scored with by default.
        json: print everything as JSON.
        out: file to write, too: JSON, or Markdown where its name ends in .md.
    """
    from diffcap.commands.compare import run as run_compare

    run_compare(run_a, run_b, samples, seed, level, pairs, folder, tokenizer, json, out)


def average(checkpoints: list[Path], out: Path = Path("averaged.ckpt")) -> None:
    """Average the weights of several checkpoints of one model into a new one.

    Args:
        checkpoints: files, or a training run's folder, which stands for the checkpoints that `--run.keep` has kept in it
            and its last.ckpt.
        out: the new checkpoint, which every command takes that takes the others.
    """
    from diffcap.checkpoints.combining import average as write_average

    steps = write_average(checkpoints, out)
    echo(f"{out}: the mean of {len(steps)} checkpoints, of steps {', '.join(f'{step:,}' for step in steps)}")


def caption(
    before: str,
    after: str | None = None,
    checkpoint: list[str] | None = None,
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
            Face hub; by default the small captioner of rendered blocks scenes that ships with diffcap. Given several times,
            captioners of one vocabulary caption together, by the mean of their probabilities.
        beam: Width of the search, at most 100; 1 takes the most likely word at every place, 5 tries more and lists what else
            was found.
        length_penalty: Sums of log-probabilities are divided by words to this power when beams are compared.
        heatmap: PNG file for both images and where each word looked; for many pairs a folder.
        json: Print JSON: one object for a pair, a line a pair for many.
        batch_size: Pairs at once.
        device: cpu, cuda, or auto.
        backbone_weights: File of the backbone's weights, where there is no network to download them.
    """
    from diffcap.commands.caption import run as run_caption

    run_caption(before, after, checkpoint, beam, length_penalty, heatmap, json, batch_size, device, backbone_weights)


def import_(
    method: str,
    file: Path,
    vocabulary: Path | None = None,
    out: Path | None = None,
    dataset: str = "clevr_change",
    heads: int = 8,
    vision_heads: int | None = None,
    max_length: int | None = None,
    coordinates: bool | None = None,
    grid: tuple[int, int] | None = None,
    intra_layers: int | None = None,
) -> None:
    """Turn a checkpoint that the authors of a method released into one of diffcap's; nothing pickled in it is run.

    Sizes are read off the weights; the options hold what cannot be.

    Args:
        method: Whose checkpoint it is: pcl, scorer, dirl, clip4idc, or a method of an installed package.
        file: The authors' file.
        vocabulary: JSON from word to id, vocab.json of SCORER and DIRL, dict.json of IDC-PCL; not for CLIP4IDC.
        out: Folder to write; the file's name with -diffcap behind it by default.
        dataset: That it was trained on: birds2words has scores of raw tokens.
        heads: Of every attention but CLIP's own.
        vision_heads: Of CLIP's image tower; 64 channels each by default.
        max_length: Positions of a caption; by default what the authors' code has on CLEVR-Change.
        coordinates: Whether SCORER's or DIRL's features have x and y appended; by default seen by their number.
        grid: Rows and columns of IDC-PCL's features; 7 and 7 by default.
        intra_layers: Blocks of CLIP4IDC's image tower that see one image only; three quarters by default.
    """
    from diffcap.commands.interchange import run_import
    from diffcap.interop.official import ImportOptions

    options = ImportOptions(heads, vision_heads, max_length, coordinates, grid, intra_layers, dataset)
    run_import(method, file, vocabulary, out, options)


def export(checkpoint: Path, out: Path | None = None) -> None:
    """Write a checkpoint as model.safetensors and config.json, which other programs read, too, and its metrics.json.

    Args:
        checkpoint: best.ckpt of any stage, or a folder of this form.
        out: Folder to write; the checkpoint's folder with -exported behind it by default.
    """
    from diffcap.commands.interchange import run_export

    run_export(checkpoint, out)


def push(
    checkpoint: Path,
    name: str,
    metrics: Path | None = None,
    pictures: list[Path] | None = None,
    license: str = "other",
    private: bool = False,
) -> None:
    """Put a captioner on the Hugging Face hub: weights, configuration, and a model card with its scores and pictures.

    Args:
        checkpoint: best.ckpt of the finetune or the reinforce stage, or a folder of `diffcap export`.
        name: Of the repository, user/name; it is made if it is not there.
        metrics: metrics.json of its evaluation; by default that of the checkpoint's run which is of the same weights.
        pictures: PNG files for the card, a JSON list, no two of one name; by default those of the run's report.
        license: Of the weights, as the hub names it, for example apache-2.0; the dataset's decides what is allowed.
        private: Make a new repository private; nothing is uploaded to one that others can see already.
    """
    from diffcap.commands.interchange import run_push

    run_push(checkpoint, name, metrics, pictures, license, private)


def pull(name: str, out: Path | None = None) -> None:
    """Fetch a captioner from the Hugging Face hub.

    Args:
        name: Of the repository, user/name.
        out: Folder to write; the repository's name by default.
    """
    from diffcap.commands.interchange import run_pull

    run_pull(name, out)


def serve(
    checkpoint: list[str] | None = None,
    host: str = "127.0.0.1",
    port: int = 7860,
    runs: Path = Path("runs"),
    device: str = "auto",
    backbone_weights: str | None = None,
) -> None:
    """Serve a web page: two drop zones, the caption word by word with where each word looked; needs diffcap[web].

    Args:
        checkpoint: Captioners to offer first, each as `diffcap caption` takes it: --checkpoint A B.
        host: Address to listen at; the default lets only this machine in, 0.0.0.0 everybody who reaches it.
        port: Port to listen at; 0 takes any that is free.
        runs: Folder whose captioners are offered, too, beside the one that ships with diffcap.
        device: cpu, cuda, or auto.
        backbone_weights: File of the backbone's weights for the captioners of --checkpoint, where there is no network.
    """
    from diffcap.web.server import serve as run_serve

    run_serve(checkpoint or [], runs, host, port, device, backbone_weights)


COMMANDS: dict[str, Any] = {
    "caption": caption,
    "score": score,
    "compare": compare,
    "average": average,
    "import": import_,
    "export": export,
    "push": push,
    "pull": pull,
    "serve": serve,
}
FORMS = {
    "caption": Form(second="--after", repeated="--checkpoint"),
    "average": Form(many=True),
    "serve": Form(repeated="--checkpoint", words=True),
}
FLAGS = ("--json", "--private")


class CommandParser(OneLineErrorParser):
    """The parser of the commands; its help has the form of `average` that `spelled_out` accepts, not jsonargparse's list."""

    def format_help(self, *formatter: Any) -> str:
        """The help text."""
        for action in self._actions:
            if action.dest == "checkpoints":
                action.metavar = "CHECKPOINT [CHECKPOINT ...]"
        return super().format_help(*formatter)


def _with_checkpoint(words: list[str]) -> list[str]:
    """Options of `serve`, where `--method` and other variables of an experiment stand for its checkpoint."""
    variables, rest = parse(words)
    if "method" not in variables:
        return rest
    return ["--checkpoint", str(Experiment(**variables).checkpoint), *rest]


def main(arguments: list[str] | None = None) -> None:
    """Run `diffcap COMMAND ...`; `arguments` are those of the process unless given."""
    words = sys.argv[1:] if arguments is None else arguments
    if words and words[0] in (*STAGES, "extra"):
        run_stage_program(words[0], words[1:], [sys.argv[0], words[0]])
        return
    if words and words[0] == "serve":
        with plain_errors():
            words = ["serve", *_with_checkpoint(words[1:])]
    run(
        COMMANDS,
        spelled_out(words, FORMS, FLAGS),
        as_positional=True,
        parser_class=CommandParser,
        prog="diffcap",
        version=__version__,
        description=DESCRIPTION,
    )


if __name__ == "__main__":
    main()
