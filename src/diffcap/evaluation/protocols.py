"""Which pairs are scored together, and `metrics.json`."""

from collections.abc import Mapping, Sequence
from typing import Any

from diffcap.evaluation.captions import ALL_METRICS, score_groups, unavailable_metrics
from diffcap.evaluation.slots import slot_accuracy
from diffcap.evaluation.tokenize import Tokenizer
from diffcap.records import ChangePair

# The order of the papers' tables; a dataset's other types follow in alphabetical order.
TYPE_ORDER = ("color", "material", "add", "drop", "move")


def groups_of(pairs: Sequence[ChangePair]) -> dict[str, list[str]]:
    """The groups of one split: "total"; "semantic" and "distractor" where both occur; each change type.

    A change type's group holds semantic pairs only, as in the papers' tables. A dataset without types and distractors
    has "total" alone.

    Returns:
        name -> ids in the order of `pairs`; no group is empty but "total" of no pairs.
    """
    groups = {"total": [pair.id for pair in pairs]}
    semantic = [pair for pair in pairs if not pair.is_distractor]
    if 0 < len(semantic) < len(pairs):
        groups["semantic"] = [pair.id for pair in semantic]
        groups["distractor"] = [pair.id for pair in pairs if pair.is_distractor]
    types = {pair.change_type for pair in semantic if pair.change_type is not None}
    for name in [*(name for name in TYPE_ORDER if name in types), *sorted(types - set(TYPE_ORDER))]:
        groups[name] = [pair.id for pair in semantic if pair.change_type == name]
    return groups


def standing(info: Mapping[str, Any]) -> dict[str, str]:
    """What every score has to say of its dataset, as keys of a protocol.

    Args:
        info: the dataset's `dataset.json`.

    Returns:
        "official": "whole" or "part" of the released dataset, where its size is known; "change_types": where they and the
        distractors come from, where the dataset's files do not hold them.
    """
    official = (info.get("official") or {}).get("state")
    derived = info.get("change_types")
    return {**({"official": official} if official else {}), **({"change_types": derived} if derived else {})}


def remarks(protocol: Mapping[str, Any]) -> str:
    """What `standing` put into a protocol, for titles: each remark with a comma and a blank behind it; often ""."""
    said = []
    if protocol.get("official") == "part":
        said.append("a part of the official dataset, ")
    if protocol.get("change_types"):
        said.append(f"change types {protocol['change_types']}, ")
    return "".join(said)


def evaluate(
    predictions: Mapping[str, str],
    pairs: Sequence[ChangePair],
    tokenizer: Tokenizer = "ptb",
    metrics: Sequence[str] = ALL_METRICS,
    protocol: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Score one split's captions by its protocol: what `metrics.json` holds.

    Args:
        predictions: id -> caption, exactly the ids of `pairs`.
        pairs: the pairs of the split, each with its reference captions.
        tokenizer: "ptb" or "raw".
        metrics: names out of `captions.ALL_METRICS`.
        protocol: what else there is to say about how it was scored ({"dataset": ..., "split": ...}).
        provenance: where the captions come from (checkpoint, seed, versions, manifest's hash).

    Returns:
        {"protocol": {..., "tokenizer", "metrics", "pairs": group -> number}, "groups": group -> metric -> fraction,
        "provenance": {...}}. A metric that could not be had stands in provenance's "unavailable" with the way to get
        it. Where the pairs know their changed object (`blocks`), "slots" holds `slots.slot_accuracy`.

    Raises:
        DiffcapError: ids are missing or unknown, a pair has no reference, or there is no Java.
    """
    groups = groups_of(pairs)
    scores = score_groups(predictions, {pair.id: pair.captions for pair in pairs}, groups, tokenizer, metrics)
    missing = unavailable_metrics(metrics)
    result: dict[str, Any] = {
        "protocol": {
            **(protocol or {}),
            "tokenizer": tokenizer,
            "metrics": [name for name in ALL_METRICS if name in metrics and name not in missing],
            "pairs": {name: len(ids) for name, ids in groups.items()},
        },
        "groups": scores,
        "provenance": {**(provenance or {}), **({"unavailable": missing} if missing else {})},
    }
    if any("changed" in pair.extra for pair in pairs):
        result["slots"] = slot_accuracy(predictions, pairs)
    return result
