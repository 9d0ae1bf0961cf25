"""Rows of the results table: scores of each run and each baseline, means over several seeds."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from diffcap.evaluation.captions import ALL_METRICS, unavailable_metrics
from diffcap.evaluation.coco import read_other_predictions, read_predictions
from diffcap.evaluation.protocols import dataset_protocol, groups_of
from diffcap.evaluation.slots import slot_accuracy
from diffcap.records import ChangePair, Dataset, file_hash, read_json
from diffcap.run_folder import (
    METRICS,
    PREDICTIONS,
    TrainingLineage,
    evaluated_checkpoints,
    find_evaluation,
    metrics_filename,
    training_lineage,
)
from diffcap.utils.errors import DiffcapError, wrap_errors

Row = dict[str, Any]
ZERO_SHOT = "zero-shot"  # stage of a vision-language model without training in metrics.json
_SLOTS = ("type", "object", "to")
_SAME = ("dataset", "split", "limit", "beams", "length_penalty", "tokenizer", "changes", "metrics")


@dataclass(frozen=True)
class Run:
    """An evaluation of a run, or the captions that another system wrote into a file."""

    folder: Path  # as the user named it: the run's or the evaluation's; the file of another system
    evaluation: Path  # folder with metrics.json; the file of another system
    metrics: dict[str, Any]  # content of metrics.json
    predictions: dict[str, str]  # id -> caption
    checkpoints: list[Path]  # several of an ensemble; none of another system
    lineages: list[TrainingLineage]  # the trainings behind each checkpoint
    ptb_groups: dict[str, Any] | None = (
        None  # scores by group with PTB tokens, if they are known and the protocol has others
    )


def read_run(folder: str | Path) -> Run:
    """Read an evaluation from the folder of a run, whose `eval` is read, or from its own."""
    evaluation = find_evaluation(folder)
    metrics = read_metrics(evaluation)
    checkpoints = evaluated_checkpoints(evaluation, metrics)
    predictions = read_predictions(evaluation / PREDICTIONS)
    ptb = metrics_filename("ptb")
    return Run(
        Path(folder),
        evaluation,
        metrics,
        predictions,
        checkpoints,
        [training_lineage(path) for path in checkpoints],
        read_metrics(evaluation, ptb)["groups"] if (evaluation / ptb).is_file() else None,
    )


def read_files(
    files: Mapping[str, Sequence[str]], pairs: Sequence[ChangePair], dataset: Dataset, split: str
) -> dict[str, dict[str, str]]:
    """Read the captions of other systems (name -> files, one per seed) for the scored pairs of a split: file -> id -> caption."""
    scored, known = [pair.id for pair in pairs], [pair.id for pair in dataset.pairs if pair.split == split]
    name = f"the {split} split of {dataset.name}"
    return {path: read_other_predictions(path, scored, known, name) for paths in files.values() for path in paths}


def file_run(path: str, captions: Mapping[str, str], result: Mapping[str, Any], ptb: Mapping[str, Any] | None) -> Run:
    """The captions of another system as a run; `ptb` are its scores with PTB tokens if the protocol has raw ones."""
    metrics = {**result, "provenance": {"file": path, "sha256": file_hash(path)}}
    return Run(Path(path), Path(path), metrics, dict(captions), [], [], ptb["groups"] if ptb else None)


def zero_shot_origin(run: Run) -> dict[str, Any] | None:
    """Base model, revision (None: a local folder) and prompt of a model without training, and the sentences of its answer if
    they are not 1; None for another system."""
    notes = run.metrics["provenance"]
    for entry in notes.get("checkpoints") or []:
        if entry.get("stage") == ZERO_SHOT:
            answer = {"sentences": notes["sentences"]} if notes.get("sentences", 1) != 1 else {}
            return {**{name: entry.get(name) for name in ("base", "revision")}, "prompt": notes.get("prompt"), **answer}
    return None


def read_metrics(evaluation: Path, name: str = METRICS) -> dict[str, Any]:
    """Read an evaluation's metrics.json, or its scores by another tokenizer."""
    path = evaluation / name
    metrics = read_json(path, "scores", "give the folder of an evaluated run, or run `make eval`")
    with wrap_errors(path, "not the scores of an evaluation", "run `make eval` again"):
        itemgetter("dataset", "split", "tokenizer", "metrics", "pairs")(metrics["protocol"])
        itemgetter("groups", "provenance")(metrics)
    for scored, recorded in metrics["provenance"].get("files", {}).items():
        file = evaluation / scored
        if not file.is_file() or file_hash(file) != recorded:
            raise DiffcapError(f"{file}: not the file that {name} was computed from; run `make eval` again.")
    return metrics


def training(lineages: Sequence[TrainingLineage]) -> Row:
    """What went into a row: {"seconds": of all trainings, "steps": stage -> number}; nothing where no training is known."""
    files = dict.fromkeys(path for lineage in lineages for path in lineage.finished_markers())  # members may share one
    seconds, steps = 0.0, Counter[str]()
    for path in files:
        one = read_json(path, "record of a finished training", "run that training stage again with the same command")
        steps[one["stage"]] += one["steps"]
        seconds += one["train_seconds"]
    return {"seconds": seconds, "steps": dict(steps)} if files else {}


def common_protocol(runs: Sequence[Run], dataset: Dataset, split: str) -> dict[str, Any]:
    """The protocol that all runs were scored by, which is then the baselines' too, with how the dataset stands to the official one."""
    first = runs[0]
    for run in runs:
        protocol, theirs = run.metrics["protocol"], run.metrics["provenance"].get("manifest_sha256")
        where = run.evaluation / METRICS
        if theirs != dataset.info["manifest_sha256"]:
            raise DiffcapError(
                f"{where}: scored on another manifest than {dataset.name}'s of now; run `make eval` again."
            )
        if protocol["split"] != split:
            raise DiffcapError(
                f"{where}: holds scores of the {protocol['split']} split, asked for was {split}; "
                f"evaluate with --split {split}, or report with --split {protocol['split']}."
            )
        for key in _SAME:
            value, ours = (one.get(key) for one in (protocol, first.metrics["protocol"]))
            if key == "length_penalty":  # greedy decoding has none, as files of before
                value, ours = (one if one and protocol["beams"] > 1 else 0.0 for one in (value, ours))
            if value != ours:
                raise DiffcapError(
                    f"{where}: its {key} is {value!r}, that of {first.folder} is {ours!r}; evaluate both in the same way."
                )
    return {**first.metrics["protocol"], **dataset_protocol(dataset.info)}  # runs of before have no such keys


def default_protocol(dataset: Dataset, split: str) -> dict[str, Any]:
    """A protocol where there is no run: all pairs of the split, PTB tokens, all metrics that this machine can compute."""
    groups = groups_of([pair for pair in dataset.pairs if pair.split == split and pair.captions])
    if not groups["total"]:
        raise DiffcapError(f"{dataset.name} has no {split} pair with a reference caption; choose another --split.")
    unavailable = unavailable_metrics()
    changes = dataset.info.get("changes")
    return {
        "dataset": dataset.name,
        "split": split,
        **({"changes": changes} if changes else {}),
        "tokenizer": "ptb",
        "metrics": [name for name in ALL_METRICS if name not in unavailable],
        "pairs": {name: len(ids) for name, ids in groups.items()},
        **dataset_protocol(dataset.info),
    }


def score_row(result: Mapping[str, Any], predictions: Mapping[str, str], pairs: Sequence[ChangePair]) -> Row:
    """A row from what `protocols.evaluate` returns: its groups, and where there are slots, those too.

    Returns:
        {group: {metric: fraction}, "slots": {"type", "object", "to"}, "type_accuracy": {group: fraction}, "id_tokens": groups of the
        protocol levir_cc}.
    """
    row: Row = dict(result["groups"])
    if "id_tokens" in result:
        row["id_tokens"] = result["id_tokens"]["groups"]
    if "slots" in result:
        row["slots"] = {name: result["slots"][name] for name in _SLOTS if name in result["slots"]}
        by_id = {pair.id: pair for pair in pairs}
        row["type_accuracy"] = {
            name: slot_accuracy(predictions, [by_id[id] for id in ids])["type"]
            for name, ids in groups_of(pairs).items()
        }
    return row


def run_row(run: Run, pairs: Sequence[ChangePair]) -> Row:
    """`score_row` of a run, with "seconds" of training (all stages) and "steps" by stage, where they are known."""
    lacking = [pair.id for pair in pairs if pair.id not in run.predictions]
    if lacking:
        raise DiffcapError(
            f"{run.evaluation / PREDICTIONS}: {len(lacking)} pairs have no caption (first {lacking[0]}); "
            "run `make eval` again."
        )
    return {**score_row(run.metrics, run.predictions, pairs), **training(run.lineages)}


def mean_row(rows: Sequence[Row]) -> Row:
    """One row for several seeds: the mean at every number's place, and under "std" the sample standard deviation.

    A single row comes back as it is.
    """
    if len(rows) == 1:
        return rows[0]
    return {**_merge(rows, statistics.fmean), "std": _merge(rows, statistics.stdev), "runs": len(rows)}


def _merge(values: Sequence[Any], reduce: Any) -> Any:
    if isinstance(values[0], Mapping):
        shared = [key for key in values[0] if all(key in value for value in values)]
        return {key: _merge([value[key] for value in values], reduce) for key in shared}
    return reduce([float(value) for value in values])
