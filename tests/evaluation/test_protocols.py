"""Groups of a split, and the form of `metrics.json`."""

import pytest

from diffcap.evaluation.captions import FAST_METRICS, score_captions
from diffcap.evaluation.protocols import evaluate, groups_of
from diffcap.records import ChangePair

QUICK = (*FAST_METRICS, "SPICE")


def pair(id: str, change_type: str | None = None, is_distractor: bool = False, **extra: object) -> ChangePair:
    return ChangePair(
        id, "b.png", "a.png", [f"caption of {id}", "the cube moved"], "test", change_type, is_distractor, extra
    )


CLEVR = [
    pair("1.png", "move"),
    pair("1.png_n", None, True),
    pair("2.png", "color"),
    pair("2.png_n", None, True),
    pair("3.png", "zoom"),
    pair("4.png", "color"),
]


def test_groups_are_total_semantic_distractor_and_each_type_in_the_papers_order() -> None:
    groups = groups_of(CLEVR)
    assert list(groups) == ["total", "semantic", "distractor", "color", "move", "zoom"]
    assert groups["total"] == [p.id for p in CLEVR]
    assert groups["semantic"] == ["1.png", "2.png", "3.png", "4.png"]
    assert groups["distractor"] == ["1.png_n", "2.png_n"]
    assert groups["color"] == ["2.png", "4.png"]


def test_groups_of_few_pairs() -> None:
    assert groups_of([pair("a", "color"), pair("b", "color", True)])["color"] == ["a"]
    assert groups_of([pair("a"), pair("b")]) == {"total": ["a", "b"]}
    assert list(groups_of([pair("a", None, True)])) == ["total"]
    assert groups_of([pair("a", "color"), pair("b", "distractor", True)])["distractor"] == ["b"]


def test_metrics_json_holds_groups_scored_alone() -> None:
    predictions = {p.id: f"the caption of {p.id[0]}" for p in CLEVR}
    result = evaluate(predictions, CLEVR, "raw", QUICK, protocol={"split": "test"}, provenance={"seed": 3})
    assert list(result) == ["protocol", "groups", "provenance"]
    assert result["protocol"]["split"] == "test" and result["protocol"]["tokenizer"] == "raw"
    assert result["protocol"]["pairs"] == {"total": 6, "semantic": 4, "distractor": 2, "color": 2, "move": 1, "zoom": 1}
    assert result["provenance"]["seed"] == 3
    semantic = {p.id: p for p in CLEVR if not p.is_distractor}
    alone = score_captions(
        {i: predictions[i] for i in semantic}, {i: p.captions for i, p in semantic.items()}, "raw", QUICK
    )
    assert result["groups"]["semantic"] == pytest.approx(alone)
    assert result["protocol"]["metrics"] == list(result["groups"]["total"])
    assert ("SPICE" in result["groups"]["total"]) != ("SPICE" in result["provenance"].get("unavailable", {}))
