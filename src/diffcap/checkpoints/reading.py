"""Reading a checkpoint of ours: what every stage after the first begins with.

Two forms hold the same: the file that training writes, and the exported folder of `config.json`, the "diffcap" entry with
the number of steps, and `model.safetensors`, the weights (`diffcap export`, `diffcap import`, the Hugging Face hub).
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
from diffcap.utils.files import atomic_write
from diffcap.utils.unpickling import error_reason

CAPTIONING_STAGES = ("finetune", "reinforce")  # whose checkpoints can caption
FORMAT = 1  # of the "diffcap" entry; raised when an older file could no longer be read
CONFIG, WEIGHTS = "config.json", "model.safetensors"
SHA256 = "safetensors_sha256"  # entry of config.json; folders of diffcap 0.1.0 may lack it

# Entries of the metadata and their types. Every version has written those of the first two tables.
_OF_ALL: dict[str, Any] = {
    "version": str,
    "stage": str,
    "dataset": str,
    "seed": int | None,
    "words": list,
    "max_length": int,
    "features": dict,
}
_OF_CAPTIONERS: dict[str, Any] = {"method": str, "hyperparameters": dict, "tokenizer": str}
_OPTIONAL: dict[str, Any] = {
    "vocabulary_layout": str,
    "manifest_sha256": str | None,
    "changes": str | None,
    "train_seconds": int | float,
    "averaged": list,
    "imported_from": str,
}
_OF_FEATURES: dict[str, Any] = {
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
    """Load a checkpoint of ours, a file or an exported folder, onto the CPU without running pickled code.

    Args:
        mapped: read weights from the disk only when they are used, for callers that need the metadata. Neither the checksum
            of the file nor the values of the weights are checked.

    Returns:
        {"diffcap": what it says of itself, "state_dict": its weights, "global_step": steps of its training}.

    Raises:
        DiffcapError: the checkpoint is missing, damaged, from another program, or of another format, or it holds weights
            that are not finite.
    """
    path = Path(path)
    if path.is_dir() or path.name in (CONFIG, WEIGHTS):
        return _checked(_read_folder(path if path.is_dir() else path.parent, mapped), path, mapped)
    if not path.is_file():
        raise DiffcapError(f"{path}: no checkpoint there; train one with `make pretrain finetune`, or check the path.")
    try:
        if not mapped:
            _check_archive(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # foreign content may fail in any way
        raise DiffcapError(
            f"{path}: not a readable checkpoint ({error_reason(error, path)}); {remedy(path)}."
        ) from None
    return _checked(state, path, mapped)


def _check_archive(path: Path) -> None:
    """Compare every entry of a zip archive with its CRC-32, which torch writes but does not check.

    Raises:
        ValueError: an entry differs. Damaged headers raise exceptions of several other types.
    """
    if not zipfile.is_zipfile(path):
        return  # torch.load refuses it, or reads the older format, which diffcap never wrote
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"the checksum of {damaged} is wrong")


def remedy(path: Path) -> str:
    """How to get a checkpoint again whose file is damaged."""
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
            f"{path}: not a checkpoint of diffcap; one that a method's authors released comes in through "
            "`diffcap import METHOD FILE`."
        )
    if metadata["format"] != FORMAT:
        raise DiffcapError(
            f"{path}: checkpoint format {metadata['format']!r:.40}, this diffcap reads {FORMAT}; "
            f"use diffcap {metadata['version']!s:.40}, which wrote it, or train it again."
        )
    with wrap_errors(path, "its metadata are damaged", remedy(path)):
        metadata = _plain(metadata)
        _check_metadata(metadata)
        if type(state.get("global_step")) is not int:
            raise ValueError(f'"global_step" is {state.get("global_step")!r:.40}, not an int')
    weights = state.get("state_dict")
    if not isinstance(weights, dict):
        raise DiffcapError(f"{path}: its state_dict is not a dict of weights; {remedy(path)}.")
    for name, value in weights.items():
        fault = unusable(value) if isinstance(name, str) else "has a name that is not a string"
        if fault:
            raise DiffcapError(f"{path}: its weight {name!r:.80} {fault}; {remedy(path)}.")
        if not mapped and not is_finite(value):
            raise DiffcapError(
                f"{path}: its weight {name!r:.80} holds nan or inf, as after a training that diverged; use another checkpoint, "
                f"or train again with a lower learning rate, as in `make {metadata['stage']} ARGS=--model.lr=1e-5`."
            )
    return {**state, "diffcap": metadata}


def _plain(metadata: dict[Any, Any]) -> dict[str, Any]:
    """The same as an exported folder's config.json would give it: text as keys, lists instead of tuples.

    Raises:
        ValueError, TypeError: a value cannot be written as JSON in UTF-8.
    """
    text = json.dumps(metadata, ensure_ascii=False, allow_nan=False)
    plain: dict[str, Any] = json.loads(text.encode())
    return plain


def _check_metadata(metadata: dict[str, Any]) -> None:
    """Check the entries and their types, so that the code that uses them can rely on both.

    Raises:
        ValueError: an entry is missing or of another type.
    """
    _check_types(metadata, {**_OF_CAPTIONERS, **_OPTIONAL}, _OF_ALL)
    if metadata["stage"] in CAPTIONING_STAGES:
        _check_types(metadata, {}, _OF_CAPTIONERS)
    _check_types(metadata["features"], _OF_FEATURES, {})
    if not all(isinstance(word, str) for word in metadata["words"]):
        raise ValueError('"words" is not a list of texts')


def _check_types(entries: dict[str, Any], optional: dict[str, Any], required: dict[str, Any]) -> None:
    for key, kind in {**optional, **required}.items():
        if key in required and key not in entries:
            raise ValueError(f'"{key}" is missing')
        if key in entries and not isinstance(entries[key], kind):
            raise ValueError(f'"{key}" is {entries[key]!r:.40}, not {getattr(kind, "__name__", kind)}')


def unusable(value: Any) -> str:
    """Why a value cannot be a weight, whose numbers are all in the file; empty if it can."""
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
    return all(bool(edge.isfinite()) for edge in value.aminmax())  # ten times as fast as isfinite of every value


def _read_folder(folder: Path, mapped: bool) -> dict[str, Any]:
    from safetensors.torch import load_file

    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise DiffcapError(
                f"{folder}: holds no {name}; give a checkpoint's file, or a folder that `diffcap export` or `diffcap import` wrote."
            )
    metadata = read_json(folder / CONFIG, "configuration", "export the checkpoint again")
    if not isinstance(metadata, dict):
        raise DiffcapError(f"{folder / CONFIG}: not a configuration of diffcap; export the checkpoint again.")
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
    """Write the exported form: float32 weights of the captioner under their names in a checkpoint, and all it says of itself.

    The configuration comes last, so that a folder without one is known not to be whole.

    Args:
        folder: made if it is not there. state: as `read_checkpoint` gives it.

    Raises:
        DiffcapError: the weights cannot be written; a folder that was there before is as it was.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder = Path(folder)
    kept = {f"captioner.{name}": value.contiguous().clone() for name, value in weights_of(state).items()}
    with atomic_write(folder / WEIGHTS) as temporary:
        try:
            save_file(kept, temporary, {"format": "pt"})
        except SafetensorError as error:  # which a full disk causes, too
            raise DiffcapError(
                f"{folder / WEIGHTS}: cannot be written ({error_reason(error, temporary)}); check the free space and the "
                "permissions there, or give another folder."
            ) from None
        temporary.chmod(0o644)  # safetensors makes it readable for its owner alone
        checksum = file_hash(temporary)
        (folder / CONFIG).unlink(missing_ok=True)  # it describes the earlier weights
    write_json(folder / CONFIG, {**state["diffcap"], "step": state["global_step"], SHA256: checksum})


def weights_hash(state: dict[str, Any]) -> str:
    """SHA-256 of the captioner's weights, in hexadecimal: what a checkpoint and its exported form have in common.

    Files of two equal trainings are not equal, since they tell how long it took; their weights are.

    Args:
        state: as `read_checkpoint` gives it.
    """
    digest = hashlib.sha256()
    for name, value in sorted(weights_of(state).items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def described(path: str | Path, seen_from: str | Path) -> dict[str, Any]:
    """What an evaluation writes down of a checkpoint: where it lies, seen from a folder, and what tells it from others."""
    state = read_checkpoint(path, mapped=True)
    file = Path(os.path.relpath(path, seen_from)).as_posix()
    return {
        "file": file,
        "stage": state["diffcap"].get("stage"),
        "step": state["global_step"],
        "weights_sha256": weights_hash(state),
    }


def weights_of(state: dict[str, Any], prefix: str = "captioner.") -> dict[str, torch.Tensor]:
    """The parameters of a checkpoint whose names begin so, without that beginning."""
    found = state["state_dict"].items()
    return {name.removeprefix(prefix): value for name, value in found if name.startswith(prefix)}
