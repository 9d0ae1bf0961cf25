"""The captioners that the web page offers; only a few of them are in memory at a time."""

import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from diffcap.checkpoints.base_models import describe_origin, find_base, names_base_model
from diffcap.checkpoints.reading import CAPTIONING_STAGES, CONFIG, WEIGHTS, read_checkpoint
from diffcap.pair_captioner import SHIPPED_CAPTIONERS, PairCaptioner, load_captioner
from diffcap.records import read_json
from diffcap.registry import methods
from diffcap.utils.console import echo
from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import served_name

_MAX_LOADED = 3  # captioners in memory at once


class Choice(NamedTuple):
    """A captioner that visitors may choose: its label in the list, and the arguments with which `load_captioner` loads it."""

    label: str  # method, dataset, and the name of the run or file (or "ships with diffcap")
    # NAME@COMMIT for a vision-language model, openai:MODEL@ADDRESS for a served one; None for the shipped captioner of blocks
    checkpoint: str | Path | None
    backbone_weights: str | None = None  # file with the weights of the image network, if they cannot be downloaded
    base: str | None = None  # base model of a fine-tuned vision-language model, if it is not where the checkpoint says


def find_choices(
    checkpoints: Sequence[str], runs: Path, backbone_weights: str | None = None, base: str | None = None
) -> list[Choice]:
    """Return the captioners in `checkpoints`, captioners that ship with diffcap, and the captioners in the folder `runs`, newest first.

    For a vision-language model that was not fine-tuned, its name, commit and licence are printed. If a captioner below `runs` cannot be
    read by this version of diffcap, it is left out, and stderr says why.
    """
    choices: list[Choice] = []
    shown: list[Path] = []  # the path in the label of each choice

    def add(path: str | Path, label: str, *source: Any) -> None:
        # RUN/finetune/best.ckpt is shown as RUN, and RUN/reinforce/best.ckpt as RUN/reinforce.
        shown.append(Path(re.sub(r"(/finetune)?(/best\.ckpt)?$", "", str(path))))
        choices.append(Choice(label, *source))

    for name in checkpoints:
        title = next(method.title for method in methods().values() if method.base_model_module)
        if served := served_name(name):
            add(served, f"{title} · on a server", name)
        elif names_base_model(name):
            # This fetches the model, so that an error is raised before the first visitor comes.
            model = find_base(name, any_type=True)
            echo(describe_origin(model.name, model.revision, model.licence))
            # All visitors get this commit, even if the repository has a newer one when the model is loaded.
            commit = f"@{model.revision}" if model.revision else ""
            add(f"{model.name}{commit[:8]}", f"{title} · without training", f"{model.name}{commit}")
        else:
            metadata = load_captioner(name, "cpu", backbone_weights, base).metadata  # errors are raised now
            add(Path(name).resolve(), _label_of(metadata), name, backbone_weights, base)
    shipped_choices = [
        Choice(f"{_label_of(read_json(folder / CONFIG, 'configuration'))} · ships with diffcap", name)
        for name, folder in SHIPPED_CAPTIONERS.items()
    ]
    named_paths = {Path(name).resolve() for name in checkpoints}
    # A run has best.ckpt; an exported captioner is a folder with `CONFIG` and `WEIGHTS`.
    paths = [path for path in runs.rglob("best.ckpt") if path.parent.name in CAPTIONING_STAGES]
    paths += [path.parent for path in runs.rglob(CONFIG) if (path.parent / WEIGHTS).is_file()]
    paths = [path for path in paths if path.resolve() not in named_paths]
    for path in sorted(paths, key=lambda path: (-path.stat().st_mtime, str(path))):
        try:
            if path.is_dir():
                metadata = read_json(path / CONFIG, "configuration")
            else:
                metadata = read_checkpoint(path, mapped=True)["diffcap"]  # mapped=True: the weights are not read
            is_captioner = isinstance(metadata, dict) and metadata.get("stage") in CAPTIONING_STAGES
            if is_captioner and metadata.get("method") in list(methods()):
                add(path.resolve(), _label_of(metadata), path)
        except DiffcapError as error:
            echo(f"note: left out: {error}", err=True)
    keys = [(choice.label, path) for choice, path in zip(choices, shown)]
    # Labels get the last part of the choice's path, or more parts if other choices would have the same label.
    labels = {(label, path): f"{label} · {path.name}" for label, path in keys}
    for num_parts in range(2, max((len(path.parts) for _, path in keys), default=0)):
        counts = Counter(labels.values())
        for (label, path), old_label in labels.items():
            if counts[old_label] > 1:
                labels[label, path] = f"{label} · {'/'.join(path.parts[-num_parts:])}"
    choices = [choice._replace(label=labels[key]) for choice, key in zip(choices, keys)]
    return [*choices[: len(checkpoints)], *shipped_choices, *choices[len(checkpoints) :]]


def _label_of(metadata: dict[str, object]) -> str:
    return f"{methods()[str(metadata['method'])].title} · {metadata.get('dataset', 'unknown dataset')}"


class Captioners:
    """Loads captioners when they are needed, keeps the `max_loaded` last used in memory, and lets one caller at a time use a captioner."""

    def __init__(self, choices: Sequence[Choice], device: str = "auto", max_loaded: int = _MAX_LOADED) -> None:
        self.choices = list(choices)
        self._locks = [threading.Lock() for _ in self.choices]

        @lru_cache(max_loaded)
        def load(index: int) -> PairCaptioner:
            choice = self.choices[index]
            return load_captioner(choice.checkpoint, device, choice.backbone_weights, choice.base)

        self._load = load

    @contextmanager
    def use(self, index: int) -> Iterator[PairCaptioner]:
        """Lock and return the captioner with this index in `choices`."""
        with self._locks[index]:
            yield self._load(index)
