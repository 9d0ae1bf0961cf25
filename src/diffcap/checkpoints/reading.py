"""Read and write diffcap's checkpoints, which have two forms with the same content.

Training writes one file, whose entry "diffcap" has the metadata. `diffcap export`, `diffcap import` and the Hugging Face Hub use an
exported folder. In this folder, `model.safetensors` has the weights, and `config.json` has the metadata and the number of training steps.
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
from diffcap.run_folder import FINISHED, IDENTITY, RUNNING, TRAINING_STAGES
from diffcap.utils.errors import DiffcapError, wrap_errors
from diffcap.utils.files import atomic_write, served_name, url_of
from diffcap.utils.unpickling import error_reason

CAPTIONING_STAGES = ("finetune", "reinforce")  # stages whose checkpoints contain a captioner
FORMAT = 1  # version of the structure of the entry "diffcap"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
SHA256 = "safetensors_sha256"  # entry of config.json; folders of diffcap 0.1.0 may lack it


def read_checkpoint(path: str | Path, mapped: bool = False) -> dict[str, Any]:
    """Load a checkpoint, which is a file or an exported folder, to the CPU without running pickled code.

    Return {"diffcap": metadata, "state_dict": weights by name, "global_step": number of training steps}. `mapped` is faster: the
    weights are mapped into memory instead of being read, and neither the checksum nor the values of the weights are checked.
    """
    path = Path(path)
    if path.is_dir() or path.name in (CONFIG, WEIGHTS):
        return _check_content(_read_folder(path if path.is_dir() else path.parent, mapped), path, mapped)
    if not path.is_file():
        if name := served_name(str(path)):
            raise DiffcapError(f"{name}: a model behind a server, which has no weights to read; give a checkpoint.")
        if url := url_of(path):
            raise DiffcapError(
                f"{url}: a URL, not a checkpoint; give the path of a file, or user/name for one on the Hugging Face Hub."
            )
        raise DiffcapError(
            f"{path}: no checkpoint there; train one with `make pretrain finetune`, or check the path (`blocks` and `tiles` are "
            "the captioners that ship with diffcap)."
        )
    try:
        if not mapped and zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:  # ZIP has a CRC-32 of every entry, which torch does not check
                if damaged := archive.testzip():
                    raise ValueError(f"the checksum of {damaged} is wrong")
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # foreign content may raise any error
        raise DiffcapError(f"{path}: not a readable checkpoint ({error_reason(error)}); {remedy(path)}.") from None
    return _check_content(content, path, mapped)


def remedy(path: Path) -> str:
    """Return advice for the user of a damaged checkpoint."""
    if path.is_dir() or path.name in (CONFIG, WEIGHTS):
        return "copy or download the folder again, or write it again with `diffcap export` or `diffcap import`"
    if any((path.parent / name).is_file() for name in (RUNNING, FINISHED, IDENTITY)):  # files of a training
        command = f"`make {path.parent.name}` command" if path.parent.name in TRAINING_STAGES else "command"
        return f"restore it from a copy, or move {path.parent} away and train it again with the same {command}"
    return "copy or download it again, or write it again with the same command"


# Check the content of a checkpoint and, unless `mapped`, that its weights are finite. Return the content with lists for tuples.
def _check_content(content: Any, path: Path, mapped: bool) -> dict[str, Any]:
    metadata = content.get("diffcap") if isinstance(content, dict) else None
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
        metadata = json.loads(json.dumps(metadata))  # tuples become lists, as in config.json
        required = ["version", "dataset", "seed", "words", "max_length", "features"]
        if metadata["stage"] in CAPTIONING_STAGES:
            required += ["method", "hyperparameters", "tokenizer"]
        for key in required:
            if key not in metadata:
                raise KeyError(key)
        weights = dict(content["state_dict"])
        step = int(content["global_step"])
    for name, value in weights.items():
        if not isinstance(value, Tensor):
            raise DiffcapError(f"{path}: its weight {name!r:.80} is not a tensor; {remedy(path)}.")
        if not mapped and not is_finite(value):
            raise DiffcapError(
                f"{path}: its weight {name!r:.80} contains nan or inf, perhaps because the training diverged; use another "
                f"checkpoint, or train again with a lower learning rate, such as `make {metadata['stage']} ARGS=--model.lr=1e-5`."
            )
    return {**content, "diffcap": metadata, "state_dict": weights, "global_step": step}


def is_finite(value: Tensor) -> bool:
    """Return True if no value of a tensor is nan or inf."""
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
    step = metadata.pop("step", 0)
    expected = metadata.pop(SHA256, None)
    if expected is not None and not mapped and file_hash(folder / WEIGHTS) != expected:
        raise DiffcapError(
            f"{folder / WEIGHTS}: its SHA-256 is not the {SHA256} in {CONFIG}, so the file is damaged or was replaced; "
            f"{remedy(folder)}."
        )
    with wrap_errors(folder / WEIGHTS, "not a readable safetensors file", remedy(folder)):
        weights = load_file(folder / WEIGHTS)
    return {"diffcap": metadata, "state_dict": weights, "global_step": step}


def write_folder(folder: str | Path, content: dict[str, Any]) -> None:
    """Write a checkpoint as an exported folder. config.json is written last, so a folder without config.json is incomplete."""
    from safetensors.torch import save_file

    folder = Path(folder)
    weights = {f"captioner.{name}": value.contiguous().clone() for name, value in weights_of(content).items()}
    advice = "check the free space and the permissions there, or give another folder"
    with atomic_write(folder / WEIGHTS) as temporary:
        # If the disk is full, safetensors raises an exception of its own, not an OSError.
        with wrap_errors(folder / WEIGHTS, "cannot be written", advice):
            save_file(weights, temporary, {"format": "pt"})
        temporary.chmod(0o644)  # safetensors creates a file that only its owner can read
        checksum = file_hash(temporary)
        (folder / CONFIG).unlink(missing_ok=True)  # the old file describes the earlier weights
    write_json(folder / CONFIG, {**content["diffcap"], "step": content["global_step"], SHA256: checksum})


def weights_hash(content: dict[str, Any]) -> str:
    """Return the SHA-256 (hexadecimal) of the captioner's weights. A file and its exported folder have the same hash."""
    digest = hashlib.sha256()
    for name, value in sorted(weights_of(content).items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def checkpoint_record(path: str | Path, folder: str | Path) -> dict[str, Any]:
    """Return the entry of a checkpoint in metrics.json: its path relative to `folder`, stage, step and hash of the weights."""
    content = read_checkpoint(path, mapped=True)
    return {
        "file": Path(os.path.relpath(path, folder)).as_posix(),
        "stage": content["diffcap"].get("stage"),
        "step": content["global_step"],
        "weights_sha256": weights_hash(content),
    }


def weights_of(content: dict[str, Any], prefix: str = "captioner.") -> dict[str, torch.Tensor]:
    """Return the weights whose names begin with `prefix`, with this prefix removed from the names."""
    weights = content["state_dict"].items()
    return {name.removeprefix(prefix): value for name, value in weights if name.startswith(prefix)}
