"""The paired bootstrap test: is one system better than another, or is the difference due to the choice of the test pairs?

Koehn, "Statistical significance tests for machine translation evaluation" (EMNLP 2004). The test pairs are scored in groups,
such as "total" (all pairs). A bootstrap sample of a group has as many pairs as the group, drawn from it with replacement. The samples are
the same for both systems. Each sample is scored as a corpus:

* BLEU-1 to BLEU-4: the counts of the sampled pairs are added up;
* METEOR: the counts of its Java program are added up, and the program computes the score of the sum;
* ROUGE-L, SPICE: mean over the sampled pairs;
* CIDEr-D: mean over the sampled pairs, with the document frequencies of the whole group, because a sample lacks about a third of the pairs.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from diffcap.evaluation.captions import (
    ALL_METRICS,
    ENGLISH_METRICS,
    Groups,
    Hypotheses,
    References,
    Tokenizer,
    tokenize_together,
    unavailable_metrics,
)
from diffcap.evaluation.java import MeteorProcess, meteor_counts, meteor_of_sums, running_meteor, spice
from diffcap.evaluation.ngrams import BLEU, Array, CiderD, bleu_counts, bleu_of_sums, rouge_l
from diffcap.text.characters import uses_characters

SAMPLES_PER_CHUNK = 64  # samples generated at once; for n pairs, they need memory for 64 x n counts


class AdditiveMetric(NamedTuple):
    """One or several metrics whose corpus score is a function of a sum over the pairs."""

    names: tuple[str, ...]  # of K metrics
    summands: dict[str, Array]  # group -> (n, D), one row for each of its n pairs
    score: Callable[[Array], Array]  # from sums (S, D) to scores (S, K)


def mean_of_sums(sums: Array) -> Array:
    """Compute means (S, 1) from sums (S, 2) of rows (value, 1); a NaN value has the row (0, 0), so it does not count."""
    return sums[:, :1] / np.maximum(1, sums[:, 1:])


def additive_metrics(
    hypotheses: Hypotheses,
    references: References,
    groups: Groups,
    metrics: Sequence[str],
    meteor_process: MeteorProcess | None = None,
) -> list[AdditiveMetric]:
    """Compute the summands (rows that are added up over the pairs) of all metrics for one system's captions.

    METEOR needs `meteor_process`, a result of `running_meteor`.
    """
    row_index = {id: index for index, id in enumerate(hypotheses)}

    def split_by_group(rows: Array) -> dict[str, Array]:
        return {group: rows[[row_index[id] for id in ids]] for group, ids in groups.items()}

    def summands_of_means(scores: Mapping[str, float]) -> dict[str, Array]:
        values = np.array([scores[id] for id in hypotheses])
        return split_by_group(np.stack([np.nan_to_num(values), ~np.isnan(values)], 1).astype(float))

    additive = []
    if any(name in BLEU for name in metrics):
        additive.append(AdditiveMetric(BLEU, split_by_group(bleu_counts(hypotheses, references)), bleu_of_sums))
    if "METEOR" in metrics:
        assert meteor_process is not None
        counts = split_by_group(meteor_counts(hypotheses, references, meteor_process))
        additive.append(AdditiveMetric(("METEOR",), counts, lambda sums: meteor_of_sums(sums, meteor_process)[:, None]))
    if "ROUGE-L" in metrics:
        additive.append(AdditiveMetric(("ROUGE-L",), summands_of_means(rouge_l(hypotheses, references)), mean_of_sums))
    if "CIDEr-D" in metrics:
        summands = {}
        for group, ids in groups.items():
            cider = CiderD({id: references[id] for id in ids})
            values = cider(ids, [hypotheses[id] for id in ids])
            summands[group] = np.stack([values, np.ones(len(values))], 1)
        additive.append(AdditiveMetric(("CIDEr-D",), summands, mean_of_sums))
    if "SPICE" in metrics:
        additive.append(AdditiveMetric(("SPICE",), summands_of_means(spice(hypotheses, references)), mean_of_sums))
    return additive


def bootstrap_sums(rows: Array, num_samples: int, generator: np.random.Generator) -> Array:
    """Return sums (1 + num_samples, D): of all rows (n, D), then of each bootstrap sample (n rows, drawn with replacement)."""
    parts = [rows.sum(0, keepdims=True)]
    num_rows = len(rows)
    for start in range(0, num_samples, SAMPLES_PER_CHUNK):
        size = min(SAMPLES_PER_CHUNK, num_samples - start)
        row_indices = generator.integers(num_rows, size=(size, num_rows))
        row_indices += num_rows * np.arange(size)[:, None]  # samples have different indices: one `bincount` counts all
        repeats = np.bincount(row_indices.ravel(), minlength=size * num_rows).reshape(size, num_rows)
        parts.append(repeats.astype(float) @ rows)
    return np.concatenate(parts)


def bootstrap_scores(
    systems: Sequence[Sequence[AdditiveMetric]], groups: Groups, num_samples: int, seed: int
) -> list[dict[str, dict[str, Array]]]:
    """Score systems on all pairs, then on bootstrap samples, which are the same for all systems.

    A system is given as its `additive_metrics`; its result is group -> metric -> scores (1 + num_samples,), first the score of all pairs.
    """
    all_metrics = [metric for system in systems for metric in system]  # all metrics of the first system come first
    results: list[dict[str, dict[str, Array]]] = [{group: {} for group in groups} for _ in systems]
    for group_index, group in enumerate(groups):
        summands = [metric.summands[group] for metric in all_metrics]
        generator = np.random.default_rng([seed, group_index])
        sums = bootstrap_sums(np.concatenate(summands, 1), num_samples, generator)
        edges = np.cumsum([columns.shape[1] for columns in summands])  # columns of `sums` where metrics begin
        for index, (metric, metric_sums) in enumerate(zip(all_metrics, np.split(sums, edges[:-1], 1))):
            scores = metric.score(metric_sums)
            results[index // len(systems[0])][group].update(zip(metric.names, scores.T))
    return results


def compare_scores(a: Array, b: Array, level: float) -> dict[str, Any]:
    """Compare one metric of two systems. Each array (1 + samples,) has the score of all pairs, then that of each bootstrap sample.

    Returns:
        "a", "b": scores of all pairs. "difference": b - a. "a_interval", "b_interval", "interval" (of the difference):
        percentile intervals [low, high]. "b_better": fraction of the samples in which b scores higher; ties count half.
    """
    tail = (1 - level) / 2  # fraction of the samples below the interval, and above it

    def interval(values: Array) -> list[float]:
        return [float(edge) for edge in np.quantile(values[1:], [tail, 1 - tail])]

    difference = np.round(b - a, 12)  # the last digits of sums depend on the order of the summands
    sample_differences = np.round(difference[1:], 6)  # BLEU-4 of captions without any match is about 1e-9, not 0
    b_better = np.mean((sample_differences > 0) + (sample_differences == 0) / 2)
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
    """Compare two systems' captions of the same pairs (id -> caption) with the paired bootstrap test.

    `level` is the confidence level of the intervals. Each group (name -> ids) has an id. For `tokenizer` and `metrics`, see
    `captions.score_captions`.

    Returns:
        "groups": group -> metric -> the result of `compare_scores`.
        "wins": group -> {"b", "a", "tie"}: the numbers of pairs for which b, a or neither has the higher CIDEr-D.
        "scores": id -> [CIDEr-D of a, CIDEr-D of b], with the document frequencies of all pairs.
    """
    excluded = set(unavailable_metrics(metrics))
    if uses_characters(caption for texts in references.values() for caption in texts):
        excluded.update(ENGLISH_METRICS)
    available = [name for name in metrics if name not in excluded]
    captions = {"the first run": a, "the second run": b}  # the names are for messages
    hypotheses, reference_tokens = tokenize_together(captions, references, tokenizer)
    systems = list(hypotheses.values())
    with running_meteor() if "METEOR" in available else nullcontext() as meteor_process:
        additive = [additive_metrics(texts, reference_tokens, groups, available, meteor_process) for texts in systems]
        scores_a, scores_b = bootstrap_scores(additive, groups, samples, seed)
    comparisons = {
        group: {metric: compare_scores(scores_a[group][metric], scores_b[group][metric], level) for metric in available}
        for group in groups
    }
    cider = CiderD(reference_tokens)
    ids = list(references)
    ciders = np.stack([cider(ids, [texts[id] for id in ids]) for texts in systems], 1)
    signs = np.sign(np.round(ciders[:, 1] - ciders[:, 0], 9))
    winners = dict(zip(ids, [{1: "b", -1: "a", 0: "tie"}[sign] for sign in signs.tolist()]))
    group_winners = {group: [winners[id] for id in members] for group, members in groups.items()}
    wins = {group: {run: runs.count(run) for run in ("b", "a", "tie")} for group, runs in group_winners.items()}
    return {"groups": comparisons, "wins": wins, "scores": dict(zip(ids, ciders.tolist()))}
