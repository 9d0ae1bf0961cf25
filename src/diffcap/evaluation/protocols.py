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
    """Score one split's captions by its protocol: the content of `metrics.json`.

    Args:
        predictions: id -> caption, exactly the ids of `pairs`.
        pairs: the pairs of the split, each with its reference captions.
        tokenizer: "ptb" or "raw".
        metrics: names out of `captions.ALL_METRICS`.
        protocol: further entries of the protocol ({"dataset": ..., "split": ...}).
        provenance: origin of the captions (checkpoint, seed, versions, manifest's hash).

    Returns:
        {"protocol": {..., "tokenizer", "metrics", "pairs": group -> number}, "groups": group -> metric -> fraction,
        "provenance": {...}}. Unavailable metrics are listed under "unavailable" in provenance with the way to install them.
        If the pairs know their changed object (`blocks`), "slots" holds `slots.slot_accuracy`.

    Raises:
        DiffcapError: ids are missing or unknown, a pair has no reference, or there is no Java.
    """
    return evaluate_systems({"": predictions}, pairs, tokenizer, metrics, protocol, provenance)[""]


def evaluate_systems(
    systems: Mapping[str, Mapping[str, str]],
    pairs: Sequence[ChangePair],
    tokenizer: Tokenizer = "ptb",
    metrics: Sequence[str] = ALL_METRICS,
    protocol: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """`evaluate` for several systems, name -> id -> caption, in much less time than one by one: name -> its result."""
    groups = groups_of(pairs)
    scores = score_groups(systems, {pair.id: pair.captions for pair in pairs}, groups, tokenizer, metrics)
    missing = unavailable_metrics(metrics)
    knows_objects = any("changed" in pair.extra for pair in pairs)
    return {
        name: {
            "protocol": {
                **(protocol or {}),
                "tokenizer": tokenizer,
                "metrics": [metric for metric in ALL_METRICS if metric in metrics and metric not in missing],
                "pairs": {group: len(ids) for group, ids in groups.items()},
            },
            "groups": scores[name],
            "provenance": {**(provenance or {}), **({"unavailable": missing} if missing else {})},
            **({"slots": slot_accuracy(predictions, pairs)} if knows_objects else {}),
        }
        for name, predictions in systems.items()
    }
