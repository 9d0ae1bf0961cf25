"""Caption metrics as the papers compute them: the scores of pycocoevalcap on PTB or raw tokens.

Every group of pairs is scored as a separate corpus: BLEU and METEOR add up counts over the group, and CIDEr-D takes its
document frequencies from the references of the group. So the score of "total" is not the mean of the other groups.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np

from diffcap.evaluation.bleu import BLEU, bleu_counts, bleu_of_sums
from diffcap.evaluation.cider import CiderD
from diffcap.evaluation.meteor import meteor
from diffcap.evaluation.rouge import rouge_l
from diffcap.evaluation.spice import spice, spice_install_hint
from diffcap.evaluation.tokenize import Tokenizer, tokenize
from diffcap.utils.errors import DiffcapError

FAST_METRICS = (*BLEU, "ROUGE-L", "CIDEr-D")
ALL_METRICS = (*BLEU, "METEOR", "ROUGE-L", "CIDEr-D", "SPICE")


def unavailable_metrics(metrics: Sequence[str] = ALL_METRICS) -> dict[str, str]:
    """Return the metrics that are left out because their files are not installed: SPICE, or none.

    METEOR also needs Java, but is not left out: without Java, scoring raises an error.

    Returns:
        metric -> how to install it.
    """
    hint = spice_install_hint() if "SPICE" in metrics else None
    return {"SPICE": hint} if hint else {}


def _first_ids(ids: Sequence[str]) -> str:
    return ", ".join(map(repr, ids[:3])) + (", ..." if len(ids) > 3 else "")


def check_ids(predictions: Collection[str], references: Mapping[str, Sequence[str]], prefix: str = "") -> None:
    """Check that the ids of predictions and references are equal.

    Args:
        predictions: ids, or a mapping from ids.
        references: id -> captions.
        prefix: beginning of the messages.

    Raises:
        DiffcapError: an id has no prediction, no reference, or an empty list of references.
    """
    if not references:
        raise DiffcapError(
            f"{prefix}there are no references to score against; check the split and the references file."
        )
    known = set(predictions)
    missing = [id for id in references if id not in known]
    unknown = [id for id in predictions if id not in references]
    without_caption = [id for id, captions in references.items() if not captions]
    if missing:
        raise DiffcapError(
            f"{prefix}{len(missing):,} of {len(references):,} reference ids have no prediction ({_first_ids(missing)}); "
            "caption every pair of the split."
        )
    if unknown:
        raise DiffcapError(
            f"{prefix}{len(unknown):,} predictions have an id that no reference has ({_first_ids(unknown)}); "
            "check that both come from the same split."
        )
    if without_caption:
        raise DiffcapError(
            f"{prefix}{len(without_caption):,} ids have no reference caption ({_first_ids(without_caption)}); leave those pairs out "
            "or add captions."
        )


def tokenize_references(references: Mapping[str, Sequence[str]], tokenizer: Tokenizer) -> dict[str, list[str]]:
    """Tokenise all reference captions in one call.

    Returns:
        id -> tokenised captions, each a string of tokens joined by spaces.
    """
    return tokenize_together({}, references, tokenizer)[1]


def tokenize_together(
    systems: Mapping[str, Mapping[str, str]], references: Mapping[str, Sequence[str]], tokenizer: Tokenizer
) -> tuple[dict[str, dict[str, str]], dict[str, list[str]]]:
    """Tokenise the captions of several systems and the references in one call, since the PTB tokeniser starts a Java program.

    A system is whatever wrote captions for the pairs: a trained captioner, a baseline, or a file of predictions.

    Args:
        systems: name -> id -> caption, for at least the ids of `references`.
        references: id -> captions.
        tokenizer: "ptb" (needs Java) or "raw", see `tokenize`.

    Returns:
        name -> id -> tokenised caption, and id -> tokenised references, in the order of `references`. A tokenised caption is a
        string of tokens joined by spaces.
    """
    texts = [captions[id] for captions in systems.values() for id in references]
    texts += [caption for captions in references.values() for caption in captions]
    tokens = iter(tokenize(texts, tokenizer))
    hypotheses = {name: {id: next(tokens) for id in references} for name in systems}
    return hypotheses, {id: [next(tokens) for _ in captions] for id, captions in references.items()}


Hypotheses = Mapping[str, str]  # id -> tokenised caption
References = Mapping[str, list[str]]  # id -> tokenised captions
Groups = Mapping[str, list[str]]  # name -> ids
Scores = dict[str, dict[str, float]]  # group -> metric -> score
Key = TypeVar("Key")


def _bleu(hypotheses: Hypotheses, references: References, groups: Groups) -> Scores:
    counts = dict(zip(hypotheses, bleu_counts(hypotheses, references)))
    scores = {}
    for name, ids in groups.items():
        sums = sum(counts[id] for id in ids)  # BLEU of a corpus is computed from the sums of its pairs' counts
        scores[name] = dict(zip(BLEU, bleu_of_sums(sums[None])[0].tolist()))
    return scores


def _rouge(hypotheses: Hypotheses, references: References, groups: Groups) -> Scores:
    scores = rouge_l(hypotheses, references)
    return {name: {"ROUGE-L": math.fsum(scores[id] for id in ids) / len(ids)} for name, ids in groups.items()}


def _cider(hypotheses: Hypotheses, references: References, groups: Groups) -> Scores:
    scores = {}
    for name, ids in groups.items():
        scorer = CiderD({id: references[id] for id in ids})  # the document frequencies are those of the group
        scores[name] = {"CIDEr-D": float(np.mean(scorer(ids, [hypotheses[id] for id in ids])))}
    return scores


def _spice(hypotheses: Hypotheses, references: References, groups: Groups) -> Scores:
    scores = spice(hypotheses, references)

    def mean(ids: list[str]) -> float:
        # NaN: neither the caption nor its references contain a tuple. One such pair would make pycocoevalcap's mean NaN.
        defined = [scores[id] for id in ids if not math.isnan(scores[id])]
        return math.fsum(defined) / max(1, len(defined))

    return {name: {"SPICE": mean(ids)} for name, ids in groups.items()}


def _meteor(hypotheses: Hypotheses, references: References, groups: Groups) -> Scores:
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
        hypotheses: id -> tokenised caption, a string of tokens joined by spaces.
        references: id -> tokenised captions, for at least the ids of `hypotheses`.
        groups: name -> ids; each is scored as a separate corpus, empty groups are skipped.
        metrics: names from `ALL_METRICS`.

    Returns:
        group -> metric -> score, in the order of `groups` and `ALL_METRICS`. Scores are between 0 and 1; CIDEr-D is between 0
        and 10. SPICE is left out if its files are not installed, see `unavailable_metrics`.

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
    unavailable = unavailable_metrics(metrics)
    wanted = [name for name in ALL_METRICS if name in metrics and name not in unavailable]
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
        systems: name -> id -> caption, each with exactly the ids of `references`.
        references: id -> one or more captions.
        groups: name -> ids; each is scored as a separate corpus, empty groups are skipped.
        tokenizer: "ptb" (needs Java) or "raw", see `tokenize`.
        metrics: names from `ALL_METRICS`; METEOR and SPICE need Java.

    Returns:
        system -> group -> metric -> score, as `score_tokens`.

    Raises:
        DiffcapError: ids are missing or unknown, a metric is unknown, or there is no Java.

    Example:
        >>> predictions = {"1": "the cube moved", "2": "nothing changed"}
        >>> references = {"1": ["the cube moved"], "2": ["no change"]}
        >>> scores = score_groups({"mine": predictions}, references, {"change": ["1"]}, "raw", ["BLEU-1", "ROUGE-L"])
        >>> scores["mine"]["change"]["ROUGE-L"]
        1.0
    """
    texts = tokenize_systems(systems, references, tokenizer)
    return score_together(texts, groups, metrics)


class TokenizedCaptions(NamedTuple):
    """Captions of one system and their references: id -> tokens joined by spaces.

    Example:
        >>> text = TokenizedCaptions({"1": "the cube moved"}, {"1": ["the red cube moved", "the cube moved"]})
        >>> score_together({"mine": text}, {"total": ["1"]}, ["BLEU-1", "ROUGE-L"])["mine"]["total"]["ROUGE-L"]
        1.0
    """

    hypotheses: Hypotheses
    references: References


def tokenize_systems(
    systems: Mapping[str, Mapping[str, str]], references: Mapping[str, Sequence[str]], tokenizer: Tokenizer
) -> dict[str, TokenizedCaptions]:
    """Check and tokenise the captions of several systems, see `score_groups`; the result is for `score_together`.

    Raises:
        DiffcapError: ids are missing or unknown, or there is no Java.
    """
    for name, captions in systems.items():
        check_ids(captions, references, f"{name}: " if len(systems) > 1 else "")
    hypotheses, tokenized_references = tokenize_together(systems, references, tokenizer)
    return {name: TokenizedCaptions(texts, tokenized_references) for name, texts in hypotheses.items()}


def score_together(
    texts: Mapping[Key, TokenizedCaptions], groups: Groups, metrics: Sequence[str] = ALL_METRICS
) -> dict[Key, Scores]:
    """Score each group of pairs of several texts; the Java programs start once for all of them.

    Args:
        texts: name -> captions and references, each with at least the ids of `groups`. The names may be of any type.
        groups, metrics: as in `score_tokens`.

    Returns:
        name -> group -> metric -> score, as `score_tokens`.
    """
    # All texts are scored in one call, so the ids and groups of each get its number. The ids of a single one are kept: an
    # error message names the id of the pair.
    numbered = list(enumerate(texts.items(), 1))

    def key(number: int, id: str) -> str:
        return f"{id} (system {number})" if len(texts) > 1 else id

    scores = score_tokens(
        {key(number, id): caption for number, (_, text) in numbered for id, caption in text.hypotheses.items()},
        {key(number, id): captions for number, (_, text) in numbered for id, captions in text.references.items()},
        {
            f"{number} {group}": [key(number, id) for id in ids]
            for number, _ in numbered
            for group, ids in groups.items()
        },
        metrics,
    )
    return {
        name: {group: scores[f"{number} {group}"] for group, ids in groups.items() if ids}
        for number, (name, _) in numbered
    }


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


def cider_per_pair(
    systems: Mapping[str, Mapping[str, str]], references: Mapping[str, Sequence[str]], tokenizer: Tokenizer = "ptb"
) -> dict[str, dict[str, float]]:
    """Compute CIDEr-D of each pair, for several systems that captioned the same pairs.

    Args:
        systems: name -> id -> caption, each with exactly the ids of `references`.
        references: id -> one or more captions; the document frequencies are those of all pairs.
        tokenizer: "ptb" (needs Java) or "raw", see `tokenize`.

    Returns:
        system -> id -> score between 0 and 10; the mean over the pairs is the system's corpus score.

    Raises:
        DiffcapError: ids are missing or unknown, or there is no Java.

    Example:
        >>> references = {"1": ["the cube moved"], "2": ["nothing changed", "no change"]}
        >>> scores = cider_per_pair({"mine": {"1": "the cube moved", "2": "nothing moved"}}, references, "raw")
        >>> {id: round(score, 3) for id, score in scores["mine"].items()}
        {'1': 7.5, '2': 0.625}
    """
    for name, captions in systems.items():
        check_ids(captions, references, f"{name}: ")
    hypotheses, tokenized_references = tokenize_together(systems, references, tokenizer)
    scorer, ids = CiderD(tokenized_references), list(references)
    return {name: dict(zip(ids, scorer(ids, list(texts.values())).tolist())) for name, texts in hypotheses.items()}
