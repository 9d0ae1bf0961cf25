"""The layout of a run's folder, `runs/<dataset>/<method>`.

```
pretrain/ finetune/ reinforce/   one training stage each: config.yaml, identity.json, logs/, last.ckpt, best.ckpt, finished.json
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
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from diffcap.records import file_hash
from diffcap.utils.errors import DiffcapError
from diffcap.utils.settings import setting

PRETRAIN, FINETUNE, REINFORCE = "pretrain", "finetune", "reinforce"
STAGES = (PRETRAIN, FINETUNE, REINFORCE)  # each starts from the checkpoint of an earlier one, if there is one
AVERAGED, EVAL = "averaged", "eval"
BEST, LAST = "best.ckpt", "last.ckpt"
KEPT = "step-*.ckpt"
CONFIGURATION, IDENTITY, FINISHED, LOGS = "config.yaml", "identity.json", "finished.json", "logs"
METRICS, PREDICTIONS, REFERENCES, GROUPS = "metrics.json", "predictions.json", "references.json", "groups.json"
START_SHA256 = "init_from_sha256"  # entry of finished.json: "checkpoint_sha256" of the training that it started from
UNSCORED = "predictions-unscored.json"


def metrics_by(tokenizer: str) -> str:
    """Name of the file with the scores of a tokenizer other than the protocol's."""
    return f"metrics-{tokenizer}.json"


def evaluation_of(stage: str) -> str:
    """Name of the evaluation folder of a stage: eval for the fine-tuning, `<stage>-eval` for others."""
    return EVAL if stage == FINETUNE else f"{stage}-{EVAL}"


def report_of(stage: str) -> str:
    """Name of the report folder of a stage: report for the fine-tuning, `<stage>-report` for others."""
    return "report" if stage == FINETUNE else f"{stage}-report"


@contextmanager
def stage_lock(out: Path, seed: int) -> Iterator[None]:
    """Lock a stage's folder for one training.

    The lock file is next to the folder, because a training may rename the folder. The lock is a POSIX record lock: the kernel
    releases it when the process ends, also by SIGKILL, and the forked workers of a data loader do not inherit it.

    Args:
        out: folder of the stage; it does not need to exist. seed: of this training, for the message to another one.

    Raises:
        DiffcapError: another process trains in this folder.
    """
    path = out.absolute().with_name(f".{out.absolute().name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # POSIX allows both
            holder = dict.fromkeys(("pid", "host", "seed", "started"), "?") | _read_object(path)
            raise DiffcapError(
                f"{out}: process {holder['pid']} on {holder['host']} (seed {holder['seed']}, started {holder['started']}) "
                f"trains in this folder; wait until it ends, stop it with `kill {holder['pid']}`, or train in another folder "
                f"with RUN={out.parent}-2 (without make: --run.out={out.parent}-2/{out.name})."
            ) from None
        started = datetime.now().isoformat(" ", "seconds")
        file.truncate(0)
        json.dump({"pid": os.getpid(), "host": platform.node(), "seed": seed, "started": started}, file)
        file.flush()
        yield


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} if the file is missing, damaged or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def identity_of(out: Path) -> str | None:
    """The identity of the training in a stage's folder (see `lit.run`); None if identity.json is missing or damaged."""
    identity = _read_object(out / IDENTITY).get("identity")
    return identity if isinstance(identity, str) else None


def checkpoint_entries(checkpoint: Path) -> dict[str, Any]:
    """The entries of finished.json that identify the checkpoint file of a finished stage."""
    state = checkpoint.stat()
    return {
        "checkpoint": checkpoint.name,
        "checkpoint_bytes": state.st_size,
        "checkpoint_mtime_ns": state.st_mtime_ns,
        "checkpoint_sha256": file_hash(checkpoint),
    }


def is_finished(out: Path) -> bool:
    """Whether a stage's folder has a readable finished.json; `fault_of` tells whether its checkpoint is the right one."""
    return _read_object(out / FINISHED).get("checkpoint") in (BEST, LAST)


def stage_of(out: Path) -> str:
    """The training stage of a folder: the one in its finished.json, or else the one that its name begins with."""
    named = next((stage for stage in STAGES if out.name.startswith(stage)), FINETUNE)
    stage = _read_object(out / FINISHED).get("stage", named)
    return stage if stage in STAGES else named


def main_process() -> bool:
    """Whether this is the process of rank 0; usable before Lightning has set up its ranks."""
    return all(os.environ.get(name, "0") == "0" for name in ("LOCAL_RANK", "RANK", "SLURM_PROCID"))


def fault_of(out: Path) -> str | None:
    """Why the training in a stage's folder can neither be used nor resumed; None if it can.

    The size of a finished training's checkpoint is always compared. Its SHA-256 is compared only if the file's time differs
    from the recorded one, because hashing takes seconds per gigabyte.
    """
    identity = identity_of(out)
    if identity is None:
        there = [name for name in (IDENTITY, LAST, BEST, FINISHED) if (out / name).exists()]
        return f"{IDENTITY} is missing or damaged" if there else None
    if not is_finished(out):
        return None
    done = _read_object(out / FINISHED)
    if done.get("identity") != identity:
        return f"{FINISHED} belongs to another training than {IDENTITY}"
    checkpoint = out / done["checkpoint"]
    if not checkpoint.is_file():
        return f"{checkpoint.name} of the finished training is missing"
    if "checkpoint_sha256" not in done:  # written by an earlier version
        same = zipfile.is_zipfile(checkpoint)  # False for a cut file
    else:
        state = checkpoint.stat()
        same = state.st_size == done["checkpoint_bytes"] and (
            state.st_mtime_ns == done["checkpoint_mtime_ns"] or file_hash(checkpoint) == done["checkpoint_sha256"]
        )
    return None if same else f"{checkpoint.name} is not the file that the finished training wrote"


def check_finished(checkpoints: Iterable[str | Path]) -> None:
    """Check that checkpoints of finished trainings are the files that those trainings wrote.

    Raises:
        DiffcapError: finished.json of the folder is damaged, or it describes another file under this name.
    """
    for path in map(Path, checkpoints):
        out = path.parent
        if path.name not in (BEST, LAST) or not (out / FINISHED).is_file() or not (out / IDENTITY).is_file():
            continue  # the checkpoint belongs to no run, or to one that is still training
        fault = fault_of(out) if is_finished(out) else f"{FINISHED} is damaged"
        if fault and (not is_finished(out) or _read_object(out / FINISHED)["checkpoint"] == path.name):
            raise DiffcapError(
                f"{out}: {fault}; run `make {out.name}` with the same variables again, which repairs it."
            )


class Chain(NamedTuple):
    """The trainings that lead to a checkpoint: its run's folder, and the stages of this run in their order."""

    run: Path
    stages: tuple[str, ...]

    def finished(self) -> list[Path]:
        """The finished.json of every finished training, in their order.

        Trainings of other runs count if a stage started from their checkpoint (`model.init_from`). A stage of this run counts
        only if the following stage started from it.
        """
        folder = next((self.run / stage for stage in reversed(self.stages) if is_done(self.run / stage)), None)
        folders: list[Path] = []
        while folder is not None and folder not in folders:
            folders.insert(0, folder)
            folder = self._previous(folder)
        return [folder / FINISHED for folder in folders]

    def _previous(self, folder: Path) -> Path | None:
        """The folder of the training that a training started from."""
        record = _read_object(folder / FINISHED)
        start = setting([folder / CONFIGURATION], "model", "init_from")
        candidates: list[Path] = []
        if start:
            named = start_folder(Path(start))
            # The configuration of a copied run names the stages of the original.
            candidates = [self.run / named.name, named] if folder.parent == self.run else [named]
        elif START_SHA256 not in record and folder.parent == self.run and folder.name in self.stages:
            candidates = [self.run / stage for stage in reversed(self.stages[: self.stages.index(folder.name)])]
        for candidate in candidates:
            digest = checkpoint_sha256(candidate)
            # A finished.json of an earlier version does not record the hash.
            if candidate != folder and is_done(candidate) and record.get(START_SHA256, digest) == digest:
                return candidate
        return None


def is_done(out: Path) -> bool:
    """Whether a stage's folder has a finished.json, readable or not."""
    return (out / FINISHED).is_file()


def start_folder(checkpoint: Path) -> Path:
    """The stage's folder of a checkpoint that a training starts from; an average belongs to the fine-tuning."""
    folder = checkpoint if is_done(checkpoint) else checkpoint.parent
    return folder.with_name(FINETUNE) if folder.name == AVERAGED else folder


def checkpoint_sha256(out: Path) -> str | None:
    """The hash of a finished stage's checkpoint in finished.json; None if it has none."""
    digest = _read_object(out / FINISHED).get("checkpoint_sha256")
    return digest if isinstance(digest, str) else None


def find_evaluation(named: str | Path) -> Path:
    """Find the folder of an evaluation.

    Args:
        named: the folder of an evaluation, or of a run, whose `eval` is used.

    Raises:
        DiffcapError: there is no metrics.json; the message lists the other evaluations of the run.
    """
    folder = Path(named)
    for place in (folder, folder / EVAL):
        if (place / METRICS).is_file():
            return place
    others = sorted(path.parent.name for path in folder.glob(f"*/{METRICS}"))
    if others:
        raise DiffcapError(
            f"{folder}: has no {EVAL}, but {', '.join(others)}; give one of them, such as {folder / others[0]}, or run `make eval`."
        )
    raise DiffcapError(
        f"{folder / EVAL / METRICS}: file not found; give the folder of an evaluated run, or run `make eval`."
    )


def checkpoints_of(evaluation: Path, metrics: Mapping[str, Any]) -> list[Path]:
    """The checkpoints of an evaluation; several for an ensemble.

    Args:
        evaluation: folder of the evaluation.
        metrics: its metrics.json. One of an earlier version does not name the checkpoint, which then is best.ckpt of the stage in
            the folder's name.
    """
    notes = metrics.get("provenance") or {}
    if notes.get("checkpoints"):
        return [Path(os.path.normpath(evaluation / one["file"])) for one in notes["checkpoints"]]
    if notes.get("ensemble"):
        return [Path(path) for path in notes["ensemble"]]
    stage = next((name for name in (*STAGES, AVERAGED) if evaluation.name.startswith(evaluation_of(name))), FINETUNE)
    return [evaluation.parent / stage / BEST]


def chain_of(checkpoint: Path) -> Chain:
    """The chain of trainings of a run that may have led to one of its checkpoints."""
    stage = checkpoint.parent.name
    last = STAGES.index(stage) if stage in STAGES else STAGES.index(FINETUNE)  # an average belongs to the fine-tuning
    return Chain(checkpoint.parent.parent, STAGES[: last + 1])


def evaluations_near(checkpoint: Path) -> Sequence[Path]:
    """The metrics.json files of a checkpoint's run, that of its stage first; for an exported folder only the one in it."""
    if checkpoint.is_dir():
        return [path for path in (checkpoint / METRICS,) if path.is_file()]
    run = checkpoint.absolute().parent.parent
    first = run / evaluation_of(checkpoint.parent.name) / METRICS
    return [*([first] if first.is_file() else []), *sorted(set(run.glob(f"*/{METRICS}")) - {first})]
