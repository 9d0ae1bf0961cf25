"""Caption metrics as the papers compute them: the scores of pycocoevalcap on Penn Treebank (PTB) or raw tokens.

Every group of pairs is scored as a separate corpus: BLEU and METEOR add up counts over the group, and CIDEr-D takes its
document frequencies from the references of the group. So the score of "total" is not the mean of the other groups.

A tokenised caption is a string of tokens with single spaces between them.
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Literal, TypeVar, get_args

import numpy as np

from diffcap.evaluation.java import meteor, ptb_tokens, spice, spice_install_hint
from diffcap.evaluation.ngrams import BLEU, CiderD, Groups, Hypotheses, References, bleu_counts, bleu_of_sums, rouge_l
from diffcap.text.characters import split_characters, uses_characters
from diffcap.utils.errors import DiffcapError

FAST_METRICS = (*BLEU, "ROUGE-L", "CIDEr-D")  # metrics that need no Java program
ALL_METRICS = (*BLEU, "METEOR", "ROUGE-L", "CIDEr-D", "SPICE")
ENGLISH_METRICS = ("METEOR", "SPICE")  # their programs know English words only
Tokenizer = Literal["ptb", "raw"]

Scores = dict[str, dict[str, float]]  # group -> metric -> score
Key = TypeVar("Key")


def tokenize(captions: Sequence[str], tokenizer: Tokenizer = "ptb") -> list[str]:
    """Tokenise captions.

    "ptb": Penn Treebank tokens in lower case, without punctuation, from Stanford's tokeniser as in the COCO caption evaluation
    (SCORER, DIRL, CLIP4IDC); needs Java. "raw": split at white space (IDC-PCL), so a punctuation mark between spaces is a token.

    Example:
        >>> tokenize(["The  cube moved ."], "raw")
        ['The cube moved .']
        >>> tokenize(["The  cube moved."], "ptb")  # needs Java # doctest: +SKIP
        ['the cube moved']
    """
    if tokenizer not in get_args(Tokenizer):
        raise DiffcapError(f"tokenizer {tokenizer!r} is not known; choose ptb or raw.")
    # Unicode line and paragraph separators would make Stanford's tokeniser print more lines than it read.
    lines = [" ".join(caption.split()) for caption in captions]
    if tokenizer == "raw":
        return lines
    distinct_lines = list(dict.fromkeys(line for line in lines if line))
    tokens = dict(zip(distinct_lines, ptb_tokens(distinct_lines))) if distinct_lines else {}
    return [tokens.get(line, "") for line in lines]


def unavailable_metrics(metrics: Sequence[str] = ALL_METRICS) -> dict[str, str]:
    """Return the metrics whose files are not installed: name -> how to install them. Only SPICE needs files."""
    hint = spice_install_hint() if "SPICE" in metrics else None
    return {"SPICE": hint} if hint else {}


def check_ids(predictions: Mapping[str, str], references: Mapping[str, Sequence[str]], prefix: str = "") -> None:
    """Raise an error if the ids of captions and references differ. The message begins with `prefix`."""
    if not references:
        raise DiffcapError(f"{prefix}there are no references; check the split and the references file.")
    missing_ids = [id for id in references if id not in predictions]
    unknown_ids = [id for id in predictions if id not in references]
    ids_without_caption = [id for id, captions in references.items() if not captions]
    faults = (
        (missing_ids, f"of {len(references):,} reference ids have no prediction", "caption every pair of the split"),
        (unknown_ids, "predictions have an id that no reference has", "check that both come from the same split"),
        (ids_without_caption, "ids have no reference caption", "leave those pairs out or add captions"),
    )
    for ids, fault, remedy in faults:
        if ids:
            raise DiffcapError(f"{prefix}{len(ids):,} {fault} ({first_ids(ids)}); {remedy}.")


def first_ids(ids: Sequence[str]) -> str:
    """Return the first three ids as text for a message, with "..." if there are more."""
    return ", ".join(map(repr, ids[:3])) + (", ..." if len(ids) > 3 else "")


def tokenize_together(
    systems: Mapping[str, Mapping[str, str]], references: Mapping[str, Sequence[str]], tokenizer: Tokenizer
) -> tuple[dict[str, dict[str, str]], dict[str, list[str]]]:
    """Check the ids of several systems, and tokenise their captions and the references in one call, because "ptb" starts Java.

    If the references are compared by characters (`uses_characters`), all texts are split into characters first.

    The results are the captions, system -> id -> caption, and the references, id -> captions; ids in the order of `references`.
    """
    for name, captions in systems.items():
        check_ids(captions, references, f"{name}: " if name else "")
    texts = [captions[id] for captions in systems.values() for id in references]
    all_references = [caption for captions in references.values() for caption in captions]
    texts += all_references
    if uses_characters(all_references):
        texts = list(map(split_characters, texts))
    tokenised = iter(tokenize(texts, tokenizer))
    hypotheses = {name: {id: next(tokenised) for id in references} for name in systems}
    reference_tokens = {id: [next(tokenised) for _ in captions] for id, captions in references.items()}
    return hypotheses, reference_tokens


def _score_metric(metric: str, hypotheses: Hypotheses, references: References, groups: Groups) -> Scores:
    """Compute one metric for all groups; "BLEU" is BLEU-1 to BLEU-4."""
    if metric == "METEOR":
        return {group: {metric: score} for group, score in meteor(hypotheses, references, groups).items()}
    scores: Scores = {}
    if metric == "BLEU":
        counts = dict(zip(hypotheses, bleu_counts(hypotheses, references)))
        for group, ids in groups.items():
            sums = sum(counts[id] for id in ids)  # BLEU of a corpus is computed from the sums of its pairs' counts
            (bleu_scores,) = bleu_of_sums(sums[None])
            scores[group] = dict(zip(BLEU, bleu_scores.tolist()))
    elif metric == "CIDEr-D":
        for group, ids in groups.items():
            cider = CiderD({id: references[id] for id in ids})  # the document frequencies are those of the group
            ciders = cider(ids, [hypotheses[id] for id in ids])
            scores[group] = {metric: float(np.mean(ciders))}
    else:
        pair_scores = rouge_l(hypotheses, references) if metric == "ROUGE-L" else spice(hypotheses, references)
        for group, ids in groups.items():
            # SPICE compares objects, attributes and relations. It is NaN if the texts of a pair have none; leave out these pairs.
            defined_scores = [pair_scores[id] for id in ids if not math.isnan(pair_scores[id])]
            scores[group] = {metric: math.fsum(defined_scores) / max(1, len(defined_scores))}
    return scores


def score_tokens(
    hypotheses: Hypotheses, references: References, groups: Groups, metrics: Sequence[str] = ALL_METRICS
) -> Scores:
    """Score groups of pairs with tokenised captions.

    Args:
        groups: name -> ids; empty groups are skipped.
        metrics: names from `ALL_METRICS`; METEOR and SPICE need Java.

    Returns:
        group -> metric -> score, in the order of `groups` and `ALL_METRICS`. Scores are between 0 and 1; CIDEr-D is between 0 and
        10. SPICE is left out if its files are not installed, see `unavailable_metrics`.

    Raises:
        DiffcapError: a metric is unknown, there is no Java, or a Java program failed.
    """
    if unknown := [name for name in metrics if name not in ALL_METRICS]:
        raise DiffcapError(f"metric {unknown[0]!r} is not known; choose from {', '.join(ALL_METRICS)}.")
    unavailable = unavailable_metrics(metrics)
    available = [name for name in ALL_METRICS if name in metrics and name not in unavailable]
    calls = list(dict.fromkeys("BLEU" if name in BLEU else name for name in available))  # one call for all BLEU scores
    non_empty = {group: list(ids) for group, ids in groups.items() if ids}
    arguments = (hypotheses, references, non_empty)
    # METEOR and SPICE are Java programs: they run at the same time as the metrics in Python, on another core.
    with ThreadPoolExecutor(max_workers=1) as executor:
        java_calls = [name for name in calls if name in ("METEOR", "SPICE")]
        futures = [executor.submit(_score_metric, name, *arguments) for name in java_calls]
        results = [_score_metric(name, *arguments) for name in calls if name not in java_calls]
        results += [future.result() for future in futures]
    merged = {group: dict(chain.from_iterable(result[group].items() for result in results)) for group in non_empty}
    return {group: {name: float(scores[name]) for name in available} for group, scores in merged.items()}


def score_together(
    texts: Mapping[Key, tuple[Hypotheses, References]], groups: Groups, metrics: Sequence[str] = ALL_METRICS
) -> dict[Key, Scores]:
    """Run `score_tokens` for the captions and references under each key of `texts`; the Java programs start once for all keys."""
    all_hypotheses, all_references, all_groups = {}, {}, {}
    for number, (hypotheses, references) in enumerate(texts.values(), 1):
        # The ids of a single system get no suffix, because error messages name the id of a pair.
        suffix = f" (system {number})" if len(texts) > 1 else ""
        all_hypotheses.update({f"{id}{suffix}": caption for id, caption in hypotheses.items()})
        all_references.update({f"{id}{suffix}": captions for id, captions in references.items()})
        all_groups.update({f"{number} {group}": [f"{id}{suffix}" for id in ids] for group, ids in groups.items()})
    scores = score_tokens(all_hypotheses, all_references, all_groups, metrics)
    non_empty = [group for group, ids in groups.items() if ids]
    return {key: {group: scores[f"{number} {group}"] for group in non_empty} for number, key in enumerate(texts, 1)}


def score_captions(
    predictions: Mapping[str, str],
    references: Mapping[str, Sequence[str]],
    tokenizer: Tokenizer = "ptb",
    metrics: Sequence[str] = ALL_METRICS,
) -> dict[str, float]:
    """Score the captions of one system (id -> caption, for each id of `references`) as one corpus: metric -> score.

    `tokenizer`: see `tokenize`; `metrics` and the scores: see `score_tokens`.

    Example:
        >>> predictions = {"1": "the cube moved", "2": "nothing changed"}
        >>> references = {"1": ["the red cube moved"], "2": ["nothing changed", "no change"]}
        >>> scores = score_captions(predictions, references, "raw", ["BLEU-1", "BLEU-4", "ROUGE-L", "CIDEr-D"])
        >>> {metric: round(score, 3) for metric, score in scores.items()}
        {'BLEU-1': 0.819, 'BLEU-4': 0.0, 'ROUGE-L': 0.918, 'CIDEr-D': 2.821}
    """
    hypotheses, reference_tokens = tokenize_together({"": predictions}, references, tokenizer)
    return score_tokens(hypotheses[""], reference_tokens, {"total": list(references)}, metrics)["total"]


def cider_per_pair(
    systems: Mapping[str, Mapping[str, str]], references: Mapping[str, Sequence[str]], tokenizer: Tokenizer = "ptb"
) -> Scores:
    """Compute CIDEr-D of each pair with the document frequencies of all pairs: system -> id -> score between 0 and 10.

    The mean over the pairs is the system's corpus score.
    """
    hypotheses, reference_tokens = tokenize_together(systems, references, tokenizer)
    cider, ids = CiderD(reference_tokens), list(references)
    ciders = {name: cider(ids, list(texts.values())) for name, texts in hypotheses.items()}
    return {name: dict(zip(ids, values.tolist())) for name, values in ciders.items()}
