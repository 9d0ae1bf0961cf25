"""Combine several checkpoints: the mean of their weights, or an ensemble of captioners with the same token ids."""

import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from diffcap.checkpoints.base_models import text_only_error
from diffcap.checkpoints.loading import Checkpoint, load
from diffcap.checkpoints.reading import read_checkpoint
from diffcap.models.answering import AnsweringModel
from diffcap.models.generation import Ensemble
from diffcap.records import file_hash
from diffcap.run_folder import LAST, STEP_CHECKPOINT_GLOB
from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import atomic_write


def expand_folders(paths: Sequence[str | Path]) -> list[Path]:
    """Replace each folder by its periodic checkpoints (option `run.keep_last_k`) and last.ckpt; paths of files stay as they are."""
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            files.append(path)
            continue
        periodic_files = sorted(path.glob(STEP_CHECKPOINT_GLOB))
        if not periodic_files:
            raise DiffcapError(
                f"{path}: the folder has no periodic checkpoints ({STEP_CHECKPOINT_GLOB}); train with --run.keep_last_k=5, or give files."
            )
        last_file = path / LAST
        # The last.ckpt of an interrupted run equals the newest periodic checkpoint.
        is_distinct = last_file.is_file() and file_hash(last_file) != file_hash(periodic_files[-1])
        files += [*periodic_files, last_file] if is_distinct else periodic_files
    return files


def average(paths: Sequence[str | Path], out: str | Path) -> list[int]:
    """Write to the file `out` the mean of checkpoints of one model, given as files or folders. Return the training step of each."""
    files = expand_folders(paths)
    contents = [read_checkpoint(file) for file in files]
    first_metadata = contents[0]["diffcap"]
    for file, content in zip(files[1:], contents[1:]):
        for key in ("method", "stage", "hyperparameters", "vocabulary_layout"):  # layout: special tokens, order of ids
            if content["diffcap"].get(key) != first_metadata.get(key):
                raise DiffcapError(f"{file}: {key} differs from {files[0]}; average checkpoints of one model.")
        _check_words(files[0], first_metadata["words"], file, content["diffcap"]["words"])
    if len(files) < 2:
        raise DiffcapError(f"{files[0]}: there is no other checkpoint to average with; give at least two.")
    last_content = contents[-1]
    weights = dict(last_content["state_dict"])
    for name, value in weights.items():
        if value.is_floating_point():
            values = [content["state_dict"][name].double() for content in contents]
            weights[name] = torch.stack(values).mean(0).to(value.dtype)
    steps = [content["global_step"] for content in contents]
    sources = [{"file": file.name, "step": step} for file, step in zip(files, steps)]
    metadata = {**last_content["diffcap"], "averaged": sources}  # the other entries are from the last checkpoint
    buffer = io.BytesIO()  # torch.save to a file does not raise OSError if the disk is full
    torch.save({"state_dict": weights, "global_step": steps[-1], "diffcap": metadata}, buffer)
    with atomic_write(out, per_process=False) as temporary:  # one fixed name, so that killed processes leave one file
        temporary.write_bytes(buffer.getbuffer())
    return steps


# Compare two vocabularies; if they differ, raise an error that names the first different word.
def _check_words(first_path: Path, first_words: list[str], path: Path, words: list[str]) -> None:
    for number, (word, expected) in enumerate(itertools.zip_longest(words, first_words, fillvalue=""), 1):
        if word != expected:
            raise DiffcapError(
                f"{path}: its vocabulary differs from {first_path}: word {number} is {repr(word) if word else 'missing'}, "
                f"not {repr(expected) if expected else 'missing'}; "
                "use checkpoints that were trained with the same manifest and min_count."
            )


def load_members(
    paths: Sequence[str | Path], base: str | Path | None = None, prompt: str | None = None, **zero_shot_options: Any
) -> list[Checkpoint]:
    """Load the members of an ensemble with the arguments of `load`. Members of different methods need the same token ids."""
    members = [load(path, base, prompt, **zero_shot_options) for path in paths]
    first = members[0]
    for member in members:
        if len(members) > 1 and isinstance(member.captioner, AnsweringModel):
            raise text_only_error(member.metadata["base"])
    files = [Path(path) for path in paths]
    for path, member in zip(files[1:], members[1:]):
        _check_words(files[0], first.vocabulary.words, path, member.vocabulary.words)
        if member.vocabulary.family != first.vocabulary.family:  # layouts of one family have the same special tokens
            raise DiffcapError(
                f"{path}: its vocabulary layout is {member.vocabulary.layout}, that of {files[0]} is {first.vocabulary.layout}; "
                "the members of an ensemble need the same layout, or the same base model."
            )
    return members


def as_ensemble(members: Sequence[Checkpoint]) -> Checkpoint:
    """Combine checkpoints to one, whose captioner takes a list with the features of each member. `max_length` is the smallest of all."""
    captioner = Ensemble([member.captioner for member in members]).eval()
    metadata = {**members[0].metadata, "ensemble": [member.metadata["method"] for member in members]}
    max_length = min(member.max_length for member in members)
    return members[0]._replace(captioner=captioner, max_length=max_length, metadata=metadata)
