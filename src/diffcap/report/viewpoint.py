"""`viewpoint.json`: scores by the similarity of the two viewpoints (Park, Darrell and Rohrbach, "Robust Change Captioning", ICCV
2019)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from diffcap.evaluation.captions import score_tokens, tokenize_together
from diffcap.evaluation.protocols import groups_of
from diffcap.evaluation.slots import slot_accuracy
from diffcap.evaluation.tokenize import Tokenizer
from diffcap.records import ChangePair
from diffcap.report.rows import Row, mean_row

KEY = "viewpoint_iou"
_GROUPS = ("total", "semantic", "distractor")


@dataclass(frozen=True)
class Bin:
    """Pairs whose viewpoint IoU lies in `low` to `high`, both included."""

    low: float
    high: float
    pairs: list[ChangePair]


def quantile_bins(pairs: Sequence[ChangePair], count: int) -> list[Bin]:
    """Divide the pairs with a viewpoint IoU into bins of about equal size, from different to similar viewpoints.

    Pairs of equal IoU are in one bin, so there may be fewer bins than `count`.

    Returns:
        Bins that are not empty; no bins if no pair has an IoU, or all have the same.
    """
    known = [pair for pair in pairs if isinstance(pair.extra.get(KEY), int | float)]
    known.sort(key=lambda pair: pair.extra[KEY])
    values = np.array([pair.extra[KEY] for pair in known], dtype=float)
    if len(np.unique(values)) < 2:
        return []
    count = min(count, len(known))
    wanted = [round(len(known) * number / count) for number in range(1, count)]
    # A cut between equal values moves to the nearer end of these values.
    ends = [(np.searchsorted(values, values[cut]), np.searchsorted(values, values[cut], "right")) for cut in wanted]
    cuts = {int(min(end, key=lambda place: abs(place - cut))) for end, cut in zip(ends, wanted)}
    edges = sorted({0, *cuts, len(known)})
    return [Bin(float(values[first]), float(values[last - 1]), known[first:last]) for first, last in pairwise(edges)]


def score_bins(
    predictions: Mapping[str, str],
    bins: Sequence[Bin],
    hypotheses: Mapping[str, str],
    references: Mapping[str, list[str]],
) -> list[Row]:
    """Score one system's captions, each bin as a corpus with document frequencies of its own.

    Args:
        predictions: id -> caption, for at least the bins' pairs. hypotheses: the same captions as tokens.
        references: id -> tokens of each reference.

    Returns:
        A row for each bin: {"CIDEr-D": group -> fraction}, with the groups total and, where both occur, semantic and
        distractor; and "type_accuracy" for the same groups if the dataset has the attributes of its changed objects.
    """
    has_object_labels = any("changed" in pair.extra for part in bins for pair in part.pairs)
    rows: list[Row] = []
    for part in bins:
        pairs = {pair.id: pair for pair in part.pairs}
        groups = _groups(part)
        scores = score_tokens(hypotheses, references, groups, ["CIDEr-D"])
        row: Row = {"CIDEr-D": {name: scores[name]["CIDEr-D"] for name in groups}}
        if has_object_labels:
            row["type_accuracy"] = {
                name: slot_accuracy(predictions, [pairs[id] for id in ids])["type"] for name, ids in groups.items()
            }
        rows.append(row)
    return rows


def viewpoint_scores(
    systems: Mapping[str, Sequence[Mapping[str, str]]], bins: Sequence[Bin], tokenizer: Tokenizer
) -> dict[str, Any]:
    """The content of `viewpoint.json`: the bins with their numbers of pairs, and each system's rows, see `mean_row`.

    Args:
        systems: name -> captions by id, one mapping for each seed.
    """
    references = {pair.id: pair.captions for part in bins for pair in part.pairs}
    runs = [(name, captions) for name, seeds in systems.items() for captions in seeds]
    texts = {str(number): {id: captions[id] for id in references} for number, (_, captions) in enumerate(runs)}
    hypotheses, tokens = tokenize_together(texts, references, tokenizer)
    rows: dict[str, list[list[Row]]] = {}
    for number, (name, captions) in enumerate(runs):
        rows.setdefault(name, []).append(score_bins(captions, bins, hypotheses[str(number)], tokens))
    counts = [{name: len(ids) for name, ids in _groups(part).items()} for part in bins]
    return {
        "bins": [{"low": part.low, "high": part.high, "pairs": pairs} for part, pairs in zip(bins, counts)],
        "systems": {name: [mean_row(of_bin) for of_bin in zip(*seeds)] for name, seeds in rows.items()},
    }


def _groups(part: Bin) -> dict[str, list[str]]:
    return {name: ids for name, ids in groups_of(part.pairs).items() if name in _GROUPS}
