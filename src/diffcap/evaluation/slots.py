"""Slot accuracy on `blocks`: from the words alone, was the type of change right, and what was said of the object."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diffcap.errors import DiffcapError
from diffcap.records import ChangePair

ATTRIBUTES = ("size", "color", "material", "shape")

# word -> (attribute, value), for every word that blocks captions use for an attribute
_COLORS = ("gray", "red", "blue", "green", "brown", "purple", "cyan", "yellow")
_WORDS = {
    **dict.fromkeys(("large", "big"), ("size", "large")),
    **dict.fromkeys(("small", "tiny"), ("size", "small")),
    **{color: ("color", color) for color in _COLORS},
    **dict.fromkeys(("rubber", "matte"), ("material", "rubber")),
    **dict.fromkeys(("metal", "metallic", "shiny"), ("material", "metal")),
    **dict.fromkeys(("cube", "block"), ("shape", "cube")),
    **dict.fromkeys(("sphere", "ball"), ("shape", "sphere")),
    "cylinder": ("shape", "cylinder"),
}

# Key words of one change type never occur in the captions of another. A change of colour and one of material share
# theirs ("turn"): the caption's last word tells them apart.
_KEYS = {
    "add": {"added", "appeared", "new", "introduced"},
    "drop": {"removed", "disappeared", "missing", "gone", "vanished"},
    "move": {"moved", "shifted", "relocated", "position", "location", "elsewhere"},
    "none": {"no", "nothing", "same", "identical", "unchanged", "still"},
    "turn": {"became", "turned", "changed", "now"},
}


@dataclass(frozen=True)
class Slots:
    """What a caption says, None where it does not.

    Attributes:
        change_type: "color", "material", "add", "drop", "move", or "none" for no change; None when the key words of no
            type, or of two, occur.
        size, color, material, shape: of the first object named, in the manifest's words ("metal" for "shiny").
        to: the new colour or material.
    """

    change_type: str | None = None
    size: str | None = None
    color: str | None = None
    material: str | None = None
    shape: str | None = None
    to: str | None = None


def parse_caption(caption: str) -> Slots:
    """Read the change type and the first noun phrase out of a caption of the `blocks` grammar, right or wrong.

    The noun phrase is the first unbroken run of attribute words; it ends at its first shape. The new value of a colour
    or material change, the caption's last word, is no part of it.
    """
    words = re.findall(r"[a-z]+", caption.lower())
    found = [name for name, keys in _KEYS.items() if keys.intersection(words)]
    change_type = found[0] if len(found) == 1 else None
    to = None
    if change_type == "turn":
        change_type = None
        last = _WORDS.get(words[-1])
        if last is not None and last[0] in ("color", "material"):
            change_type, to = last
            words = words[:-1]
    said: dict[str, str] = {}
    for word in words:
        if word in _WORDS:
            attribute, value = _WORDS[word]
            said[attribute] = value
            if attribute == "shape":
                break
        elif said:
            break
    return Slots(change_type=change_type, to=to, **said)


# What `word_kinds` tells apart, in the order of a caption.
WORD_KINDS = (*ATTRIBUTES, "other object", "change", "new value", "other")


def word_kinds(words: Sequence[str]) -> list[str]:
    """What each word of a caption of the `blocks` grammar is about, for scores by word.

    Returns:
        For each word: "size", "color", "material" or "shape" of the first object named, as `parse_caption` reads it; "new value"
        of a colour or material change; "change" for a key word of a type of change; "other object" for the attributes of
        whatever the object is placed against; "other" for the rest.
    """
    plain = [re.sub(r"[^a-z]", "", word.lower()) for word in words]
    keys = set().union(*_KEYS.values())
    turned = parse_caption(" ".join(plain)).to is not None
    last = max((place for place, word in enumerate(plain) if word), default=-1)
    kinds, begun, over = [], False, False
    for place, word in enumerate(plain):
        attribute = _WORDS[word][0] if word in _WORDS else None
        over = over or (begun and attribute is None)
        if turned and place == last:
            kinds.append("new value")
        elif attribute:
            kinds.append("other object" if over else attribute)
            begun, over = True, over or attribute == "shape"
        else:
            kinds.append("change" if word in keys else "other")
    return kinds


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags)


def slot_accuracy(predictions: Mapping[str, str], pairs: Sequence[ChangePair]) -> dict[str, float]:
    """Compare what captions say with what the manifest knows.

    Args:
        predictions: id -> caption, for every id of `pairs`.
        pairs: `change_type` is one of color, material, add, drop, move, or anything where `is_distractor`;
            `extra["changed"]` of a change holds "size", "color", "material", "shape" (before the change) and, for
            color and material, the new value as "to".

    Returns:
        Fractions. "type": over all pairs, a distractor's type being "none". Over the pairs with a change: "object" (all
        four attributes said and right), "object_said" (all four said), each attribute by name (said and right) and with
        "_said" (said at all). "to": over color and material changes, the new value right. Keys without pairs are left
        out.

    Raises:
        DiffcapError: a pair has no prediction or a change lacks its "changed" entry; with count and first names.
    """
    missing = [pair.id for pair in pairs if pair.id not in predictions]
    if missing:
        raise DiffcapError(f"{len(missing):,} pairs have no prediction (first: {missing[0]!r}); caption them all.")
    changes = [pair for pair in pairs if not pair.is_distractor]
    objects = {pair.id: pair.extra.get("changed") for pair in changes}
    bare = [id for id, named in objects.items() if not (isinstance(named, dict) and set(ATTRIBUTES) <= named.keys())]
    if bare:
        raise DiffcapError(
            f'{len(bare):,} pairs do not name their changed object under "changed" (first: {bare[0]!r}); '
            "slot accuracy is for the blocks dataset; write its manifest again with `make data`."
        )
    said = {pair.id: parse_caption(predictions[pair.id]) for pair in pairs}
    scores: dict[str, float] = {}
    if pairs:
        types = {pair.id: "none" if pair.is_distractor else pair.change_type for pair in pairs}
        scores["type"] = _share([said[id].change_type == truth for id, truth in types.items()])
    if changes:
        truths = {pair.id: pair.extra["changed"] for pair in changes}

        def right(id: str, attribute: str) -> bool:
            return getattr(said[id], attribute) == truths[id][attribute]

        scores["object"] = _share([all(right(id, name) for name in ATTRIBUTES) for id in truths])
        scores["object_said"] = _share([all(getattr(said[id], name) for name in ATTRIBUTES) for id in truths])
        for name in ATTRIBUTES:
            scores[name] = _share([right(id, name) for id in truths])
            scores[f"{name}_said"] = _share([getattr(said[id], name) is not None for id in truths])
    turned = [pair for pair in changes if pair.change_type in ("color", "material")]
    if turned:
        scores["to"] = _share([said[pair.id].to == pair.extra["changed"].get("to") for pair in turned])
    return scores
