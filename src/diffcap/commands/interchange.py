"""The commands `diffcap import`, `export`, `push` and `pull`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from diffcap.utils.console import echo
from diffcap.utils.errors import DiffcapError

if TYPE_CHECKING:
    from diffcap.interop.official import ImportOptions


def run_import(method: str, file: Path, vocabulary: Path | None, out: Path | None, options: "ImportOptions") -> None:
    """Import an official checkpoint; see `cli.import_`."""
    from diffcap.checkpoints.reading import CAPTIONING_STAGES, write_folder
    from diffcap.interop.official import import_official

    state = import_official(file, method, vocabulary, options)
    folder = out or file.with_name(f"{file.name.split('.')[0]}-diffcap")
    _check_target(folder)
    write_folder(folder, state)
    sizes = state["diffcap"]["hyperparameters"]
    summary = ", ".join(f"{key} {value}" for key, value in sizes.items() if not isinstance(value, dict))
    echo(f"{folder}: {method}, {state['diffcap']['stage']} stage; {summary}")
    if state["diffcap"]["stage"] in CAPTIONING_STAGES:
        echo(f"try it: diffcap caption BEFORE AFTER --checkpoint {folder}")
    else:
        echo("a pre-training checkpoint cannot caption: fine-tune from it with --model.init_from")


def run_export(
    checkpoint: Path, out: Path | None, form: Literal["peft", "merged"] | None = None, base: str | None = None
) -> None:
    """Export a checkpoint; see `cli.export`."""
    from diffcap.checkpoints.exporting import export

    folder = out or checkpoint.with_name(f"{checkpoint.name.removesuffix('.ckpt')}-{form or 'exported'}")
    if form is not None and folder.is_dir() and any(folder.iterdir()):
        raise DiffcapError(f"--out {folder}: contains files; give a new folder.")
    _check_target(folder)
    if form is not None:
        from diffcap.checkpoints.exporting import export_vlm

        export_vlm(checkpoint, folder, form, base)
        size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        echo(
            f"{folder}: {size / 1e6:.1f} MB, {'an adapter for PEFT' if form == 'peft' else 'a model for transformers'}"
        )
        return
    scores = export(checkpoint, folder)
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    note = (
        f"with the scores of {scores.file}"
        if scores.metrics is not None
        else f"without scores: {scores.missing_reason}"
    )
    echo(f"{folder}: {size / 1e6:.1f} MB, {note}")


def run_push(
    checkpoint: Path,
    name: str,
    metrics: Path | None,
    pictures: Sequence[Path] | None,
    license: str,
    private: bool,
) -> None:
    """Push a captioner; see `cli.push`."""
    from diffcap.checkpoints.hub import push

    echo(push(checkpoint, name, metrics, pictures, license, private))


def run_pull(name: str, out: Path | None) -> None:
    """Pull a captioner; see `cli.pull`."""
    from diffcap.checkpoints.loading import pull

    _check_target(out or Path(name.rpartition("/")[2]))
    folder = pull(name, out or Path(name.rpartition("/")[2]))
    echo(f"{folder}: {name}; try it: diffcap caption BEFORE AFTER --checkpoint {folder}")


def _check_target(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise DiffcapError(f"--out {folder}: is a file; give a folder.")
    found = list(folder.iterdir()) if folder.is_dir() else []
    exported = "config.json", "model.safetensors"  # only the second one if writing was interrupted
    if found and not any((folder / name).is_file() for name in exported):
        raise DiffcapError(f"--out {folder}: contains other files ({found[0].name}); give a new folder.")
