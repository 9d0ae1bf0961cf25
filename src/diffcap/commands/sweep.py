"""`diffcap sweep`: search the settings of a training stage with Optuna, from the YAML file that `wandb sweep` takes.

A trial is a process `diffcap <stage>` that writes into `runs/<dataset>/<method>/sweep/<stage>/<hash of its settings>`. Optuna appends
all trials to `study.log` in the parent of these folders. Several commands, also on machines that share this folder, may work on one study.

A command holds a lock for the trial that it runs. The kernel releases the lock if the command is killed. If a trial is running according
to `study.log` but its lock is free, the next command tries its values again in the same folder, so the training resumes.
"""

import csv
import fcntl
import itertools
import json
import math
import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from signal import SIGTERM, default_int_handler, signal
from typing import Any

import yaml
from jsonargparse import Namespace

from diffcap import record
from diffcap.compose import merge
from diffcap.experiment import Experiment, parse
from diffcap.lit.launch import find_launch
from diffcap.pipeline import run_in_process
from diffcap.records import write_text
from diffcap.run_folder import FINETUNE, LOGS, PRETRAIN, TRIAL_VARIABLE, stage_lock
from diffcap.stages import STAGES, is_made
from diffcap.utils.console import echo
from diffcap.utils.errors import DiffcapError, wrap_errors
from diffcap.utils.settings import read_settings

with suppress(ModuleNotFoundError):  # the help of all commands works without Optuna
    import optuna
    from optuna.storages.journal import JournalFileBackend, JournalStorage
    from optuna.trial import TrialState

_MAX_FAILURES = 3  # failed trials in a row that end the command


def sweep(file: Path, trials: int = 20, study: Path | None = None, options: list[str] | None = None) -> None:
    """Search the settings of a training stage with Optuna. A file such as those in configs/sweep gives the ranges of the settings.

    The same command may run several times at once, such as once per GPU. After an interruption, it resumes. It writes the best
    settings into best.yaml, in the folder of the trials, for `make finetune eval CONFIG=.../best.yaml`.

    Args:
        file: YAML file of a sweep, in the form of Weights & Biases. No account is needed.
        trials: Number of trials of all commands together, without failed ones; with `method: grid`, at most all combinations.
        study: File in which Optuna stores the trials, by default study.log. The best settings are written into its folder.
        options: Variables of the experiment and options of the stage for every trial, written after two hyphens: -- --trainer short
    """
    if "optuna" not in sys.modules:
        raise DiffcapError("sweeps need optuna, which is not installed; run: pip install 'diffcap[sweep]'")
    if launch := find_launch():
        raise DiffcapError(
            f"{launch.launcher} started this command; start it without, with `-- --devices N` for N processes per trial."
        )
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    signal(SIGTERM, default_int_handler)  # ends the command and its training, as Ctrl-C does
    search = Search(file, options or [], study)
    failures = 0
    while failures < _MAX_FAILURES:
        search.write_best()
        with ExitStack() as lock:
            trial = search.start_trial(trials, lock)
            if trial is None:
                break
            failures = 0 if search.run_trial(trial) else failures + 1
    if failures:
        raise DiffcapError(
            f"{file}: the last {failures} trials failed, see above; correct the cause, and run the command again."
        )


class Search:
    """A study of Optuna: the trials of a sweep.

    Args:
        file: YAML file of the sweep.
        words: variables and options of every trial, which override those in the entry `command` of the YAML file.
        path: file in which Optuna stores the study (default: study.log in the folder of the trials).
    """

    def __init__(self, file: Path, words: Sequence[str], path: Path | None) -> None:
        content = read_settings(file)
        with wrap_errors(file, "not the file of a sweep", "write it as in the files of configs/sweep"):
            stage, method, metric = Path(content["program"]).stem, content["method"], content["metric"]
            self.metric, goal = metric["name"], metric["goal"]
            # The command is `${env} python stages/finetune.py --dataset=blocks ... ${args}`.
            own_words = [word for word in content.get("command", []) if not word.startswith("$")]
            own_words = list(itertools.dropwhile(lambda word: not word.startswith("--"), own_words))
            parameters = content["parameters"]
            self.space = {name: _distribution(f"{file}: {name}", values) for name, values in parameters.items()}
        for key, value, choices in (
            ("program", stage, (PRETRAIN, FINETUNE)),
            ("method", method, ("bayes", "random", "grid")),
            ("metric.goal", goal, ("maximize", "minimize")),
        ):
            if value not in choices:
                raise DiffcapError(f"{file}: {key} is {value}; give {' or '.join(choices)}.")
        pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
        if early := content.get("early_terminate"):
            if early.get("type") != "hyperband" or "min_iter" not in early:
                raise DiffcapError(f"{file}: early_terminate needs `type: hyperband` and `min_iter`; it has {early}.")
            pruner = optuna.pruners.SuccessiveHalvingPruner(early["min_iter"], early.get("eta", 3))
        self.file, self.stage, self.is_grid = file, stage, method == "grid"
        self.variables, self.options = parse([*own_words, "--logger=none", *words])
        e = Experiment(**self.variables)
        self.run, self.folder = e.run, Path(e.run) / "sweep" / stage
        self.path = path or self.folder / "study.log"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # All commands of a study must have the same identity. It lacks the variables `devices` and `logger`, which do not change a score.
        compared = {name: value for name, value in self.variables.items() if name not in ("devices", "logger")}
        self.identity = json.dumps([stage, metric, parameters, compared, self.options], sort_keys=True)
        sampler = optuna.samplers.TPESampler(multivariate=True, constant_liar=True)
        with self._exclusive():
            for need, owner in STAGES[stage].needs(e):
                if not is_made(need, owner):
                    run_in_process([need, *owner.words(), "--needed"])
            with wrap_errors(self.path, "not the file of a study", "give another --study"):
                self.study = optuna.create_study(
                    study_name=content.get("name", file.stem),
                    storage=JournalStorage(JournalFileBackend(str(self.path))),
                    sampler=sampler if method == "bayes" else optuna.samplers.RandomSampler(),
                    pruner=pruner,
                    direction=goal,
                    load_if_exists=True,
                )
            if self.study.user_attrs.get("identity", self.identity) != self.identity:
                raise DiffcapError(
                    f"{self.path}: the study has another metric, other parameters or other options than {file} and this command "
                    "line; restore them, or give another file as --study."
                )
            if self.is_grid and not self.study.user_attrs:
                choices_of = {name: getattr(distribution, "choices", ()) for name, distribution in self.space.items()}
                if ranges := [name for name, choices in choices_of.items() if not choices]:
                    raise DiffcapError(f"{file}: method is grid, and {ranges[0]} has a range; give `values`.")
                for values in itertools.product(*choices_of.values()):
                    self.study.enqueue_trial(dict(zip(choices_of, values, strict=True)))
            elif self.is_grid:  # the values of failed trials are tried again
                trials = self.study.get_trials(deepcopy=False)
                kept = [{**trial.system_attrs.get("fixed_params", {}), **trial.params} for trial in trials]
                kept = [params for trial, params in zip(trials, kept) if trial.state != TrialState.FAIL]
                for trial in trials:
                    if trial.state == TrialState.FAIL and trial.params not in kept:
                        self.study.enqueue_trial(trial.params)
                        kept.append(trial.params)
            self.study.set_user_attr("identity", self.identity)

    def start_trial(self, count: int, lock: ExitStack) -> "optuna.Trial | None":
        """Return a new trial, with its lock in `lock`; or None if `count` trials are complete, pruned or running, or no values are left."""
        with self._exclusive():
            # Enqueue the values of trials whose command was killed.
            for running in self.study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
                # If one of the two locks is held, the trial is running: a killed command may leave its training running.
                with suppress(DiffcapError), self._lock(running), stage_lock(self._folder(running), 0):
                    self.study.tell(running.number, state=TrialState.FAIL)
                    # `params` lacks some enqueued values (`fixed_params`) if the command was killed while it chose values.
                    self.study.enqueue_trial({**running.system_attrs.get("fixed_params", {}), **running.params})
                    echo(f"trial {running.number} was interrupted; its values are tried again")
            states = Counter(trial.state for trial in self.study.get_trials(deepcopy=False))
            num_trials = states[TrialState.COMPLETE] + states[TrialState.PRUNED] + states[TrialState.RUNNING]
            if num_trials >= count or (self.is_grid and not states[TrialState.WAITING]):
                return None
            for _ in range(_MAX_FAILURES):
                trial = self.study.ask(self.space)
                with suppress(DiffcapError):  # raised if another command trains with the same values
                    lock.enter_context(self._lock(trial))
                    return trial
                self.study.tell(trial, state=TrialState.FAIL)
        echo("other commands train with all values that were chosen; run this command again for more trials")
        return None

    def _folder(self, trial: "optuna.Trial | optuna.trial.FrozenTrial") -> Path:
        return self.folder / record.digest(self.identity, trial.params)[:8]

    def _lock(self, trial: "optuna.Trial | optuna.trial.FrozenTrial") -> AbstractContextManager[None]:
        """Return the lock of the command that runs a trial."""
        return stage_lock(self.folder / f"{self._folder(trial).name}-trial", 0)

    def run_trial(self, trial: "optuna.Trial") -> bool:
        """Train with the values of a trial, report each validation, and tell the study the result. Return False if the trial failed."""
        folder, values, num_reported = self._folder(trial), list[float](), 0
        echo(f"trial {trial.number}: {trial.params}, {folder}")
        command = [sys.executable, "-m", "diffcap", self.stage, f"--run={self.run}", *self._words(trial.params)]
        is_running, is_pruned = True, False
        with subprocess.Popen(command, env={**os.environ, TRIAL_VARIABLE: folder.name}) as process:
            try:
                while is_running and not is_pruned:
                    time.sleep(0.5)
                    is_running = process.poll() is None
                    values = self._validations(folder)
                    for value in values[num_reported:]:
                        num_reported += 1
                        trial.report(value, num_reported)
                        # Also called after the training has ended: `should_prune` stores the value, with which later trials are compared.
                        is_pruned |= trial.should_prune() and is_running
            finally:
                process.terminate()
        ended = TrialState.COMPLETE if values and process.returncode == 0 else TrialState.FAIL
        state = TrialState.PRUNED if is_pruned else ended
        choose = max if self.study.direction.name == "MAXIMIZE" else min
        self.study.tell(trial, choose(values) if state == TrialState.COMPLETE else None, state)
        score = f"{self.metric} {choose(values):.4f}" if values else f"no finite {self.metric}"
        echo(f"trial {trial.number}: {state.name.lower()} after {num_reported} validations, {score}")
        return state != TrialState.FAIL

    def _validations(self, folder: Path) -> list[float]:
        """Return the finite values of the metric that a training has logged, in the order of the steps."""
        values: dict[int, float] = {}
        logged: set[str] = set()
        for path in sorted(folder.glob(f"{LOGS}/version_*/metrics.csv"), key=lambda path: path.stat().st_mtime):
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            rows = csv.DictReader(line for line in lines if line.endswith("\n"))  # the last one may be incomplete
            logged |= {name for name in rows.fieldnames or () if name.startswith("val/")}
            values |= {int(row["step"]): float(row[self.metric]) for row in rows if row.get(self.metric)}
        if logged and self.metric not in logged:
            raise DiffcapError(
                f"{self.file}: metric.name is {self.metric}, but validation logs {', '.join(sorted(logged))}; give one of these, and "
                f"remove {self.path}."
            )
        return [values[step] for step in sorted(values) if math.isfinite(values[step])]

    def write_best(self) -> None:
        """Write the settings of the best complete trial as a CONFIG file."""
        with self._exclusive():
            trials = self.study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
            if not trials:
                return
            best = self.study.best_trial
            variables, options = parse(self._words(best.params))
            del variables["logger"]
            config = variables.pop("config", None)
            section, remaining = Namespace(), iter(options)
            for word in remaining:
                name, equals, value = word.removeprefix("--").partition("=")
                section[name] = yaml.safe_load(value if equals else next(remaining, ""))
            content = {**variables, self.stage: section.as_dict()}
            header = f"# Trial {best.number}: {self.metric} {best.value:.4f}, {self._folder(best)}\n"
            path = self.path.with_name("best.yaml" if self.path.name == "study.log" else f"{self.path.stem}-best.yaml")
            text = yaml.safe_dump(merge(read_settings(config), content) if config else content, sort_keys=False)
            write_text(path, header + text)
        echo(f"best of {len(trials)} complete trials: {best.number}, {self.metric} {best.value:.4f}, {path}")

    def _words(self, values: Mapping[str, Any]) -> list[str]:
        """Return the words of a training's command line; `values` are those of a trial."""
        variables = [f"--{name}={value}" for name, value in self.variables.items()]
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
        return [*variables, *self.options, *(f"--{name}={text}" for name, text in texts.items())]

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Wait until no other command chooses a trial or writes the best settings, and keep the others waiting."""
        with self.path.with_name(f".{self.path.name}.lock").open("w") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)  # until the file is closed
            yield


def _distribution(where: str, values: Mapping[str, Any]) -> "optuna.distributions.BaseDistribution":
    """Return Optuna's distribution of a parameter of the file."""
    remedy = "give `values`, or `min` below `max` and the distribution uniform, log_uniform_values or int_uniform"
    with wrap_errors(where, "not the values of a parameter", remedy):
        if "values" in values:
            return optuna.distributions.CategoricalDistribution(values["values"])
        kind = values["distribution"]
        if kind not in ("uniform", "log_uniform_values", "int_uniform"):
            raise ValueError(f"the distribution is {kind}")
        if kind == "int_uniform":
            return optuna.distributions.IntDistribution(values["min"], values["max"])
        return optuna.distributions.FloatDistribution(values["min"], values["max"], log=kind != "uniform")
