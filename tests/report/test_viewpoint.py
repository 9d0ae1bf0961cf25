"""Scores by viewpoint."""

import statistics
from itertools import pairwise

import numpy as np
import pytest

from diffcap.evaluation.protocols import evaluate
from diffcap.evaluation.slots import parse_caption
from diffcap.records import ChangePair
from diffcap.report.rows import Row
from diffcap.report.viewpoint import Bin, quantile_bins, score_bins, viewpoint_scores

CUBE = {"size": "large", "color": "gray", "material": "metal", "shape": "cube", "to": None}
SAID = ("the cube vanished", "the gray cube was moved", "there is no change", "the small ball appeared")


def pairs_of(values: list[float | None], has_object_labels: bool = True) -> list[ChangePair]:
    pairs = []
    for number, value in enumerate(values):
        still = number % 3 == 0
        extra = {} if value is None else {"viewpoint_iou": value}
        if has_object_labels and not still:
            extra["changed"] = CUBE
        captions = ["no change was made", "there is no change"] if still else [f"the gray cube was moved {number}"]
        pairs.append(ChangePair(str(number), "b", "a", captions, "test", None if still else "move", still, extra))
    return pairs


def captions_for(pairs: list[ChangePair], seed: int = 0) -> dict[str, str]:
    random = np.random.default_rng(seed)
    return {pair.id: SAID[random.integers(4)] for pair in pairs}


def score_raw(captions: dict[str, str], bins: list[Bin]) -> list[Row]:
    references = {pair.id: pair.captions for part in bins for pair in part.pairs}
    return score_bins(captions, bins, captions, references)


def test_bins_part_all_pairs_that_know_their_viewpoint() -> None:
    values = np.random.default_rng(0).uniform(0.3, 0.9, 53).round(4).tolist()
    pairs = pairs_of([*values, None, None])
    bins = quantile_bins(pairs, 5)
    assert sorted(pair.id for part in bins for pair in part.pairs) == sorted(pair.id for pair in pairs[:53])
    assert {len(part.pairs) for part in bins} <= {10, 11} and len(bins) == 5
    for part in bins:
        inside = [pair.extra["viewpoint_iou"] for pair in part.pairs]
        assert (part.low, part.high) == (min(inside), max(inside))
    assert all(one.high < two.low for one, two in pairwise(bins))


def test_equal_viewpoints_stay_together() -> None:
    bins = quantile_bins(pairs_of([1.0] * 8 + [0.5, 0.6]), 5)
    assert [(part.low, part.high, len(part.pairs)) for part in bins] == [(0.5, 0.6, 2), (1.0, 1.0, 8)]
    assert len(quantile_bins(pairs_of([0.1, 0.2, 0.3]), 5)) == 3
    assert quantile_bins(pairs_of([1.0] * 8), 5) == [] == quantile_bins(pairs_of([None] * 4), 5)


@pytest.mark.parametrize("pairs", range(2, 8))
@pytest.mark.parametrize("count", [1, 3, 5, 10])
def test_fewer_pairs_than_bins_give_fewer_bins(pairs: int, count: int) -> None:
    parts = quantile_bins(pairs_of([0.1 * number for number in range(pairs)]), count)
    assert len(parts) == min(pairs, count) and all(part.pairs for part in parts)
    assert [pair.id for part in parts for pair in part.pairs] == [str(number) for number in range(pairs)]


def test_each_bin_scores_as_a_split_of_its_own() -> None:
    pairs = pairs_of(np.random.default_rng(1).uniform(size=40).tolist())
    predictions = captions_for(pairs)
    bins = quantile_bins(pairs, 3)
    rows = score_raw(predictions, bins)
    for part, row in zip(bins, rows):
        own = {pair.id: predictions[pair.id] for pair in part.pairs}
        alone = evaluate(own, part.pairs, "raw", ["CIDEr-D"])
        for group in ("total", "semantic", "distractor"):
            assert row["CIDEr-D"][group] == pytest.approx(alone["groups"][group]["CIDEr-D"])
        right = [parse_caption(own[pair.id]).change_type == (pair.change_type or "none") for pair in part.pairs]
        assert row["type_accuracy"]["total"] == sum(right) / len(right) == alone["slots"]["type"]
    plain = score_raw(predictions, quantile_bins(pairs_of([0.1, 0.5, 0.8, 0.9], has_object_labels=False), 2))
    assert all(row.keys() == {"CIDEr-D"} for row in plain)


def test_seeds_give_a_mean_and_a_standard_deviation() -> None:
    pairs = pairs_of(np.random.default_rng(2).uniform(size=40).tolist())
    bins = quantile_bins(pairs, 4)
    seeds = [captions_for(pairs, seed) for seed in (1, 2)]
    scores = viewpoint_scores({"base": seeds[:1], "run": seeds}, bins, "raw")
    assert [part["pairs"]["total"] for part in scores["bins"]] == [10] * 4
    each = [score_raw(predictions, bins) for predictions in seeds]
    for number, row in enumerate(scores["systems"]["run"]):
        values = [rows[number]["CIDEr-D"]["total"] for rows in each]
        assert row["CIDEr-D"]["total"] == pytest.approx(statistics.mean(values))
        assert row["std"]["CIDEr-D"]["total"] == pytest.approx(statistics.stdev(values)) and row["runs"] == 2
    assert scores["systems"]["base"] == each[0]
