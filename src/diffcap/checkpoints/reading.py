"""Read and write diffcap's checkpoints, which have two forms with the same content.

Training writes a file. `diffcap export`, `diffcap import` and the Hugging Face Hub use the exported folder: `config.json`, the
"diffcap" entry with the number of steps, and `model.safetensors`, the weights.
"""

import hashlib
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffcap.records import file_hash, read_json, write_json
from diffcap.run_folder import IDENTITY, STAGES
from diffcap.utils.errors import DiffcapError, wrap_errors
from diffcap.utils.files import atomic_write, url_of
from diffcap.utils.unpickling import error_reason

CAPTIONING_STAGES = ("finetune", "reinforce")  # whose checkpoints can caption
FORMAT = 1  # version of the "diffcap" entry
CONFIG, WEIGHTS = "config.json", "model.safetensors"
SHA256 = "safetensors_sha256"  # entry of config.json; folders of diffcap 0.1.0 may lack it

# Entries of the metadata and their types.
_REQUIRED: dict[str, Any] = {
    "version": str,
    "stage": str,
    "dataset": str,
    "seed": int | None,
    "words": list,
    "max_length": int,
    "features": dict,
}
_REQUIRED_OF_CAPTIONERS: dict[str, Any] = {"method": str, "hyperparameters": dict, "tokenizer": str}
_OPTIONAL: dict[str, Any] = {
    "vocabulary_layout": str,
    "manifest_sha256": str | None,
    "changes": str | None,
    "train_seconds": int | float,
    "averaged": list,
    "imported_from": str,
}
_FEATURES: dict[str, Any] = {
    "name": str,
    "shape": list,
    "dtype": str,
    "library": str | None,
    "network": str | None,
    "stage": str | int | None,
    "preprocessing": dict,
    "pool": list | None,
}


def read_checkpoint(path: str | Path, mapped: bool = False) -> dict[str, Any]:
    """Load a checkpoint, a file or an exported folder, to the CPU without running pickled code.

    Args:
        mapped: map the weights into memory, for callers that need the metadata only. Neither the checksum of the file nor the
            values of the weights are checked.

    Returns:
        {"diffcap": metadata, "state_dict": weights by name, "global_step": number of training steps}.

    Raises:
        DiffcapError: the checkpoint is missing, damaged, written by another program, has another format, or contains NaN or
            infinite weights.
    """
    path = Path(path)
    if path.is_dir() or path.name in (CONFIG, WEIGHTS):
        return _checked(_read_folder(path if path.is_dir() else path.parent, mapped), path, mapped)
    if not path.is_file():
        if url := url_of(path):
            raise DiffcapError(
                f"{url}: a URL, not a checkpoint; give the path of a file, or user/name for one on the Hugging Face Hub."
            )
        raise DiffcapError(
            f"{path}: no checkpoint there; train one with `make pretrain finetune`, or check the path (blocks and tiles are the "
            "captioners that ship with diffcap)."
        )
    try:
        if not mapped:
            _check_archive(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # foreign content may raise any error
        raise DiffcapError(
            f"{path}: not a readable checkpoint ({error_reason(error, path)}); {remedy(path)}."
        ) from None
    return _checked(state, path, mapped)


def _check_archive(path: Path) -> None:
    """Compare every entry of a zip archive with its CRC-32, which torch writes but does not check."""
    if not zipfile.is_zipfile(path):
        return  # torch.load refuses it, or reads torch's legacy format
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"the checksum of {damaged} is wrong")


def remedy(path: Path) -> str:
    """Advice for the user of a damaged checkpoint."""
    if path.is_dir() or path.name in (CONFIG, WEIGHTS):
        return "copy or download the folder again, or write it again with `diffcap export` or `diffcap import`"
    if (path.parent / IDENTITY).is_file():
        command = f"`make {path.parent.name}` command" if path.parent.name in STAGES else "command"
        return f"restore it from a copy, or move {path.parent} away and train it again with the same {command}"
    return "copy or download it again, or write it again with the same command"


def _checked(state: Any, path: Path, mapped: bool) -> dict[str, Any]:
    metadata = state.get("diffcap") if isinstance(state, dict) else None
    if not isinstance(metadata, dict) or not {"format", "version"} <= metadata.keys():
        raise DiffcapError(
            f"{path}: not a checkpoint of diffcap; import a checkpoint of a method's authors with `diffcap import METHOD FILE`."
        )
    if metadata["format"] != FORMAT:
        raise DiffcapError(
            f"{path}: its format is {metadata['format']!r:.40}, but this diffcap reads format {FORMAT}; "
            f"use diffcap {metadata['version']!s:.40}, which wrote it, or train it again."
        )
    with wrap_errors(path, "its metadata are damaged", remedy(path)):
        metadata = _as_json(metadata)
        _check_metadata(metadata)
        if type(state.get("global_step")) is not int:
            raise ValueError(f'"global_step" is {state.get("global_step")!r:.40}, not an int')
    weights = state.get("state_dict")
    if not isinstance(weights, dict):
        raise DiffcapError(f"{path}: its state_dict is not a dict of weights; {remedy(path)}.")
    for name, value in weights.items():
        fault = weight_fault(value) if isinstance(name, str) else "has a name that is not a string"
        if fault:
            raise DiffcapError(f"{path}: its weight {name!r:.80} {fault}; {remedy(path)}.")
        if not mapped and not is_finite(value):
            raise DiffcapError(
                f"{path}: its weight {name!r:.80} contains nan or inf, perhaps because the training diverged; use another "
                f"checkpoint, or train again with a lower learning rate, such as `make {metadata['stage']} ARGS=--model.lr=1e-5`."
            )
    return {**state, "diffcap": metadata}


def _as_json(metadata: dict[Any, Any]) -> dict[str, Any]:
    """Convert metadata as a config.json would: keys to strings, tuples to lists."""
    text = json.dumps(metadata, ensure_ascii=False, allow_nan=False)
    plain: dict[str, Any] = json.loads(text.encode())
    return plain


def _check_metadata(metadata: dict[str, Any]) -> None:
    """Check the presence and the types of the entries."""
    _check_types(metadata, {**_REQUIRED_OF_CAPTIONERS, **_OPTIONAL}, _REQUIRED)
    if metadata["stage"] in CAPTIONING_STAGES:
        _check_types(metadata, {}, _REQUIRED_OF_CAPTIONERS)
    _check_types(metadata["features"], _FEATURES, {})
    if not all(isinstance(word, str) for word in metadata["words"]):
        raise ValueError('"words" is not a list of strings')


def _check_types(entries: dict[str, Any], optional: dict[str, Any], required: dict[str, Any]) -> None:
    for key, kind in {**optional, **required}.items():
        if key in required and key not in entries:
            raise ValueError(f'"{key}" is missing')
        if key in entries and not isinstance(entries[key], kind):
            raise ValueError(f'"{key}" is {entries[key]!r:.40}, not {getattr(kind, "__name__", kind)}')


def weight_fault(value: Any) -> str:
    """Why a value is not a dense CPU tensor with all its numbers in the file; empty if it is one."""
    if not isinstance(value, Tensor):
        return "is not a tensor"
    plain = value.layout == torch.strided and value.device.type == "cpu" and not value.is_quantized
    if not plain or value.is_complex() or (value.is_floating_point() and value.itemsize == 1):
        return "is not a plain tensor"
    few = value.untyped_storage().nbytes() < value.numel() * value.element_size()
    return "has fewer values in the file than its shape needs" if few else ""


def is_finite(value: Tensor) -> bool:
    """Whether no value of a tensor is nan or inf."""
    if not value.is_floating_point() or not value.numel():
        return True
    return all(bool(extreme.isfinite()) for extreme in value.aminmax())  # ten times faster than isfinite on every value


def _read_folder(folder: Path, mapped: bool) -> dict[str, Any]:
    from safetensors.torch import load_file

    if (folder / "adapter_config.json").is_file():
        raise DiffcapError(
            f"{folder}: an adapter of PEFT, which diffcap does not read; give best.ckpt of the run, or the folder that `diffcap export` "
            "writes without --form peft."
        )
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise DiffcapError(
                f"{folder}: {name} is missing; give a checkpoint file, or a folder that `diffcap export` or `diffcap import` wrote."
            )
    metadata = read_json(folder / CONFIG, "configuration", "export the checkpoint again")
    if not isinstance(metadata, dict):
        raise DiffcapError(f"{folder / CONFIG}: not a JSON object; export the checkpoint again.")
    step, expected = metadata.pop("step", 0), metadata.pop(SHA256, None)
    if expected is not None and not mapped and file_hash(folder / WEIGHTS) != expected:
        raise DiffcapError(
            f"{folder / WEIGHTS}: its SHA-256 is not the {SHA256} in {CONFIG}, so the file is damaged or was replaced; "
            f"{remedy(folder)}."
        )
    try:
        weights = load_file(folder / WEIGHTS)
    except Exception as error:  # damaged headers raise exceptions of several types
        raise DiffcapError(
            f"{folder / WEIGHTS}: not a readable safetensors file ({error_reason(error, folder / WEIGHTS)}); {remedy(folder)}."
        ) from None
    return {"diffcap": metadata, "state_dict": weights, "global_step": step}


def write_folder(folder: str | Path, state: dict[str, Any]) -> None:
    """Write the exported form of a checkpoint: the weights of the captioner, and the metadata.

    config.json is written last, so a folder without it is incomplete.

    Args:
        folder: created if it does not exist. state: see `read_checkpoint`.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder = Path(folder)
    kept = {f"captioner.{name}": value.contiguous().clone() for name, value in weights_of(state).items()}
    with atomic_write(folder / WEIGHTS) as temporary:
        try:
            save_file(kept, temporary, {"format": "pt"})
        except SafetensorError as error:  # also raised if the disk is full
            raise DiffcapError(
                f"{folder / WEIGHTS}: cannot be written ({error_reason(error, temporary)}); check the free space and the "
                "permissions there, or give another folder."
            ) from None
        temporary.chmod(0o644)  # safetensors creates a file that only its owner can read
        checksum = file_hash(temporary)
        (folder / CONFIG).unlink(missing_ok=True)  # it describes the earlier weights
    write_json(folder / CONFIG, {**state["diffcap"], "step": state["global_step"], SHA256: checksum})


def weights_hash(state: dict[str, Any]) -> str:
    """SHA-256 of the captioner's weights in hexadecimal; the same for a checkpoint file and its exported form.

    The files of two equal trainings differ, because they contain the training time; their weights are equal.

    Args:
        state: see `read_checkpoint`.
    """
    digest = hashlib.sha256()
    for name, value in sorted(weights_of(state).items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def checkpoint_record(path: str | Path, folder: str | Path) -> dict[str, Any]:
    """The entry of a checkpoint in metrics.json: its path relative to a folder, stage, step and hash of the weights."""
    state = read_checkpoint(path, mapped=True)
    return {
        "file": Path(os.path.relpath(path, folder)).as_posix(),
        "stage": state["diffcap"].get("stage"),
        "step": state["global_step"],
        "weights_sha256": weights_hash(state),
    }


def weights_of(state: dict[str, Any], prefix: str = "captioner.") -> dict[str, torch.Tensor]:
    """The weights of a checkpoint whose names have a prefix, under their names without it."""
    found = state["state_dict"].items()
    return {name.removeprefix(prefix): value for name, value in found if name.startswith(prefix)}
