"""Rows of the results table: scores of each run and each baseline, means over several seeds, and scores by viewpoint."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from diffcap.evaluation.captions import ALL_METRICS, Tokenizer, score_tokens, tokenize_together, unavailable_metrics
from diffcap.evaluation.coco import read_predictions
from diffcap.evaluation.protocols import dataset_protocol, groups_of
from diffcap.evaluation.slots import slot_accuracy
from diffcap.records import ChangePair, Dataset, file_hash, read_json
from diffcap.run_folder import (
    METRICS,
    PREDICTIONS,
    evaluated_checkpoints,
    find_evaluation,
    metrics_filename,
    training_lineage,
)
from diffcap.utils.errors import DiffcapError, wrap_errors

Row = dict[str, Any]
ZERO_SHOT = "zero-shot"  # stage of a vision-language model without training in metrics.json
_VIEWPOINT = "viewpoint_iou"
_SLOTS = ("type", "object", "to")
_COMMON_SETTINGS = ("dataset", "split", "limit", "beams", "length_penalty", "tokenizer", "changes", "metrics")


@dataclass(frozen=True)
class Run:
    """An evaluation of a run, or the captions that another system wrote into a file."""

    folder: Path  # path from the command line: a run's folder, an evaluation's folder, or the file of another system
    metrics: dict[str, Any]  # content of metrics.json
    predictions: dict[str, str]  # id -> caption
    checkpoints: Sequence[Path] = ()  # several for an ensemble, none for another system
    ptb_groups: dict[str, Any] | None = None  # scores by group with PTB tokens, if the protocol has other tokens


def read_run(folder: str | Path) -> Run:
    """Read an evaluation from its own folder, or from the folder of its run."""
    evaluation = find_evaluation(folder)
    metrics = read_metrics(evaluation)
    ptb = metrics_filename("ptb")
    return Run(
        Path(folder),
        metrics,
        read_predictions(evaluation / PREDICTIONS),
        evaluated_checkpoints(evaluation, metrics),
        read_metrics(evaluation, ptb)["groups"] if (evaluation / ptb).is_file() else None,
    )


def zero_shot_origin(run: Run) -> dict[str, Any]:
    """Return "base", "revision" and "prompt" of a model without training, and "sentences" if not 1; {} for other runs."""
    origin = run.metrics["provenance"]
    for entry in origin.get("checkpoints") or []:
        if entry.get("stage") == ZERO_SHOT:
            sentences = {"sentences": origin["sentences"]} if origin.get("sentences", 1) != 1 else {}
            return {
                "base": entry.get("base"),
                "revision": entry.get("revision"),
                "prompt": origin.get("prompt"),
                **sentences,
            }
    return {}


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


def common_protocol(runs: Sequence[Run], dataset: Dataset, split: str) -> dict[str, Any]:
    """Check that all runs were scored alike, and return their protocol with the dataset's entries (`dataset_protocol`)."""
    first = runs[0]
    for run in runs:
        protocol = run.metrics["protocol"]
        manifest = run.metrics["provenance"].get("manifest_sha256")
        where = find_evaluation(run.folder) / METRICS
        if manifest != dataset.info["manifest_sha256"]:
            raise DiffcapError(f"{where}: scored on another manifest of {dataset.name}; run `make eval` again.")
        if protocol["split"] != split:
            raise DiffcapError(
                f"{where}: contains scores of the {protocol['split']} split, not of {split}; "
                f"evaluate with --split {split}, or report with --split {protocol['split']}."
            )
        for key in _COMMON_SETTINGS:
            value, first_value = protocol.get(key), first.metrics["protocol"].get(key)
            if key == "length_penalty":  # greedy decoding does not use it
                value, first_value = (one if one and protocol["beams"] > 1 else 0.0 for one in (value, first_value))
            if value != first_value:
                difference = f"its {key} is {value!r}, that of {first.folder} is {first_value!r}"
                raise DiffcapError(f"{where}: {difference}; evaluate both in the same way.")
    return {**first.metrics["protocol"], **dataset_protocol(dataset.info)}


def default_protocol(dataset: Dataset, split: str) -> dict[str, Any]:
    """Return the protocol of a report without runs: all pairs of the split, PTB tokens, all metrics that can be computed."""
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
    """Make a row from the result of `protocols.evaluate`.

    Returns:
        {group: {metric: fraction}, "slots": {"type", "object", "to"}, "type_accuracy": {group: fraction}, "id_tokens": groups of the
        protocol levir_cc}.
    """
    row: Row = dict(result["groups"])
    if "id_tokens" in result:
        row["id_tokens"] = result["id_tokens"]["groups"]
    if "slots" in result:
        row["slots"] = {name: result["slots"][name] for name in _SLOTS if name in result["slots"]}
        row["type_accuracy"] = type_accuracy(predictions, pairs, groups_of(pairs))
    return row


def type_accuracy(
    predictions: Mapping[str, str], pairs: Sequence[ChangePair], groups: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """Compute the accuracy of the change type in each group (name -> ids)."""
    by_id = {pair.id: pair for pair in pairs}
    return {name: slot_accuracy(predictions, [by_id[id] for id in ids])["type"] for name, ids in groups.items()}


def run_row(run: Run, pairs: Sequence[ChangePair]) -> Row:
    """Make the row of a run: `score_row` and `training`."""
    missing = [pair.id for pair in pairs if pair.id not in run.predictions]
    if missing:
        file = find_evaluation(run.folder) / PREDICTIONS
        raise DiffcapError(f"{file}: {len(missing)} pairs have no caption (first {missing[0]}); run `make eval` again.")
    return {**score_row(run.metrics, run.predictions, pairs), **training(run.checkpoints)}


def training(checkpoints: Sequence[Path]) -> Row:
    """Sum up the trainings of the checkpoints: {"seconds", "steps": stage -> number}; {} if no training is recorded."""
    lineages = map(training_lineage, checkpoints)
    files = dict.fromkeys(path for lineage in lineages for path in lineage.finished_markers())  # members may share one
    seconds = 0.0
    steps = Counter[str]()
    for path in files:
        record = read_json(path, "record of a finished training", "run that training stage again with the same command")
        steps[record["stage"]] += record["steps"]
        seconds += record["train_seconds"]
    return {"seconds": seconds, "steps": dict(steps)} if files else {}


def mean_row(rows: Sequence[Row]) -> Row:
    """Merge the rows of several seeds: the mean of each number, and under "std" the sample standard deviation. Keep a single row."""
    if len(rows) == 1:
        return rows[0]
    return {**_merge(rows, statistics.fmean), "std": _merge(rows, statistics.stdev), "runs": len(rows)}


def _merge(values: Sequence[Any], reduce: Any) -> Any:
    if isinstance(values[0], Mapping):
        shared = [key for key in values[0] if all(key in value for value in values)]
        return {key: _merge([value[key] for value in values], reduce) for key in shared}
    return reduce([float(value) for value in values])


def quantile_bins(pairs: Sequence[ChangePair], count: int) -> list[list[ChangePair]]:
    """Divide the pairs by viewpoint IoU into bins of about equal size, from different to similar (Park et al., ICCV 2019).

    Pairs of equal IoU are in one bin, so there may be fewer bins than `count`; none if all have the same.
    """
    known = [pair for pair in pairs if isinstance(pair.extra.get(_VIEWPOINT), int | float)]
    known.sort(key=lambda pair: pair.extra[_VIEWPOINT])
    values = np.array([pair.extra[_VIEWPOINT] for pair in known], dtype=float)
    if len(np.unique(values)) < 2:
        return []
    count = min(count, len(known))
    edges = {0, len(known)}
    for number in range(1, count):
        cut = round(len(known) * number / count)
        # A cut between equal values moves to the nearer end of these values.
        ends = [int(np.searchsorted(values, values[cut], side)) for side in ("left", "right")]
        edges.add(min(ends, key=lambda end: abs(end - cut)))
    return [known[start:stop] for start, stop in pairwise(sorted(edges))]


def viewpoint_scores(
    systems: Mapping[str, Sequence[Mapping[str, str]]], bins: Sequence[Sequence[ChangePair]], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Score each bin as a corpus with its own document frequencies: the content of `viewpoint.json`.

    A bin has the groups total and, if both occur, semantic and distractor. The accuracy of the change type is added if the dataset has
    the attributes of its changed objects.
    """
    references = {pair.id: pair.captions for part in bins for pair in part}
    has_object_labels = any("changed" in pair.extra for part in bins for pair in part)
    runs = [(name, captions) for name, run_captions in systems.items() for captions in run_captions]
    texts = {str(number): {id: captions[id] for id in references} for number, (_, captions) in enumerate(runs)}
    hypotheses, tokens = tokenize_together(texts, references, tokenizer)
    bin_entries: list[dict[str, Any]] = []
    rows: dict[str, list[Row]] = {name: [] for name in systems}
    for part in bins:
        groups = {name: ids for name, ids in groups_of(part).items() if name in ("total", "semantic", "distractor")}
        low, high = (float(pair.extra[_VIEWPOINT]) for pair in (part[0], part[-1]))
        counts = {name: len(ids) for name, ids in groups.items()}
        bin_entries.append({"low": low, "high": high, "pairs": counts})
        run_rows: dict[str, list[Row]] = {name: [] for name in systems}
        for number, (name, captions) in enumerate(runs):
            scores = score_tokens(hypotheses[str(number)], tokens, groups, ["CIDEr-D"])
            row: Row = {"CIDEr-D": {group: scores[group]["CIDEr-D"] for group in groups}}
            if has_object_labels:
                row["type_accuracy"] = type_accuracy(captions, part, groups)
            run_rows[name].append(row)
        for name in systems:
            rows[name].append(mean_row(run_rows[name]))
    return {"bins": bin_entries, "systems": rows}
