"""Make the rows of the results table: scores of runs and baselines, means over several seeds. Also compute scores by viewpoint."""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
from diffcap.records import ChangePair, Dataset, JsonDict, file_hash, read_json
from diffcap.run_folder import (
    METRICS,
    PREDICTIONS,
    evaluated_checkpoints,
    find_evaluation,
    metrics_filename,
    training_lineage,
)
from diffcap.utils.errors import DiffcapError, wrap_errors

Captions = Mapping[str, str]  # id of a pair -> caption
Groups = Mapping[str, Sequence[str]]  # name of a group of pairs -> ids
Row = JsonDict  # scores of one system; `score_row` describes the keys
_IOU_KEY = "viewpoint_iou"  # in `extra` of a pair: 1 if both images have the same camera position, less if not
_BIN_GROUPS = ("total", "semantic", "distractor")  # all pairs, pairs with a change, pairs without
# Entries of the protocol that must be equal in all runs. "changes" says how a pair with several changes was captioned.
_COMMON_KEYS = ("dataset", "split", "limit", "beams", "length_penalty", "tokenizer", "changes", "metrics")


@dataclass(frozen=True)
class Run:
    """An evaluation of a run, or the captions that another system wrote into a file."""

    path: Path  # from the command line: a run's folder, an evaluation's folder, or the file of another system
    metrics: JsonDict  # content of metrics.json
    predictions: dict[str, str]  # id -> caption
    checkpoints: Sequence[Path] = ()  # several for an ensemble, none for another system
    ptb_scores: JsonDict | None = None  # group -> metric -> score with PTB tokens, if `metrics` has other tokens


def read_run(path: str | Path) -> Run:
    """Read an evaluation from the folder of the evaluation, or from the folder of its run."""
    evaluation_folder = find_evaluation(path)
    metrics = read_metrics(evaluation_folder)
    ptb_filename = metrics_filename("ptb")
    has_ptb = (evaluation_folder / ptb_filename).is_file()
    return Run(
        Path(path),
        metrics,
        read_predictions(evaluation_folder / PREDICTIONS),
        evaluated_checkpoints(evaluation_folder, metrics),
        read_metrics(evaluation_folder, ptb_filename)["groups"] if has_ptb else None,
    )


def zero_shot_origin(run: Run) -> JsonDict:
    """Return "base", "revision" and "prompt" of a model without training, and the number of "sentences" if not 1; {} for other runs."""
    provenance = run.metrics["provenance"]
    for checkpoint in provenance.get("checkpoints") or []:
        if checkpoint.get("stage") == "zero-shot":  # a vision-language model that was not trained
            origin = {key: checkpoint.get(key) for key in ("base", "revision")} | {"prompt": provenance.get("prompt")}
            num_sentences = provenance.get("sentences", 1)
            return origin if num_sentences == 1 else {**origin, "sentences": num_sentences}
    return {}


def read_metrics(evaluation_folder: Path, filename: str = METRICS) -> JsonDict:
    """Read an evaluation's metrics.json, or its file of scores with another tokenizer."""
    path = evaluation_folder / filename
    metrics = read_json(path, "scores", "give the folder of an evaluated run, or run `make eval`")
    with wrap_errors(path, "not the scores of an evaluation", "run `make eval` again"):
        itemgetter("dataset", "split", "tokenizer", "metrics", "pairs")(metrics["protocol"])  # may raise a KeyError
        itemgetter("groups", "provenance")(metrics)
    for scored_filename, recorded_hash in metrics["provenance"].get("files", {}).items():
        file = evaluation_folder / scored_filename
        if not file.is_file() or file_hash(file) != recorded_hash:
            raise DiffcapError(f"{file}: not the file that {filename} was computed from; run `make eval` again.")
    return metrics


def common_protocol(runs: Sequence[Run], dataset: Dataset, split: str) -> JsonDict:
    """Check that all runs were scored alike, and return the protocol, {"dataset", "split", "tokenizer", ...}, which says how."""
    first_protocol = runs[0].metrics["protocol"]
    for run in runs:
        protocol = run.metrics["protocol"]
        manifest_hash = run.metrics["provenance"].get("manifest_sha256")
        metrics_file = find_evaluation(run.path) / METRICS
        if manifest_hash != dataset.info["manifest_sha256"]:
            raise DiffcapError(f"{metrics_file}: scored on another manifest of {dataset.name}; run `make eval` again.")
        if protocol["split"] != split:
            raise DiffcapError(
                f"{metrics_file}: contains scores of the {protocol['split']} split, not of {split}; "
                f"evaluate with --split {split}, or report with --split {protocol['split']}."
            )
        for key in _COMMON_KEYS:
            values = [protocol.get(key), first_protocol.get(key)]
            if key == "length_penalty":  # greedy decoding does not use it
                values = [penalty if penalty and protocol["beams"] > 1 else 0.0 for penalty in values]
            if values[0] != values[1]:
                difference = f"its {key} is {values[0]!r}, that of {runs[0].path} is {values[1]!r}"
                raise DiffcapError(f"{metrics_file}: {difference}; evaluate both in the same way.")
    return {**first_protocol, **dataset_protocol(dataset.info)}


def default_protocol(dataset: Dataset, split: str) -> JsonDict:
    """Return the protocol of a report without runs: all pairs of the split, PTB tokens, all metrics that can be computed."""
    groups = groups_of([pair for pair in dataset.pairs if pair.split == split and pair.captions])
    if not groups["total"]:
        raise DiffcapError(f"{dataset.name} has no {split} pair with a reference caption; choose another --split.")
    unavailable = unavailable_metrics()
    return {
        "dataset": dataset.name,
        "split": split,
        "tokenizer": "ptb",
        "metrics": [name for name in ALL_METRICS if name not in unavailable],
        "pairs": {name: len(ids) for name, ids in groups.items()},
        **dataset_protocol(dataset.info, dataset.info.get("changes")),
    }


def score_row(result: JsonDict, predictions: Captions, pairs: Sequence[ChangePair]) -> Row:
    """Make a row from the result of `protocols.evaluate`. A group ("total", "color") is a set of pairs that are scored as one corpus.

    Returns:
        {group: {metric: fraction}, "change_probability": {"AUC", "accuracy"}, "slots": {"type", "object", "to"}, "type_accuracy":
        {group: fraction}, "id_tokens": {group: {metric: fraction}} of word ids instead of words}. The last four are left out if
        `result` lacks them.
    """
    row: Row = dict(result["groups"])
    if "change_probability" in result:
        row["change_probability"] = result["change_probability"]
    if "id_tokens" in result:
        row["id_tokens"] = result["id_tokens"]["groups"]
    if "slots" in result:
        row["slots"] = {name: share for name, share in result["slots"].items() if name in ("type", "object", "to")}
        row["type_accuracy"] = type_accuracy(predictions, pairs, groups_of(pairs))
    return row


def type_accuracy(predictions: Captions, pairs: Sequence[ChangePair], groups: Groups) -> dict[str, float]:
    """Compute the accuracy of the change type in each group (name -> ids)."""
    by_id = {pair.id: pair for pair in pairs}
    return {name: slot_accuracy(predictions, [by_id[id] for id in ids])["type"] for name, ids in groups.items()}


def run_row(run: Run, pairs: Sequence[ChangePair]) -> Row:
    """Make the row of a run: its scores, and the seconds and steps of its trainings."""
    missing = [pair.id for pair in pairs if pair.id not in run.predictions]
    if missing:
        file = find_evaluation(run.path) / PREDICTIONS
        raise DiffcapError(f"{file}: {len(missing)} pairs have no caption (first {missing[0]}); run `make eval` again.")
    return {**score_row(run.metrics, run.predictions, pairs), **training_cost(run.checkpoints)}


def training_cost(checkpoints: Sequence[Path]) -> Row:
    """Sum up the cost of the checkpoints' trainings: {"seconds", "steps": stage -> number}; {} if no training is recorded."""
    lineages = map(training_lineage, checkpoints)  # the trainings that led to each checkpoint
    record_files = {path: None for lineage in lineages for path in lineage.finished_files()}  # in order, distinct
    seconds = 0.0
    steps = Counter[str]()
    for path in record_files:
        record = read_json(path, "record of a finished training", "run that training stage again with the same command")
        steps[record["stage"]] += record["steps"]
        seconds += record["train_seconds"]
    return {"seconds": seconds, "steps": dict(steps)} if record_files else {}


def mean_row(rows: Sequence[Row]) -> Row:
    """Average the rows of several seeds, with "std" (sample standard deviations) and "runs" (number of rows). One row is returned as is."""
    if len(rows) == 1:
        return rows[0]
    return {**_reduce(rows, statistics.fmean), "std": _reduce(rows, statistics.stdev), "runs": len(rows)}


def _reduce(entries: Sequence[Any], statistic: Callable[[list[float]], float]) -> Any:
    """Compute a statistic of each number in dicts of equal structure; keys that are not in all dicts are left out."""
    if isinstance(entries[0], Mapping):
        shared_keys = [key for key in entries[0] if all(key in entry for entry in entries)]
        return {key: _reduce([entry[key] for entry in entries], statistic) for key in shared_keys}
    return statistic([float(number) for number in entries])


def quantile_bins(pairs: Sequence[ChangePair], num_bins: int) -> list[list[ChangePair]]:
    """Divide the pairs by viewpoint IoU into bins of about equal size, from different to similar (Park et al., ICCV 2019).

    Pairs of equal IoU are in one bin, so there may be fewer bins than `num_bins`. The result is [] if all pairs have the same IoU.
    """
    sorted_pairs = [pair for pair in pairs if isinstance(pair.extra.get(_IOU_KEY), int | float)]
    sorted_pairs.sort(key=lambda pair: pair.extra[_IOU_KEY])
    ious = np.array([pair.extra[_IOU_KEY] for pair in sorted_pairs], dtype=float)
    if len(np.unique(ious)) < 2:
        return []
    num_bins = min(num_bins, len(sorted_pairs))
    cuts = np.round(len(sorted_pairs) * np.arange(1, num_bins) / num_bins).astype(int)
    # A cut between equal values moves to the nearer end of these values.
    left, right = (np.searchsorted(ious, ious[cuts], side) for side in ("left", "right"))
    ends = np.where(cuts - left <= right - cuts, left, right)
    edges = sorted({0, *ends.tolist(), len(sorted_pairs)})
    return [sorted_pairs[start:stop] for start, stop in pairwise(edges)]


def viewpoint_scores(
    systems: Mapping[str, Sequence[Captions]], bins: Sequence[Sequence[ChangePair]], tokenizer: Tokenizer
) -> JsonDict:
    """Compute the content of `viewpoint.json`. Each bin, with IoU from "low" to "high", is a corpus with separate document frequencies.

    Args:
        systems: name -> for each seed, id -> caption.
        bins: for each bin, pairs of similar viewpoint IoU, sorted by IoU, see `quantile_bins`.

    Returns:
        {"bins": for each bin, {"low", "high", "pairs": group -> number}, "systems": name -> for each bin, {"CIDEr-D", "type_accuracy":
        group -> score}}. The groups are total and, if both occur, semantic and distractor. "type_accuracy" needs `extra["changed"]`.
    """
    references = {pair.id: pair.captions for bin_pairs in bins for pair in bin_pairs}
    has_object_labels = any("changed" in pair.extra for bin_pairs in bins for pair in bin_pairs)
    named_captions = [(name, captions) for name, seed_captions in systems.items() for captions in seed_captions]
    texts = {str(index): {id: captions[id] for id in references} for index, (_, captions) in enumerate(named_captions)}
    hypotheses, reference_tokens = tokenize_together(texts, references, tokenizer)
    bin_entries: list[JsonDict] = []
    system_scores: dict[str, list[JsonDict]] = {name: [] for name in systems}
    for bin_pairs in bins:
        groups = {group: ids for group, ids in groups_of(bin_pairs).items() if group in _BIN_GROUPS}
        low, high = (float(pair.extra[_IOU_KEY]) for pair in (bin_pairs[0], bin_pairs[-1]))
        counts = {group: len(ids) for group, ids in groups.items()}
        bin_entries.append({"low": low, "high": high, "pairs": counts})
        seed_scores: dict[str, list[JsonDict]] = {name: [] for name in systems}
        for (name, captions), tokens in zip(named_captions, hypotheses.values()):
            metrics = score_tokens(tokens, reference_tokens, groups, ["CIDEr-D"])
            scores: JsonDict = {"CIDEr-D": {group: metrics[group]["CIDEr-D"] for group in groups}}
            if has_object_labels:
                scores["type_accuracy"] = type_accuracy(captions, bin_pairs, groups)
            seed_scores[name].append(scores)
        for name in systems:
            system_scores[name].append(mean_row(seed_scores[name]))
    return {"bins": bin_entries, "systems": system_scores}
