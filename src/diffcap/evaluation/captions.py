"""Caption metrics as the papers compute them: the scores of pycocoevalcap on PTB or raw tokens.

Every group of pairs is scored as a separate corpus: BLEU and METEOR add up counts over the group, and CIDEr-D takes its
document frequencies from the references of the group. So the score of "total" is not the mean of the other groups.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from diffcap.evaluation.bleu import BLEU, bleu_counts, bleu_of_sums
from diffcap.evaluation.cider import CiderD
from diffcap.evaluation.meteor import meteor
from diffcap.evaluation.rouge import rouge_l
from diffcap.evaluation.spice import spice, spice_remedy
from diffcap.evaluation.tokenize import Tokenizer, tokenize
from diffcap.utils.errors import DiffcapError

FAST_METRICS = (*BLEU, "ROUGE-L", "CIDEr-D")
ALL_METRICS = (*BLEU, "METEOR", "ROUGE-L", "CIDEr-D", "SPICE")


def unavailable_metrics(metrics: Sequence[str] = ALL_METRICS) -> dict[str, str]:
    """Return the metrics that cannot be computed on this machine, each with a sentence that says how to install it."""
    remedy = spice_remedy() if "SPICE" in metrics else None
    return {"SPICE": remedy} if remedy else {}


def _names(ids: Sequence[str]) -> str:
    return ", ".join(map(repr, ids[:3])) + (", ..." if len(ids) > 3 else "")


def check_ids(predictions: Collection[str], references: Mapping[str, Sequence[str]], where: str = "") -> None:
    """Check that the ids of predictions and references are equal.

    Args:
        predictions: ids, or a mapping from ids. references: id -> captions. where: beginning of the message.

    Raises:
        DiffcapError: an id has no prediction, no reference, or an empty list of references.
    """
    if not references:
        raise DiffcapError(f"{where}there are no references to score against; check the split and the references file.")
    known = set(predictions)
    missing = [id for id in references if id not in known]
    unknown = [id for id in predictions if id not in references]
    without_caption = [id for id, captions in references.items() if not captions]
    if missing:
        raise DiffcapError(
            f"{where}{len(missing):,} of {len(references):,} reference ids have no prediction ({_names(missing)}); "
            "caption every pair of the split."
        )
    if unknown:
        raise DiffcapError(
            f"{where}{len(unknown):,} predictions have an id that no reference has ({_names(unknown)}); "
            "check that both come from the same split."
        )
    if without_caption:
        raise DiffcapError(
            f"{where}{len(without_caption):,} ids have no reference caption ({_names(without_caption)}); leave those pairs out "
            "or add captions."
        )


def tokenize_references(references: Mapping[str, Sequence[str]], tokenizer: Tokenizer) -> dict[str, list[str]]:
    """Tokenise all reference captions in one call; returns id -> strings of tokens."""
    return tokenize_together({}, references, tokenizer)[1]


def tokenize_together(
    systems: Mapping[str, Mapping[str, str]], references: Mapping[str, Sequence[str]], tokenizer: Tokenizer
) -> tuple[dict[str, dict[str, str]], dict[str, list[str]]]:
    """Tokenise the captions of systems and their references in one call, since the PTB tokeniser starts a Java program.

    Args:
        systems: name -> id -> caption, for at least the ids of `references`.

    Returns:
        name -> id -> tokens, and id -> tokens of each reference, in the order of `references`.
    """
    texts = [captions[id] for captions in systems.values() for id in references]
    texts += [caption for captions in references.values() for caption in captions]
    tokens = iter(tokenize(texts, tokenizer))
    hypotheses = {name: {id: next(tokens) for id in references} for name in systems}
    return hypotheses, {id: [next(tokens) for _ in captions] for id, captions in references.items()}


def _bleu(hypotheses: Mapping[str, str], references: Mapping[str, list[str]], groups: Mapping[str, list[str]]) -> Any:
    counts = dict(zip(hypotheses, bleu_counts(hypotheses, references)))
    return {name: dict(zip(BLEU, bleu_of_sums(sum(counts[id] for id in ids)[None])[0])) for name, ids in groups.items()}


def _rouge(hypotheses: Mapping[str, str], references: Mapping[str, list[str]], groups: Mapping[str, list[str]]) -> Any:
    scores = rouge_l(hypotheses, references)
    return {name: {"ROUGE-L": math.fsum(scores[id] for id in ids) / len(ids)} for name, ids in groups.items()}


def _cider(hypotheses: Mapping[str, str], references: Mapping[str, list[str]], groups: Mapping[str, list[str]]) -> Any:
    scores = {}
    for name, ids in groups.items():
        scorer = CiderD({id: references[id] for id in ids})  # the document frequencies are those of the group
        scores[name] = {"CIDEr-D": float(np.mean(scorer(ids, [hypotheses[id] for id in ids])))}
    return scores


def _spice(hypotheses: Mapping[str, str], references: Mapping[str, list[str]], groups: Mapping[str, list[str]]) -> Any:
    scores = spice(hypotheses, references)

    def mean(ids: list[str]) -> float:
        defined = [scores[id] for id in ids if not math.isnan(scores[id])]
        return math.fsum(defined) / max(1, len(defined))

    return {name: {"SPICE": mean(ids)} for name, ids in groups.items()}


def _meteor(hypotheses: Mapping[str, str], references: Mapping[str, list[str]], groups: Mapping[str, list[str]]) -> Any:
    return {name: {"METEOR": score} for name, score in meteor(hypotheses, references, groups).items()}


_SCORERS = {"BLEU": _bleu, "METEOR": _meteor, "ROUGE-L": _rouge, "CIDEr-D": _cider, "SPICE": _spice}


def score_tokens(
    hypotheses: Mapping[str, str],
    references: Mapping[str, list[str]],
    groups: Mapping[str, list[str]],
    metrics: Sequence[str] = ALL_METRICS,
) -> dict[str, dict[str, float]]:
    """Score groups of pairs with tokenised captions.

    Args:
        hypotheses: id -> tokens joined by spaces.
        references: id -> such strings, for at least the ids of `hypotheses`.
        groups: name -> ids; each is scored as a separate corpus, empty groups are skipped.
        metrics: names from `ALL_METRICS`.

    Returns:
        group -> metric -> score, fractions, in the order of `groups` and `ALL_METRICS`. Metrics that cannot be computed on
        this machine are left out, see `unavailable_metrics`.

    Raises:
        DiffcapError: a metric is unknown, or the Java program of a metric failed.

    Example:
        >>> hypotheses = {"1": "the cube moved", "2": "nothing changed"}
        >>> references = {"1": ["the red cube moved"], "2": ["nothing changed at all", "no change"]}
        >>> scores = score_tokens(hypotheses, references, {"total": ["1", "2"], "change": ["1"]}, ["BLEU-1", "ROUGE-L"])
        >>> {name: {metric: round(score, 3) for metric, score in row.items()} for name, row in scores.items()}
        {'total': {'BLEU-1': 0.819, 'ROUGE-L': 0.732}, 'change': {'BLEU-1': 0.717, 'ROUGE-L': 0.836}}
    """
    unknown = [name for name in metrics if name not in ALL_METRICS]
    if unknown:
        raise DiffcapError(f"metric {unknown[0]!r} is not known; choose from {', '.join(ALL_METRICS)}.")
    wanted = [name for name in ALL_METRICS if name in metrics and name not in unavailable_metrics(metrics)]
    kinds = list(dict.fromkeys("BLEU" if name in BLEU else name for name in wanted))
    non_empty = {name: list(ids) for name, ids in groups.items() if ids}
    # METEOR and SPICE are Java programs: they run at the same time as the metrics in Python, on another core.
    with ThreadPoolExecutor(max_workers=1) as executor:
        futures = {
            kind: executor.submit(_SCORERS[kind], hypotheses, references, non_empty)
            for kind in kinds
            if kind in ("METEOR", "SPICE")
        }
        scores = {kind: _SCORERS[kind](hypotheses, references, non_empty) for kind in kinds if kind not in futures}
        scores.update({kind: future.result() for kind, future in futures.items()})
    merged = {name: {key: value for kind in kinds for key, value in scores[kind][name].items()} for name in non_empty}
    return {name: {key: float(row[key]) for key in wanted} for name, row in merged.items()}


def score_groups(
    systems: Mapping[str, Mapping[str, str]],
    references: Mapping[str, Sequence[str]],
    groups: Mapping[str, list[str]],
    tokenizer: Tokenizer = "ptb",
    metrics: Sequence[str] = ALL_METRICS,
) -> dict[str, dict[str, dict[str, float]]]:
    """Score each group of pairs of several systems; the Java programs start once for all of them.

    Args:
        systems: name -> id -> caption, each with exactly the ids of `references`. The other arguments are those of
            `score_captions` and `score_tokens`.

    Returns:
        system -> group -> metric -> score.

    Example:
        >>> predictions = {"1": "the cube moved", "2": "nothing changed"}
        >>> references = {"1": ["the cube moved"], "2": ["no change"]}
        >>> scores = score_groups({"mine": predictions}, references, {"change": ["1"]}, "raw", ["BLEU-1", "ROUGE-L"])
        >>> scores["mine"]["change"]["ROUGE-L"]
        1.0
    """
    for captions in systems.values():
        check_ids(captions, references)
    hypotheses, tokens = tokenize_together(systems, references, tokenizer)
    # Pairs and groups of two systems must differ in name; a message about a pair of the only system names its id.
    several = len(systems) > 1
    keys = {
        name: {id: f"{id} (system {number})" if several else id for id in references}
        for number, name in enumerate(systems, 1)
    }
    group_keys = {(name, group): f"{number} {group}" for number, name in enumerate(systems) for group in groups}
    scores = score_tokens(
        {key: hypotheses[name][id] for name, key_of in keys.items() for id, key in key_of.items()},
        {key: tokens[id] for key_of in keys.values() for id, key in key_of.items()},
        {key: [keys[name][id] for id in groups[group]] for (name, group), key in group_keys.items()},
        metrics,
    )
    return {name: {group: scores[group_keys[name, group]] for group, ids in groups.items() if ids} for name in systems}


def score_captions(
    predictions: Mapping[str, str],
    references: Mapping[str, Sequence[str]],
    tokenizer: Tokenizer = "ptb",
    metrics: Sequence[str] = ALL_METRICS,
) -> dict[str, float]:
    """Score captions against their references, as one corpus.

    Args:
        predictions: id -> caption, exactly the ids of `references`.
        references: id -> one or more captions.
        tokenizer: "ptb" (needs Java) or "raw", see `tokenize`.
        metrics: names from `ALL_METRICS`; METEOR and SPICE need Java.

    Returns:
        metric -> score. Fractions; CIDEr-D is between 0 and 10. SPICE is left out if its files are not installed.

    Raises:
        DiffcapError: ids are missing or unknown, a metric is unknown, or there is no Java.

    Example:
        >>> predictions = {"1": "the cube moved", "2": "nothing changed"}
        >>> references = {"1": ["the red cube moved"], "2": ["nothing changed", "no change"]}
        >>> scores = score_captions(predictions, references, "raw", ["BLEU-1", "BLEU-4", "ROUGE-L", "CIDEr-D"])
        >>> {metric: round(score, 3) for metric, score in scores.items()}
        {'BLEU-1': 0.819, 'BLEU-4': 0.0, 'ROUGE-L': 0.918, 'CIDEr-D': 2.821}
    """
    return score_groups({"": predictions}, references, {"total": list(references)}, tokenizer, metrics)[""]["total"]


def score_pairs(
    systems: Mapping[str, Mapping[str, str]], references: Mapping[str, Sequence[str]], tokenizer: Tokenizer = "ptb"
) -> dict[str, dict[str, float]]:
    """Compute CIDEr-D of each pair, for several systems that captioned the same pairs.

    Args:
        systems: name -> id -> caption, each with exactly the ids of `references`.
        references: id -> one or more captions; the document frequencies are those of all pairs.
        tokenizer: "ptb" (needs Java) or "raw".

    Returns:
        system -> id -> score; the mean over the pairs is the system's corpus score.

    Raises:
        DiffcapError: ids are missing or unknown, or there is no Java.

    Example:
        >>> references = {"1": ["the cube moved"], "2": ["nothing changed", "no change"]}
        >>> scores = score_pairs({"mine": {"1": "the cube moved", "2": "nothing moved"}}, references, "raw")
        >>> {id: round(score, 3) for id, score in scores["mine"].items()}
        {'1': 7.5, '2': 0.625}
    """
    for name, captions in systems.items():
        check_ids(captions, references, f"{name}: ")
    hypotheses, tokens = tokenize_together(systems, references, tokenizer)
    scorer, ids = CiderD(tokens), list(references)
    return {name: dict(zip(ids, scorer(ids, list(said.values())).tolist())) for name, said in hypotheses.items()}
