"""Run the command of a stage. First run the stages whose results it needs and lacks, then the stage, unless its result is up to date.

A command has one of two forms:

* `diffcap finetune --dataset blocks --method scorer --model.lr=1e-4`: the variables of an experiment, and options of the stage.
  The variables determine the settings. The stages that it needs run first if their results are missing. The Makefile uses this form.
* `diffcap eval --checkpoint a.ckpt --out runs/a --folder data/blocks`: options of the stage alone. No other stage runs.
"""

import itertools
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from diffcap import __version__, record
from diffcap.compose import merge, parts
from diffcap.experiment import NAMES, RETRIEVAL, VARIABLES, Experiment, is_run_config, parse
from diffcap.lit.launch import end_together, find_launch
from diffcap.registry import import_object, methods
from diffcap.run_folder import (
    FINETUNE,
    FINISHED,
    PRETRAIN,
    PRETRAIN_EXTRA,
    REINFORCE,
    TRIAL_VARIABLE,
    WANDB_SWEEP,
    find_fault,
    is_finished,
    is_main_process,
    read_object,
)
from diffcap.stages import LIGHTNING, RECORDS, STAGES, TRAININGS, ZERO_SHOT, Request, is_made, needed_by, record_path
from diffcap.utils.console import OneLineErrorParser, experiment_options
from diffcap.utils.errors import DiffcapError, plain_errors
from diffcap.utils.settings import own_configs, read_settings


def run_stage(stage: str, words: Sequence[str]) -> None:
    """Run a stage with the arguments `words`, unless its record says that it is up to date.

    With `--needed` (another stage needs the result), an existing result is made again only if its input files have changed.
    """
    is_only_needed = "--needed" in words
    words = [word for word in words if word != "--needed"]
    variables, stage_options = parse(words)
    if not STAGES[stage].is_parallel and not is_main_process():
        return  # a launcher such as torchrun has started several processes, of which only the first runs this stage
    if _is_direct(stage, words, variables):
        _run_body(Request(stage, {}, words, sources=own_configs(words)))
        return
    experiment_options.extend(NAMES)  # suggested for misspelt options
    configs = own_configs(stage_options)
    if stage in LIGHTNING and len(configs) == 1 and "config" not in variables:
        variables["config"] = configs[0]
        pairs = itertools.pairwise(["", *stage_options])  # each word with the one before it, to find `--config PATH`
        stage_options = [word for previous, word in pairs if "--config" not in (previous, word.partition("=")[0])]
    if {"--help", "-h"} & set(stage_options):
        print(f"Variables of an experiment, each an option of `diffcap {stage}` and, in capitals, a variable of make:")
        for variable in VARIABLES:
            text, default = variable.metadata["help"], variable.metadata["default"]
            print(f"  --{variable.name:<22} {text}{f' ({default})' if default else ''}", flush=True)
        if stage not in LIGHTNING or "all" in stage_options:
            print("\nOptions of the stage:\n", flush=True)
            _run_body(Request(stage, {}, ["--help"]))
        else:
            print(f"\nThe stage has more options (--model.*, --data.*, --trainer.*): diffcap {stage} --help all")
        return
    # make and `runner.make` give all variables and the goals to every stage. `print_paths` has checked the variables for make.
    is_step = is_only_needed or "goals" in variables
    goals = variables.pop("goals", stage).split()
    e = make_experiment(variables, goals, is_step)
    if stage in (PRETRAIN, PRETRAIN_EXTRA, "negatives") and _is_unused(stage, e):
        if stage_options and goals == [stage]:
            raise DiffcapError(f"{stage_options[0]} has no effect: METHOD={e.method} needs no {stage}; omit it.")
        return
    request = _make_request(stage, e, stage_options)
    if "--print_config" in stage_options:
        print("".join(f"# settings: {source}\n" for source in request.sources), end="", flush=True)
    elif not {TRIAL_VARIABLE, WANDB_SWEEP} & {*os.environ}:  # a trial of a sweep does not run the stages that it needs
        needs_download = stage == "data" and not e.data and not e.dataset_spec.rendered
        if needs_download and e.offline == "yes" and not (is_only_needed and is_made(stage, e)):
            raise DiffcapError(
                f"OFFLINE=yes: the files of DATASET={e.dataset} would be downloaded; give DATA=<folder with its files>, or omit OFFLINE."
            )
        e.check_inputs({stage})
        needs = STAGES[stage].needs(e)
        if missing := [need for need in needs if not is_made(*need)]:
            _check_stages(e, needed_by(e, [stage]), {stage: stage_options})
            _run_missing(missing, request, e)
        record_file = record_path(stage, e)
        if record_file.parent.is_dir() and _is_current(request, record_file, is_only_needed):
            if is_main_process() and any(_is_newer(record_path(*need), record_file) for need in needs):
                record_file.touch()  # make compares file times, and would run the stage again
            return
    _run_body(request)


def make_experiment(given: Mapping[str, str], goals: Sequence[str], is_step: bool) -> Experiment:
    """Return the experiment of a command.

    If reinforce is a goal, the captioner of reinforce is evaluated. If no training is a goal, and the captioner was fine-tuned without a
    pre-training, this captioner is used, and no pre-training runs. `is_step` is true for one stage of a larger command, whose variables
    (`given`) may be for other stages.
    """
    variables = dict(given)
    if REINFORCE in goals:
        variables.setdefault("captioner", REINFORCE)
    if ZERO_SHOT in goals:
        zero_shot_methods = [name for name, method in methods().items() if method.base_model_module]
        variables.setdefault("method", zero_shot_methods[0])
    e = Experiment(**variables)
    if not is_step and set(goals) & set(STAGES):
        check_used(given, goals, [e])
    is_only_finetuned = is_finished(e.stage_folder(FINETUNE)) and not (Path(e.pretraining) / FINISHED).is_file()
    if e.has_pretraining and is_only_finetuned and not {PRETRAIN, PRETRAIN_EXTRA, FINETUNE} & set(goals):
        e = Experiment(**{**variables, "pretrain": "no"})
    if ZERO_SHOT in goals and not e.method_spec.base_model_module:
        names = " or ".join(zero_shot_methods)
        raise DiffcapError(f"zeroshot is for METHOD={names}, and METHOD={e.method} needs training; leave out METHOD.")
    if e.eval == RETRIEVAL and "report" in goals:
        raise DiffcapError("EVAL=retrieval has no report; omit the goal report, or EVAL.")
    return e


def check_used(given: Mapping[str, str], goals: Sequence[str], experiments: Iterable[Experiment]) -> None:
    """Raise an error if a variable in `given` has no effect on any of the experiments, in the stages that the goals need."""
    used = NAMES - {"tagger", "pretraining", "captioner", "eval"}
    for e in experiments:
        stages = {stage for stage, _ in needed_by(e, goals)}
        pretraining = e.method_spec.pretraining
        is_retrieval = e.eval == RETRIEVAL
        if "negatives" in stages and pretraining and pretraining.needs_negatives:
            used.add("tagger")
        if e.has_pretraining and (FINETUNE in stages or is_retrieval):
            used.add("pretraining")
        if "eval" in stages and not is_retrieval:
            used.add("captioner")
        used |= {"eval"} if stages & {"eval", ZERO_SHOT} else set()
    if unused := [name for name in given if name not in used]:
        name, value = unused[0].upper(), given[unused[0]]
        raise DiffcapError(f"{name}={value}: {' '.join(goals)} with METHOD={e.method} does not use {name}; omit it.")


def _check_stages(e: Experiment, needed: Sequence[tuple[str, Experiment]], options: Mapping[str, list[str]]) -> None:
    """Check the files of all stages of a command, and their `options` (by stage), before the first stage runs, which may take hours."""
    e.check_inputs({stage for stage, _ in needed})
    missing = [need for need in needed if not is_made(*need)]
    for need in missing:
        check_extra(*need, e)
    for stage, owner in needed:
        has_options = stage in options or stage in e.sections
        if has_options and owner is e and any(need in missing for need in needed_by(e, [stage])[:-1]):
            check_options(_make_request(stage, e, options.get(stage, [])))


def _is_unused(stage: str, e: Experiment) -> bool:
    """Return True if a stage before fine-tuning is unnecessary for the method, and print the command to continue with."""
    pretraining = e.method_spec.pretraining
    if stage in (PRETRAIN, PRETRAIN_EXTRA) and not e.has_pretraining:
        ablation = f", {e.ablation}," if e.ablation else ""
        condition = f" with PRETRAIN={e.pretrain or 'no'}" if pretraining else ""
        command = f"make finetune METHOD={e.method} DATASET={e.dataset}"
        print(f"{e.method}{ablation} has no pre-training stage{condition}; continue with: {command}")
        return True
    if stage == "negatives" and not (pretraining and pretraining.needs_negatives):
        print(f"{e.method} needs no hard negatives; continue with: make finetune METHOD={e.method}")
        return True
    return False


def _make_request(stage: str, e: Experiment, stage_options: list[str]) -> Request:
    """Return the request for a stage, from the experiment's settings, the stage's section in the CONFIG file and the command line."""
    if stage == "extract" and e.features_from:
        stage = "import_features"
    row = STAGES[stage]
    settings = {name: value for name, value in row.settings(e).items() if value is not None}
    sources = []
    if stage in LIGHTNING:
        initial_checkpoint = (settings.get("model") or {}).get("init_from")
        # make gives the initial checkpoint as --init_from. This option is unnecessary if the settings name the same checkpoint.
        stage_options = [word for word in stage_options if word != f"--init_from={initial_checkpoint}"]
        stage_options = [f"--model.{word[2:]}" if word.startswith("--init_from=") else word for word in stage_options]
        sources = [part.source for part in parts(e, stage)]
    if stage in ("extract", "import_features"):
        stage_options = [*shlex.split(e.extract_args), *stage_options]
    if section := e.sections.get(PRETRAIN if stage == PRETRAIN_EXTRA else stage):
        sources.append(f"{e.config}: {stage}")
        if stage not in TRAININGS:  # the settings of a training contain the section already
            settings = merge(settings, section) if stage in LIGHTNING else settings | section
    # Several jobs may each extract a part of the features (`--data.shard=3/16`). They write one record, so this option is not hashed.
    words = zip(["", *stage_options], stage_options)  # each after its predecessor, because an option may be two words
    asked_options = [word for last, word in words if last != "--data.shard" and not word.startswith("--data.shard")]
    asked = record.digest(__version__, settings, os.environ.get("DIFFCAP_CORENLP"), asked_options)
    return Request(stage, settings, stage_options, asked, row.inputs(e), sources)


def _run_missing(missing: Sequence[tuple[str, Experiment]], request: Request, e: Experiment) -> None:
    """Run the stages whose results are missing. If a launcher has started several processes, a missing result is an error."""
    launch = find_launch()
    for stage, experiment in missing:
        if is_made(stage, experiment):  # by one of the previous stages
            continue
        words = [stage, *experiment.words()]
        # With the launcher's environment variables, a new process would wait for the launcher's other processes.
        if launch:
            raise DiffcapError(
                f"{STAGES[stage].folder(experiment)}: the result of the stage {stage} is missing, and {launch.launcher} cannot "
                f"start it; first run `diffcap {' '.join(words)}`, without {launch.launcher}."
            )
        # The pre-training on a dataset of EXTRA has the same options as the main pre-training.
        shared_options = ["--", *request.words] if stage == PRETRAIN_EXTRA else []
        run_in_process([*words, "--needed", *shared_options])


def check_options(request: Request) -> None:
    """End the process with an error message if the request's options have a misspelt name or a wrong value. The stage does not run."""
    if request.stage not in LIGHTNING:
        _parse(request)
        return
    try:
        _run_body(replace(request, is_check=True))
    except SystemExit as end:
        if end.code:
            raise


def run_in_process(command: Sequence[str]) -> None:
    """Run `diffcap <command>` in a new process."""
    if subprocess.run([sys.executable, "-m", "diffcap", *command], check=False).returncode:
        raise DiffcapError(
            f"{command[0]} failed, see above; fix it and run the command again; completed parts are kept."
        )


def check_extra(stage: str, other: Experiment, e: Experiment) -> None:
    """Raise an error if the user must first run a stage, whose result is missing, for `other`, the experiment of a dataset in EXTRA."""
    if other is not e and stage == "data":
        raise DiffcapError(
            f"{other.folder}/manifest.jsonl: EXTRA={e.extra} needs this dataset; make it with `make data DATASET={other.dataset}`, and "
            "DATA=<folder> if it is not to be downloaded."
        )
    if other is not e and stage == "extract" and e.features_from:
        raise DiffcapError(
            f"{other.features_folder}: FEATURES_FROM is for {e.dataset} only; first run `make extract DATASET={other.dataset} "
            f"FEATURES_FROM=<the authors' folder for {other.dataset}>`."
        )


def _is_current(request: Request, record_file: Path, is_only_needed: bool) -> bool:
    """Return whether a stage's result is up to date according to its record. First write a record for a result of diffcap 0.1."""
    stage, folder = request.stage, record_file.parent
    old_record = record.read(record_file)
    if not old_record and (is_only_needed or _asked_before(request, folder)):
        old_record = _record_earlier_result(request, record_file)
    if not old_record:
        return False
    if stage in TRAININGS:
        is_lost = find_fault(folder) is not None
    else:
        is_lost = bool(record.lost_products(record_file, old_record, compare=not is_only_needed))
    # These stages compare their source files themselves, because their records do not list those files.
    runs_always = stage == "data" or request.settings.get("model", {}).get("from_files")
    if is_lost or (not is_only_needed and (runs_always or old_record["asked"] != request.asked)):
        return False
    changed_files = record.changed_files(old_record)
    if is_main_process() and changed_files:
        print(f"{folder}: {', '.join(changed_files)} changed, so {stage} runs again", flush=True)
    elif is_main_process() and not is_only_needed:
        print(f"{folder}: nothing to do, {stage} is complete with these settings")
    return not changed_files


def _record_earlier_result(request: Request, record_file: Path) -> dict[str, Any]:
    """Write and return the record of a complete result of diffcap 0.1; return {} if there is no such result."""
    row, folder = STAGES[request.stage], record_file.parent
    if request.stage in TRAININGS:
        finished = read_object(record_file)
        if find_fault(folder) or not finished:
            return {}
        new_record = {**finished, **record.make("", "", {}, [])}
    else:
        last_product = folder / row.products[0]  # the file that is written last
        inputs = [*request.inputs, *row.unnamed_inputs(request.settings)]
        if not last_product.is_file() or any(_is_newer(path, last_product) for path in inputs):
            return {}
        files = record.describe_files([*inputs, *record.named_files(request.settings)], {})
        new_record = record.make(request.asked, "", files, [folder / name for name in row.products])
    if is_main_process():
        record.write(record_file, new_record)
    return new_record


def _asked_before(request: Request, folder: Path) -> bool:
    """Return whether diffcap 0.1 made the result with the request's options. That version wrote the options into a file in `folder`."""
    if request.stage == "extract":
        meta, model = read_object(folder / "meta.json"), request.settings["model"]
        is_same = all(meta.get(key) == model[key] for key in ("library", "network", "stage") if key in model)
        return is_same and model.get("weights", "default") == "default" and not request.words
    words = [word for name, value in request.settings.items() for word in (f"--{name}", str(value))]
    note = read_object(folder / f".{request.stage}.done.json")
    return request.stage == "eval" and note.get("arguments") == [*words, *request.words]


def _is_newer(path: Path, reference: Path) -> bool:
    return path.is_file() and path.stat().st_mtime_ns > reference.stat().st_mtime_ns


def _parse(request: Request) -> tuple[OneLineErrorParser, Any]:
    """Parse the options of a stage without Lightning."""
    parser = OneLineErrorParser(prog=f"diffcap {request.stage}", allow_abbrev=False)
    parser.add_function_arguments(import_object(STAGES[request.stage].body), as_group=False)
    namespace = parser.parse_object(request.settings) if request.settings else None
    return parser, parser.parse_args(request.words, namespace=namespace)


def _run_body(request: Request) -> None:
    """Run the function of a stage, unless its record has the same options and files. Functions of stages in `LIGHTNING` check this."""
    stage, row = request.stage, STAGES[request.stage]
    body = import_object(row.body)
    if stage in LIGHTNING:
        body(request)
        return
    parser, options = _parse(request)
    values = options.as_dict()
    folder = Path(row.out(values) or f"data/{values['dataset']}")
    record_file = folder / RECORDS[stage]
    old_record = record.read(record_file)
    paths = [*request.inputs, *row.unnamed_inputs(values), *record.named_files(values)]
    files = record.describe_files(paths, old_record)
    result_id = record.result_id({**values, "DIFFCAP_CORENLP": os.environ.get("DIFFCAP_CORENLP")}, files)
    is_same = stage != "data" and old_record.get("id") == result_id
    if not is_same or record.lost_products(record_file, old_record):
        body(**parser.instantiate_classes(options).as_dict())
    elif is_main_process():
        print(f"{folder}: nothing to do, {stage} is complete with these settings")
    if is_main_process():
        new_record = record.make(request.asked, result_id, files, [folder / name for name in row.products])
        record.write(record_file, new_record)


def _is_direct(stage: str, words: Sequence[str], variables: Mapping[str, str]) -> bool:
    """Return whether a command has only options of the stage, no experiment. Raise an error if --config is a method's settings file."""
    configs = own_configs(words)
    for path in configs:
        # configs/method/<method>.yaml; earlier versions had configs/method/<method>/<stage>.yaml.
        method = path.partition("configs/method/")[2].partition("/")[0].removesuffix(".yaml")
        if method in methods():
            raise DiffcapError(
                f"--config {path}: a method's settings are used by name; give --dataset NAME --method {method}, as in "
                f"`diffcap {stage} --dataset blocks --method {method}`."
            )
    if "goals" in variables:
        return False
    names = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
    has_experiment = bool(names & {"dataset", "method"})
    if stage == "report":
        has_results = bool({"runs", "predictions"} & names or {"folder", "out"} <= names)
        return has_results and not has_experiment and "config" not in names
    if direct_options := STAGES[stage].direct:
        return bool(set(direct_options) & names) and not (stage == "negatives" and has_experiment)
    if has_experiment or not configs:
        return not has_experiment and bool({"data.folder", "run.out"} & names)
    # A file that names a dataset or a method, or is the config.yaml of a run, is used as CONFIG.
    contents = [read_settings(path) for path in configs if Path(path).is_file()]
    keys = {key for content in contents if isinstance(content, dict) for key in content}
    return not keys & {"dataset", "method", "DATASET", "METHOD"} and not any(map(is_run_config, contents))


def print_paths(words: Sequence[str]) -> None:
    """Print the names of files and folders that the Makefile needs, one NAME=VALUE per line. A space in a value is printed as |.

    After `--`, `words` have the options of the stages, one word per stage: `--dataset blocks --goals eval -- "finetune --model.lr=1"`.
    """
    variables, options_of_stages = parse(words)
    goals = variables.pop("goals", "").split()
    e = make_experiment(variables, goals, is_step=False)
    needed = needed_by(e, goals)
    options = {stage: stage_options for stage, *stage_options in map(shlex.split, options_of_stages)}
    used = {*(goals if len(goals) > 1 else ()), *(stage for stage, _ in needed)}
    if unused := [stage for stage in options if set(goals) & set(STAGES) and stage not in used]:
        raise DiffcapError(
            f"{unused[0]}_ARGS: {' '.join(goals)} with METHOD={e.method} does not use {unused[0]}; omit it."
        )
    _check_stages(e, needed, options)
    pretrains = e.has_pretraining and (PRETRAIN in goals or e.owns_pretraining)
    needs_negatives = ("negatives", e) in STAGES[PRETRAIN].needs(e)
    records = [record_path(*need) for need in needed]
    lost = [path for path in records if record.lost_products(path, record.read(path), compare=False)]
    names: dict[str, list[Path | str]] = {
        "folder": [e.folder],
        "store": [e.features_folder],
        "negatives": [record_path("negatives", e)] if needs_negatives else [],
        "first": [e.stage_folder(PRETRAIN_EXTRA)] if e.has_pretraining and e.first_pretraining_dataset else [],
        "pretraining": [e.stage_folder(PRETRAIN)] if pretrains else [],
        "start": [e.pretrained_checkpoint] if e.has_pretraining else [],
        "run": [e.run],
        "captioner": [e.evaluated_checkpoint.parent],
        "evaluation": [STAGES["eval"].folder(e)],
        "zeroshot": [STAGES[ZERO_SHOT].folder(e)],
        "report": [STAGES["report"].folder(e)],
        "lost": list(lost),
    }
    for name, values in names.items():
        for value in map(str, values):
            if invalid := sorted(set("|\t:%#$\\'\"*?[;&()<>`") & set(value)):
                raise DiffcapError(
                    f"{value}: make cannot use {' '.join(invalid)} in the name of a folder; give another RUN, FOLDER, "
                    "FEATURES or PRETRAINING."
                )
        print(f"{name}={';'.join(str(value).replace(' ', '|') for value in values)}")


def main(stage: str, words: Sequence[str] | None = None) -> None:
    """Run a stage as a program; `words` defaults to the arguments of the process. An error is printed as one line."""
    with plain_errors(), end_together(STAGES[stage].is_parallel):
        run_stage(stage, sys.argv[1:] if words is None else words)
