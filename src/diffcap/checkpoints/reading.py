"""Reading a checkpoint of ours: what every stage after the first begins with.

Two forms hold the same: the file that training writes, and the exported folder of `config.json`, the "diffcap" entry with
the number of steps, and `model.safetensors`, the weights (`diffcap export`, `diffcap import`, the Hugging Face hub).
"""

import hashlib
import os
from pathlib import Path
from typing import Any

import torch

from diffcap.errors import DiffcapError
from diffcap.files import whole
from diffcap.records import read_json, write_json
from diffcap.unpickling import reason_of

CAPTIONING_STAGES = ("finetune", "reinforce")  # whose checkpoints can caption
FORMAT = 1  # of the "diffcap" entry; raised when an older file could no longer be read
CONFIG, WEIGHTS = "config.json", "model.safetensors"


def read_checkpoint(path: str | Path, mapped: bool = False) -> dict[str, Any]:
    """Load a checkpoint of ours, a file or an exported folder, onto the CPU without running pickled code.

    Args:
        mapped: read a file's weights only when they are used, for what wants to know what it says of itself.

    Returns:
        {"diffcap": what it says of itself, "state_dict": its weights, "global_step": steps of its training}.

    Raises:
        DiffcapError: missing, damaged, from another program, or of another format.
    """
    path = Path(path)
    if path.is_dir() or path.name in (CONFIG, WEIGHTS):
        return _checked(_read_folder(path if path.is_dir() else path.parent), path)
    if not path.is_file():
        raise DiffcapError(f"{path}: no checkpoint there; train one with `make pretrain finetune`, or check the path.")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # text makes the unpickler stumble over its letters in any way at all
        raise DiffcapError(
            f"{path}: not a readable checkpoint ({reason_of(error, path)}); train it again or copy it again."
        ) from None
    return _checked(state, path)


def _checked(state: Any, path: Path) -> dict[str, Any]:
    facts = state.get("diffcap") if isinstance(state, dict) else None
    if not isinstance(facts, dict) or not {"format", "version"} <= facts.keys():
        raise DiffcapError(
            f"{path}: not a checkpoint of diffcap; one that a method's authors released comes in through "
            "`diffcap import METHOD FILE`."
        )
    if facts["format"] != FORMAT:
        raise DiffcapError(
            f"{path}: checkpoint format {facts['format']}, this diffcap reads {FORMAT}; "
            f"use diffcap {facts['version']}, which wrote it, or train it again."
        )
    return state


def _read_folder(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise DiffcapError(
                f"{folder}: holds no {name}; give a checkpoint's file, or a folder that `diffcap export` or `diffcap import` wrote."
            )
    facts = read_json(folder / CONFIG, "configuration", "export the checkpoint again")
    try:
        weights = load_file(folder / WEIGHTS)
    except Exception as error:  # as damaged headers make it fail
        raise DiffcapError(
            f"{folder / WEIGHTS}: not a readable safetensors file ({reason_of(error, folder / WEIGHTS)}); export it or fetch it again."
        ) from None
    if not isinstance(facts, dict):
        raise DiffcapError(f"{folder / CONFIG}: not a configuration of diffcap; export the checkpoint again.")
    step = facts.pop("step", 0)
    return {"diffcap": facts, "state_dict": weights, "global_step": step}


def write_folder(folder: str | Path, state: dict[str, Any]) -> None:
    """Write the exported form: float32 weights of the captioner under their names in a checkpoint, and all it says of itself.

    The configuration comes last, so that a folder without one is known not to be whole.

    Args:
        folder: made if it is not there. state: as `read_checkpoint` gives it.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).unlink(missing_ok=True)
    kept = {f"captioner.{name}": value.contiguous().clone() for name, value in weights_of(state).items()}
    with whole(folder / WEIGHTS) as temporary:
        save_file(kept, temporary, {"format": "pt"})
        temporary.chmod(0o644)  # safetensors makes it readable for its owner alone
    write_json(folder / CONFIG, {**state["diffcap"], "step": state["global_step"]})


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
