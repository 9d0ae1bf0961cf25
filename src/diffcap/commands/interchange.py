"""The commands `diffcap average`, `import`, `export`, `push` and `pull`."""

from pathlib import Path
from typing import Any, Literal

from diffcap.datasets.registry import RELEASED_CHECKPOINTS_DATASET
from diffcap.records import read_root
from diffcap.registry import base_model_function
from diffcap.run_folder import read_object
from diffcap.utils.console import echo
from diffcap.utils.errors import DiffcapError


def average(checkpoints: list[Path], out: Path = Path("averaged.ckpt")) -> None:
    """Average the weights of several checkpoints of one model.

    Args:
        checkpoints: Checkpoint files; or the folder of a training, for its periodic checkpoints (`--run.keep_last_k`) and last.ckpt.
        out: Checkpoint file to write.
    """
    from diffcap.checkpoints.combining import average as write_average

    steps = write_average(checkpoints, out)
    echo(f"{out}: the mean of {len(steps)} checkpoints, of steps {', '.join(f'{step:,}' for step in steps)}")


def import_(
    method: str,
    file: Path,
    vocabulary: Path | None = None,
    out: Path | None = None,
    dataset: str = RELEASED_CHECKPOINTS_DATASET,
    heads: int = 8,
    max_length: int | None = None,
    options: dict[str, Any] | None = None,
) -> None:
    """Convert a checkpoint that the authors of a method released, without running pickled code.

    Most hyperparameters follow from the weights. The options give the others.

    Args:
        method: Method of the checkpoint: pcl, scorer, dirl, clip4idc, or a method of an installed package.
        file: The authors' file.
        vocabulary: JSON file from word to id: vocab.json of SCORER and DIRL, dict.json of IDC-PCL; not for CLIP4IDC.
        out: Folder to write; by default the file's name without its suffix, followed by -diffcap.
        dataset: Training dataset; birds2words is evaluated with raw tokens.
        heads: Number of heads of every attention layer except CLIP's.
        max_length: Maximal number of tokens of a caption; by default the authors' value for CLEVR-Change.
        options: Options that only this method has, such as --options.grid=[14,14] for pcl; an error lists them.
    """
    from diffcap.checkpoints.importing import ImportOptions, import_official
    from diffcap.checkpoints.reading import CAPTIONING_STAGES, write_folder

    content = import_official(file, method, vocabulary, ImportOptions(heads, max_length, dataset, options or {}))
    folder = out or file.with_name(f"{file.name.split('.')[0]}-diffcap")
    _check_target(folder)
    write_folder(folder, content)
    metadata = content["diffcap"]
    arguments = metadata["hyperparameters"].items()
    summary = ", ".join(f"{key} {value}" for key, value in arguments if not isinstance(value, dict))
    echo(f"{folder}: {method}, {metadata['stage']} stage; {summary}")
    if metadata["stage"] in CAPTIONING_STAGES:
        echo(f"try it: diffcap caption BEFORE AFTER --checkpoint {folder}")
    else:
        echo("a pre-training checkpoint cannot caption: fine-tune from it with --model.init_from")


def export(
    checkpoint: Path,
    out: Path | None = None,
    form: Literal["peft", "merged", "messages"] | None = None,
    base: str | None = None,
) -> None:
    """Write a checkpoint as model.safetensors and config.json, with the metrics.json of an evaluation of its weights if there is one.

    Args:
        checkpoint: best.ckpt of any stage, or an exported folder; with --form messages, a dataset's folder, such as data/desk.
        out: Folder to write; by default, for best.ckpt, the folder best-exported next to it.
        form: Files for other programs. For the method vlm: peft (LoRA's adapter) or merged (a whole model for transformers). For a
            dataset: messages, the training data of LLaMA-Factory and ms-swift.
        base: Folder of the vision-language model of the method vlm, if the checkpoint names another place; only with --form.
    """
    from diffcap.checkpoints.hub import export as write_export

    folder = out or checkpoint.with_name(f"{checkpoint.name.removesuffix('.ckpt')}-{form or 'exported'}")
    if form is not None and folder.is_dir() and any(folder.iterdir()):
        raise DiffcapError(f"--out {folder}: contains files; give a new folder.")
    _check_target(folder)
    if form is None:
        scores = write_export(checkpoint, folder)
        has_scores = scores.metrics is not None
        note = f"with the scores of {scores.file}" if has_scores else f"without scores: {scores.missing_reason}"
    elif form == "messages":
        base_model_function("export_messages")(checkpoint, folder)
        note = f"messages; give media_dir (LLaMA-Factory) or ROOT_IMAGE_DIR (ms-swift) as {read_root(checkpoint).resolve()}"
    else:
        base_model_function("export")(checkpoint, folder, form, base)  # of the method vlm
        note = "an adapter for PEFT" if form == "peft" else "a model for transformers"
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    echo(f"{folder}: {size / 1e6:.1f} MB, {note}")


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
        metrics: metrics.json of the evaluation of these weights; by default the file is searched in the run folder of the checkpoint.
        pictures: PNG files for the model card, with distinct names (--pictures A B); by default those of the run's report.
        license: The Hub's identifier of the licence of the weights, such as apache-2.0; the dataset's terms limit the choice.
        private: Create a private repository; if the repository exists and is public, nothing is uploaded.
    """
    from diffcap.checkpoints.hub import push as upload

    echo(upload(checkpoint, name, metrics, pictures, license, private))


def pull(name: str, out: Path | None = None) -> None:
    """Download a captioner from the Hugging Face Hub.

    Args:
        name: Repository as user/name.
        out: Folder to write; by default the repository's name.
    """
    from diffcap.checkpoints.loading import pull as download

    target = out or Path(name.rpartition("/")[2])
    _check_target(target)
    folder = download(name, target)
    echo(f"{folder}: {name}; try it: diffcap caption BEFORE AFTER --checkpoint {folder}")


def _check_target(folder: Path) -> None:
    """Raise an error if the folder has files that diffcap did not export."""
    if folder.exists() and not folder.is_dir():
        raise DiffcapError(f"--out {folder}: is a file; give a folder.")
    files = list(folder.iterdir()) if folder.is_dir() else []
    names = [path.name for path in files if not path.name.startswith(".")]
    # Keys of the config.json that diffcap writes; "words" is the vocabulary.
    has_own_config = {"stage", "words", "hyperparameters"} <= read_object(folder / "config.json").keys()
    # An interrupted export leaves model.safetensors and no config.json.
    if files and not has_own_config and names != ["model.safetensors"]:
        other_name = "config.json" if "config.json" in names else files[0].name
        raise DiffcapError(f"--out {folder}: contains files of another program ({other_name}); give a new folder.")
