"""Run every stage of a method at a dataset's official size, sampled, and print what the real run needs."""

import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from diffcap.experiment import Experiment
from diffcap.features.store import FROM_FILES, FeatureStore
from diffcap.pipeline import run_in_process
from diffcap.records import file_hash, read_json, write_json, write_text
from diffcap.rehearsal import (
    SOURCES,
    check_disk,
    disk_bytes,
    gpu,
    least_steps,
    markdown,
    measure,
    notes,
    read_rate,
    recomputes,
    show,
    task_shares,
    training_row,
    write_sample,
)
from diffcap.run_folder import FINETUNE, PRETRAIN
from diffcap.runner import run_command
from diffcap.utils.cores import available_cores
from diffcap.utils.errors import DiffcapError
from diffcap.utils.provenance import git_commit, provenance
from diffcap.utils.settings import CONFIGS, get_config_value

VARIABLES = (
    "dataset",
    "method",
    "data",
    "folder",
    "backbone",
    "weights",
    "tagger",
    "trainer",
    "seed",
    "devices",
    "offline",
)


def rehearsal(
    variables: dict[str, str],
    steps: int | None = None,
    limit: int = 256,
    scenes: int | None = None,
    rendered: int = 100,
    gpu_tflops: float = 30.0,
) -> None:
    """Write a dataset with the official counts, run data and negatives on it and the other stages on a sample, write the table.

    The table is runs/rehearsal-<dataset>/<method>/table.md and table.json. A stage that was measured is not repeated.

    Args:
        variables: Variables of the experiment, in JSON; each is also an option: --method scorer. DATA is the folder where the
            dataset is written, FOLDER that of manifests, features and negatives. Weights are random unless WEIGHTS is given, and
            the tagger is that of blocks unless TAGGER is given: nothing is downloaded, and the scores mean nothing.
        steps: Training steps of each stage; by default 300 on a GPU and 6 on a CPU. A stage with several tasks trains them in turn,
            and has at least three steps of each.
        limit: Number of pairs of the validation and of the evaluation.
        scenes: Number of scenes; by default the official one.
        rendered: Number of scenes that are rendered, with three images each, and whose features are extracted.
        gpu_tflops: Without a GPU, its hours are calculated from the number of floating-point operations and this speed, 10^12
            operations per second.

    Raises:
        DiffcapError: the dataset has no rehearsal, a value is not valid, the disk is too small, or a stage failed.
    """
    experiment, variables = _experiment(variables, {"steps": steps, "limit": limit, "gpu_tflops": gpu_tflops})
    source = import_module(SOURCES[experiment.dataset])
    folder, official = Path(experiment.folder), Path(experiment.data or f"{experiment.folder}/official")
    check_disk(folder, **({} if scenes is None else {"needed_gb": 2}))
    if steps is None:
        import torch

        steps = 300 if torch.cuda.is_available() else 6
    print(f"== {official}: the files of {experiment.dataset_spec.title}", flush=True)
    source.write(official, scenes, rendered)
    whole, sample, run = folder / "whole", folder / "sample", Path(experiment.run)
    size = {"scenes": scenes, "rendered": rendered, "data": str(official)}
    rows = _whole_rows(experiment, variables, whole, size)
    write_sample(whole, sample, partial(source.rendered_image, rendered=rendered))
    variables = {**variables, "folder": str(sample), "run": str(run)}
    rows += _sampled_rows(Experiment(**variables), variables, whole, size, steps, limit, gpu_tflops)
    machine = _machine()
    remarks = notes(rows, experiment, gpu_tflops, machine)
    write_json(run / "table.json", {"rows": rows, "notes": remarks, "machine": machine, "provenance": provenance()})
    write_text(run / "table.md", markdown(rows, remarks))
    show(rows, remarks, f"{experiment.method_spec.title} on {experiment.dataset_spec.title}: rehearsal")
    print(f"{run / 'table.md'}, table.json")


def _experiment(variables: dict[str, str], numbers: dict[str, float | None]) -> tuple[Experiment, dict[str, str]]:
    """Check the options; returns the experiment and its variables, with the defaults of the rehearsal."""
    for name, value in numbers.items():
        if value is not None and not value > 0:
            raise DiffcapError(f"--{name} is {value}; it must be more than 0.")
    dataset = variables.get("dataset", "clevr_change")
    if dataset not in SOURCES:
        raise DiffcapError(f"DATASET={dataset}: there is no rehearsal of it; the rehearsal has {', '.join(SOURCES)}.")
    for name in variables:
        if name not in VARIABLES:
            known = ", ".join(each.upper() for each in VARIABLES)
            raise DiffcapError(f"{name.upper()}= is not for the rehearsal; leave it out (it takes {known}).")
    variables = {
        "folder": f"data/rehearsal-{dataset}",
        "tagger": "blocks",
        **variables,
        "dataset": dataset,
        "logger": "none",
    }
    experiment = Experiment(**variables)
    downloaded = get_config_value([CONFIGS / f"backbone/{experiment.backbone}.yaml"], "model", "library") != "blocks"
    if not experiment.weights and experiment.offline != "yes" and downloaded:
        variables["weights"] = "random"
    variables["run"] = f"runs/rehearsal-{dataset}/{experiment.method}"
    return Experiment(**variables), variables


def _words(variables: dict[str, str], *options: str) -> list[str]:
    return [*(word for name, value in variables.items() for word in (f"--{name}", value)), "--", *options]


def _whole_rows(
    experiment: Experiment, variables: dict[str, str], whole: Path, size: dict[str, Any]
) -> list[dict[str, Any]]:
    """Run data and negatives completely."""
    variables = {**variables, "folder": str(whole), "data": size["data"]}
    measured = whole.with_name("measured")
    record = measure(measured / "data.json", size, [whole], partial(run_in_process, "data", _words(variables)))
    info = read_json(whole / "dataset.json")
    files = [whole / name for name in ("manifest.jsonl", "dataset.json", "vocabulary.json", "checked.json")]
    rows = [
        _row(
            "data", record, files, f"{info['pairs']:,} pairs, {info['images']:,} images, {info['captions']:,} captions"
        )
    ]
    if _needs_negatives(experiment):
        files = [whole / name for name in ("negatives.jsonl", "negatives.json", "negatives.md", "tags.jsonl")]
        settings = {**size, "tagger": experiment.tagger, "seed": experiment.seed}
        action = partial(run_in_process, "negatives", _words(variables))
        record = measure(measured / "negatives.json", settings, files, action)
        captions = read_json(whole / "negatives.json")["captions"]
        rows.append(_row("negatives", record, files, f"negatives for {captions:,} captions"))
    return rows


def _needs_negatives(experiment: Experiment) -> bool:
    pretraining = experiment.method_spec.pretraining
    return pretraining is not None and pretraining.needs_negatives


def _row(stage: str, record: dict[str, Any], files: Sequence[Path], what: str) -> dict[str, Any]:
    """The row of a stage that ran completely."""
    seconds = record["seconds"]
    return {
        "stage": stage,
        "here": "everything",
        "real": what,
        "minutes": seconds / 60,
        "hours": seconds / 3600,
        "disk_bytes": disk_bytes(files),
        "peak_bytes": record["peak_bytes"],
    }


def _sampled_rows(
    experiment: Experiment,
    variables: dict[str, str],
    whole: Path,
    size: dict[str, Any],
    steps: int,
    limit: int,
    tflops: float,
) -> list[dict[str, Any]]:
    """Run extract, the trainings and eval on the sample."""
    info, run, store = read_json(whole / "dataset.json"), Path(experiment.run), experiment.features_folder
    measured = Path(experiment.folder) / "measured"
    extracted = {**size, **{name: getattr(experiment, name) for name in ("backbone", "weights", "devices")}}
    times_file = measured / f"{experiment.features}-times.json"

    def extract() -> dict[str, float]:
        run_in_process("extract", _words(variables, _timed(times_file)))
        return {"read_rate": read_rate(FeatureStore.open(store).data_files)}

    record = measure(measured / f"{experiment.features}.json", extracted, [store], extract)
    images, opened, rate = info["images"], FeatureStore.open(store), record["read_rate"]
    factor = images / len(opened)
    row = _row("extract", record, [], f"{images:,} images") | {"here": f"{len(opened):,} images"}
    if opened.meta.get(FROM_FILES):  # only reads the files
        row |= {"real": f"{images:,} image files, at the disk's rate", "hours": images * opened.row_bytes / rate / 3600}
        row["disk_bytes"] = int(disk_bytes([store]) * factor)
    else:
        times = read_json(times_file)
        predict = times["predict"]
        seconds, flops = predict["seconds"] * factor, predict["flops"] and predict["flops"] * factor
        row |= {"hours": seconds / 3600, **gpu(times, seconds, flops, tflops)}
        row["disk_bytes"] = int(images * opened.row_bytes)
    rows = [row]
    settings: dict[str, Any] = {**size, **variables, "steps": steps, "limit": limit}
    for stage in (PRETRAIN, FINETUNE) if experiment.has_pretraining else (FINETUNE,):
        out, times_file = experiment.stage_folder(stage), run / "measured" / f"{stage}-times.json"
        here = max(steps, least_steps(experiment, stage))
        options = [f"--trainer.max_steps={here}", f"--trainer.val_check_interval={here}", f"--data.val_limit={limit}"]
        if stage == PRETRAIN and _needs_negatives(experiment):
            options.append(f"--data.negatives={whole / 'negatives.jsonl'}")
        more: dict[str, Any] = {"tasks": "in turn"} if task_shares(experiment, stage) else {}
        if recomputes(experiment, stage):
            options.append("--model.captioner.init_args.checkpointing=true")
            more["checkpointing"] = True
        action = partial(run_in_process, stage, _words(variables, *options, _timed(times_file)))
        settings["files"] = [file_hash(file) for file in experiment.config_files(stage)]
        record = measure(run / "measured" / f"{stage}.json", {**settings, **more, "steps": here}, [out], action)
        row = training_row(experiment, stage, record, read_json(times_file), rate, tflops)
        rows.append({**row, "disk_bytes": disk_bytes([out])})
    times = read_json(times_file)
    action = partial(run_in_process, "eval", _words(variables, f"--limit={limit}"))
    record = measure(run / "measured/eval.json", settings, [experiment.evaluation], action)
    tested, validation = info["splits"]["test"]["pairs"], times["validation"]
    here = min(limit, tested)
    row = _row("eval", record, [experiment.evaluation], f"{tested:,} pairs")
    seconds = record["seconds"] + (tested - here) * validation["seconds"] / validation["pairs"]
    flops = validation["flops"] and validation["flops"] * tested / validation["pairs"]
    row |= {"here": f"{here:,} pairs", "hours": seconds / 3600, **gpu(times, seconds, flops, tflops), "gpu_bytes": None}
    row["disk_bytes"] = row["disk_bytes"] * tested // here
    return [*rows, row]


def _timed(path: Path) -> str:
    """The option that adds the callback which measures a trainer."""
    callback = {"class_path": "diffcap.lit.step_times.StepTimes", "init_args": {"path": str(path)}}
    return f"--trainer.callbacks={json.dumps([callback])}"


def _machine() -> dict[str, Any]:
    date = datetime.now(UTC).date().isoformat()
    return {"cores": available_cores(), "load": os.getloadavg()[0], "date": date, "commit": git_commit()}


if __name__ == "__main__":
    run_command(rehearsal)
