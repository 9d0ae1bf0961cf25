"""Run the stages of an experiment: parse their commands, find the stages that the goals need, skip those that are up to date.

A stage command, such as `diffcap finetune`, has two forms:

* `diffcap finetune --dataset blocks --method scorer --model.lr=1e-4`: the variables of an `Experiment`, and options of the stage.
  `stage_calls` derives the other options of the stage from the variables. The Makefile uses this form, with the requested targets
  in `--goals`.
* `diffcap finetune --config a.yaml --config b.yaml --data.folder data/blocks ...`: options of the stage alone.
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from diffcap.experiment import NAMES, RETRIEVAL, Experiment, options_help, parse
from diffcap.methods import import_object
from diffcap.run_folder import (
    FINETUNE,
    FINISHED,
    PRETRAIN,
    REINFORCE,
    is_finished,
    main_process,
)
from diffcap.run_folder import STAGES as TRAINING
from diffcap.stage_calls import StageCall, extra_datasets, stage_calls
from diffcap.utils.command_line import experiment_options
from diffcap.utils.errors import DiffcapError, plain_errors
from diffcap.utils.settings import read_settings

ZERO_SHOT = "zeroshot"  # the evaluation of a vision-language model without training
STAGES = ("data", "extract", "negatives", *TRAINING, ZERO_SHOT, "eval", "report")
# The function that runs each stage, given the stage's options. It is imported only when it is called.
BODIES = {
    "data": "diffcap.commands.data:main",
    "extract": "diffcap.commands.extract:main",
    "import_features": "diffcap.commands.import_features:main",
    "negatives": "diffcap.commands.negatives:main",
    **{stage: f"diffcap.commands.train:{stage}" for stage in TRAINING},
    ZERO_SHOT: "diffcap.commands.evaluate:main",
    "eval": "diffcap.commands.evaluate:main",
    "report": "diffcap.commands.report:main",
}
LIGHTNING = (
    "extract",
    *TRAINING,
)  # stages with Lightning's command line, whose help takes seconds, because it imports torch
# A command line with this option has the second form.
OWN_FORM = {"data": "out", "negatives": "folder", ZERO_SHOT: "checkpoint", "eval": "checkpoint", "report": "runs"}


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
        elif stage == ZERO_SHOT:
            waiting.append("extract")
        elif stage == "eval":
            waiting.append(PRETRAIN if e.eval == RETRIEVAL else e.captioner)
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
    if ZERO_SHOT in goals:
        variables.setdefault("method", "vlm")
    if stage == "extract":
        variables.pop("extract_args", None)  # make also gives them as options of the stage
    experiment = Experiment(**variables)
    experiment = _without_pretraining(experiment, goals)
    if stage == "extra":
        _make_extra(experiment)
        return
    if experiment.eval == RETRIEVAL and "report" in goals:
        raise DiffcapError("EVAL=retrieval has no report; omit the goal report, or EVAL.")
    requested, needed = stage in goals, needed_by(experiment, goals)
    if stage not in needed:
        return
    if ZERO_SHOT in needed and not experiment.method_spec.base_model:
        raise DiffcapError(
            f"zeroshot is for METHOD=vlm, and METHOD={experiment.method} needs training; leave out METHOD."
        )
    if needed.intersection((*TRAINING, ZERO_SHOT)):
        experiment.check_features()
    if PRETRAIN in needed:
        extra_datasets(experiment)  # checks them before anything runs
    if stage == PRETRAIN and not experiment.has_pretraining:
        if requested:
            print(_nothing_to_pretrain(experiment))
        return
    pretraining = experiment.method_spec.pretraining
    if stage == "negatives" and not (pretraining and pretraining.needs_negatives):
        print(f"{experiment.method} needs no hard negatives; go on with: make finetune METHOD={experiment.method}")
        return
    if stage == PRETRAIN and not requested and Path(experiment.pretraining) != experiment.stage_folder(PRETRAIN):
        if not is_finished(Path(experiment.pretraining)):
            raise DiffcapError(
                f"PRETRAINING={experiment.pretraining}: contains no finished pre-training; train it first, or omit PRETRAINING."
            )
        return
    if stage == PRETRAIN:
        _make_extra(experiment)
    *first, last = stage_calls(experiment, stage, own)
    if stage == "data" and (requested or not last.is_current):
        _check_download(experiment)
    for call in first:
        _run_call(call, requested, _in_process)
    _run_call(last, requested or (stage == "data" and bool(experiment.data)), partial(_execute, prefix=prefix))


def _check_download(e: Experiment) -> None:
    """Refuse to download a dataset with OFFLINE=yes."""
    if e.offline == "yes" and not e.data and not e.dataset_spec.rendered:
        raise DiffcapError(
            f"OFFLINE=yes: the files of DATASET={e.dataset} would be downloaded; give DATA=<folder with its files>, or omit OFFLINE."
        )


def _in_process(call: StageCall) -> None:
    from diffcap.lit.launch import find_launch

    if launch := find_launch():  # the new process would take itself for one of the launcher's, and wait for the others
        command = "the same command" if call.stage in TRAINING else "`diffcap extra` with the same options"
        raise DiffcapError(
            f"{call.product}: the file is missing or out of date, and {launch.launcher} cannot start the stage that makes it; "
            f"first run {command}, without {launch.launcher}."
        )
    run_in_process(call.stage, call.arguments)


def _execute(call: StageCall, prefix: Sequence[str]) -> None:
    execute(call.stage, call.arguments, prefix)


def _run_call(call: StageCall, requested: bool, run: Callable[[StageCall], None]) -> None:
    """Run one call of a stage, unless it is up to date.

    Args:
        requested: whether the user requested the stage; then changed settings, not only changed files, make it out of date.
    """
    if not requested and call.is_current:
        return
    if call.is_done and "WANDB_SWEEP_ID" not in os.environ and "--print_config" not in call.arguments:
        if main_process():
            print(f"{call.product.parent}: nothing to do, {call.stage} is complete with these settings")
        return
    if "--print_config" in call.arguments:
        files = [path for path in own_configs(call.arguments)]
        print("".join(f"# settings: {path}\n" for path in files), end="", flush=True)
    try:
        run(call)
    except SystemExit as stop:  # a finished training exits with 0
        if stop.code or "--print_config" in call.arguments:
            raise
    if main_process():
        call.note_done()


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
            (call,) = stage_calls(other, stage)
            if stage == "data" and not call.is_current:
                _check_download(other)
            _run_call(call, stage == "data" and bool(other.data), _in_process)


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
    if stage == "report" and {"folder", "out"} <= named and not named & {"dataset", "method", "config"}:
        return True  # of predictions files alone
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
    if stage not in (*LIGHTNING, "eval", ZERO_SHOT) and not main_process():
        return  # the other stages have one process, also where a launcher starts several
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
