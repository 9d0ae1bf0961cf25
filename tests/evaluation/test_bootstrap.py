"""The paired bootstrap: its scores on all pairs are the metrics', its draws are draws, its intervals cover the truth."""

import random

import numpy as np
import pytest
from tests.toy import captions, pairs

from diffcap.evaluation.bootstrap import additive_metrics, bootstrap_scores, bootstrap_sums, compare, compare_scores
from diffcap.evaluation.captions import score_tokens
from diffcap.evaluation.java import meteor, meteor_counts, meteor_of_sums, running_meteor
from diffcap.evaluation.protocols import groups_of
from diffcap.utils.errors import DiffcapError

FAST = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "ROUGE-L", "CIDEr-D")
PAIRS = pairs(20)
REFERENCES = {pair.id: pair.captions for pair in PAIRS}
GROUPS = groups_of(PAIRS)


def predictions(seed: int, right: float) -> dict[str, str]:
    """Captions of which a part is a reference, and the others some other pair's or nothing."""
    draws = random.Random(seed)
    others = ["", *(captions(draws.randrange(20), draws.random() < 0.5)[0] for _ in range(9))]
    return {
        id: draws.choice(texts) if draws.random() < right else draws.choice(others) for id, texts in REFERENCES.items()
    }


def test_a_draw_is_scored_as_the_corpus_of_its_pairs() -> None:
    hypotheses = predictions(3, 0.5)
    ids, samples = list(REFERENCES), 5
    system = additive_metrics(hypotheses, REFERENCES, {"total": ids}, FAST)
    scores = bootstrap_scores([system], {"total": ids}, samples, seed=4)[0]["total"]
    generator = np.random.default_rng([4, 0])
    numbers = generator.integers(len(ids), size=(samples, len(ids)))
    cider = system[-1].summands["total"][:, 0]
    for draw, drawn in enumerate(numbers, 1):
        texts = {str(n): hypotheses[ids[place]] for n, place in enumerate(drawn)}
        expectation = {str(n): REFERENCES[ids[place]] for n, place in enumerate(drawn)}
        corpus = score_tokens(texts, expectation, {"total": list(texts)}, [name for name in FAST if name != "CIDEr-D"])
        for metric, score in corpus["total"].items():
            assert scores[metric][draw] == pytest.approx(score, abs=1e-9), metric
        assert scores["CIDEr-D"][draw] == pytest.approx(cider[drawn].mean(), abs=1e-9)  # the group's frequencies


@pytest.mark.thorough
def test_meteor_of_summed_counts_is_the_jars_own_corpus_score() -> None:
    hypotheses = {**predictions(5, 0.5), "0.png": REFERENCES["0.png"][0]}
    ids, draws = list(hypotheses), random.Random(0)
    groups = {str(n): draws.choices(ids, k=draws.randint(1, 40)) for n in range(12)} | {"one": ["0.png"]}
    with running_meteor() as process:
        rows = dict(zip(ids, meteor_counts(hypotheses, REFERENCES, process)))
        found = meteor_of_sums(np.array([sum(rows[id] for id in members) for members in groups.values()]), process)
    expected = meteor(hypotheses, REFERENCES, groups)
    np.testing.assert_allclose(found, list(expected.values()), rtol=0, atol=1e-12)
    assert len(set(found.round(6))) > 5 and found[-1] > 0.9


def test_draws_are_paired_and_depend_on_the_seed_alone() -> None:
    one = predictions(1, 0.3)
    same = compare(one, one, REFERENCES, GROUPS, "raw", FAST, samples=20)
    assert all(
        row["interval"] == [0, 0] and row["a_interval"] == pytest.approx(row["b_interval"]) and row["b_better"] == 0.5
        for metrics in same["groups"].values()
        for row in metrics.values()
    )
    assert same["wins"]["total"] == {"b": 0, "a": 0, "tie": len(REFERENCES)}
    two = predictions(2, 0.7)
    runs = [compare(one, two, REFERENCES, GROUPS, "raw", FAST, samples=20, seed=seed) for seed in (0, 0, 1)]
    assert runs[0] == runs[1] and runs[0]["groups"] != runs[2]["groups"]


def test_intervals_are_as_wide_as_the_theory_of_means_says() -> None:
    values = np.random.default_rng(0).normal(3, 2, size=(400, 1))
    sums = bootstrap_sums(np.concatenate([values, np.ones_like(values)], 1), 4000, np.random.default_rng(1))
    means = sums[:, 0] / sums[:, 1]
    assert (sums[:, 1] == 400).all() and means[0] == pytest.approx(values.mean())
    row = compare_scores(np.zeros_like(means), means, level=0.95)
    half = 1.96 * values.std() / 20
    assert row["interval"] == pytest.approx([means[0] - half, means[0] + half], abs=0.1 * half)
    assert row["b_better"] == 1 and [row["difference"], row["b"]] == pytest.approx([means[0]] * 2)


def test_the_better_one_wins_by_group() -> None:
    worse = {id: "" for id in REFERENCES}
    better = {id: texts[0] if id.endswith("_n") else "" for id, texts in REFERENCES.items()}
    found = compare(worse, better, REFERENCES, GROUPS, "raw", FAST, samples=50)
    distractors = len(GROUPS["distractor"])
    assert found["wins"]["distractor"] == {"b": distractors, "a": 0, "tie": 0}
    assert found["wins"]["move"] == {"b": 0, "a": 0, "tie": len(GROUPS["move"])}
    low, high = found["groups"]["total"]["CIDEr-D"]["interval"]
    assert 0 < low < found["groups"]["total"]["CIDEr-D"]["difference"] < high
    assert found["scores"]["0.png_n"][1] > 1 > 0 == found["scores"]["0.png_n"][0]
    del worse["3.png"]
    with pytest.raises(DiffcapError, match=r"the first run: 1 of 40 reference ids have no prediction .'3.png'"):
        compare(worse, better, REFERENCES, GROUPS, "raw", FAST, samples=1)
