"""Which captioners the page offers, and the few of them that are in memory."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from diffcap.checkpoints.base_models import describe_origin, find_base, names_base_model
from diffcap.checkpoints.reading import CAPTIONING_STAGES, CONFIG, WEIGHTS, read_checkpoint
from diffcap.pair_captioner import SHIPPED_CAPTIONERS, PairCaptioner, load_captioner
from diffcap.records import read_json
from diffcap.registry import methods
from diffcap.utils.console import echo
from diffcap.utils.errors import DiffcapError

KEPT = 3  # captioners in memory at once


class Choice(NamedTuple):
    """A captioner that visitors may choose."""

    label: str  # method, dataset and where it comes from
    source: str | Path | None  # for `load_captioner`, as the others; a vision-language model of the Hub with its commit
    weights: str | None = None
    base: str | None = None


def find_choices(
    checkpoints: Sequence[str], runs: Path, backbone_weights: str | None = None, base: str | None = None
) -> list[Choice]:
    """What is offered: the checkpoints that were named, those that ship, then the captioners in `runs`, newest first.

    Name, commit and licence of a vision-language model without training are printed. A file below `runs` that is not a captioner of
    this diffcap is left out, and stderr says why.
    """
    found: list[tuple[Path, Choice]] = []
    for name in checkpoints:
        if names_base_model(name):
            model = find_base(name)  # fetches it, and raises here, before the first request
            echo(describe_origin(model.name, model.revision, model.licence))
            # All visitors get this commit, also if the repository has another one when the model is loaded.
            pinned = f"{model.name}@{model.revision}" if model.revision else model.name
            shown = f"{model.name}@{model.revision[:7]}" if model.revision else model.name
            title = next(method.title for method in methods().values() if method.base_model)
            found.append((Path(shown), Choice(f"{title} · without training", pinned)))
        else:
            metadata = load_captioner(name, "cpu", backbone_weights, base).metadata  # raises here, too
            found.append((Path(name).resolve(), Choice(_label(metadata), name, backbone_weights, base)))
    shipped = [
        Choice(f"{_label(read_json(folder / CONFIG, 'configuration'))} · ships with diffcap", name)
        for name, folder in SHIPPED_CAPTIONERS.items()
    ]
    named = {Path(name).resolve() for name in checkpoints}
    paths = [path for path in runs.rglob("best.ckpt") if path.parent.name in CAPTIONING_STAGES]
    paths += [path.parent for path in runs.rglob(CONFIG) if (path.parent / WEIGHTS).is_file()]
    for path in sorted(paths, key=lambda path: (-path.stat().st_mtime, str(path))):
        if path.resolve() in named:
            continue
        try:
            if path.is_dir():
                metadata = read_json(path / CONFIG, "configuration")
            else:
                metadata = read_checkpoint(path, mapped=True)["diffcap"]
            is_captioner = isinstance(metadata, dict) and metadata.get("stage") in CAPTIONING_STAGES
            if is_captioner and metadata.get("method") in list(methods()):
                found.append((path.resolve(), Choice(_label(metadata), path)))
        except DiffcapError as error:
            echo(f"note: left out: {error}", err=True)
    choices = _with_places(found)
    return [*choices[: len(checkpoints)], *shipped, *choices[len(checkpoints) :]]


def _label(metadata: dict[str, object]) -> str:
    return f"{methods()[str(metadata['method'])].title} · {metadata.get('dataset', 'unknown dataset')}"


def _with_places(found: Sequence[tuple[Path, Choice]]) -> list[Choice]:
    """Add to each label the last part of the captioner's path, or as many parts as are needed to tell it from the others."""
    places = []  # a run's checkpoint is known by the run's folder, any other checkpoint by its own name
    for path, choice in found:
        stage = path.parent if path.name == "best.ckpt" else path
        places.append((choice.label, stage.parent if stage.name == "finetune" else stage))
    shown = {(label, place): f"{label} · {place.name}" for label, place in places}
    for size in range(2, max((len(place.parts) for _, place in places), default=0)):
        taken = Counter(shown.values())
        for (label, place), old in shown.items():
            if taken[old] > 1:
                shown[label, place] = f"{label} · {'/'.join(place.parts[-size:])}"
    return [choice._replace(label=shown[place]) for (_, choice), place in zip(found, places)]


class Captioners:
    """Loads captioners when somebody asks for them, keeps the last `kept` of them, and lets one caller at a time use each."""

    def __init__(self, choices: Sequence[Choice], device: str = "auto", kept: int = KEPT) -> None:
        self.choices = list(choices)
        self._device, self._most = device, kept
        self._locks = [threading.Lock() for _ in self.choices]
        self._kept: OrderedDict[int, PairCaptioner] = OrderedDict()
        self._keeping = threading.Lock()

    @contextmanager
    def use(self, number: int) -> Iterator[PairCaptioner]:
        """Have a captioner, by its place in `choices`, to oneself."""
        with self._locks[number]:
            with self._keeping:
                captioner = self._kept.get(number)
            if captioner is None:
                choice = self.choices[number]
                captioner = load_captioner(choice.source, self._device, choice.weights, choice.base)
            with self._keeping:
                self._kept[number] = captioner
                self._kept.move_to_end(number)
                while len(self._kept) > self._most:
                    self._kept.popitem(last=False)
            yield captioner
