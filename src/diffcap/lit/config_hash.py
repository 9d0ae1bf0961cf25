"""The hash of a training's configuration and input files, which decides whether a run in a folder is the same training."""

import hashlib
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from diffcap.checkpoints.base_models import base_sha256
from diffcap.checkpoints.reading import read_checkpoint, weights_hash
from diffcap.features.store import SUMS
from diffcap.records import file_hash
from diffcap.run_folder import (
    BEST,
    CONFIGURATION,
    FINISHED,
    IDENTITY,
    LAST,
    find_fault,
    is_finished,
    read_config_hash,
    read_stage,
)
from diffcap.utils.errors import DiffcapError

# Keys that are ignored when a run is matched for resuming.
HASH_EXCLUDED_KEYS = (
    "trainer.devices", "trainer.accelerator", "trainer.strategy", "trainer.num_nodes", "trainer.enable_progress_bar",
    "data.num_workers", "run.logger", "run.project", "run.keep_last_k", "run.dataset", "run.method", "run.ablation",
    "run.preset", "run.force_bf16", "config",
)  # fmt: skip


# Keys that earlier versions did not have, and the values with which they change nothing: these values are not hashed either, so that
# runs of earlier versions can be resumed.
LATER_KEYS = {"model.half_precision_clip": False, "model.init_without": None, "run.matmul_precision": None,
    "data.base": None, "data.base_revision": None, "model.resnet_weights": None, "model.decoder_clip_value": None,
    "model.decoder_plateau_factor": None, "data.vocabulary_splits": "train",
    "model.captioner.init_args.fgvc_losses": None}  # fmt: skip


def hash_config(config: dict[str, Any]) -> str:
    """Hash a resolved configuration without `HASH_EXCLUDED_KEYS`, together with the input files that it names."""
    hashed = json.loads(json.dumps(config))
    ignored = {**dict.fromkeys(HASH_EXCLUDED_KEYS, ...), **LATER_KEYS}  # ...: with every value
    for path, default in ignored.items():
        *groups, key = path.split(".")
        mapping = hashed
        for group in groups:
            mapping = mapping.get(group) or {}
        if default is ... or mapping.get(key, default) == default:
            mapping.pop(key, None)
    inputs: list[str | None] = [file_hash(path) for path in _input_files(hashed["data"]) if path.is_file()]
    for name in ("clip_weights", "resnet_weights"):
        if (weights := hashed["model"].get(name)) and Path(weights).is_file():
            inputs.append(file_hash(Path(weights)))
    if start := hashed["model"].get("init_from"):
        inputs.append(_init_hash(Path(start)))
    if (base := hashed["data"].get("base")) and Path(base).is_dir():  # one of the Hub is known by its commit
        inputs.append(base_sha256(Path(base)))
        hashed["data"]["base"] = hashed["model"]["captioner"]["init_args"]["base"] = None  # it may be moved
    hashed["inputs"] = inputs
    return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()[:16]


def _init_hash(checkpoint: Path) -> str | None:
    """Hash of the initial checkpoint: the configuration hash of its run, or the hash of its weights if it is of no run.

    The hash of the file would change with the training time, which the checkpoint contains.
    """
    if checkpoint.name in (BEST, LAST) and checkpoint.with_name(IDENTITY).is_file():
        config_hash = read_config_hash(checkpoint.parent)
        if config_hash is None:
            check_init_from(checkpoint)
        return config_hash
    return weights_hash(read_checkpoint(checkpoint)) if checkpoint.exists() else None


def _input_files(data: dict[str, Any]) -> list[Path]:
    """The files that identify a stage's data: statistics and features of its datasets, and their negatives."""

    def dataset_files(folder: Path) -> list[Path]:
        store = folder / "features" / data["features"]
        return [folder / "dataset.json", store / "meta.json", store / SUMS]

    folder = Path(data["folder"])
    inputs = dataset_files(folder)
    if "tasks" in data:
        inputs.append(Path(data.get("negatives") or folder / "negatives.jsonl"))
    for name in ("singles", "labelled"):
        inputs += dataset_files(Path(data[name])) if data.get(name) else []
    if data.get("singles"):
        inputs.append(Path(data["singles"]) / "negatives.jsonl")
    return inputs + [Path(other) / "dataset.json" for other in data.get("vocabulary_with") or []]


def check_init_from(checkpoint: Path) -> None:
    """Check the training whose checkpoint is `model.init_from`; the model itself checks the checkpoint file.

    Raises:
        DiffcapError: finished.json does not describe the checkpoint in the folder; the message has the command that trains
            the stage again.
    """
    out = checkpoint.parent
    if checkpoint.name not in (BEST, LAST) or not (out / IDENTITY).is_file():  # the checkpoint belongs to no run
        return
    fault = find_fault(out)
    if not fault and not is_finished(out):
        fault = f"{FINISHED} is damaged" if (out / FINISHED).exists() else "its training is not finished"
    if fault:
        command = shlex.join([sys.executable, "-m", "diffcap", read_stage(out), "--config", str(out / CONFIGURATION)])
        raise DiffcapError(f"{out}: {fault}; train that stage with `{command}`, then run this command again.")
