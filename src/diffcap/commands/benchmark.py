"""The command `diffcap benchmark`: train and evaluate a grid of experiments, and write a table for each dataset."""

import itertools
import json
import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from diffcap.experiment import AXES, Experiment, read_variables
from diffcap.pipeline import check_extra, check_used
from diffcap.registry import Ablation
from diffcap.run_folder import EVAL, FINETUNE, PRETRAIN, PRETRAIN_EXTRA
from diffcap.runner import Job, Variables, in_parallel, make, parse_seeds, run_job, write_report
from diffcap.stages import STAGES, Need, is_made, needed_by, record_path
from diffcap.utils.console import echo, parse_shard
from diffcap.utils.errors import DiffcapError
from diffcap.utils.settings import read_settings


def benchmark(
    grid: Path,
    seeds: str | None = None,
    steps: int | None = None,
    pretrain_steps: int | None = None,
    shard: str | None = None,
    list: bool = False,
    prepare: bool = False,
    variables: dict[str, str] | None = None,
) -> None:
    """Train and evaluate every combination of datasets, methods and seeds of a YAML file, and write a table for each dataset.

    An experiment has the same run folder as `diffcap finetune` with the same variables. Finished experiments are skipped, and
    interrupted ones are resumed. The tables are in runs/<dataset>/benchmark/<name>, where <name> is the name of the YAML file
    without its suffix, or <method>-<name of the file> if --method is given.

    Args:
        grid: YAML file with the lists `datasets`, `methods` and `seeds`. It may also have the variables and the sections of options
            that a CONFIG file may have.
        seeds: Training seeds instead of those in the file, separated by commas.
        steps: Fine-tuning steps of every experiment; by default the number in its settings.
        pretrain_steps: Steps of each pre-training, also of a first one on a dataset of EXTRA; by default the numbers in the settings.
        shard: Run a part of the experiments and write no table: 3/16 is the fourth of 16 parts, 0/16 the first. Run --prepare before it.
        list: Only print the variables of each experiment, one experiment per line.
        prepare: Only make the files that several experiments read: data, features and negatives.
        variables: Variables of every experiment, in JSON. Each can also be given as an option, such as --trainer smoke.
    """
    variables = variables or {}
    tables, remarks = read_grid(grid, variables, parse_seeds(seeds) if seeds else None)
    # The seeds run one after the other. So an interrupted command leaves all experiments of the first seeds.
    rows = itertools.chain(*(table.values() for table in tables.values()))
    jobs = sorted(itertools.chain(*rows), key=lambda job: int(job.experiment.seed))
    check_used(variables, [EVAL], [job.experiment for job in jobs])
    queues, links = make_queues(jobs)
    if shard:
        index, count = parse_shard("--shard", shard)
        queues = queues[index::count]
    jobs = [job for queue in queues for job in queue]
    if list:
        if steps or pretrain_steps:
            raise DiffcapError(f"--list prints no steps; write them in {grid}, as trainer.max_steps in finetune.")
        echo(*(shlex.join(job.experiment.words()) for job in jobs))
        return
    _prepare(jobs, is_check=bool(shard) and not prepare)
    if prepare:
        return
    failures: dict[str, str] = {}  # title of an experiment -> error

    def run_queue(queue: Sequence[Job]) -> None:
        for job in queue:
            for link in [path for path in links if path.parent == job.run and not path.exists()]:
                for folder in (links[link], job.run):
                    folder.mkdir(parents=True, exist_ok=True)
                link.unlink(missing_ok=True)  # a link to a deleted folder
                link.symlink_to(Path(os.path.relpath(links[link], job.run)))
            try:
                run_job(replace(job, finetune=steps, pretrain=job.pretrain if job.pretrain == 0 else pretrain_steps))
            except DiffcapError as error:
                failures[job.title] = str(error)

    devices = max((int(job.experiment.devices) for job in jobs), default=1)
    in_parallel([partial(run_queue, queue) for queue in queues], devices)
    for dataset, table in () if shard else tables.items():
        first, *others = itertools.chain(*table.values())
        if any(job.title in failures for job in (first, *others)):
            continue
        e = first.experiment
        out = Path("runs", dataset, "benchmark", "-".join(filter(None, [variables.get("method"), grid.stem])))
        remark = ["--remark", " ".join(dict.fromkeys(remarks[dataset]))] if dataset in remarks else []
        write_report(e.folder, e.features, table, out, "--pictures", "0", "--attention", "0", *remark)
    if failures:
        echo(*failures.values(), err=True)
        raise DiffcapError(f"{len(failures)} of {len(jobs)} experiments failed; their datasets have no new table.")


def read_grid(
    path: Path, variables: Variables, seeds: Sequence[int] | None = None
) -> tuple[dict[str, dict[str, list[Job]]], dict[str, list[str]]]:
    """Read the experiments of a grid. `variables` and `seeds` replace those in the file.

    Returns two dicts: dataset -> title of a row of its table -> the experiments of the row, one per seed; and dataset -> a sentence about
    each skipped experiment.
    """
    content = read_settings(path)
    axes: dict[str, Any] = dict(content) if isinstance(content, dict) else {}
    if seeds:
        axes["seeds"] = seeds
    entries: list[list[Variables]] = []
    for axis, name in AXES.items():
        if not isinstance(axes.get(axis), list) or not axes[axis]:
            raise DiffcapError(f"{path}: the grid has no {axis}; give {', '.join(AXES)}, each as a list.")
        entries.append([])
        for entry in axes[axis]:
            own, sections = read_variables(f"{path}: {axis}", entry if isinstance(entry, dict) else {name: entry})
            if sections:
                raise DiffcapError(
                    f"{path}: {axis}: {next(iter(sections))} is a section of options; move it to the top level of the file, or to "
                    "another file, and give its path as the variable config."
                )
            entries[-1].append(own)
    shared, sections = read_variables(path, {key: value for key, value in axes.items() if key not in AXES})
    if sections:
        if any("config" in values for values in (shared, variables, *itertools.chain(*entries))):
            raise DiffcapError(
                f"{path}: has the section {next(iter(sections))}, so config cannot name another file; write all sections in such files."
            )
        shared["config"] = str(path)  # each experiment reads the sections of this file
    tables: dict[str, dict[str, list[Job]]] = {}
    remarks: dict[str, list[str]] = {}
    runs: dict[Path, Job] = {}
    for dataset, method, seed in itertools.product(*entries):
        for title, values, reason in _ablations({**shared, **dataset, **method, **seed, **variables}):
            e = Experiment(**values)
            if reason:
                remarks.setdefault(e.dataset, []).append(f"Skipped: {title}, because {reason}.")
                continue
            method_title = e.method_spec.title if len(entries[1]) > 1 or not title else ""
            row = ", ".join(filter(None, [method_title, e.base_model_name, title or e.extra, values.get("run")]))
            job = Job(f"{row}, {e.dataset}, seed {e.seed}", values, pretrain=None if e.has_pretraining else 0)
            if job.run in runs:
                commands = " and ".join(f"`{shlex.join(each.experiment.words())}`" for each in (runs[job.run], job))
                raise DiffcapError(f"{path}: {commands} have the same run folder, {job.run}; leave out one of them.")
            runs[job.run] = job
            tables.setdefault(e.dataset, {}).setdefault(row, []).append(job)
    if not tables:
        raise DiffcapError(f"{path}: no row is left. {' '.join(dict.fromkeys(itertools.chain(*remarks.values())))}")
    return tables, remarks


def _ablations(variables: Variables) -> Iterator[tuple[str, Variables, str]]:
    """Yield (title, variables, reason) of each ablation that the variable `ablation` names. Each ablation is a row of the table.

    The reason says why the row is skipped; it is empty for other rows. The variable may be several names, separated by commas, or "all".
    Without the variable, the only row is the method itself, with an empty title.
    """
    others = {name: value for name, value in variables.items() if name != "ablation"}
    base, names = Experiment(**others), variables.get("ablation", "")
    known = base.method_spec.ablations
    for name in known if names == "all" else names.split(","):
        row = known.get(name, Ablation(name))
        with_extra = {**others, "extra": row.extra} if row.extra and not base.dataset_spec.rendered else others
        missing = [other.folder for other in Experiment(**with_extra).extra_experiments if not is_made("data", other)]
        if row.removes and not base.setting(FINETUNE, "model", "captioner", "init_args", row.removes):
            yield row.title, others, f"the method has no such component on {base.dataset}"
        elif row.extra and (missing or with_extra is others):
            yield row.title, others, f"{missing[0]} is not there" if missing else f"{base.dataset} has no photos"
        else:
            yield row.title, with_extra if row.extra else {**others, "ablation": name}, ""


def make_queues(jobs: Iterable[Job]) -> tuple[list[list[Job]], dict[Path, Path]]:
    """Divide experiments into queues. Experiments with the same pre-training are in one queue: the first of them runs the pre-training.

    Returns the queues, and the symbolic links through which the other experiments read this pre-training: path of the link in their run
    folder -> folder of the pre-training.
    """
    first: dict[str, Job] = {}  # settings of a pre-training -> the experiment that trains it
    queues: dict[Path, list[Job]] = {}  # folder of the first run -> queue
    links: dict[Path, Path] = {}
    for job in jobs:
        queue_of = job
        for stage, e in needed_by(job.experiment, [FINETUNE]):
            if stage in (PRETRAIN_EXTRA, PRETRAIN):
                settings = STAGES[stage].settings(e)
                settings["run"].update(out="", ablation="")
                owner = first.setdefault(json.dumps(settings, sort_keys=True, default=str), job)
                if owner is not job:
                    links[e.stage_folder(stage)] = owner.experiment.stage_folder(stage)
                    queue_of = owner
        queues.setdefault(queue_of.run, []).append(job)
    return [*queues.values()], links


def _prepare(jobs: Sequence[Job], is_check: bool) -> None:
    """Make the files that several experiments need and would write at the same time. With `is_check`, only check that they exist."""
    shared: dict[Path, Need] = {}  # path of a result's record -> the stage and its experiment
    for job in jobs:
        e = Experiment(**{name: value for name, value in job.variables.items() if name != "seed"})
        for stage, owner in needed_by(e, [EVAL]):
            if stage in ("data", "extract", "negatives"):
                if not is_made(stage, owner):
                    check_extra(stage, owner, e)
                shared.setdefault(record_path(stage, owner), (stage, owner))
    for path, (stage, owner) in shared.items():
        if is_check and not is_made(stage, owner):
            raise DiffcapError(
                f"{path.parent}: the result of the stage {stage} is missing; first run the same command with --prepare instead of --shard."
            )
        if not is_check and not (stage == "data" and is_made(stage, owner)):
            make(owner.dataset, stage, owner.explicit_values)
