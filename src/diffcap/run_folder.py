"""The files of a run, which is a folder `runs/<dataset>/<method>`, and the state of its trainings according to these files.

```
pretrain/ finetune/ reinforce/   one training stage each: config.yaml, logs/, last.ckpt, best.ckpt, and running.json, which
                                 finished.json replaces at the end
averaged/best.ckpt               the mean of periodic checkpoints of the fine-tuning
eval/ reinforce-eval/ ...        one evaluation each: metrics.json, predictions.json, references.json, groups.json
report/ reinforce-report/        tables and figures
.finetune.lock                   locked while the training of this stage runs; contains its process ID
```
"""

import fcntl
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from diffcap.records import JsonDict, file_hash
from diffcap.utils.errors import DiffcapError
from diffcap.utils.settings import get_config_value

PRETRAIN, FINETUNE, REINFORCE = "pretrain", "finetune", "reinforce"  # reinforce: training by rewards, after finetune
PRETRAIN_EXTRA = "pretrain-extra"  # a pre-training before the main one, on a dataset of the variable EXTRA
TRAINING_STAGES = (PRETRAIN, FINETUNE, REINFORCE)  # each starts from an earlier stage's checkpoint, if any
AVERAGED, EVAL, REPORT = "averaged", "eval", "report"
BEST, LAST = "best.ckpt", "last.ckpt"
STEP_CHECKPOINT_GLOB = "step-*.ckpt"
CONFIGURATION, RUNNING, FINISHED, LOGS = "config.yaml", "running.json", "finished.json", "logs"
IDENTITY = "identity.json"  # diffcap 0.1 wrote this file instead of running.json
METRICS, PREDICTIONS, REFERENCES, GROUPS = "metrics.json", "predictions.json", "references.json", "groups.json"
# Environment variables of a trial, which is one training of a sweep. `diffcap sweep` sets the first one to the name of the trial's folder.
# The agent of W&B sets the second one.
TRIAL_VARIABLE, WANDB_SWEEP = "DIFFCAP_TRIAL", "WANDB_SWEEP_ID"
INIT_FROM_SHA256 = "init_from_sha256"  # key in finished.json: SHA-256 of the checkpoint in `model.init_from`
UNSCORED = "predictions-unscored.json"  # captions of the pairs without a reference
SWAPPED = "predictions-swapped.json"  # captions of (after, before), of EVAL=swap
CHANGED = "changed.json"  # id of a pair -> probability of a change; only if the split has pairs without a change


def metrics_filename(tokenizer: str) -> str:
    """Return the name of the file with scores that use another tokenizer than those in metrics.json."""
    return f"metrics-{tokenizer}.json"


def result_folder_name(stage: str, result: str) -> str:
    """Return the folder's name for an evaluation or report (`result`) of a stage: "eval" for finetune, "reinforce-eval" for reinforce."""
    return result if stage == FINETUNE else f"{stage}-{result}"


@contextmanager
def stage_lock(stage_folder: Path, seed: int) -> Iterator[None]:
    """Lock a stage's folder for one training.

    The folder does not need to exist. The lock file is next to it, because a training may rename the folder. The lock is a POSIX
    record lock: the kernel releases it when the process ends, also by SIGKILL, and the forked workers of a data loader do not inherit
    it. The error of a second training shows the seed of the first one.
    """
    folder = stage_folder.resolve()  # several experiments may have links to the folder of one pre-training
    path = folder.with_name(f".{folder.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # POSIX allows both errors for a locked file
            holder = dict.fromkeys(("pid", "host", "seed", "started"), "?") | read_object(path)
            raise DiffcapError(
                f"{stage_folder}: process {holder['pid']} on {holder['host']} (seed {holder['seed']}, started {holder['started']}) "
                f"trains in this folder; wait until it ends, stop it with `kill {holder['pid']}`, or train in another folder "
                f"with RUN={stage_folder.parent}-2 (without make: --run.out={stage_folder.parent}-2/{stage_folder.name})."
            ) from None
        started = datetime.now().isoformat(" ", "seconds")
        file.truncate(0)
        json.dump({"pid": os.getpid(), "host": platform.node(), "seed": seed, "started": started}, file)
        file.flush()
        yield


def read_object(path: Path) -> JsonDict:
    """Read a JSON object; return {} if the file is missing, damaged or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def checkpoint_metadata(checkpoint: Path) -> JsonDict:
    """Return the entries of finished.json that identify the checkpoint file of a finished stage."""
    stat = checkpoint.stat()
    return {
        "checkpoint": checkpoint.name,
        "checkpoint_bytes": stat.st_size,
        "checkpoint_mtime_ns": stat.st_mtime_ns,
        "checkpoint_sha256": file_hash(checkpoint),
    }


def is_finished(stage_folder: Path) -> bool:
    """Return whether a stage's folder has a readable finished.json; `find_fault` checks its checkpoint."""
    return read_object(stage_folder / FINISHED).get("checkpoint") in (BEST, LAST)


def stage_of(stage_folder: Path) -> str:
    """Return the training stage whose name the folder's name begins with; finetune for any other folder, such as averaged/."""
    return next((stage for stage in TRAINING_STAGES if stage_folder.name.startswith(stage)), FINETUNE)


def is_main_process() -> bool:
    """Return whether this is the first process (rank 0) of a training. This works before Lightning sets up its ranks."""
    names = ["LOCAL_RANK", "RANK", "SLURM_PROCID"]
    if "TORCHELASTIC_RUN_ID" in os.environ:  # under `srun torchrun`, rank 0 may not be the first task of srun
        names = ["RANK"]
    elif "MASTER_ADDR" in os.environ:  # several hosts, without a launcher
        names.append("NODE_RANK")
    return all(os.environ.get(name, "0") == "0" for name in names)


def find_fault(stage_folder: Path) -> str | None:
    """Return why the training in a stage's folder cannot be used or resumed; None if there is no fault."""
    if not is_finished(stage_folder):
        if (stage_folder / FINISHED).exists():
            return f"{FINISHED} is damaged"
        if read_object(stage_folder / RUNNING) or read_object(stage_folder / IDENTITY):
            return None
        has_files = any((stage_folder / name).exists() for name in (RUNNING, LAST, BEST))
        return f"{RUNNING} is missing or damaged" if has_files else None
    checkpoint = stage_folder / read_object(stage_folder / FINISHED)["checkpoint"]
    if not checkpoint.is_file():
        return f"{checkpoint.name} of the finished training is missing"
    return None if recorded_weights(checkpoint) else f"{checkpoint.name} is not what the finished training wrote"


def recorded_weights(checkpoint: Path) -> str | None:
    """Return the recorded hash of the weights of a checkpoint that a finished training wrote; None for any other file.

    The file is hashed only if its time is not the recorded one, because hashing takes seconds per gigabyte.
    """
    record = read_object(checkpoint.with_name(FINISHED))
    if record.get("checkpoint") != checkpoint.name:
        return None
    stat = checkpoint.stat()
    is_same = stat.st_size == record["checkpoint_bytes"] and (
        stat.st_mtime_ns == record["checkpoint_mtime_ns"] or file_hash(checkpoint) == record["checkpoint_sha256"]
    )
    return f"weights {record.get('weights_sha256', record['checkpoint_sha256'])}" if is_same else None


def check_finished(checkpoints: Iterable[str | Path]) -> None:
    """Check that the checkpoints that finished trainings recorded are unchanged; other checkpoints are not checked."""
    for path in map(Path, checkpoints):
        folder = path.parent
        if path.name not in (BEST, LAST) or not (folder / FINISHED).is_file():
            continue  # the checkpoint belongs to no run, or to one that is still training
        fault = find_fault(folder)
        if fault and (not is_finished(folder) or read_object(folder / FINISHED)["checkpoint"] == path.name):
            raise DiffcapError(
                f"{folder}: {fault}; run `make {folder.name}` with the same variables to train it again."
            )


class TrainingLineage(NamedTuple):
    """The trainings that produced a checkpoint: its run's folder, and the run's stages in order, up to the checkpoint's stage."""

    run: Path
    stages: tuple[str, ...]

    def finished_files(self) -> list[Path]:
        """Return the finished.json files of the finished trainings, the first training first.

        A training of another run is included if a stage started from its checkpoint (`model.init_from`). A stage of this run
        is included only if the next stage started from its checkpoint.
        """
        candidates = [self.run / stage for stage in reversed(self.stages)]
        folder = next((folder for folder in candidates if (folder / FINISHED).is_file()), None)
        folders: list[Path] = []
        while folder is not None and folder not in folders:
            folders.append(folder)
            folder = self._find_parent(folder)
        return [folder / FINISHED for folder in reversed(folders)]

    def _find_parent(self, folder: Path) -> Path | None:
        """Return the stage folder of the checkpoint that a training started from, or None. Old records lack it, so try earlier stages."""
        record = read_object(folder / FINISHED)
        init_from = get_config_value([folder / CONFIGURATION], "model", "init_from")
        candidates: list[Path] = []
        if init_from:
            parent = initial_stage_folder(Path(init_from))
            # config.yaml of a copied run contains the paths of the original run.
            candidates = [self.run / parent.name, parent] if folder.parent == self.run else [parent]
        elif INIT_FROM_SHA256 not in record and folder.parent == self.run and folder.name in self.stages:
            candidates = [self.run / stage for stage in reversed(self.stages[: self.stages.index(folder.name)])]
        for candidate in candidates:
            parent_record = read_object(candidate / FINISHED)
            is_parent = record.get(INIT_FROM_SHA256) in (None, parent_record.get("checkpoint_sha256"))
            if candidate != folder and parent_record and is_parent:
                return candidate
        return None


def training_lineage(checkpoint: Path) -> TrainingLineage:
    """Return the lineage of a run's checkpoint; averaged/best.ckpt counts as a checkpoint of the fine-tuning."""
    stage = checkpoint.parent.name
    index = TRAINING_STAGES.index(stage if stage in TRAINING_STAGES else FINETUNE)
    return TrainingLineage(checkpoint.parent.parent, TRAINING_STAGES[: index + 1])


def initial_stage_folder(checkpoint: Path) -> Path:
    """Return the folder of the stage that made an initial checkpoint (`model.init_from`); averaged/best.ckpt is from finetune/."""
    folder = checkpoint if (checkpoint / FINISHED).is_file() else checkpoint.parent
    return folder.with_name(FINETUNE) if folder.name == AVERAGED else folder


def find_evaluation(path: str | Path) -> Path:
    """Find the folder of an evaluation; `path` is that folder, or the folder of a run with the subfolder `eval`."""
    folder = Path(path)
    for candidate in (folder, folder / EVAL):
        if (candidate / METRICS).is_file():
            return candidate
    evaluation_names = sorted(path.parent.name for path in folder.glob(f"*/{METRICS}"))
    if evaluation_names:
        raise DiffcapError(
            f"{folder}: the run has no folder {EVAL}, but {', '.join(evaluation_names)}; "
            f"give one of them, such as {folder / evaluation_names[0]}, or run `make eval`."
        )
    evaluation_folder = folder if folder.name.endswith(EVAL) else folder / EVAL
    raise DiffcapError(
        f"{evaluation_folder / METRICS}: file not found; give the folder of an evaluated run, or run `make eval`."
    )


def evaluated_checkpoints(evaluation_folder: Path, metrics: Mapping[str, Any]) -> list[Path]:
    """Return the checkpoints of an evaluation; several for an ensemble, none for a vision-language model without training.

    If an earlier version wrote its `metrics` without the checkpoint's path, this is best.ckpt of the stage in the folder's name.
    """
    provenance = metrics.get("provenance") or {}
    if provenance.get("checkpoints"):
        files = [entry["file"] for entry in provenance["checkpoints"] if "file" in entry]
        return [Path(os.path.normpath(evaluation_folder / file)) for file in files]
    stage = FINETUNE
    for name in (*TRAINING_STAGES, AVERAGED):
        if evaluation_folder.name.startswith(result_folder_name(name, EVAL)):
            stage = name
    return [evaluation_folder.parent / stage / BEST]


def find_metrics_files(checkpoint: Path) -> Sequence[Path]:
    """Return the metrics.json files of a checkpoint's run, first that of its stage. If `checkpoint` is an exported folder: only its own."""
    if checkpoint.is_dir():
        return [path for path in (checkpoint / METRICS,) if path.is_file()]
    run_folder = checkpoint.absolute().parent.parent
    own_metrics_file = run_folder / result_folder_name(checkpoint.parent.name, EVAL) / METRICS
    return sorted(run_folder.glob(f"*/{METRICS}"), key=lambda path: (path != own_metrics_file, path))
