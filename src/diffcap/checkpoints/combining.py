"""Several checkpoints as one: the mean of their weights, or an ensemble of captioners that number their words alike."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from diffcap.checkpoints.loading import Checkpoint, load
from diffcap.checkpoints.reading import read_checkpoint
from diffcap.models.ensemble import Ensemble
from diffcap.records import file_hash
from diffcap.run_folder import KEPT, LAST
from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import atomic_write


def expanded(paths: Sequence[str | Path]) -> list[Path]:
    """Files, with a run's folder standing for the checkpoints that `run.keep` has kept there, and its last one.

    Raises:
        DiffcapError: a folder holds none.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            files.append(path)
            continue
        kept = sorted(path.glob(KEPT))
        if not kept:
            raise DiffcapError(f"{path}: no kept checkpoints ({KEPT}) there; train with --run.keep=5, or name files.")
        last = path / LAST
        new = last.is_file() and file_hash(last) != file_hash(kept[-1])  # of an interrupted run it is the last one kept
        files += [*kept, *([last] if new else [])]
    return files


def average(paths: Sequence[str | Path], out: str | Path) -> list[int]:
    """Write the mean of the weights of checkpoints of one model; what else it holds is the last one's.

    Args:
        paths: files, or folders, see `expanded`. out: the new checkpoint.

    Returns:
        The steps that were averaged.

    Raises:
        DiffcapError: fewer than two, one cannot be read, or they are not of one model.
    """
    files = expanded(paths)
    states = [read_checkpoint(path) for path in files]
    first = states[0]
    for path, state in zip(files[1:], states[1:]):
        _check_same_model(files[0], first, path, state)
    if len(files) < 2:
        raise DiffcapError(f"{files[0]}: the only checkpoint; give at least two to average.")
    last = states[-1]
    mean = {name: _mean([state["state_dict"][name] for state in states]) for name in first["state_dict"]}
    steps = [state["global_step"] for state in states]
    sources = [{"file": Path(path).name, "step": step} for path, step in zip(files, steps)]
    facts = {**last["diffcap"], "averaged": sources}
    content = io.BytesIO()  # torch.save to a file does not raise OSError where the disk is full
    torch.save({"state_dict": mean, "global_step": last["global_step"], "diffcap": facts}, content)
    with atomic_write(out, per_process=False) as temporary:
        temporary.write_bytes(content.getbuffer())
    return steps


def _mean(values: list[torch.Tensor]) -> torch.Tensor:
    if not values[0].is_floating_point():
        return values[-1]
    return torch.stack([value.double() for value in values]).mean(0).to(values[0].dtype)


def _check_same_model(one: Path, first: dict[str, Any], path: Path, state: dict[str, Any]) -> None:
    for key in ("method", "stage", "hyperparameters", "vocabulary_layout"):
        theirs, ours = state["diffcap"].get(key), first["diffcap"].get(key)
        if theirs != ours:
            raise DiffcapError(f"{path}: its {key} is not that of {one}; average checkpoints of one model.")
    _check_words(one, first["diffcap"]["words"], path, state["diffcap"]["words"])
    shapes, theirs = ({name: value.shape for name, value in each["state_dict"].items()} for each in (first, state))
    if shapes != theirs:
        name = next(name for name in {**shapes, **theirs} if shapes.get(name) != theirs.get(name))
        raise DiffcapError(f"{path}: its {name} is not that of {one}; average checkpoints of one model.")


def _check_words(one: Path, ours: list[str], path: Path, theirs: list[str]) -> None:
    if ours == theirs:
        return
    place = next(
        (n for n, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs))
    )  # one may be the beginning of the other
    shown = [repr(words[place]) if place < len(words) else "nothing more" for words in (theirs, ours)]
    raise DiffcapError(
        f"{path}: its vocabulary is not that of {one}: word {place + 1} is {shown[0]} there and {shown[1]} here; "
        "take checkpoints that were trained on one manifest with one min_count."
    )


def load_together(paths: Sequence[str | Path]) -> list[Checkpoint]:
    """Load the members of an ensemble, methods of any kind that number their words alike.

    Raises:
        DiffcapError: one cannot be loaded, or has another vocabulary or other opening and closing tokens.
    """
    files = [Path(path) for path in paths]
    members = [load(path) for path in files]
    first = members[0]
    for path, member in zip(files[1:], members[1:]):
        _check_words(files[0], first.vocabulary.words, path, member.vocabulary.words)
        if member.vocabulary.family != first.vocabulary.family:
            raise DiffcapError(
                f"{path}: numbers its words as {member.vocabulary.layout} does, {files[0]} as {first.vocabulary.layout}; "
                "an ensemble needs one numbering (SCORER and DIRL share theirs)."
            )
    return members


def together(members: Sequence[Checkpoint]) -> Checkpoint:
    """Several checkpoints as one that takes lists of features; captions are as long as the shortest `max_length` allows."""
    captioner = Ensemble([member.captioner for member in members]).eval()
    metadata = {**members[0].metadata, "ensemble": [member.metadata["method"] for member in members]}
    return members[0]._replace(
        captioner=captioner, max_length=min(member.max_length for member in members), metadata=metadata
    )
