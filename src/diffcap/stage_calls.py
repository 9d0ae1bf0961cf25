"""The calls of the stages of an experiment: their options, the files that they read and write, and whether they are up to date."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffcap.experiment import RETRIEVAL, Experiment, split_words
from diffcap.run_folder import (
    BEST,
    CONFIGURATION,
    FINETUNE,
    FINISHED,
    GROUPS,
    IDENTITY,
    LAST,
    METRICS,
    PREDICTIONS,
    PRETRAIN,
    REFERENCES,
    REINFORCE,
)
from diffcap.run_folder import STAGES as TRAINING
from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import atomic_write
from diffcap.utils.settings import CONFIGS, get_config_value


@dataclass(frozen=True)
class StageCall:
    """One call of a stage.

    Attributes:
        stage: key of `pipeline.BODIES`.
        arguments: options of the stage.
        product: file that exists if the call is complete.
        inputs: files that make the call out of date if they are newer than the product.
        read: other files that affect the result.
        results: other files that the call writes.
        always: whether a requested call always runs, because the stage itself checks its files.
    """

    stage: str
    arguments: list[str]
    product: Path
    inputs: list[Path] = field(default_factory=list)
    read: list[Path] = field(default_factory=list)
    results: list[Path] = field(default_factory=list)
    always: bool = False

    @property
    def is_current(self) -> bool:
        """Whether the product exists and no input is newer."""
        if not self.product.is_file():
            return False
        made = self.product.stat().st_mtime_ns
        return all(path.stat().st_mtime_ns <= made for path in self.inputs if path.exists())

    @property
    def _note(self) -> Path:
        return self.product.parent / f".{self.stage}.done.json"

    def _state(self) -> dict[str, Any]:
        """Arguments, hashes of the settings files, and size and time of every other file that is read or written."""
        given = [value for word in self.arguments for value in (word, word.partition("=")[2]) if value]
        # os.path: a section of CONFIG, in JSON, may be too long for Path.is_file
        files = [Path(value) for value in given if os.path.isfile(value)]  # noqa: PTH113
        settings = [path for path in files if path.suffix == ".yaml"]
        stamps = {}
        for path in [*files, *self.inputs, *self.read, self.product, *self.results]:
            if path not in settings and path.exists():
                state = path.stat()
                stamps[str(path)] = [state.st_size, state.st_mtime_ns]
        hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in settings]
        return {"arguments": self.arguments, "settings": hashes, "files": stamps}

    @property
    def is_done(self) -> bool:
        """Whether the same call has completed before, and no file that it reads or writes has changed since."""
        if self.always or not self.product.is_file():
            return False
        try:
            return bool(json.loads(self._note.read_text(encoding="utf-8")) == self._state())
        except (OSError, ValueError):
            return False

    def note_done(self) -> None:
        """Record that the call is complete; if the stage had nothing to do, mark the product as newer than the inputs."""
        if not self.product.is_file():
            return
        if not self.is_current:
            self.product.touch()
        if not self.always:
            with atomic_write(self._note) as temporary:
                temporary.write_text(json.dumps(self._state()), encoding="utf-8")


def stage_calls(experiment: Experiment, stage: str, own: Sequence[str] = ()) -> list[StageCall]:
    """The calls of a stage for an experiment, in order; only `pretrain` with EXTRA has several.

    Args:
        experiment: the experiment.
        stage: data, extract, negatives, a training stage, eval or report.
        own: options of the stage; they come last and have priority.
    """
    if stage in TRAINING:
        return list(_training(experiment, stage, list(own)))
    return [_PLAIN[stage](experiment, list(own))]


def _data(e: Experiment, own: list[str]) -> StageCall:
    words = ["--dataset", e.dataset, "--out", e.folder]
    words += ["--source", _expanded(e.data)] if e.data else []
    words += ["--seed", e.seed] if e.dataset_spec.rendered else []
    words += ["--pairs", e.pairs] if e.pairs and e.dataset_spec.pairs else []
    words += _options(e, "data")
    return StageCall("data", [*words, *own], Path(e.folder) / "manifest.jsonl", always=True)


def _extract(e: Experiment, own: list[str]) -> StageCall:
    inputs, read = [Path(e.folder) / "manifest.jsonl"], [Path(e.folder) / "dataset.json"]
    results = [e.features_folder / name for name in ("meta.json", "features.f16", "features.u8", "sums.u32", "done.u8")]
    if e.features_from:
        source = _expanded(e.features_from)
        words = ["--folder", e.folder, "--source", source, "--name", e.features, *own]
        return StageCall("import_features", words, e.features_folder / "complete", inputs, read, results)
    config = CONFIGS / f"backbone/{e.backbone}.yaml"
    words = ["--config", str(config), "--data.folder", e.folder]
    words += ["--model.name", e.features] if e.features != e.backbone else []
    if e.weights and not e.reads_pixels:
        weights = Path(e.weights).expanduser()
        words += ["--model.weights", str(weights)]
        inputs += [weights] if e.backbone == "clip4idc" else []  # the user's own training, which may be repeated
    words += ["--trainer.devices", e.devices, *(["--trainer.strategy", "ddp"] if e.devices != "1" else [])]
    words += [*_options(e, "extract"), *split_words(e.extract_args)]
    # Without an array, every call quickly finds the image files that have changed.
    always = bool(get_config_value([config], "model", "from_files"))
    return StageCall("extract", [*words, *own], e.features_folder / "complete", inputs, read, results, always)


def _negatives(e: Experiment, own: list[str]) -> StageCall:
    tagger = _expanded(e.tagger)
    words = ["--folder", e.folder, "--tagger", tagger, "--seed", e.seed, *_options(e, "negatives"), *own]
    folder = Path(e.folder)
    return StageCall("negatives", words, folder / "negatives.jsonl", [folder / "manifest.jsonl"], always=True)


def _eval(e: Experiment, own: list[str]) -> StageCall:
    is_retrieval = e.eval == RETRIEVAL
    checkpoint = e.pretrained_checkpoint if is_retrieval else e.checkpoint
    inputs = [(Path(e.pretraining) if is_retrieval else e.stage_folder(e.captioner)) / FINISHED]
    words = ["--checkpoint", str(checkpoint), "--out", str(e.evaluation), "--folder", e.folder, "--devices", e.devices]
    words += ["--task", RETRIEVAL] if is_retrieval else []
    folder = Path(e.folder)
    read = [checkpoint, folder / "manifest.jsonl", folder / "dataset.json", e.features_folder / "complete"]
    read += _base_model_files(e)
    # A user who installs the files for SPICE sets this variable: then the captions are scored again.
    read += [Path(os.environ["DIFFCAP_CORENLP"])] if os.environ.get("DIFFCAP_CORENLP") else []
    results = [e.evaluation / name for name in (PREDICTIONS, REFERENCES, GROUPS)]
    return StageCall("eval", [*words, *_options(e, "eval"), *own], e.evaluation / METRICS, inputs, read, results)


def _zeroshot(e: Experiment, own: list[str]) -> StageCall:
    settings = e.config_files(FINETUNE)
    base, revision, prompt, sentences = (
        get_config_value(settings, "model", "captioner", "init_args", name)
        for name in ("base", "revision", "prompt", "sentences")
    )
    source = _expanded(e.vlm) or (f"{base}@{revision}" if revision else base)
    out = e.zero_shot_evaluation
    words = [
        "--checkpoint",
        source,
        "--out",
        str(out),
        "--folder",
        e.folder,
        "--features",
        e.features,
    ]
    words += ["--devices", e.devices, *(["--prompt", prompt] if prompt else [])]
    words += ["--sentences", str(sentences or 1), "--max_length", str(get_config_value(settings, "data", "max_length"))]
    words += ["--tokenizer", get_config_value(settings, "model", "tokenizer") or "ptb", "--batch_size", "8"]
    folder = Path(e.folder)
    read = [folder / "manifest.jsonl", folder / "dataset.json", *_base_model_files(e)]
    results = [out / name for name in (PREDICTIONS, REFERENCES, GROUPS)]
    inputs = [e.features_folder / "complete"]
    return StageCall("zeroshot", [*words, *_options(e, "zeroshot"), *own], out / METRICS, inputs, read, results)


def _report(e: Experiment, own: list[str]) -> StageCall:
    runs = json.dumps({e.method: str(e.evaluation)})
    words = ["--folder", e.folder, "--features", e.features, "--runs", runs, "--out", str(e.report)]
    inputs = [e.evaluation / METRICS]
    read = [e.evaluation / PREDICTIONS, e.checkpoint, Path(e.folder) / "manifest.jsonl"]
    results = [e.report / name for name in ("table.md", "report.html")]
    words += [*_options(e, "report"), *own]
    from_files = any(word.startswith("--predictions") for word in words)  # whose changes are not noticed
    return StageCall("report", words, e.report / "table.json", inputs, read, results, always=from_files)


_PLAIN: dict[str, Callable[[Experiment, list[str]], StageCall]] = {
    "data": _data, "extract": _extract, "negatives": _negatives, "zeroshot": _zeroshot, "eval": _eval, "report": _report,
}  # fmt: skip


def _expanded(path: str) -> str:
    """Expand `~` in a path, which make does not do."""
    return path.replace("~", str(Path.home()), 1) if path == "~" or path.startswith("~/") else path


def _base_model_files(e: Experiment) -> list[Path]:
    """The files of a base model in a local folder: configurations, tokenizer, chat template and weights."""
    folder = Path(_expanded(e.vlm)) if e.vlm else None
    if folder is None or not folder.is_dir():
        return []
    kinds = (".json", ".jinja", ".safetensors", ".model", ".txt")
    return sorted(path for path in folder.iterdir() if path.suffix in kinds)


def _options(e: Experiment, stage: str) -> list[str]:
    """Options from the section of a stage in the file of CONFIG, for a stage that does not train."""
    section = e.sections.get(stage, {})
    if stage == "extract":
        return ["--config", json.dumps(section)] if section else []
    return [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in section.items()]


def _training(e: Experiment, stage: str, own: list[str]) -> Iterator[StageCall]:
    if stage == PRETRAIN:
        yield from _pretraining(e, own)
        return
    inputs, options = [e.features_folder / "complete"], []
    if stage == FINETUNE and e.has_pretraining:
        inputs.append(Path(e.pretraining) / FINISHED)
        options = ["--model.init_from", str(e.pretrained_checkpoint)]
    if stage == REINFORCE:
        inputs = [e.stage_folder(FINETUNE) / FINISHED]
        options = ["--model.init_from", str(e.stage_folder(FINETUNE) / BEST)]
    if stage == FINETUNE and not e.has_pretraining:
        options = _pretrained_weights(e)
    yield _train(e, stage, inputs, [*options, *own])


def _pretrained_weights(e: Experiment) -> list[str]:
    """The option for WEIGHTS of a method that reads pixels; for other methods, WEIGHTS is an option of the extraction."""
    option = "--model.resnet_weights" if e.method_spec.pixels_backbone else "--model.clip_weights"
    return [option, _expanded(e.weights)] if e.weights and e.reads_pixels else []


def _pretraining(e: Experiment, own: list[str]) -> Iterator[StageCall]:
    pretraining = e.method_spec.pretraining
    assert pretraining is not None
    inputs, options, names = [e.features_folder / "complete"], _pretrained_weights(e), list[str]()
    if pretraining.needs_negatives:
        inputs.append(Path(e.folder) / "negatives.jsonl")
    cub, nabirds = extra_datasets(e)
    if nabirds:
        names = [nabirds.dataset]
        inputs.append(nabirds.features_folder / "complete")
    if "mixed" in e.extras:
        assert cub is not None
        names = ["mixed"]
        inputs += [cub.features_folder / "complete", Path(cub.folder) / "negatives.jsonl"]
        options += ["--data.singles", cub.folder]
    if nabirds:
        options += ["--data.labelled", nabirds.folder]
    if cub and "cub" in e.extras:
        first = [
            cub.features_folder / "complete",
            Path(cub.folder) / "negatives.jsonl",
            Path(e.folder) / "manifest.jsonl",
        ]
        words = [*own, *split_words(e.cub_args)]
        yield _train(e, PRETRAIN, first, words, [cub.dataset], Path(cub.folder), Path(e.cub_run))
        options += ["--model.init_from", str(Path(e.cub_run) / LAST)]
        inputs.append(Path(e.cub_run) / FINISHED)
    yield _train(e, PRETRAIN, inputs, [*options, *own], names)


def _train(
    e: Experiment,
    stage: str,
    inputs: list[Path],
    words: list[str],
    datasets: Iterable[str] = (),
    folder: Path | None = None,
    out: Path | None = None,
) -> StageCall:
    """The call of a training stage.

    Args:
        inputs: see `StageCall`. words: options with priority over those of the experiment.
        datasets: more datasets whose settings files are used.
        folder: folder of the manifest, if it is not the experiment's.
        out: folder of the stage, if it is not the experiment's.
    """
    vocabulary = ([e.folder] if folder else [e.cub_folder]) if {"cub", "mixed"} & set(e.extras) else []
    out, folder = out or e.stage_folder(stage), folder or Path(e.folder)
    options = [word for file in e.config_files(stage, datasets) for word in ("--config", str(file))]
    section = e.sections.get(stage)
    if section and isinstance(section.get("run"), dict) and "out" in section["run"]:
        options += ["--config", e.config]  # a run's config.yaml
    elif section:
        options += ["--config", json.dumps(section)]
    options += ["--data.folder", str(folder), "--data.features", e.features]
    options += ["--seed_everything", e.seed, "--data.seed", e.seed]
    options += ["--run.out", str(out), "--run.logger", e.logger, "--trainer.devices", e.devices]
    options += ["--run.dataset", e.dataset, "--run.method", e.method, "--run.preset", e.trainer]
    options += ["--run.ablation", e.ablation] if e.ablation else []
    options += ["--model.captioner.init_args.base", _expanded(e.vlm)] if e.vlm else []
    options += ["--data.vocabulary_with", f"[{','.join(vocabulary)}]"] if vocabulary else []
    store = folder / "features" / e.features
    read = [folder / "dataset.json", folder / "manifest.jsonl", store / "meta.json", store / "sums.u32"]
    read += _base_model_files(e)
    results = [out / name for name in (IDENTITY, CONFIGURATION, BEST, LAST)]
    return StageCall(stage, [*options, *words], out / FINISHED, inputs, read, results)


def extra_datasets(e: Experiment) -> tuple[Experiment | None, Experiment | None]:
    """The experiments of CUB and NABirds whose data, features and negatives EXTRA needs; None for one that it does not need.

    Raises:
        DiffcapError: the dataset uses features that authors released (FEATURES_FROM), and there are none for one of these.
    """
    found: list[Experiment | None] = []
    for name in ("cub", "nabirds"):
        if name not in e.extras and "mixed" not in e.extras:
            found.append(None)
            continue
        folder, source = getattr(e, f"{name}_folder"), getattr(e, f"{name}_features_from")
        other = Experiment(
            dataset=name,
            method=e.method,
            folder=folder,
            data=getattr(e, f"{name}_data"),
            features_from=source,
            backbone=e.backbone,
            features=e.features,
            tagger=e.tagger,
            weights=e.weights,
            devices=e.devices,
            seed=e.seed,
            extract_args="" if e.features_from or source else e.extract_args,
        )
        if e.features_from and not source and not (other.features_folder / "complete").exists():
            raise DiffcapError(
                f"FEATURES_FROM is for {e.dataset} only; also give {name.upper()}_FEATURES_FROM=<the authors' folder for "
                f"{other.dataset}>."
            )
        found.append(other)
    return found[0], found[1]
