"""The stages of an experiment. `STAGES` has a row for each stage: its function, its settings, its files, and the stages that it needs.

The record of a stage is a JSON file beside its result. It lists the options and files that the result was made from.

An experiment is a set of variables, such as dataset and method. The settings are a stage's options in one dictionary. For a training,
the section of the user's CONFIG file overrides the settings in configs/, and the variables override both.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from diffcap.compose import compose, merge
from diffcap.experiment import CAPTIONS, PROBE, RETRIEVAL, SWAP, Experiment
from diffcap.records import read_json
from diffcap.run_folder import (
    BEST,
    EVAL,
    FINETUNE,
    FINISHED,
    GROUPS,
    LAST,
    METRICS,
    PREDICTIONS,
    PRETRAIN,
    PRETRAIN_EXTRA,
    REFERENCES,
    REINFORCE,
    REPORT,
    evaluated_checkpoints,
    find_evaluation,
    result_folder_name,
)
from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import expand_home, served_name
from diffcap.utils.settings import Settings

ZERO_SHOT = "zeroshot"  # the evaluation of a vision-language model without training
Need = tuple[str, Experiment]  # a stage whose result another stage reads, and its experiment


@dataclass(frozen=True)
class Request:
    """A stage to run, and the options for it."""

    stage: str  # key of `STAGES`
    settings: Settings  # options that the variables of an experiment determine; {} if the command has no experiment
    words: list[str]  # options of the command line, which override the settings
    asked: str = ""  # hash of settings and words; the record stores it to detect changed options
    inputs: list[Path] = field(default_factory=list)  # files that the result depends on, although no option names them
    sources: list[str] = field(default_factory=list)  # places of the settings, such as "pcl.yaml: finetune"
    is_check: bool = False  # True to end the stage with `SystemExit` after it has read its options


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A row of `STAGES`. Functions of an `Experiment` are for a command with an experiment, functions of options (`Settings`) for any."""

    # Import path of the function that runs the stage. It gets the options as arguments, or the `Request` for a stage in `LIGHTNING`.
    body: str
    settings: Callable[[Experiment], Settings]
    needs: Callable[[Experiment], list[Need]]  # the stages whose results this stage reads
    folder: Callable[[Experiment], Path]  # the folder of the stage's record
    products: tuple[str, ...] = ()  # names of the files that the stage writes into `folder`, the first of them last
    direct: tuple[str, ...] = ()  # names of options; a command with one of them has no experiment
    # The folder of the stage's record, found from the options instead of the experiment
    out: Callable[[Settings], str] = lambda options: options["out"]
    # Files that the stage reads although no option names them, such as the manifest (the list of pairs), from the options or experiment
    unnamed_inputs: Callable[[Settings], Iterable[Path]] = lambda options: ()
    inputs: Callable[[Experiment], list[Path]] = lambda e: []
    is_parallel: bool = False  # True if the stage can run in several processes


def _extract(e: Experiment) -> Settings:
    """Return the settings to extract features, from the backbone's entry, or to import features that a method's authors published."""
    if e.features_from:
        return {"folder": e.folder, "source": expand_home(e.features_from), "name": e.features}
    settings = compose(e, "extract")
    settings["model"]["name"] = e.features
    if e.weights and not e.reads_pixels:
        settings["model"]["weights"] = expand_home(e.weights)
    settings["data"] = {**settings.get("data", {}), "folder": e.folder}
    settings["trainer"] = {**settings.get("trainer", {}), "devices": e.devices}
    if e.devices != "1":
        settings["trainer"]["strategy"] = "ddp"
    return settings


def _eval(e: Experiment) -> Settings:
    checkpoint, out = str(e.evaluated_checkpoint), str(STAGES["eval"].folder(e))
    settings = {"checkpoint": checkpoint, "out": out, "folder": e.folder, "devices": int(e.devices)}
    return {**settings, "task": e.eval if e.eval != CAPTIONS else None}  # retrieval is that of the pre-trained model


def _zeroshot(e: Experiment) -> Settings:
    """Return the settings to evaluate, without training, the pre-trained model that VLM or the method's settings name."""
    settings = compose(e, FINETUNE)
    arguments = settings["model"]["captioner"]["init_args"]
    base, revision = arguments.get("base"), arguments.get("revision")
    return {
        "checkpoint": expand_home(e.base_model) or (f"{base}@{revision}" if revision else base),
        "out": str(STAGES[ZERO_SHOT].folder(e)),
        "folder": e.folder,
        "features": e.features,
        "devices": int(e.devices),
        "prompt": arguments.get("prompt"),
        "sentences": arguments.get("sentences") or 1,  # of the answer, which the caption keeps
        # A served model may reason before it answers; its own limit is larger.
        "max_length": None if served_name(e.base_model) else settings["data"].get("max_length"),
        "tokenizer": settings["model"].get("tokenizer") or "ptb",
        "batch_size": 8,
        "task": SWAP if e.eval == SWAP else None,
    }


def _training(e: Experiment, stage: str) -> Settings:
    section = PRETRAIN if stage == PRETRAIN_EXTRA else stage  # name of the stage's section in the CONFIG file
    settings = merge(compose(e, stage), e.sections.get(section, {}))
    data: Settings = {"folder": e.folder, "features": e.features, "seed": int(e.seed)}
    model: Settings = {}
    run = {
        "out": str(e.stage_folder(stage)),
        "logger": e.logger,
        "dataset": e.dataset,
        "method": e.method,
        "preset": e.trainer,
    }
    if e.ablation:
        run["ablation"] = e.ablation
    initial_checkpoint = e.stage_folder(FINETUNE) / BEST if stage == REINFORCE else None
    if stage == PRETRAIN and e.first_pretraining_dataset:
        initial_checkpoint = e.stage_folder(PRETRAIN_EXTRA) / LAST
    elif stage == FINETUNE and e.has_pretraining:
        initial_checkpoint = e.pretrained_checkpoint
    if initial_checkpoint:
        model["init_from"] = str(initial_checkpoint)
    elif e.weights and e.reads_pixels:
        model["initial_weights"] = expand_home(e.weights)
    if e.base_model:
        model["captioner"] = {"init_args": {"base": expand_home(e.base_model)}}
    folders = {other.dataset: other.folder for other in e.extra_experiments}
    if stage == PRETRAIN_EXTRA:  # on a dataset of the variable EXTRA, before the main pre-training
        data |= {"folder": folders[e.first_pretraining_dataset], "vocabulary_with": [e.folder]}
    elif captioned_dataset := e.first_pretraining_dataset or e.single_image_dataset:
        data["vocabulary_with"] = [folders[captioned_dataset]]
    if stage == PRETRAIN:  # datasets of EXTRA whose single images have captions or class labels
        data |= {"singles": folders[e.single_image_dataset]} if e.single_image_dataset else {}
        data |= {"labelled": folders[e.labelled_dataset]} if e.labelled_dataset else {}
    if e.trainer == PROBE:  # a short training that estimates the time of the whole one
        full_training = compose(Experiment(**{**e.explicit_values, "trainer": "default"}), stage)["trainer"]
        lengths = {name: full_training[name] for name in ("max_steps", "val_check_interval")}
        probe = {"class_path": "diffcap.lit.probe.Probe", "init_args": lengths}
        callbacks = [*(settings["trainer"].get("callbacks") or []), probe]
        settings = merge(settings, {"trainer": {"callbacks": callbacks}})
    variables = {"seed_everything": int(e.seed), "model": model, "data": data, "run": run}
    return merge(settings, {**variables, "trainer": {"devices": e.devices}})


def _files_of_runs(options: Settings) -> Iterable[Path]:
    """Yield the result files of the evaluations in a report, and their checkpoints, because the report shows the models' attention."""
    for folders in (options.get("runs") or {}).values():
        for folder in [folders] if isinstance(folders, str) else folders:
            try:
                evaluation_folder = find_evaluation(folder)
                checkpoints = evaluated_checkpoints(evaluation_folder, read_json(evaluation_folder / METRICS))
            except DiffcapError:  # the report reads the same files later and raises this error
                continue
            yield from (evaluation_folder / METRICS, evaluation_folder / PREDICTIONS, *checkpoints)


def _before_pretraining(e: Experiment) -> list[Need]:
    pretraining = e.method_spec.pretraining
    needs: list[Need] = [("extract", e)]
    if pretraining and pretraining.needs_negatives:
        needs.append(("negatives", e))
    for other in e.extra_experiments:
        needs += [("data", other), ("extract", other)]
        if other.dataset == e.first_pretraining_dataset or other.dataset == e.single_image_dataset:
            needs.append(("negatives", other))
    return [*needs, (PRETRAIN_EXTRA, e)] if e.first_pretraining_dataset else needs


def _training_stage(stage: str, needs: Callable[[Experiment], list[Need]]) -> Stage:
    return Stage(
        body="diffcap.lit.run:train",
        settings=lambda e: _training(e, stage),
        needs=needs,
        folder=lambda e: e.stage_folder(stage),
        is_parallel=True,
    )


_FEATURE_FILES = ("complete", "meta.json", "index.json", "sums.u32", "features.f16", "features.u8")


def _manifest(options: Settings) -> Iterable[Path]:
    return [Path(options["folder"]) / "manifest.jsonl"] if options.get("folder") else []


_evaluation_stage = partial(
    Stage,
    body="diffcap.commands.evaluate:evaluate",
    products=(METRICS, PREDICTIONS, REFERENCES, GROUPS),  # groups.json: the ids of the pairs of each change type
    direct=("checkpoint",),
    unnamed_inputs=_manifest,
    inputs=lambda e: [e.features_folder / "sums.u32"],
    is_parallel=True,
)
STAGES: dict[str, Stage] = {
    "data": Stage(
        body="diffcap.commands.data:prepare",
        settings=lambda e: {
            "dataset": e.dataset,
            "out": e.folder,
            "source": expand_home(e.data) or None,
            "seed": int(e.seed) if e.dataset_spec.rendered else None,
            "pairs": int(e.pairs) if e.pairs and e.dataset_spec.pairs else None,  # not for datasets of single images
        },
        needs=lambda e: [],
        folder=lambda e: Path(e.folder),
        products=("manifest.jsonl", "dataset.json"),
        direct=("out",),
    ),
    "extract": Stage(
        body="diffcap.commands.extract:extract_features",
        settings=_extract,
        needs=lambda e: [("data", e)],
        folder=lambda e: e.features_folder,
        products=_FEATURE_FILES,
        inputs=lambda e: [Path(e.folder) / "manifest.jsonl"],
        is_parallel=True,
    ),
    "import_features": Stage(
        body="diffcap.commands.extract:import_features",
        settings=_extract,
        needs=lambda e: [("data", e)],
        folder=lambda e: e.features_folder,
        products=_FEATURE_FILES,
        direct=("folder",),
        out=lambda options: f"{options['folder']}/features/{options['name']}",
        unnamed_inputs=_manifest,
    ),
    "negatives": Stage(
        body="diffcap.commands.negatives:make_negatives",
        settings=lambda e: {"folder": e.folder, "tagger": expand_home(e.tagger), "seed": int(e.seed)},
        needs=lambda e: [("data", e)],
        folder=lambda e: Path(e.folder),
        products=("negatives.jsonl", "negatives.json"),
        direct=("folder",),
        out=lambda options: options["folder"],
        unnamed_inputs=_manifest,
    ),
    PRETRAIN_EXTRA: _training_stage(
        PRETRAIN_EXTRA,
        lambda e: [
            ("data", e),
            *(need for need in _before_pretraining(e) if need[1].dataset == e.first_pretraining_dataset),
        ],
    ),
    PRETRAIN: _training_stage(PRETRAIN, _before_pretraining),
    FINETUNE: _training_stage(FINETUNE, lambda e: [("extract", e), *([(PRETRAIN, e)] if e.owns_pretraining else [])]),
    REINFORCE: _training_stage(REINFORCE, lambda e: [(FINETUNE, e)]),
    ZERO_SHOT: _evaluation_stage(
        settings=_zeroshot,
        needs=lambda e: [("extract", e)],
        folder=lambda e: Path(e.run) / f"zeroshot-{EVAL}",
    ),
    "eval": _evaluation_stage(  # no stage is needed to evaluate the retrieval of another run's pre-training
        settings=_eval,
        needs=lambda e: [(e.evaluated_stage, e)] if e.eval != RETRIEVAL or e.owns_pretraining else [],
        folder=lambda e: Path(e.run) / result_folder_name(e.evaluated_stage, EVAL),
    ),
    "report": Stage(
        body="diffcap.commands.report:report",
        settings=lambda e: {
            "folder": e.folder,
            "features": e.features,
            "runs": {e.method: str(STAGES["eval"].folder(e))},
            "out": str(STAGES["report"].folder(e)),
        },
        needs=lambda e: [("eval", e)],
        folder=lambda e: Path(e.run) / result_folder_name(e.captioner, REPORT),  # e.captioner: finetune or reinforce
        products=("table.json", "table.md", "report.html"),
        direct=("runs", "predictions"),
        unnamed_inputs=lambda options: [*_manifest(options), *_files_of_runs(options)],
    ),
}
COMMANDS = tuple(name for name in STAGES if name not in (PRETRAIN_EXTRA, "import_features"))
TRAININGS = (PRETRAIN_EXTRA, PRETRAIN, FINETUNE, REINFORCE)
RECORDS = {  # stage -> name of the record file
    **{stage: f"{stage}.done.json" for stage in STAGES},
    **dict.fromkeys(TRAININGS, FINISHED),
    "import_features": "extract.done.json",
}
LIGHTNING = ("extract", *TRAININGS)  # stages whose options are parsed by Lightning's command line


def record_path(stage: str, e: Experiment) -> Path:
    """Return the path of the record of a stage of an experiment."""
    return STAGES[stage].folder(e) / RECORDS[stage]


def is_made(stage: str, e: Experiment) -> bool:
    """Return whether a stage has a result: a record or, if diffcap 0.1 made the result, the file that is written last."""
    path = record_path(stage, e)
    return path.is_file() or any(path.with_name(name).is_file() for name in STAGES[stage].products[:1])


def needed_by(e: Experiment, goals: Iterable[str]) -> list[Need]:
    """Return the goals and all stages that they depend on. Each stage comes after those that it needs."""
    found: dict[tuple[str, Path], Need] = {}
    for goal in goals:
        if goal in STAGES and (goal != PRETRAIN or e.has_pretraining):
            earlier = [need for stage, owner in STAGES[goal].needs(e) for need in needed_by(owner, [stage])]
            for need in [*earlier, (goal, e)]:
                found.setdefault((need[0], record_path(*need)), need)
    return list(found.values())
