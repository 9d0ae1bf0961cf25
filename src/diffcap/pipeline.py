"""The stages of an experiment: their commands, whether they are up to date, and their execution.

A stage command, such as `diffcap finetune`, has two forms:

* `diffcap finetune --dataset blocks --method scorer --model.lr=1e-4`: the variables of an `Experiment`, and options of the stage.
  This module derives the other options of the stage from the variables. The Makefile uses this form, with the requested targets
  in `--goals`.
* `diffcap finetune --config a.yaml --config b.yaml --data.folder data/blocks ...`: options of the stage only.
"""

import hashlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from diffcap.experiment import NAMES, Experiment, options_help, parse, split_words
from diffcap.methods import import_object
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
    is_finished,
)
from diffcap.utils.command_line import experiment_options
from diffcap.utils.errors import DiffcapError, plain_errors
from diffcap.utils.files import atomic_write
from diffcap.utils.settings import CONFIGS, read_settings

TRAINING = (PRETRAIN, FINETUNE, REINFORCE)
STAGES = ("data", "extract", "negatives", *TRAINING, "eval", "report")
# The function that runs each stage, given the stage's options. It is imported only when it is called.
BODIES = {
    "data": "diffcap.commands.data:main",
    "extract": "diffcap.commands.extract:main",
    "import_features": "diffcap.commands.import_features:main",
    "negatives": "diffcap.commands.negatives:main",
    **{stage: f"diffcap.commands.train:{stage}" for stage in TRAINING},
    "eval": "diffcap.commands.evaluate:main",
    "report": "diffcap.commands.report:main",
}
LIGHTNING = (
    "extract",
    *TRAINING,
)  # stages with Lightning's command line, whose help takes seconds, because it imports torch
# A command line with this option has the second form.
OWN_FORM = {"data": "out", "negatives": "folder", "eval": "checkpoint", "report": "runs"}


@dataclass(frozen=True)
class Work:
    """One call of a stage.

    Attributes:
        stage: key of `BODIES`.
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
        files = [Path(value) for value in given if len(value) < 1000 and Path(value).is_file()]
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


def works(experiment: Experiment, stage: str, own: Sequence[str] = ()) -> list[Work]:
    """The calls of a stage for an experiment, in order; only `pretrain` with EXTRA has several.

    Args:
        own: options of the stage; they come last and have priority.
    """
    if stage in TRAINING:
        return list(_training(experiment, stage, list(own)))
    return [_PLAIN[stage](experiment, list(own))]


def _data(e: Experiment, own: list[str]) -> Work:
    words = ["--dataset", e.dataset, "--out", e.folder]
    words += ["--source", _expanded(e.data)] if e.data else []
    words += ["--seed", e.seed] if e.dataset_spec.rendered else []
    words += ["--pairs", e.pairs] if e.pairs and e.dataset_spec.pairs else []
    words += ["--images", e.images] if e.images and e.dataset_spec.rendered and not e.dataset_spec.pairs else []
    words += _options(e, "data")
    return Work("data", [*words, *own], Path(e.folder) / "manifest.jsonl", always=True)


def _extract(e: Experiment, own: list[str]) -> Work:
    inputs, read = [Path(e.folder) / "manifest.jsonl"], [Path(e.folder) / "dataset.json"]
    results = [e.features_folder / name for name in ("meta.json", "features.f16", "features.u8", "sums.u32", "done.u8")]
    if e.features_from:
        source = _expanded(e.features_from)
        words = ["--folder", e.folder, "--source", source, "--name", e.features, *own]
        return Work("import_features", words, e.features_folder / "complete", inputs, read, results)
    words = ["--config", str(CONFIGS / f"backbone/{e.backbone}.yaml"), "--data.folder", e.folder]
    words += ["--model.name", e.features] if e.features != e.backbone else []
    if e.weights and not e.method_spec.reads_pixels:
        weights = Path(e.weights).expanduser()
        words += ["--model.weights", str(weights)]
        inputs += [weights] if e.backbone == "clip4idc" else []  # the user's own training, which may be repeated
    words += ["--trainer.devices", e.devices, *(["--trainer.strategy", "ddp"] if e.devices != "1" else [])]
    words += [*_options(e, "extract"), *split_words(e.extract_args)]
    return Work("extract", [*words, *own], e.features_folder / "complete", inputs, read, results)


def _negatives(e: Experiment, own: list[str]) -> Work:
    tagger = _expanded(e.tagger)
    words = ["--folder", e.folder, "--tagger", tagger, "--seed", e.seed, *_options(e, "negatives"), *own]
    folder = Path(e.folder)
    inputs, results = [folder / "manifest.jsonl"], [folder / "negatives.json", folder / "negatives.md"]
    return Work("negatives", words, folder / "negatives.jsonl", inputs, [folder / "dataset.json"], results)


def _eval(e: Experiment, own: list[str]) -> Work:
    words = [
        "--checkpoint",
        str(e.checkpoint),
        "--out",
        str(e.evaluation),
        "--folder",
        e.folder,
        "--devices",
        e.devices,
    ]
    inputs = [e.stage_folder(e.captioner) / FINISHED]
    folder = Path(e.folder)
    read = [e.checkpoint, folder / "manifest.jsonl", folder / "dataset.json", e.features_folder / "complete"]
    # A user who installs the files for SPICE sets this variable: then the captions are scored again.
    read += [Path(os.environ["DIFFCAP_CORENLP"])] if os.environ.get("DIFFCAP_CORENLP") else []
    results = [e.evaluation / name for name in (PREDICTIONS, REFERENCES, GROUPS)]
    return Work("eval", [*words, *_options(e, "eval"), *own], e.evaluation / METRICS, inputs, read, results)


def _report(e: Experiment, own: list[str]) -> Work:
    runs = json.dumps({e.method: str(e.evaluation)})
    words = ["--folder", e.folder, "--features", e.features, "--runs", runs, "--out", str(e.report)]
    inputs = [e.evaluation / METRICS]
    read = [e.evaluation / PREDICTIONS, e.checkpoint, Path(e.folder) / "manifest.jsonl"]
    results = [e.report / name for name in ("table.md", "report.html")]
    return Work("report", [*words, *_options(e, "report"), *own], e.report / "table.json", inputs, read, results)


_PLAIN: dict[str, Callable[[Experiment, list[str]], Work]] = {
    "data": _data, "extract": _extract, "negatives": _negatives, "eval": _eval, "report": _report,
}  # fmt: skip


def _expanded(path: str) -> str:
    """Expand `~` in a path, which make does not do."""
    return path.replace("~", str(Path.home()), 1) if path == "~" or path.startswith("~/") else path


def _options(e: Experiment, stage: str) -> list[str]:
    """Options from the section of a stage in the file of CONFIG, for a stage that does not train."""
    section = e.sections.get(stage, {})
    if stage == "extract":
        return ["--config", json.dumps(section)] if section else []
    return [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in section.items()]


def _training(e: Experiment, stage: str, own: list[str]) -> Iterator[Work]:
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
        options = _clip_weights(e)
    yield _train(e, stage, inputs, [*options, *own])


def _clip_weights(e: Experiment) -> list[str]:
    """The option for WEIGHTS of a method that reads pixels; for other methods, WEIGHTS is an option of the extraction."""
    return ["--model.clip_weights", _expanded(e.weights)] if e.weights and e.method_spec.reads_pixels else []


def _pretraining(e: Experiment, own: list[str]) -> Iterator[Work]:
    pretraining = e.method_spec.pretraining
    assert pretraining is not None
    inputs, options, names = [e.features_folder / "complete"], _clip_weights(e), list[str]()
    if pretraining.needs_negatives:
        inputs.append(Path(e.folder) / "negatives.jsonl")
    cub, nabirds = extra_datasets(e)
    if nabirds:
        names = [nabirds.dataset]
        inputs.append(nabirds.features_folder / "complete")
    if "mixed" in e.extras:
        assert cub is not None
        names = [f"{e.dataset_spec.cub.removesuffix('cub')}mixed"]
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
) -> Work:
    """The call of a training stage.

    Args:
        inputs: see `Work`. words: options with priority over those of the experiment.
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
    options += ["--data.vocabulary_with", f"[{','.join(vocabulary)}]"] if vocabulary else []
    store = folder / "features" / e.features
    read = [folder / "dataset.json", folder / "manifest.jsonl", store / "meta.json", store / "sums.u32"]
    results = [out / name for name in (IDENTITY, CONFIGURATION, BEST, LAST)]
    return Work(stage, [*options, *words], out / FINISHED, inputs, read, results)


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
            dataset=getattr(e.dataset_spec, name),
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
            images=e.images,
            extract_args="" if e.features_from or source else e.extract_args,
        )
        if e.features_from and not source and not (other.features_folder / "complete").exists():
            raise DiffcapError(
                f"FEATURES_FROM is for {e.dataset} only; also give {name.upper()}_FEATURES_FROM=<the authors' folder for "
                f"{other.dataset}>."
            )
        found.append(other)
    return found[0], found[1]


def needed_by(e: Experiment, goals: Iterable[str]) -> set[str]:
    """The goals and all stages that they depend on."""
    needed: set[str] = set()
    waiting = list(goals)
    while waiting:
        stage = waiting.pop()
        if stage in needed:
            continue
        needed.add(stage)
        if stage in ("extract", "negatives"):
            waiting.append("data")
        elif stage == PRETRAIN and e.has_pretraining:
            assert e.method_spec.pretraining is not None
            waiting += ["extract", "negatives"] if e.method_spec.pretraining.needs_negatives else ["extract"]
        elif stage == FINETUNE:
            waiting += ["extract", PRETRAIN] if e.has_pretraining else ["extract"]
        elif stage == REINFORCE:
            waiting.append(FINETUNE)
        elif stage == "eval":
            waiting.append(e.captioner)
        elif stage == "report":
            waiting.append("eval")
    return needed


def run_stage(stage: str, words: Sequence[str], prefix: Sequence[str]) -> None:
    """Run a stage with either form of its command line.

    Args:
        words: arguments of the stage.
        prefix: arguments of the process before `words`, with which Lightning starts the processes of several devices.

    Raises:
        DiffcapError: an option is not valid, or the stage failed.
    """
    variables, own = parse(words)
    if is_own_form(stage, words, variables):
        execute(stage, words, prefix)
        return
    experiment_options.extend(NAMES)
    goals = variables.pop("goals", stage).split()
    if stage in TRAINING and len(own_configs(words)) == 1 and "config" not in variables:
        variables["config"] = own_configs(words)[0]
    if {"--help", "-h"} & set(own):
        print(_help(stage), flush=True)
        if stage not in LIGHTNING or "all" in own:
            print("\nOptions of the stage:\n", flush=True)
            execute(stage, ["--help"], prefix)
        else:
            print(f"\nThe stage has more options (--model.*, --data.*, --trainer.*): diffcap {stage} --help all")
        return
    if REINFORCE in goals and "captioner" not in variables:
        variables["captioner"] = REINFORCE
    if stage == "extract":
        variables.pop("extract_args", None)  # make also gives them as options of the stage
    experiment = Experiment(**variables)
    experiment = _without_pretraining(experiment, goals)
    if stage == "extra":
        _make_extra(experiment)
        return
    asked, needed = stage in goals, needed_by(experiment, goals)
    if stage not in needed:
        return
    if needed.intersection(TRAINING):
        experiment.check_features()
    if PRETRAIN in needed:
        extra_datasets(experiment)  # checks them before anything runs
    if stage == PRETRAIN and not experiment.has_pretraining:
        if asked:
            print(_nothing_to_pretrain(experiment))
        return
    pretraining = experiment.method_spec.pretraining
    if stage == "negatives" and not (pretraining and pretraining.needs_negatives):
        print(f"{experiment.method} needs no hard negatives; go on with: make finetune METHOD={experiment.method}")
        return
    if stage == PRETRAIN and not asked and Path(experiment.pretraining) != experiment.stage_folder(PRETRAIN):
        if not is_finished(Path(experiment.pretraining)):
            raise DiffcapError(
                f"PRETRAINING={experiment.pretraining}: contains no finished pre-training; train it first, or omit PRETRAINING."
            )
        return
    if stage == PRETRAIN:
        _make_extra(experiment)
    *first, last = works(experiment, stage, own)
    if stage == "data" and (asked or not last.is_current):
        _check_download(experiment)
    for work in first:
        _run_work(work, asked, _in_process)
    _run_work(last, asked or (stage == "data" and bool(experiment.data)), partial(_execute_work, prefix=prefix))


def _check_download(e: Experiment) -> None:
    """Refuse to download a dataset with OFFLINE=yes."""
    if e.offline == "yes" and not e.data and not e.dataset_spec.rendered:
        raise DiffcapError(
            f"OFFLINE=yes: the files of DATASET={e.dataset} would be downloaded; give DATA=<folder with its files>, or omit OFFLINE."
        )


def _in_process(work: Work) -> None:
    run_in_process(work.stage, work.arguments)


def _execute_work(work: Work, prefix: Sequence[str]) -> None:
    execute(work.stage, work.arguments, prefix)


def _run_work(work: Work, asked: bool, run: Callable[[Work], None]) -> None:
    """Run one call of a stage, unless it is up to date.

    Args:
        asked: whether the user requested the stage; then changed settings, not only changed files, make it out of date.
    """
    if not asked and work.is_current:
        return
    if work.is_done and "WANDB_SWEEP_ID" not in os.environ and "--print_config" not in work.arguments:
        print(f"{work.product.parent}: nothing to do, {work.stage} is complete with these settings")
        return
    if "--print_config" in work.arguments:
        files = [path for path in own_configs(work.arguments)]
        print("".join(f"# settings: {path}\n" for path in files), end="", flush=True)
    try:
        run(work)
    except SystemExit as stop:  # a finished training exits with 0
        if stop.code or "--print_config" in work.arguments:
            raise
    work.note_done()


def _without_pretraining(e: Experiment, goals: Sequence[str]) -> Experiment:
    """Switch off the pre-training if the captioner was fine-tuned without it and neither stage is requested."""
    alone = is_finished(e.stage_folder(FINETUNE)) and not (Path(e.pretraining) / FINISHED).is_file()
    if e.has_pretraining and alone and not {PRETRAIN, FINETUNE} & set(goals):
        return replace_variables(e, pretrain="no")
    return e


def replace_variables(e: Experiment, **values: str) -> Experiment:
    """A copy of an experiment with other values of some variables."""
    return Experiment(**{**e.explicit_values, **values})


def _make_extra(e: Experiment) -> None:
    """Prepare the datasets of EXTRA: manifest, features and, for CUB, hard negatives, if they are out of date."""
    for number, other in enumerate(extra_datasets(e)):
        if other is None:
            continue
        for stage in ("data", "extract", "negatives") if number == 0 else ("data", "extract"):
            (work,) = works(other, stage)
            if stage == "data" and not work.is_current:
                _check_download(other)
            _run_work(work, stage == "data" and bool(other.data), _in_process)


def _nothing_to_pretrain(e: Experiment) -> str:
    row = f", {e.ablation}," if e.ablation else ""
    why = f" with PRETRAIN={e.pretrain or 'no'}" if e.method_spec.pretraining else ""
    return f"{e.method}{row} has no pre-training stage{why}; go on with: make finetune METHOD={e.method} DATASET={e.dataset}"


def own_configs(words: Sequence[str]) -> list[str]:
    """The values of `--config` in a command line."""
    found = [value for word, value in itertools.pairwise(words) if word == "--config"]
    return found + [word.partition("=")[2] for word in words if word.startswith("--config=")]


def is_own_form(stage: str, words: Sequence[str], variables: dict[str, str]) -> bool:
    """Whether a command line has the second form, see the module's docstring."""
    if "goals" in variables:
        return False
    named = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
    if stage == "import_features":
        return True
    if stage in OWN_FORM:
        own = OWN_FORM[stage] in named
        return own and not (stage == "negatives" and named & {"dataset", "method"})
    if named & {"dataset", "method"}:
        return False
    configs = own_configs(words)
    if not configs:
        return bool({"data.folder", "run.out"} & named)
    return not any(_is_experiment(path) for path in configs)


def _is_experiment(path: str) -> bool:
    """Whether a file is for CONFIG: it names a dataset or a method, or is the config.yaml of a run."""
    content = read_settings(path) if Path(path).is_file() else None
    if not isinstance(content, dict):
        return False
    run = content.get("run")
    is_run = isinstance(run, dict) and bool(run.get("method") and run.get("dataset") and run.get("out"))
    return is_run or bool({"dataset", "method", "DATASET", "METHOD"} & set(content))


def _help(stage: str) -> str:
    return (
        f"Variables of an experiment, each an option of `diffcap {stage}` and, in capitals, a variable of make:\n"
        f"{options_help()}"
    )


def execute(stage: str, arguments: Sequence[str], prefix: Sequence[str]) -> None:
    """Run a stage in this process with its own options.

    Raises:
        DiffcapError: the stage failed.
    """
    sys.argv = [*prefix, *arguments]
    body = import_object(BODIES[stage])
    body(list(arguments))


def run_in_process(stage: str, words: Sequence[str], **environment: str) -> None:
    """Run `diffcap <stage> ...` in a new process.

    Raises:
        DiffcapError: the process failed; its message is on stderr.
    """
    command = [sys.executable, "-m", "diffcap", stage, *words]
    if subprocess.run(command, env={**os.environ, **environment}, check=False).returncode:
        raise DiffcapError(
            f"{stage} failed, see above; fix it and run the same command again; completed parts are kept."
        )


def main(stage: str, words: Sequence[str] | None = None, prefix: Sequence[str] | None = None) -> None:
    """Run a stage as a program; errors are one line."""
    with plain_errors():
        run_stage(stage, sys.argv[1:] if words is None else words, sys.argv[:1] if prefix is None else prefix)
