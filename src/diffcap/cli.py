"""The console command `diffcap`: one function per command; its signature gives the options, its docstring the help."""

import difflib
import sys
from pathlib import Path
from typing import Any, Literal

from diffcap import __version__
from diffcap.experiment import Experiment, parse
from diffcap.pipeline import STAGES
from diffcap.pipeline import main as run_stage_program
from diffcap.utils.command_line import Syntax, normalize_arguments
from diffcap.utils.console import OneLineErrorParser, echo, run
from diffcap.utils.errors import DiffcapError, plain_errors

DESCRIPTION = f"Image difference captioning. The stages of an experiment are also commands: {', '.join(STAGES)}."


def score(
    predictions: Path,
    references: Path | None = None,
    tokenizer: Literal["ptb", "raw"] = "ptb",
    json: bool = False,
    dataset: str | None = None,
    folder: Path | None = None,
    split: Literal["test", "val", "train"] = "test",
    protocol: Literal["text", "levir_cc"] = "text",
) -> None:
    """Score a file of captions: BLEU-1..4, METEOR, ROUGE-L, CIDEr-D, and SPICE if its jars are installed.

    The references are those of a file, or those of a dataset (--dataset), whose groups are then scored too.

    Args:
        predictions: COCO results file, a list of {"image_id", "caption"}; or an object from id to caption; or a .jsonl file with
            {"id", "caption"} on every line. One caption for every id of the references.
        references: COCO captions file, {"annotations": [{"image_id", "caption"}, ...]}.
        tokenizer: ptb lower-cases, splits words and drops punctuation, as in most papers; raw splits at spaces only.
        json: Print the content of metrics.json (scores as fractions) instead of a table.
        dataset: Name of a dataset that the data stage has prepared, instead of a file of references.
        folder: Folder of its manifest; data/<dataset> by default.
        split: The split of the dataset that the captions are of.
        protocol: text, or levir_cc (a dataset of remote-sensing change captioning, or of your own in Karpathy's form): also the
            metrics of word ids that the released evaluators print, change accuracy, no-change accuracy and S*m.
    """
    from diffcap.commands.score import run as run_score

    run_score(predictions, references, tokenizer, json, dataset, folder, split, protocol)


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
    from diffcap.commands.compare import run as run_compare

    run_compare(run_a, run_b, samples, seed, level, pairs, folder, tokenizer, json, out)


def audit(dataset: str | None = None, folder: Path | None = None) -> None:
    """List the pairs of a dataset whose change flag, captions, mask and images contradict each other.

    The flag is what the data stage wrote: `changeflag`, or whether a pair is a distractor. The list is also written to audit.jsonl in the
    folder.

    Args:
        dataset: Name of the dataset; the data stage must have prepared it.
        folder: Folder of its manifest; data/<dataset> by default.
    """
    from diffcap.commands.audit import run as run_audit

    run_audit(dataset, folder)


def average(checkpoints: list[Path], out: Path = Path("averaged.ckpt")) -> None:
    """Average the weights of several checkpoints of one model.

    Args:
        checkpoints: Checkpoint files, or the folder of a training: its periodic checkpoints (`--run.keep_last_k`) and last.ckpt.
        out: Checkpoint file to write.
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
    base: str | None = None,
    prompt: str | None = None,
    out: list[str] | None = None,
    tile: int | None = None,
    overlap: int | None = None,
    bands: str | None = None,
    stretch: str | None = None,
    threshold: float | None = None,
    align: bool = False,
) -> None:
    """Describe the change between two images (diffcap caption BEFORE AFTER), of many pairs, or in a whole scene (--out).

    Many pairs are a folder, two folders or a table of pairs. A whole scene is two rasters, such as GeoTIFF files; it needs diffcap[geo].

    Args:
        before: The image before the change, in any format that Pillow reads; or a folder with pairs.csv, with the folders
            before and after (or A and B), or with images X_before and X_after; or a .csv, .tsv or .jsonl file with the columns
            before, after and, optionally, id.
        after: The image after the change; also accepted as the second argument. Two folders: images with the same name are
            pairs.
        checkpoint: best.ckpt of a captioner, a folder of `diffcap export` or `diffcap import`, or user/name on the Hugging
            Face Hub; also a vision-language model, such as HuggingFaceTB/SmolVLM-500M-Instruct, or its folder. By default the
            small captioner of rendered blocks scenes that ships with diffcap. If it is given several times, the captioners are
            an ensemble and need the same vocabulary.
        beam: Beam size, 1 to 100; 1 is greedy decoding. With more, the other hypotheses and the greedy caption are listed.
        length_penalty: Exponent of the caption's length by which the log-probability of a hypothesis is divided.
        heatmap: PNG file to write with both images and the attention of each word; a folder for many pairs.
        json: Print JSON; for many pairs one line per pair.
        batch_size: Number of pairs that are captioned at once.
        device: cpu, cuda or auto.
        backbone_weights: File of the backbone's weights, if they cannot be downloaded.
        base: Folder of the base model of a checkpoint of METHOD=vlm, if it is not where the checkpoint says.
        prompt: Question to a vision-language model that was not fine-tuned.
        out: For many pairs, a .jsonl or .csv file that gets a row for each pair. For a whole scene (two rasters), a file for the
            changes: .geojson, .csv or .html (a map); may be given several times; the rasters are read and captioned in tiles. The
            same command continues an interrupted one where it stopped.
        tile: Whole scenes: side of a tile in pixels; 256 by default.
        overlap: Whole scenes: pixels that neighbouring tiles have in common; 64 by default, at most a quarter of a tile.
        bands: Whole scenes: the bands for red, green and blue, such as 4,3,2, or one band; 1,2,3 by default.
        stretch: Whole scenes: percentiles of both dates that become black and white; 2,98 by default, but not for 8-bit pixels. Without
            it, the captioner that ships gets the contrast of its training images.
        threshold: Whole scenes: tiles whose probability of no change is at least this are left out; 0.5 by default.
        align: Whole scenes: warp the second raster to the grid of the first one while it is read.
    """
    from diffcap.commands.caption import run as run_caption
    from diffcap.commands.pairs import names_many
    from diffcap.commands.scene import SceneOptions
    from diffcap.commands.scene import run as run_scene

    scene = SceneOptions(out, tile, overlap, bands, stretch, threshold, align)
    if names_many(before, after):
        if unused := [name for name in scene.given if name != "--out"]:
            raise DiffcapError(f"{unused[0]} is for a whole scene, two rasters; remove it for the pairs of {before}.")
    elif scene.given:
        unused = [name for name, value in (("--heatmap", heatmap), ("--json", json)) if value]
        if unused:
            raise DiffcapError(f"{unused[0]} is for pairs of images; remove it for a whole scene ({scene.given[0]}).")
        run_scene(
            before, after, scene, checkpoint, beam, length_penalty, batch_size, device, backbone_weights, base, prompt
        )
        return

    run_caption(
        before,
        after,
        checkpoint,
        beam,
        length_penalty,
        heatmap,
        json,
        batch_size,
        device,
        backbone_weights,
        base,
        prompt,
        out,
    )


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
    """Convert a checkpoint that the authors of a method released, without running pickled code.

    Most hyperparameters follow from the weights; the options are for the others.

    Args:
        method: Method of the checkpoint: pcl, scorer, dirl, clip4idc, or a method of an installed package.
        file: The authors' file.
        vocabulary: JSON file from word to id: vocab.json of SCORER and DIRL, dict.json of IDC-PCL; not for CLIP4IDC.
        out: Folder to write; by default the file's name and -diffcap.
        dataset: Training dataset; birds2words is evaluated with raw tokens.
        heads: Number of heads of every attention layer except CLIP's.
        vision_heads: Number of heads of CLIP's image tower; by default each head has 64 channels.
        max_length: Maximal number of tokens of a caption; by default the authors' value for CLEVR-Change.
        coordinates: Whether x and y are appended to SCORER's or DIRL's features; by default derived from the number of
            channels.
        grid: Rows and columns of IDC-PCL's features; 7 and 7 by default.
        intra_layers: Layers of CLIP4IDC's image tower that encode each image separately; three quarters by default.
    """
    from diffcap.commands.interchange import run_import
    from diffcap.interop.official import ImportOptions

    options = ImportOptions(heads, vision_heads, max_length, coordinates, grid, intra_layers, dataset)
    run_import(method, file, vocabulary, out, options)


def export(
    checkpoint: Path,
    out: Path | None = None,
    form: Literal["peft", "merged"] | None = None,
    base: str | None = None,
) -> None:
    """Write a checkpoint as model.safetensors and config.json, with the metrics.json of its weights if there is one.

    Args:
        checkpoint: best.ckpt of any stage, or an exported folder.
        out: Folder to write; by default the checkpoint's path without .ckpt and -exported.
        form: For METHOD=vlm, a form for other programs instead: peft (LoRA's adapter) or merged (a whole model for transformers).
        base: Folder of the base model of METHOD=vlm, if it is not where the checkpoint says; only with --form.
    """
    from diffcap.commands.interchange import run_export

    run_export(checkpoint, out, form, base)


def push(
    checkpoint: Path,
    name: str,
    metrics: Path | None = None,
    pictures: list[Path] | None = None,
    license: str = "other",
    private: bool = False,
) -> None:
    """Upload a captioner to the Hugging Face Hub: weights, configuration, and a model card with its scores and images.

    Args:
        checkpoint: best.ckpt of the finetune or reinforce stage, or a folder of `diffcap export`.
        name: Repository as user/name; it is created if it does not exist.
        metrics: metrics.json of the evaluation of these weights; by default it is searched in the run of the checkpoint.
        pictures: PNG files for the model card, with distinct names (--pictures A B); by default those of the run's report.
        license: The Hub's identifier of the licence of the weights, such as apache-2.0; the dataset's terms limit the choice.
        private: Create a private repository; nothing is uploaded to an existing public one.
    """
    from diffcap.commands.interchange import run_push

    run_push(checkpoint, name, metrics, pictures, license, private)


def pull(name: str, out: Path | None = None) -> None:
    """Download a captioner from the Hugging Face Hub.

    Args:
        name: Repository as user/name.
        out: Folder to write; by default the repository's name.
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
    base: str | None = None,
) -> None:
    """Serve a web page that captions two images and shows the attention of each word; needs diffcap[web].

    Args:
        checkpoint: Captioners at the top of the list: checkpoint files, exported folders, or user/name on the Hugging Face Hub,
            also of vision-language models (--checkpoint A B).
        host: Address to listen on; the default allows connections from this machine only, 0.0.0.0 from all machines.
        port: Port to listen on; 0 chooses a free one.
        runs: Folder of runs whose captioners are also listed, besides the one that ships with diffcap.
        device: cpu, cuda or auto.
        backbone_weights: File of the backbone's weights for the captioners of --checkpoint, if they cannot be downloaded.
        base: Folder of the base model of the --checkpoint of METHOD=vlm, if it is not where the checkpoint says.
    """
    from diffcap.web.server import serve as run_serve

    run_serve(checkpoint or [], runs, host, port, device, backbone_weights, base)


COMMANDS: dict[str, Any] = {
    "caption": caption,
    "score": score,
    "compare": compare,
    "audit": audit,
    "average": average,
    "import": import_,
    "export": export,
    "push": push,
    "pull": pull,
    "serve": serve,
}
SYNTAX = {
    "caption": Syntax(second="--after", list_options=("--checkpoint", "--out")),
    "score": Syntax(second="--references"),
    "average": Syntax(variadic=True),
    "push": Syntax(list_options=("--pictures",), several_values=True),
    "serve": Syntax(list_options=("--checkpoint",), several_values=True),
}
FLAGS = ("--json", "--private", "--align")


class CommandParser(OneLineErrorParser):
    """Parser whose help shows the list of `average` as `normalize_arguments` accepts it."""

    def format_help(self, *formatter: Any) -> str:
        """The help text."""
        for action in self._actions:
            if action.dest == "checkpoints":
                action.metavar = "CHECKPOINT [CHECKPOINT ...]"
        return super().format_help(*formatter)


def _check_command(words: list[str]) -> None:
    """Refuse an unknown command with the names of all commands."""
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        near = difflib.get_close_matches(words[0], [*COMMANDS, *STAGES], n=1)
        raise DiffcapError(
            f"unknown command {words[0]}{f', did you mean {near[0]}' if near else ''}; the commands are {', '.join(COMMANDS)}, and "
            f"the stages {', '.join(STAGES)}."
        )


def _with_checkpoint(words: list[str]) -> list[str]:
    """Replace `--method` and other variables of an experiment by the checkpoint of this experiment, for `serve`."""
    variables, rest = parse(words)
    if "method" not in variables:
        return rest
    return ["--checkpoint", str(Experiment(**variables).checkpoint), *rest]


def main(arguments: list[str] | None = None) -> None:
    """Run `diffcap COMMAND ...`; `arguments` defaults to those of the process."""
    words = sys.argv[1:] if arguments is None else arguments
    if words and words[0] in (*STAGES, "extra"):
        run_stage_program(words[0], words[1:], [sys.argv[0], words[0]])
        return
    with plain_errors():
        _check_command(words)
    if words and words[0] == "serve":
        with plain_errors():
            words = ["serve", *_with_checkpoint(words[1:])]
    run(
        COMMANDS,
        normalize_arguments(words, SYNTAX, FLAGS),
        as_positional=True,
        parser_class=CommandParser,
        prog="diffcap",
        version=__version__,
        description=DESCRIPTION,
    )


if __name__ == "__main__":
    main()
