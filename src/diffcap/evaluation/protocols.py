"""Groups of pairs that are scored together ("total", "color", ...), and `metrics.json`. Its entry "protocol" says how it was made."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from diffcap.datasets import CHARACTERS_NOTE
from diffcap.datasets.registry import WordIdProtocol
from diffcap.evaluation.captions import (
    ALL_METRICS,
    ENGLISH_METRICS,
    Tokenizer,
    score_together,
    tokenize_together,
    unavailable_metrics,
)
from diffcap.evaluation.remote_sensing import S_M_METRICS, WordIdScoring, accuracies, id_text
from diffcap.evaluation.slots import slot_accuracy
from diffcap.evaluation.tables import caption_notes
from diffcap.records import ChangePair, JsonDict
from diffcap.text.characters import split_characters, uses_characters

# The change types in the order of the papers' tables; other change types follow in alphabetical order.
TYPE_ORDER = ("color", "material", "add", "drop", "move")


def groups_of(pairs: Sequence[ChangePair]) -> dict[str, list[str]]:
    """Return the ids of the pairs in each group: "total" (all pairs), "semantic" (a change), "distractor" (none), each change type.

    "semantic" and "distractor" are left out unless both have pairs. In datasets whose pairs have the key "changeflag", they are named
    "change" and "no_change". As in the papers' tables, the group of a change type has only pairs with a change.
    """
    groups = {"total": [pair.id for pair in pairs]}
    semantic_pairs = [pair for pair in pairs if not pair.is_distractor]
    if 0 < len(semantic_pairs) < len(pairs):
        for group_pairs in (semantic_pairs, [pair for pair in pairs if pair.is_distractor]):
            groups[group_pairs[0].group] = [pair.id for pair in group_pairs]
    types = {pair.change_type for pair in semantic_pairs if pair.change_type is not None}
    other_types = sorted(types - set(TYPE_ORDER))
    for name in [*(name for name in TYPE_ORDER if name in types), *other_types]:
        groups[name] = [pair.id for pair in semantic_pairs if pair.change_type == name]
    return groups


def dataset_protocol(info: Mapping[str, Any], changes: str | None = None) -> dict[str, str]:
    """Return the entries of a protocol that depend on the dataset; `info` is the content of `dataset.json`.

    "changes" says how a pair with several changes was captioned. "official" is "whole" if the dataset has all pairs that its authors
    published, else "part". "change_types" says how change types were found if the dataset's files do not have them ("derived from the
    captions"). Unknown entries are left out.
    """
    state = (info.get("official") or {}).get("state")
    entries = {"changes": changes, "official": state, "change_types": info.get("change_types")}
    return {key: value for key, value in entries.items() if value}


def remarks(protocol: Mapping[str, Any]) -> str:
    """Return the entries of `dataset_protocol` as text for titles; each ends with a comma: "a part of the official dataset, "."""
    extent = "a part of the official dataset, " if protocol.get("official") == "part" else ""
    change_types = protocol.get("change_types")
    return extent + (f"change types {change_types}, " if change_types else "")


def evaluate(
    predictions: Mapping[str, str],
    pairs: Sequence[ChangePair],
    tokenizer: Tokenizer = "ptb",
    metrics: Sequence[str] = ALL_METRICS,
    further: Callable[..., Any] | None = None,
    **options: Any,
) -> JsonDict:
    """Score one system's captions of a split; arguments and result as in `evaluate_systems`. `further` adds an entry of its result."""
    result = evaluate_systems({"": predictions}, pairs, tokenizer, metrics, **options)[""]
    if further:
        texts = {pair.id: (predictions[pair.id], pair.captions) for pair in pairs}
        result["further"] = further(texts, groups_of(pairs))
    return result


def evaluate_systems(
    systems: Mapping[str, Mapping[str, str]],
    pairs: Sequence[ChangePair],
    tokenizer: Tokenizer = "ptb",
    metrics: Sequence[str] = ALL_METRICS,
    protocol: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
    id_scoring: WordIdScoring | None = None,
) -> dict[str, JsonDict]:
    """Score the captions of a split in all groups, for several systems (captioners) at once, because every call starts Java programs.

    Args:
        systems: name -> id -> caption, exactly the ids of `pairs`.
        pairs: the pairs of the split, each with its reference captions.
        tokenizer, metrics: as in `captions.score_captions`.
        protocol: further entries of "protocol" ({"dataset": ..., "split": ...}).
        provenance: origin of the captions (checkpoint, seed, versions, hash of the manifest), for "provenance".
        id_scoring: adds scores of remote-sensing datasets: "S*m", the mean of four metrics; "accuracy" if only some pairs have a change.

    Returns:
        For each system, the content of `metrics.json`: {"protocol": {..., "tokenizer", "metrics", "pairs": group -> number},
        "groups": group -> metric -> score as a fraction, "provenance": {...}}. "unavailable" in "provenance" lists metrics that
        could not be computed, and how to install them. If the pairs have annotations of the changed object, "slots" has the result
        of `slots.slot_accuracy`. If `id_scoring` has a vocabulary, "id_tokens" has "protocol" and "groups" for word ids, not text.
        "notes" lists problems of the captions, see `tables.caption_notes`.
    """
    groups = groups_of(pairs)
    notes = []
    if uses_characters(caption for pair in pairs for caption in pair.captions):
        notes.append(f"In these scores, {CHARACTERS_NOTE}. METEOR and SPICE are left out (English words only).")
        pairs = [replace(pair, captions=list(map(split_characters, pair.captions))) for pair in pairs]
        systems = {name: {id: split_characters(captions[id]) for id in captions} for name, captions in systems.items()}
        metrics = [metric for metric in metrics if metric not in ENGLISH_METRICS]
    references = {pair.id: pair.captions for pair in pairs}
    hypotheses, reference_tokens = tokenize_together(systems, references, tokenizer)
    texts = {(name, "text"): (system_texts, reference_tokens) for name, system_texts in hypotheses.items()}
    vocabulary = id_scoring.vocabulary if id_scoring else None
    id_texts = {}
    if vocabulary:
        id_references = {id: [id_text(text, vocabulary) for text in captions] for id, captions in references.items()}
        for name, captions in systems.items():
            id_hypotheses = {id: id_text(captions[id], vocabulary) for id in references}
            id_texts[name, "ids"] = (id_hypotheses, id_references)
    other_metrics = [metric for metric in metrics if metric != "SPICE"]
    scores = score_together({**texts, **id_texts}, groups, other_metrics)
    if "SPICE" in metrics:  # it parses sentences, so it cannot score ids
        for key, spice_scores in score_together(texts, groups, ["SPICE"]).items():
            for group, spice in spice_scores.items():
                scores[key][group].update(spice)
    if id_scoring:
        accuracy: dict[str, dict[str, float]] = {name: {} for name in systems}
        if len({pair.is_distractor for pair in pairs}) == 2:
            for name, captions in systems.items():
                accuracy[name] = accuracies(captions, pairs, groups, id_scoring.no_change_sentences)
        else:  # if all pairs have a change, even nonsense would count as right
            which = "no" if pairs[0].is_distractor else "every"
            notes.append(f"The accuracy is left out: {which} pair has a change.")
        for (name, _), group_scores in scores.items():
            for group, by_metric in group_scores.items():
                if not id_scoring.accuracy_only and by_metric.keys() >= set(S_M_METRICS):
                    by_metric["S*m"] = sum(by_metric[metric] for metric in S_M_METRICS) / len(S_M_METRICS)
                if accuracy[name]:
                    by_metric["accuracy"] = accuracy[name][group]
    unavailable = unavailable_metrics(metrics)
    computed = [metric for metric in ALL_METRICS if metric in metrics and metric not in unavailable]
    counts = {group: len(ids) for group, ids in groups.items()}
    has_object_labels = any("changed" in pair.extra for pair in pairs)
    results: dict[str, JsonDict] = {}
    for name, captions in systems.items():
        result: JsonDict = {
            "protocol": {**(protocol or {}), "tokenizer": tokenizer, "metrics": computed, "pairs": counts},
            "groups": scores[name, "text"],
        }
        if id_scoring and vocabulary:
            id_protocol = {
                "name": WordIdProtocol.name,
                "tokenizer": "ids",
                "vocabulary": id_scoring.vocabulary_rule,
                "vocabulary_size": len(vocabulary),  # with the special tokens
                "metrics": [metric for metric in computed if metric != "SPICE"],
            }
            result["id_tokens"] = {"protocol": id_protocol, "groups": scores[name, "ids"]}
        result["provenance"] = {**(provenance or {}), **({"unavailable": unavailable} if unavailable else {})}
        if has_object_labels:
            result["slots"] = slot_accuracy(captions, pairs)
        if all_notes := notes + caption_notes(captions, references):
            result["notes"] = all_notes
        results[name] = result
    return results
