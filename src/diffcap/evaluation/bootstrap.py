"""The paired bootstrap test: is one system better than another, or is the difference due to the choice of the test pairs?

Koehn, "Statistical significance tests for machine translation evaluation" (EMNLP 2004): as many pairs as the test set has are
drawn with replacement, the same ones for both systems, and both systems are scored on this sample, as on a corpus:

* BLEU-1 to BLEU-4: the counts of the drawn pairs are added up;
* METEOR: the counts of its Java program are added up, and the program computes the score of the sum;
* ROUGE-L, SPICE: mean over the drawn pairs;
* CIDEr-D: mean over the drawn pairs, with the document frequencies of the whole group. A sample lacks a third of the pairs and
  has others several times, so its own document frequencies would be those of a smaller corpus.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from diffcap.evaluation.captions import (
    ALL_METRICS,
    Groups,
    Hypotheses,
    References,
    Tokenizer,
    tokenize_together,
    unavailable_metrics,
)
from diffcap.evaluation.java import MeteorProcess, meteor_counts, meteor_of_sums, running_meteor, spice
from diffcap.evaluation.ngrams import BLEU, CiderD, bleu_counts, bleu_of_sums, rouge_l

Array = np.ndarray[Any, np.dtype[Any]]

CHUNK = 64  # samples that are drawn at once; for each of them, the number of draws of every pair is in memory
BLOCK = 64 * CHUNK  # samples whose sums are in memory at once


class AdditiveMetric(NamedTuple):
    """One or several metrics whose corpus score is a function of a sum over the pairs."""

    names: tuple[str, ...]  # of K metrics
    rows: dict[str, Array]  # group -> (n, D), the summands of its n pairs
    score: Callable[[Array], Array]  # from sums (S, D) to scores (S, K)


def mean_of_sums(sums: Array) -> Array:
    """Compute means (S, 1) from sums of (value, 1), (S, 2); NaN values are rows (0, 0)."""
    return sums[:, :1] / np.maximum(1, sums[:, 1:])


def additive_metrics(
    hypotheses: Hypotheses,
    references: References,
    groups: Groups,
    metrics: Sequence[str],
    meteor_process: MeteorProcess | None = None,
) -> list[AdditiveMetric]:
    """Compute the summands of all metrics for one system's captions.

    Args:
        meteor_process: from `running_meteor`; needed if METEOR is one of `metrics`.
    """
    row_of = {id: number for number, id in enumerate(hypotheses)}

    def by_group(rows: Array) -> dict[str, Array]:
        return {name: rows[[row_of[id] for id in ids]] for name, ids in groups.items()}

    def means(scores: Mapping[str, float]) -> dict[str, Array]:
        values = np.array([scores[id] for id in hypotheses])
        return by_group(np.stack([np.nan_to_num(values), ~np.isnan(values)], 1).astype(float))

    result = []
    if any(name in BLEU for name in metrics):
        result.append(AdditiveMetric(BLEU, by_group(bleu_counts(hypotheses, references)), bleu_of_sums))
    if "METEOR" in metrics:
        assert meteor_process is not None
        rows = by_group(meteor_counts(hypotheses, references, meteor_process))
        result.append(AdditiveMetric(("METEOR",), rows, lambda sums: meteor_of_sums(sums, meteor_process)[:, None]))
    if "ROUGE-L" in metrics:
        result.append(AdditiveMetric(("ROUGE-L",), means(rouge_l(hypotheses, references)), mean_of_sums))
    if "CIDEr-D" in metrics:
        rows = {}
        for name, ids in groups.items():
            values = CiderD({id: references[id] for id in ids})(ids, [hypotheses[id] for id in ids])
            rows[name] = np.stack([values, np.ones(len(values))], 1)
        result.append(AdditiveMetric(("CIDEr-D",), rows, mean_of_sums))
    if "SPICE" in metrics:
        result.append(AdditiveMetric(("SPICE",), means(spice(hypotheses, references)), mean_of_sums))
    return result


def bootstrap_sums(rows: Array, samples: int, generator: np.random.Generator) -> Array:
    """Add up all rows (n, D), then the n rows of each bootstrap sample, drawn with replacement: (1 + samples, D)."""
    parts, count = [rows.sum(0, keepdims=True)], len(rows)
    for start in range(0, samples, CHUNK):
        draws = min(CHUNK, samples - start)
        drawn = generator.integers(count, size=(draws, count)) + count * np.arange(draws)[:, None]
        times = np.bincount(drawn.ravel(), minlength=draws * count).reshape(draws, count)
        parts.append(times.astype(float) @ rows)
    return np.concatenate(parts)


def bootstrap_scores(
    systems: Sequence[Sequence[AdditiveMetric]], groups: Groups, samples: int, seed: int
) -> list[dict[str, dict[str, Array]]]:
    """Score systems on all pairs, then on bootstrap samples, which are the same for all systems.

    Args:
        systems: the metrics of each system, see `additive_metrics`.

    Returns:
        For each system: group -> metric -> (1 + samples,).
    """
    widths = [metric.rows[next(iter(groups))].shape[1] for system in systems for metric in system]
    edges = np.cumsum(widths)[:-1]
    rows = [np.concatenate([metric.rows[name] for system in systems for metric in system], 1) for name in groups]
    generators = [np.random.default_rng([seed, number]) for number in range(len(rows))]

    def scores_of(draws: int) -> list[Array]:
        """For each metric, scores (systems, groups, 1 + draws, K) of all pairs, then of the next samples."""
        # For each group, the sums of all metrics of the first system, then of the second system, ...
        sums = [
            np.split(bootstrap_sums(*of_group), edges, 1) for of_group in zip(rows, itertools.repeat(draws), generators)
        ]
        values = []
        for index, metric in enumerate(systems[0]):
            of_metric = [part[index + len(systems[0]) * system] for system in range(len(systems)) for part in sums]
            values.append(metric.score(np.concatenate(of_metric)).reshape(len(systems), len(groups), 1 + draws, -1))
        return values

    blocks = [scores_of(min(BLOCK, samples - start)) for start in range(0, samples, BLOCK)]
    scores: list[dict[str, dict[str, Array]]] = [{name: {} for name in groups} for _ in systems]
    for metric, (first, *others) in zip(systems[0], zip(*blocks)):
        values = np.concatenate([first, *(block[:, :, 1:] for block in others)], 2)
        for system, by_group in zip(scores, values):
            for name, numbers in zip(groups, by_group):
                system[name].update(zip(metric.names, numbers.T))
    return scores


def compare_scores(a: Array, b: Array, level: float) -> dict[str, Any]:
    """Compare the scores of one metric of two systems, (1 + samples,) each, see `bootstrap_scores`.

    Returns:
        "a", "b": scores of all pairs. "difference": b - a. "a_interval", "b_interval", "interval" (of the difference):
        percentile intervals [low, high]. "b_better": fraction of the samples in which b scores higher; ties count half.
    """
    outside = (1 - level) / 2

    def interval(values: Array) -> list[float]:
        return [float(edge) for edge in np.quantile(values[1:], [outside, 1 - outside])]

    difference = np.round(b - a, 12)  # the last digits of sums depend on the order of the summands
    ahead = np.round(difference[1:], 6)  # BLEU-4 of captions without any match is about 1e-9, not 0
    b_better = np.mean((ahead > 0) + (ahead == 0) / 2)
    return {
        "a": float(a[0]),
        "b": float(b[0]),
        "difference": float(difference[0]),
        "a_interval": interval(a),
        "b_interval": interval(b),
        "interval": interval(difference),
        "b_better": float(b_better),
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
    """Compare two systems' captions of the same pairs with the paired bootstrap.

    Args:
        a, b: id -> caption, exactly the ids of `references`.
        groups: name -> ids, not empty.
        references, tokenizer, metrics: as in `captions.score_captions`.
        level: of the confidence intervals, a fraction.

    Returns:
        "groups": group -> metric -> see `compare_scores`. "wins": group -> {"b", "a", "tie"}: number of pairs for which b, a or
        none has the higher CIDEr-D. "scores": id -> [CIDEr-D of a, of b], with the document frequencies of all pairs.

    Example:
        >>> references = {"1": ["the cube moved"], "2": ["nothing changed"], "3": ["a ball appeared"]}
        >>> a = {"1": "the cube moved", "2": "a cube moved", "3": "the cube moved"}
        >>> b = {"1": "the cube moved", "2": "nothing changed", "3": "a cube appeared"}
        >>> result = compare(a, b, references, {"total": ["1", "2", "3"]}, "raw", ["ROUGE-L"], samples=100)
        >>> result["wins"]["total"]
        {'b': 2, 'a': 0, 'tie': 1}
        >>> row = result["groups"]["total"]["ROUGE-L"]
        >>> round(row["a"], 3), round(row["b"], 3), row["b_better"]
        (0.333, 0.889, 0.975)
    """
    ids, missing = list(references), unavailable_metrics(metrics)
    wanted = [name for name in metrics if name not in missing]
    runs = {"the first run": a, "the second run": b}
    hypotheses, reference_tokens = tokenize_together(runs, references, tokenizer)
    systems = list(hypotheses.values())
    with running_meteor() if "METEOR" in wanted else nullcontext() as meteor_process:
        summands = [additive_metrics(texts, reference_tokens, groups, wanted, meteor_process) for texts in systems]
        scores_a, scores_b = bootstrap_scores(summands, groups, samples, seed)
    cider = CiderD(reference_tokens)
    per_pair = np.stack([cider(ids, [texts[id] for id in ids]) for texts in systems], 1)
    signs = dict(zip(ids, np.sign(np.round(per_pair[:, 1] - per_pair[:, 0], 9)).tolist()))
    return {
        "groups": {
            name: {
                metric: compare_scores(scores_a[name][metric], scores_b[name][metric], level)
                for metric in wanted
                if metric in scores_a[name]
            }
            for name in groups
        },
        "wins": {
            name: {kind: sum(signs[id] == sign for id in members) for kind, sign in (("b", 1), ("a", -1), ("tie", 0))}
            for name, members in groups.items()
        },
        "scores": dict(zip(ids, per_pair.tolist())),
    }
