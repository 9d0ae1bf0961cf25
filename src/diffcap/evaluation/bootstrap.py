"""Is one system better than another, or was it the choice of the test pairs: the paired bootstrap.

After Koehn, "Statistical significance tests for machine translation evaluation" (EMNLP 2004): pairs are drawn with replacement,
as many as there are, the same ones for both systems, and both are scored on the draw; over many draws that shows how far each
score, and the difference of the two, would move with other pairs. Every metric is computed from a draw as from a corpus:

* BLEU-1..4: lengths, numbers of n-grams and clipped matches of the drawn pairs are added up, then put into BLEU's formula;
* METEOR: its jar's own counts of the drawn pairs are added up, and the jar makes the score of the sum, as it does for a corpus;
* ROUGE-L, SPICE: the mean over the drawn pairs;
* CIDEr-D: the mean over the drawn pairs, with the document frequencies of the whole group in every draw. They weigh the words,
  and both systems share them: a draw asks what other captions would score, not what other weights would. (Made anew from a draw,
  in which a third of the pairs is missing and others stand several times, they would be those of a smaller corpus.)
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from diffcap.evaluation.captions import (
    ALL_METRICS,
    BLEU,
    check_ids,
    tokenize_together,
    unavailable_metrics,
)
from diffcap.evaluation.cider import CiderD
from diffcap.evaluation.meteor import Meteor, meteor_counts, meteor_of_sums, running_meteor
from diffcap.evaluation.spice import spice
from diffcap.evaluation.tokenize import Tokenizer

Array = np.ndarray[Any, np.dtype[Any]]
Tokens = Mapping[str, str]
References = Mapping[str, list[str]]
Groups = Mapping[str, Sequence[str]]

CHUNK = 64  # draws whose numbers of every pair are in memory at once
BLOCK = 64 * CHUNK  # draws whose sums are in memory at once
SMALL, TINY = 1e-9, 1e-15  # pycocoevalcap's, against a division by 0 and for a score of 0


class Additive(NamedTuple):
    """Metrics whose corpus score is a function of a sum over the pairs.

    Attributes:
        names: K metrics. rows: of each group (n, D), what each of its pairs adds. score: sums (S, D) to scores (S, K).
    """

    names: tuple[str, ...]
    rows: dict[str, Array]
    score: Callable[[Array], Array]


def bleu_rows(hypotheses: Tokens, references: References) -> Array:
    """What BLEU adds up, (N, 10): words, those of the closest reference, n-grams of each order, those that match."""
    from pycocoevalcap.bleu.bleu_scorer import cook_refs, cook_test

    rows = []
    for id, text in hypotheses.items():
        cooked = cook_test(text, cook_refs(references[id]))
        closest = min((abs(length - cooked["testlen"]), length) for length in cooked["reflen"])[1]
        rows.append([cooked["testlen"], closest, *cooked["guess"], *cooked["correct"]])
    return np.array(rows, dtype=float)


def bleu_of_sums(sums: Array) -> Array:
    """BLEU-1..4 of sums of `bleu_rows`, (S, 10) to (S, 4), as pycocoevalcap computes them."""
    said, told, guessed, right = sums[:, 0], sums[:, 1], sums[:, 2:6], sums[:, 6:10]
    scores = np.cumprod((right + TINY) / (guessed + SMALL), axis=1) ** (1 / np.arange(1, 5))
    ratio = (said + TINY) / (told + SMALL)
    return scores * np.where(ratio < 1, np.exp(1 - 1 / ratio), 1.0)[:, None]


def mean_of_sums(sums: Array) -> Array:
    """Sum and number of values, (S, 2), to their mean, (S, 1)."""
    return sums[:, :1] / np.maximum(1, sums[:, 1:])


def additive(
    hypotheses: Tokens,
    references: References,
    groups: Groups,
    metrics: Sequence[str],
    running: Meteor | None = None,
) -> list[Additive]:
    """The metrics of one system's captions in their additive form.

    Args:
        hypotheses, references: id -> tokens. groups: name -> ids. metrics: names out of `ALL_METRICS`.
        running: the program that computes METEOR, needed if METEOR is one of `metrics`.
    """
    place = {id: number for number, id in enumerate(hypotheses)}

    def by_group(rows: Array) -> dict[str, Array]:
        return {name: rows[[place[id] for id in ids]] for name, ids in groups.items()}

    def means(scores: Mapping[str, float]) -> dict[str, Array]:
        values = np.array([scores[id] for id in hypotheses])
        return by_group(np.stack([np.nan_to_num(values), ~np.isnan(values)], 1).astype(float))

    made = []
    if any(name in BLEU for name in metrics):
        made.append(Additive(BLEU, by_group(bleu_rows(hypotheses, references)), bleu_of_sums))
    if "METEOR" in metrics:
        if running is None:
            raise ValueError("METEOR needs its running program, see running_meteor")
        rows = by_group(meteor_counts(hypotheses, references, running))
        made.append(Additive(("METEOR",), rows, lambda sums: meteor_of_sums(sums, running)[:, None]))
    if "ROUGE-L" in metrics:
        from pycocoevalcap.rouge.rouge import Rouge

        scorer = Rouge()
        scores = {id: scorer.calc_score([text], references[id]) for id, text in hypotheses.items()}
        made.append(Additive(("ROUGE-L",), means(scores), mean_of_sums))
    if "CIDEr-D" in metrics:
        rows = {}
        for name, ids in groups.items():
            values = CiderD({id: references[id] for id in ids})(ids, [hypotheses[id] for id in ids])
            rows[name] = np.stack([values, np.ones(len(values))], 1)
        made.append(Additive(("CIDEr-D",), rows, mean_of_sums))
    if "SPICE" in metrics:
        made.append(Additive(("SPICE",), means(spice(hypotheses, references)), mean_of_sums))
    return made


def drawn_sums(rows: Array, samples: int, generator: np.random.Generator) -> Array:
    """Sums (1 + samples, D) of rows (n, D): of all rows, then of each draw of n rows with replacement."""
    parts, count = [rows.sum(0, keepdims=True)], len(rows)
    for start in range(0, samples, CHUNK):
        draws = min(CHUNK, samples - start)
        drawn = generator.integers(count, size=(draws, count)) + count * np.arange(draws)[:, None]
        times = np.bincount(drawn.ravel(), minlength=draws * count).reshape(draws, count)
        parts.append(times.astype(float) @ rows)
    return np.concatenate(parts)


def resampled(
    systems: Sequence[Sequence[Additive]], groups: Groups, samples: int, seed: int
) -> list[dict[str, dict[str, Array]]]:
    """Scores of systems with the same metrics, on all pairs and on the same draws of them.

    Returns:
        Of each system: group -> metric -> (1 + samples,), of which the first is on all pairs.
    """
    widths = [metric.rows[next(iter(groups))].shape[1] for system in systems for metric in system]
    edges = np.cumsum(widths)[:-1]
    rows = [np.concatenate([metric.rows[name] for system in systems for metric in system], 1) for name in groups]
    generators = [np.random.default_rng([seed, number]) for number in range(len(rows))]

    def scores_of(draws: int) -> list[Array]:
        """Of each metric, (systems, groups, 1 + draws, K): scores on all pairs, then on the next draws."""
        # of each group: the sums of each system's metrics, one after another
        sums = [
            np.split(drawn_sums(*of_group), edges, 1) for of_group in zip(rows, itertools.repeat(draws), generators)
        ]
        values = []
        for place, metric in enumerate(systems[0]):
            own = [part[place + len(systems[0]) * system] for system in range(len(systems)) for part in sums]
            values.append(metric.score(np.concatenate(own)).reshape(len(systems), len(groups), 1 + draws, -1))
        return values

    blocks = [scores_of(min(BLOCK, samples - start)) for start in range(0, samples, BLOCK)]
    scores: list[dict[str, dict[str, Array]]] = [{name: {} for name in groups} for _ in systems]
    for metric, (first, *others) in zip(systems[0], zip(*blocks)):
        values = np.concatenate([first, *(block[:, :, 1:] for block in others)], 2)
        for system, by_group in zip(scores, values):
            for name, numbers in zip(groups, by_group):
                system[name].update(zip(metric.names, numbers.T))
    return scores


def versus(a: Array, b: Array, level: float) -> dict[str, Any]:
    """One metric of two systems, (1 + samples,) each, in numbers.

    Returns:
        "a", "b", "difference" (b - a); "a_interval", "b_interval", "interval" (of the difference): the middle `level` of
        the draws; "b_better": the share of draws in which b is ahead, a tie counting half.
    """
    outside = (1 - level) / 2

    def interval(values: Array) -> list[float]:
        return [float(edge) for edge in np.quantile(values[1:], [outside, 1 - outside])]

    difference = np.round(b - a, 12)  # sums of fractions differ in their last digit by where they stand among others
    ahead = np.mean((difference[1:] > 0) + (difference[1:] == 0) / 2)
    return {
        "a": float(a[0]),
        "b": float(b[0]),
        "difference": float(difference[0]),
        "a_interval": interval(a),
        "b_interval": interval(b),
        "interval": interval(difference),
        "b_better": float(ahead),
    }


def compare(
    a: Mapping[str, str],
    b: Mapping[str, str],
    references: Mapping[str, Sequence[str]],
    groups: Groups,
    tokenizer: Tokenizer = "ptb",
    metrics: Sequence[str] = ALL_METRICS,
    samples: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> dict[str, Any]:
    """Two systems' captions of the same pairs.

    Args:
        a, b: id -> caption, exactly the ids of `references`. references: id -> captions.
        groups: name -> ids, none empty; each is a corpus of its own. tokenizer, metrics: as in `captions.score_captions`.
        samples: draws. seed: of the draws. level: of the intervals.

    Returns:
        "groups": group -> metric -> see `versus`. "wins": group -> on how many pairs "b" is ahead, "a" is, or "tie", by each
        pair's CIDEr-D. "scores": id -> [a's, b's] CIDEr-D, with the document frequencies of all pairs.

    Raises:
        DiffcapError: ids are missing or unknown, or there is no Java.
    """
    check_ids(a, references, where="the first run: ")
    check_ids(b, references, where="the second run: ")
    ids, missing = list(references), unavailable_metrics(metrics)
    wanted = [name for name in metrics if name not in missing]
    hypotheses, told = tokenize_together({"a": a, "b": b}, references, tokenizer)
    systems = list(hypotheses.values())
    with running_meteor() if "METEOR" in wanted else nullcontext() as running:
        one, two = resampled([additive(said, told, groups, wanted, running) for said in systems], groups, samples, seed)
    scorer = CiderD(told)
    per_pair = np.stack([scorer(ids, [said[id] for id in ids]) for said in systems], 1)
    scores = dict(zip(ids, per_pair.tolist()))
    ahead = dict(zip(ids, np.sign(np.round(per_pair[:, 1] - per_pair[:, 0], 9)).tolist()))
    return {
        "groups": {
            name: {
                metric: versus(one[name][metric], two[name][metric], level) for metric in wanted if metric in one[name]
            }
            for name in groups
        },
        "wins": {
            name: {kind: sum(ahead[id] == sign for id in members) for kind, sign in (("b", 1), ("a", -1), ("tie", 0))}
            for name, members in groups.items()
        },
        "scores": scores,
    }
