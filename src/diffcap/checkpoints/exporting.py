"""The exported folder of a checkpoint, and the evaluation scores that belong to its weights."""

from pathlib import Path
from typing import Any, NamedTuple

from diffcap.checkpoints.reading import read_checkpoint, weights_hash, write_folder
from diffcap.records import read_json, write_json
from diffcap.run_folder import METRICS, related_evaluations
from diffcap.utils.errors import DiffcapError


class Scores(NamedTuple):
    """The metrics.json of a checkpoint and its path; `missing_reason` explains why there is none."""

    metrics: dict[str, Any] | None
    file: Path | None
    missing_reason: str = ""


def find_scores(checkpoint: Path, state: dict[str, Any], metrics_file: str | Path | None = None) -> Scores:
    """Find the evaluation of a checkpoint's weights.

    Args:
        checkpoint: the file or the exported folder.
        state: its content, see `read_checkpoint`.
        metrics_file: metrics.json to use; None searches the evaluations of the same run, or the exported folder.
    """
    digest = weights_hash(state)
    if metrics_file is not None:
        metrics = _read_metrics(Path(metrics_file))
        fault = _mismatch(metrics, digest)
        if fault:
            raise DiffcapError(f"{metrics_file}: {fault}; evaluate {checkpoint} itself, or omit --metrics.")
        return Scores(metrics, Path(metrics_file))
    faults = []
    for path in related_evaluations(checkpoint):
        try:
            metrics = _read_metrics(path)
        except DiffcapError:
            faults.append(f"{path.parent.name}/{path.name} is not a metrics.json of diffcap")
            continue
        fault = _mismatch(metrics, digest)
        if not fault:
            return Scores(metrics, path)
        faults.append(f"{path.parent.name}/{path.name} {fault}")
    return Scores(None, None, "; ".join(faults) or "there is no evaluation next to the checkpoint")


def _read_metrics(path: Path) -> dict[str, Any]:
    metrics = read_json(path, "metrics", "write it with `make eval`")
    if not isinstance(metrics, dict) or not isinstance(metrics.get("groups"), dict):
        raise DiffcapError(f'{path}: not a metrics.json of diffcap, "groups" is missing; write it with `make eval`.')
    protocol, provenance = (metrics.get(key) or {} for key in ("protocol", "provenance"))
    evaluated = (provenance.get("checkpoints") or []) if isinstance(provenance, dict) else None
    if (
        not isinstance(protocol, dict)
        or not isinstance(evaluated, list)
        or not all(isinstance(e, dict) for e in evaluated)
    ):
        raise DiffcapError(
            f'{path}: not a metrics.json of diffcap, its "protocol" or "provenance" has another form; write it with `make eval`.'
        )
    return metrics


def _mismatch(metrics: dict[str, Any], digest: str) -> str:
    """Why these scores do not belong to the weights with this hash; empty if they do."""
    evaluated = (metrics.get("provenance") or {}).get("checkpoints")
    if not evaluated:
        return "does not name the weights that it evaluated"
    if len(evaluated) > 1:
        return f"belongs to an ensemble of {len(evaluated)} checkpoints"
    return "" if evaluated[0].get("weights_sha256") == digest else "belongs to other weights"


def export(checkpoint: str | Path, folder: str | Path) -> Scores:
    """Write the exported form of a checkpoint, with the metrics.json of its weights if there is one.

    Returns:
        The scores that were written, or the reason why there are none.
    """
    checkpoint, folder = Path(checkpoint), Path(folder)
    state = read_checkpoint(checkpoint)
    scores = find_scores(checkpoint, state)
    write_folder(folder, state)
    if scores.metrics is not None:
        write_json(folder / METRICS, scores.metrics)
    elif folder.absolute() != checkpoint.absolute():
        (folder / METRICS).unlink(missing_ok=True)  # scores of another checkpoint that was exported to this folder
    return scores
