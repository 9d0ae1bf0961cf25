"""The stages of an experiment: `STAGES` has a row for each, with what it runs, needs, reads and writes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from diffcap import stage_settings as settings
from diffcap.experiment import FIRST, RETRIEVAL, Experiment
from diffcap.records import read_json
from diffcap.run_folder import (
    FINETUNE,
    FINISHED,
    GROUPS,
    METRICS,
    PREDICTIONS,
    PRETRAIN,
    REFERENCES,
    REINFORCE,
    evaluated_checkpoints,
    find_evaluation,
)
from diffcap.stage_settings import Settings
from diffcap.utils.errors import DiffcapError

ZERO_SHOT = "zeroshot"  # the evaluation of a vision-language model without training
Need = tuple[str, Experiment]


@dataclass(frozen=True)
class Request:
    """The command of a stage.

    Attributes:
        stage: key of `STAGES`.
        settings: options that follow from the variables of an experiment; {} in the second form of a command.
        words: options of the command line, which override the settings.
        asked: see `diffcap.record`.
        inputs: files that the result depends on, beside those that the options name.
    """

    stage: str
    settings: Settings
    words: list[str]
    asked: str = ""
    inputs: list[Path] = field(default_factory=list)


@dataclass(frozen=True)
class Stage:
    """A row of the table.

    Attributes:
        body: import path of the function that runs it, with its options as arguments; or, for a stage with Lightning's command line, with
            a `Request`.
        settings: its options for an experiment.
        needs: the stages whose results it reads.
        folder: of its record, for an experiment.
        products: the files in this folder that it writes; the last one that it writes comes first.
        direct: a command with this option has the second form.
        out: folder of the record, for options.
        read: the files that its options mean without naming them.
        inputs: the same for an experiment.
        is_parallel: whether it runs in several processes.
    """

    body: str
    settings: Callable[[Experiment], Settings]
    needs: Callable[[Experiment], list[Need]]
    folder: Callable[[Experiment], Path]
    products: tuple[str, ...] = ()
    direct: tuple[str, ...] = ()
    out: Callable[[Settings], str] = lambda options: options["out"]
    read: Callable[[Settings], Iterable[Path]] = lambda options: ()
    inputs: Callable[[Experiment], list[Path]] = lambda e: []
    is_parallel: bool = False


def _files_of_runs(options: Settings) -> Iterable[Path]:
    """The results of the evaluations in a report, and the checkpoints, whose attention it shows."""
    for places in (options.get("runs") or {}).values():
        for place in [places] if isinstance(places, str) else places:
            try:
                evaluation = find_evaluation(place)
                checkpoints = evaluated_checkpoints(evaluation, read_json(evaluation / METRICS))
            except DiffcapError:  # the stage explains it
                continue
            yield from (evaluation / METRICS, evaluation / PREDICTIONS, *checkpoints)


def _before_pretraining(e: Experiment) -> list[Need]:
    pretraining = e.method_spec.pretraining
    needs = [("extract", e)]
    if pretraining and pretraining.needs_negatives:
        needs.append(("negatives", e))
    for other in e.extra_experiments:
        needs += [("data", other), ("extract", other)]
        if other.dataset == e.first_dataset or other.dataset == e.single_images:
            needs.append(("negatives", other))
    return [*needs, (FIRST, e)] if e.first_dataset else needs


def _before_first_pretraining(e: Experiment) -> list[Need]:
    other = next(other for other in e.extra_experiments if other.dataset == e.first_dataset)
    return [("data", e), ("data", other), ("extract", other), ("negatives", other)]


def _pretraining_of(e: Experiment) -> list[Need]:
    return [(PRETRAIN, e)] if e.has_pretraining and e.owns_pretraining else []


def _training(stage: str, needs: Callable[[Experiment], list[Need]]) -> Stage:
    return Stage(
        "diffcap.lit.run:train",
        lambda e: settings.training(e, stage),
        needs,
        lambda e: e.stage_folder(stage),
        is_parallel=True,
    )


_EVALUATED = (METRICS, PREDICTIONS, REFERENCES, GROUPS)
_FEATURES = ("complete", "meta.json", "index.json", "sums.u32", "features.f16", "features.u8")


def _manifest(options: Settings) -> Iterable[Path]:
    return [Path(options["folder"]) / "manifest.jsonl"] if options.get("folder") else []


STAGES = {
    "data": Stage(
        "diffcap.commands.data:prepare", settings.data, lambda e: [], lambda e: Path(e.folder),
        products=("manifest.jsonl", "dataset.json"), direct=("out",),
    ),
    "extract": Stage(
        "diffcap.commands.extract:extract_features", settings.extract, lambda e: [("data", e)], lambda e: e.features_folder,
        products=_FEATURES, is_parallel=True, inputs=lambda e: [Path(e.folder) / "manifest.jsonl"],
    ),
    "import_features": Stage(
        "diffcap.commands.extract:import_features", settings.extract, lambda e: [("data", e)], lambda e: e.features_folder,
        products=_FEATURES, direct=("folder",), read=_manifest,
        out=lambda options: f"{options['folder']}/features/{options['name']}",
    ),
    "negatives": Stage(
        "diffcap.commands.negatives:make_negatives", settings.negatives, lambda e: [("data", e)], lambda e: Path(e.folder),
        products=("negatives.jsonl", "negatives.json"), direct=("folder",), out=lambda options: options["folder"], read=_manifest,
    ),
    FIRST: _training(FIRST, _before_first_pretraining),
    PRETRAIN: _training(PRETRAIN, _before_pretraining),
    FINETUNE: _training(FINETUNE, lambda e: [("extract", e), *_pretraining_of(e)]),
    REINFORCE: _training(REINFORCE, lambda e: [(FINETUNE, e)]),
    ZERO_SHOT: Stage(
        "diffcap.commands.evaluate:evaluate", settings.zeroshot, lambda e: [("extract", e)], lambda e: e.zero_shot_evaluation,
        products=_EVALUATED, direct=("checkpoint",), is_parallel=True, read=_manifest,
        inputs=lambda e: [e.features_folder / "sums.u32"],
    ),
    "eval": Stage(
        "diffcap.commands.evaluate:evaluate", settings.eval, lambda e: _pretraining_of(e) if e.eval == RETRIEVAL else [(e.captioner, e)],
        lambda e: e.evaluation, products=_EVALUATED, direct=("checkpoint",), is_parallel=True, read=_manifest,
        inputs=lambda e: [e.features_folder / "sums.u32"],
    ),
    "report": Stage(
        "diffcap.commands.report:report", settings.report, lambda e: [("eval", e)], lambda e: e.report,
        products=("table.json", "table.md", "report.html"), direct=("runs", "predictions"),
        read=lambda options: [*_manifest(options), *_files_of_runs(options)],
    ),
}  # fmt: skip
COMMANDS = tuple(name for name in STAGES if name not in (FIRST, "import_features"))
TRAININGS = (FIRST, PRETRAIN, FINETUNE, REINFORCE)
RECORDS = {
    **{stage: f"{stage}.done.json" for stage in STAGES},
    **dict.fromkeys(TRAININGS, FINISHED),
    "import_features": "extract.done.json",
}
LIGHTNING = ("extract", *TRAININGS)  # stages with Lightning's command line


def record_path(stage: str, e: Experiment) -> Path:
    """The record of a stage of an experiment."""
    return STAGES[stage].folder(e) / RECORDS[stage]


def is_made(stage: str, e: Experiment) -> bool:
    """Whether a stage has a result, with a record or of diffcap 0.1."""
    path = record_path(stage, e)
    return path.is_file() or any(path.with_name(name).is_file() for name in STAGES[stage].products[:1])


def needed_by(e: Experiment, goals: Iterable[str]) -> list[Need]:
    """The goals and all stages that they depend on, each after those that it needs."""
    found: dict[tuple[str, Path], Need] = {}

    def visit(stage: str, experiment: Experiment) -> None:
        for need in STAGES[stage].needs(experiment):
            visit(*need)
        found.setdefault((stage, record_path(stage, experiment)), (stage, experiment))

    for goal in goals:
        if goal in STAGES and (goal != PRETRAIN or e.has_pretraining):
            visit(goal, e)
    return list(found.values())
