"""A captioner's exported folder, and the scores that are of the same weights."""

from pathlib import Path
from typing import Any, NamedTuple

from diffcap.checkpoints.reading import read_checkpoint, weights_hash, write_folder
from diffcap.records import read_json, write_json
from diffcap.run_folder import METRICS, evaluations_near
from diffcap.utils.errors import DiffcapError


class Scores(NamedTuple):
    """A checkpoint's metrics.json and where it stands; without one, `why` says what is missing."""

    metrics: dict[str, Any] | None
    file: Path | None
    why: str = ""


def scores_of(checkpoint: Path, state: dict[str, Any], named: str | Path | None = None) -> Scores:
    """The scores of a checkpoint, and not of another one of its run.

    Args:
        checkpoint: its file, or an exported folder. state: what it holds. named: its metrics.json; None looks through the
            evaluations of its run, or into the folder.

    Raises:
        DiffcapError: the named one is missing, or of other weights.
    """
    ours = weights_hash(state)
    if named is not None:
        metrics = _metrics(Path(named))
        fault = _fault(metrics, ours)
        if fault:
            raise DiffcapError(f"{named}: {fault}; evaluate {checkpoint} itself, or leave --metrics out.")
        return Scores(metrics, Path(named))
    faults = []
    for path in evaluations_near(checkpoint):
        try:
            metrics = _metrics(path)
        except DiffcapError:
            continue  # another program's
        fault = _fault(metrics, ours)
        if not fault:
            return Scores(metrics, path)
        faults.append(f"{path.parent.name}/{path.name} {fault}")
    return Scores(None, None, "; ".join(faults) or "no evaluation stands beside the checkpoint")


def _metrics(path: Path) -> dict[str, Any]:
    found = read_json(path, "metrics", "write it with `make eval`")
    if not isinstance(found, dict) or not isinstance(found.get("groups"), dict):
        raise DiffcapError(f'{path}: no metrics of diffcap, it has no "groups"; write it with `make eval`.')
    return found


def _fault(metrics: dict[str, Any], ours: str) -> str:
    """Why these are not the scores of the weights with this hash; empty where they are."""
    scored = (metrics.get("provenance") or {}).get("checkpoints")
    if not scored:
        return "does not say which weights it is of"
    if len(scored) > 1:
        return f"is of an ensemble of {len(scored)}"
    return "" if scored[0].get("weights_sha256") == ours else "is of other weights"


def export(checkpoint: str | Path, folder: str | Path) -> Scores:
    """Write a checkpoint in its exported form, with the metrics.json that is of its weights, if there is one.

    Raises:
        DiffcapError: the checkpoint is unreadable.
    """
    checkpoint, folder = Path(checkpoint), Path(folder)
    state = read_checkpoint(checkpoint)
    scores = scores_of(checkpoint, state)
    write_folder(folder, state)
    if scores.metrics is not None:
        write_json(folder / METRICS, scores.metrics)
    elif folder.absolute() != checkpoint.absolute():
        (folder / METRICS).unlink(missing_ok=True)  # of another checkpoint that was exported here
    return scores
