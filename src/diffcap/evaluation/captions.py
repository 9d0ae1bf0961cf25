"""Caption metrics as the papers compute them: pycocoevalcap's scorers over PTB or raw tokens.

A group of pairs is always scored as a corpus of its own: BLEU and METEOR sum counts over it, and CIDEr-D takes its
document frequencies from the references of exactly its pairs. So "total" is not a mean of its parts.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from diffcap.errors import DiffcapError
from diffcap.evaluation.cider import CiderD
from diffcap.evaluation.meteor import meteor
from diffcap.evaluation.spice import spice, spice_remedy
from diffcap.evaluation.tokenize import Tokenizer, tokenize

BLEU = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4")
FAST_METRICS = (*BLEU, "ROUGE-L", "CIDEr-D")
ALL_METRICS = (*BLEU, "METEOR", "ROUGE-L", "CIDEr-D", "SPICE")


def unavailable_metrics(metrics: Sequence[str] = ALL_METRICS) -> dict[str, str]:
    """Those of `metrics` that cannot be had on this machine, each with the way to get it."""
    remedy = spice_remedy() if "SPICE" in metrics else None
    return {"SPICE": remedy} if remedy else {}


def _names(ids: Sequence[str]) -> str:
    return ", ".join(map(repr, ids[:3])) + (", ..." if len(ids) > 3 else "")


def check_ids(predictions: Collection[str], references: Mapping[str, Sequence[str]], where: str = "") -> None:
    """Insist on one prediction for every reference id, and none besides; `where` opens the error message.

    Raises:
        DiffcapError: with the count and the first names of what is missing, unknown or empty.
    """
    if not references:
        raise DiffcapError(f"{where}there are no references to score against; check the split and the references file.")
    known = set(predictions)
    missing = [id for id in references if id not in known]
    unknown = [id for id in predictions if id not in references]
    bare = [id for id, captions in references.items() if not captions]
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
    if bare:
        raise DiffcapError(
            f"{where}{len(bare):,} ids have no reference caption ({_names(bare)}); leave those pairs out or add captions."
        )


def tokenize_references(references: Mapping[str, Sequence[str]], tokenizer: Tokenizer) -> dict[str, list[str]]:
    """Tokenise all reference captions in one call: id -> strings of tokens."""
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
    from pycocoevalcap.bleu.bleu_scorer import BleuScorer, cook_refs, cook_test

    def corpus(ids: list[str]) -> dict[str, float]:
        scorer = BleuScorer(n=4)
        scorer.crefs, scorer.ctest = [cooked_references[id] for id in ids], [cooked[id] for id in ids]
        scores, _ = scorer.compute_score(option="closest", verbose=0)
        return dict(zip(BLEU, scores))

    cooked_references = {id: cook_refs(references[id]) for id in hypotheses}
    cooked = {id: cook_test(text, cooked_references[id]) for id, text in hypotheses.items()}
    return {name: corpus(ids) for name, ids in groups.items()}


def _rouge(hypotheses: Mapping[str, str], references: Mapping[str, list[str]], groups: Mapping[str, list[str]]) -> Any:
    from pycocoevalcap.rouge.rouge import Rouge

    scorer = Rouge()
    scores = {id: scorer.calc_score([text], references[id]) for id, text in hypotheses.items()}
    return {name: {"ROUGE-L": math.fsum(scores[id] for id in ids) / len(ids)} for name, ids in groups.items()}


def _cider(hypotheses: Mapping[str, str], references: Mapping[str, list[str]], groups: Mapping[str, list[str]]) -> Any:
    scores = {}
    for name, ids in groups.items():
        scorer = CiderD({id: references[id] for id in ids})  # a group has document frequencies of its own
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
    """Score groups of pairs whose captions are tokenised already.

    Args:
        hypotheses: id -> tokens joined by blanks.
        references: id -> such strings, for at least the ids of `hypotheses`.
        groups: name -> ids; each is scored on its own, an empty one is left out.
        metrics: names out of `ALL_METRICS`.

    Returns:
        group -> metric -> score, fractions, in the order of `groups` and `ALL_METRICS`. Metrics that are unavailable
        here are left out; `unavailable_metrics` says which and why.

    Raises:
        DiffcapError: a metric is not known, or a jar failed.
    """
    strangers = [name for name in metrics if name not in ALL_METRICS]
    if strangers:
        raise DiffcapError(f"metric {strangers[0]!r} is not known; choose among {', '.join(ALL_METRICS)}.")
    wanted = [name for name in ALL_METRICS if name in metrics and name not in unavailable_metrics(metrics)]
    kinds = list(dict.fromkeys("BLEU" if name in BLEU else name for name in wanted))
    filled = {name: list(ids) for name, ids in groups.items() if ids}
    # The jars are programs of their own: they run beside the scorers in Python, on another core.
    with ThreadPoolExecutor(max_workers=1) as beside:
        jars = {
            kind: beside.submit(_SCORERS[kind], hypotheses, references, filled)
            for kind in kinds
            if kind in ("METEOR", "SPICE")
        }
        scores = {kind: _SCORERS[kind](hypotheses, references, filled) for kind in kinds if kind not in jars}
        scores.update({kind: future.result() for kind, future in jars.items()})
    merged = {name: {key: value for kind in kinds for key, value in scores[kind][name].items()} for name in filled}
    return {name: {key: float(row[key]) for key in wanted} for name, row in merged.items()}


def score_groups(
    systems: Mapping[str, Mapping[str, str]],
    references: Mapping[str, Sequence[str]],
    groups: Mapping[str, list[str]],
    tokenizer: Tokenizer = "ptb",
    metrics: Sequence[str] = ALL_METRICS,
) -> dict[str, dict[str, dict[str, float]]]:
    """Score every group of pairs of several systems; the Java programs of tokeniser and METEOR start once for all of them.

    Args:
        systems: name -> id -> caption, each with exactly the ids of `references`. The other arguments are those of
            `score_captions` and `score_tokens`.

    Returns:
        system -> group -> metric -> fraction.
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
        tokenizer: "ptb" or "raw", see `tokenize`.
        metrics: names out of `ALL_METRICS`.

    Returns:
        metric -> score, as fractions (CIDEr-D can pass 1: its scale ends at 10). SPICE is left out where its jars are
        missing.

    Raises:
        DiffcapError: ids are missing or unknown, a metric is not known, or there is no Java.
    """
    return score_groups({"": predictions}, references, {"total": list(references)}, tokenizer, metrics)[""]["total"]


def score_pairs(
    systems: Mapping[str, Mapping[str, str]], references: Mapping[str, Sequence[str]], tokenizer: Tokenizer = "ptb"
) -> dict[str, dict[str, float]]:
    """CIDEr-D of every single pair, for systems that captioned the same ones.

    Args:
        systems: name -> id -> caption, each with exactly the ids of `references`.
        references: id -> one or more captions; their document frequencies weigh the words, as in the score of all pairs.
        tokenizer: "ptb" or "raw".

    Returns:
        system -> id -> score; a system's mean is its corpus score.

    Raises:
        DiffcapError: ids are missing or unknown, or there is no Java.
    """
    for name, captions in systems.items():
        check_ids(captions, references, f"{name}: ")
    hypotheses, tokens = tokenize_together(systems, references, tokenizer)
    scorer, ids = CiderD(tokens), list(references)
    return {name: dict(zip(ids, scorer(ids, list(said.values())).tolist())) for name, said in hypotheses.items()}
