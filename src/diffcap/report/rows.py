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
_SAME = ("dataset", "split", "limit", "beams", "length_penalty", "tokenizer", "changes", "metrics")


@dataclass(frozen=True)
class Run:
    """An evaluation of a run, or the captions that another system wrote into a file."""

    folder: Path  # as the user named it: the run's or the evaluation's; the file of another system
    metrics: dict[str, Any]  # content of metrics.json
    predictions: dict[str, str]  # id -> caption
    checkpoints: Sequence[Path] = ()  # several of an ensemble; none of another system
    # Scores by group with PTB tokens, if they are known and the protocol has others.
    ptb_groups: dict[str, Any] | None = None


def read_run(folder: str | Path) -> Run:
    """Read an evaluation from the folder of a run, whose `eval` is read, or from its own."""
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
    """Base model, revision (None: a local folder) and prompt of a model without training, and the sentences of its answer if
    they are not 1; empty for another system."""
    notes = run.metrics["provenance"]
    for entry in notes.get("checkpoints") or []:
        if entry.get("stage") == ZERO_SHOT:
            answer = {"sentences": notes["sentences"]} if notes.get("sentences", 1) != 1 else {}
            model = {name: entry.get(name) for name in ("base", "revision")}
            return {**model, "prompt": notes.get("prompt"), **answer}
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
    """The protocol that all runs were scored by, with how the dataset compares to the official one."""
    first = runs[0]
    for run in runs:
        protocol = run.metrics["protocol"]
        manifest = run.metrics["provenance"].get("manifest_sha256")
        where = find_evaluation(run.folder) / METRICS
        if manifest != dataset.info["manifest_sha256"]:
            raise DiffcapError(
                f"{where}: scored on another manifest than {dataset.name}'s of now; run `make eval` again."
            )
        if protocol["split"] != split:
            raise DiffcapError(
                f"{where}: holds scores of the {protocol['split']} split, asked for was {split}; "
                f"evaluate with --split {split}, or report with --split {protocol['split']}."
            )
        for key in _SAME:
            value, other = (one.get(key) for one in (protocol, first.metrics["protocol"]))
            if key == "length_penalty":  # greedy decoding has none
                value, other = (one if one and protocol["beams"] > 1 else 0.0 for one in (value, other))
            if value != other:
                raise DiffcapError(
                    f"{where}: its {key} is {value!r}, that of {first.folder} is {other!r}; evaluate both in the same way."
                )
    return {**first.metrics["protocol"], **dataset_protocol(dataset.info)}


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
    """A row from what `protocols.evaluate` returns.

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
    """The accuracy of the change type in each group (name -> ids)."""
    by_id = {pair.id: pair for pair in pairs}
    return {name: slot_accuracy(predictions, [by_id[id] for id in ids])["type"] for name, ids in groups.items()}


def run_row(run: Run, pairs: Sequence[ChangePair]) -> Row:
    """`score_row` of a run, with what `training` returns."""
    lacking = [pair.id for pair in pairs if pair.id not in run.predictions]
    if lacking:
        raise DiffcapError(
            f"{find_evaluation(run.folder) / PREDICTIONS}: {len(lacking)} pairs have no caption (first {lacking[0]}); "
            "run `make eval` again."
        )
    return {**score_row(run.metrics, run.predictions, pairs), **training(run.checkpoints)}


def training(checkpoints: Sequence[Path]) -> Row:
    """The trainings of the checkpoints: {"seconds": of all, "steps": stage -> number}; nothing where no training is known."""
    lineages = map(training_lineage, checkpoints)
    files = dict.fromkeys(path for lineage in lineages for path in lineage.finished_markers())  # members may share one
    seconds = 0.0
    steps = Counter[str]()
    for path in files:
        one = read_json(path, "record of a finished training", "run that training stage again with the same command")
        steps[one["stage"]] += one["steps"]
        seconds += one["train_seconds"]
    return {"seconds": seconds, "steps": dict(steps)} if files else {}


def mean_row(rows: Sequence[Row]) -> Row:
    """One row for several seeds: the mean of each number, and under "std" the sample standard deviation. One row stays as it is."""
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
    wanted = [round(len(known) * number / count) for number in range(1, count)]
    # A cut between equal values moves to the nearer end of these values.
    cuts = set()
    for cut in wanted:
        ends = [np.searchsorted(values, values[cut], side) for side in ("left", "right")]
        cuts.add(int(min(ends, key=lambda place: abs(place - cut))))
    edges = sorted({0, *cuts, len(known)})
    return [known[first:last] for first, last in pairwise(edges)]


def viewpoint_scores(
    systems: Mapping[str, Sequence[Mapping[str, str]]], bins: Sequence[Sequence[ChangePair]], tokenizer: Tokenizer
) -> dict[str, Any]:
    """The content of `viewpoint.json`: the bins with their numbers of pairs, and each system's mean rows over its seeds.

    Each bin is scored as a corpus with document frequencies of its own, in the groups total and, where both occur, semantic and
    distractor; with the accuracy of the change type if the dataset has the attributes of its changed objects.
    """
    references = {pair.id: pair.captions for part in bins for pair in part}
    has_object_labels = any("changed" in pair.extra for part in bins for pair in part)
    runs = [(name, captions) for name, seeds in systems.items() for captions in seeds]
    texts = {str(number): {id: captions[id] for id in references} for number, (_, captions) in enumerate(runs)}
    hypotheses, tokens = tokenize_together(texts, references, tokenizer)
    described: list[dict[str, Any]] = []
    rows: dict[str, list[Row]] = {name: [] for name in systems}
    for part in bins:
        groups = {name: ids for name, ids in groups_of(part).items() if name in ("total", "semantic", "distractor")}
        low, high = (float(pair.extra[_VIEWPOINT]) for pair in (part[0], part[-1]))
        counts = {name: len(ids) for name, ids in groups.items()}
        described.append({"low": low, "high": high, "pairs": counts})
        seeds: dict[str, list[Row]] = {name: [] for name in systems}
        for number, (name, captions) in enumerate(runs):
            scores = score_tokens(hypotheses[str(number)], tokens, groups, ["CIDEr-D"])
            row: Row = {"CIDEr-D": {group: scores[group]["CIDEr-D"] for group in groups}}
            if has_object_labels:
                row["type_accuracy"] = type_accuracy(captions, part, groups)
            seeds[name].append(row)
        for name, of_seeds in seeds.items():
            rows[name].append(mean_row(of_seeds))
    return {"bins": described, "systems": rows}
