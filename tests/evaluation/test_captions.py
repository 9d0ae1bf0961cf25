"""The corpus metrics against pycocoevalcap's own classes."""

import json
import math
from pathlib import Path

import pytest
from tests.evaluation.stock import stock_scores

from diffcap.evaluation import captions as module
from diffcap.evaluation.captions import FAST_METRICS, score_captions, score_tokens, unavailable_metrics
from diffcap.utils.errors import DiffcapError

REFERENCES = {
    "a": ["the small red cube has been moved", "someone moved the red cube that is left of the ball"],
    "b": ["the scene is the same", "no change was made", "nothing has changed in the scene"],
    "c": ["the large green metal cylinder became blue"],
    "d": ["a ball was added", "there is a new tiny purple rubber ball behind the big cube", "a new ball appeared"],
    "e": ["the cyan block is missing", "the cyan block disappeared"],
}
PREDICTIONS = {
    "a": "the red cube that is left of the ball moved",
    "b": "no change was made",
    "c": "the large the large the cylinder became red",
    "d": "a new ball",
    "e": "the green cylinder",
}


def part(ids: str) -> tuple[dict[str, str], dict[str, list[str]]]:
    return {id: PREDICTIONS[id] for id in ids}, {id: REFERENCES[id] for id in ids}


def test_every_group_is_a_corpus_of_its_own() -> None:
    groups = {"total": list("abcde"), "some": list("ad"), "rest": list("bce"), "none": []}
    scores = score_tokens(PREDICTIONS, REFERENCES, groups, FAST_METRICS)
    assert list(scores) == ["total", "some", "rest"] and list(scores["total"]) == list(FAST_METRICS)
    for name, ids in (("total", "abcde"), ("some", "ad"), ("rest", "bce")):
        assert scores[name] == pytest.approx(stock_scores(*part(ids), meteor=False), abs=1e-9)
    mean = (2 * scores["some"]["CIDEr-D"] + 3 * scores["rest"]["CIDEr-D"]) / 5
    assert abs(scores["total"]["CIDEr-D"] - mean) > 0.01  # document frequencies are those of the group


@pytest.mark.thorough
def test_meteor_of_every_group_equals_that_of_pycocoevalcap() -> None:
    groups = {"total": list("abcde"), "some": list("ad"), "a": ["a"], "d": ["d"]}
    ours = score_tokens(PREDICTIONS, REFERENCES, groups, ["METEOR"])
    for name in ("total", "some"):
        assert ours[name]["METEOR"] == pytest.approx(stock_scores(*part("".join(groups[name])))["METEOR"], abs=1e-9)
    mean = (ours["a"]["METEOR"] + ours["d"]["METEOR"]) / 2
    assert ours["some"]["METEOR"] != pytest.approx(mean, abs=1e-3)  # no mean over pairs


@pytest.mark.thorough
def test_all_metrics_survive_empty_and_odd_captions() -> None:
    odd = {"a": "", "b": "...", "c": "a ||| b\nc", "d": "caf\u00e9 \u2028 \u7ea2\u8272", "e": "x" * 2000}
    scores = score_captions(odd, {**REFERENCES, "d": ["the caf\u00e9"]})
    assert all(0 <= value < 1 for value in scores.values())
    assert scores["METEOR"] > 0 and scores["CIDEr-D"] > 0  # the accented word was found
    assert score_captions({"a": ""}, {"a": ["."]}, metrics=["CIDEr-D"]) == {"CIDEr-D": 0}


LONG = " ".join(["the red cube in front of the blue ball moved"] * 260)
LONG_FOR_METEOR = "the pair 'long', whose caption has 2,600 words and whose longest reference has 2,600"


@pytest.mark.parametrize(
    ("predictions", "references", "metric", "words"),
    [
        ({"a": "x"}, {"a": ["x"], "b": ["y"], "c": []}, "BLEU-1", "2 of 3 reference ids have no prediction ('b'"),
        ({"a": "x", "q": "x"}, {"a": ["x"]}, "BLEU-1", "1 predictions have an id that no reference has ('q')"),
        ({"a": "x"}, {"a": []}, "BLEU-1", "1 ids have no reference caption ('a')"),
        ({}, {}, "BLEU-1", "there are no references"),
        ({"a": "x"}, {"a": ["x"]}, "BLEU-5", "'BLEU-5' is not known"),
        ({"short": "x", "long": LONG}, {"short": ["x"], "long": [LONG]}, "METEOR", LONG_FOR_METEOR),
    ],
)
def test_what_cannot_be_scored_is_refused(
    predictions: dict[str, str], references: dict[str, list[str]], metric: str, words: str
) -> None:
    with pytest.raises(DiffcapError) as caught:
        score_captions(predictions, references, "raw", [metric])
    assert words in str(caught.value) and "Java" not in str(caught.value)


def test_spice_without_its_jars_is_unavailable_not_zero(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("diffcap.evaluation.java.find_jar", lambda name: tmp_path / name)
    monkeypatch.delenv("DIFFCAP_CORENLP", raising=False)
    remedy = unavailable_metrics()["SPICE"]
    assert "stanford-corenlp-3.6.0-models.jar" in remedy and "DIFFCAP_CORENLP" in remedy
    assert "SPICE" not in score_captions({"a": "x"}, {"a": ["x"]}, "raw", ["BLEU-1", "SPICE"])
    assert unavailable_metrics(FAST_METRICS) == {}


def test_spice_with_its_jars_is_the_mean_over_pairs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def answer_as_spice(program: str, *arguments: str | Path) -> None:
        """Write a file in SPICE's form, in which the score of a pair is that of the number of words of its caption."""
        *_, source, _, out, _ = arguments
        scores = {
            row["image_id"]: {"All": {"f": len(row["test"].split()) / 10}}
            for row in json.loads(Path(source).read_text())
        }
        Path(out).write_text(json.dumps([{"image_id": id, "scores": score} for id, score in scores.items()]))

    for name in ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar"):
        (tmp_path / name).touch()
    monkeypatch.setenv("DIFFCAP_CORENLP", str(tmp_path))
    monkeypatch.setattr("diffcap.evaluation.java.run_java", answer_as_spice)
    groups = {"total": ["a", "b"], "one": ["b"]}
    scores = score_tokens({"a": "x", "b": "x y z"}, {"a": ["x"], "b": ["y"]}, groups, ["SPICE"])
    assert scores == {"total": {"SPICE": pytest.approx(0.2)}, "one": {"SPICE": pytest.approx(0.3)}}


def test_the_scores_of_single_pairs_average_to_the_score_of_all() -> None:
    perfect = {id: captions[0] for id, captions in REFERENCES.items()}
    scores = module.cider_per_pair({"ours": PREDICTIONS, "perfect": perfect}, REFERENCES, "raw")
    for name, captioned in (("ours", PREDICTIONS), ("perfect", perfect)):
        corpus = score_captions(captioned, REFERENCES, "raw", ["CIDEr-D"])["CIDEr-D"]
        assert list(scores[name]) == list(REFERENCES)
        assert math.fsum(scores[name].values()) / len(REFERENCES) == pytest.approx(corpus)
    assert scores["perfect"]["c"] == pytest.approx(10) and scores["ours"]["e"] < scores["perfect"]["e"]
    with pytest.raises(DiffcapError, match=r"^ours: 1 of 5 reference ids have no prediction \('e'\)"):
        module.cider_per_pair({"ours": part("abcd")[0]}, REFERENCES, "raw")
