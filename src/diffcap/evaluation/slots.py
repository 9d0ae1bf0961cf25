"""Slot accuracy of captions of the dataset `blocks`: are the slots (change type, changed object and its new value) right?

Reversibility, also for captions of `tiles` and CLEVR-Change: is the caption of (after, before) the inverse of that of (before, after)?
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from diffcap.datasets.no_change import is_no_change
from diffcap.evaluation.ngrams import Groups
from diffcap.records import ChangePair
from diffcap.utils.errors import DiffcapError

ATTRIBUTES = ("size", "color", "material", "shape")

_COLORS = ("gray", "red", "blue", "green", "brown", "purple", "cyan", "yellow")
# word -> (attribute, value), for every word that the captions of the dataset `blocks` use for an attribute
_ATTRIBUTE_WORDS = {
    **dict.fromkeys(("large", "big"), ("size", "large")),
    **dict.fromkeys(("small", "tiny"), ("size", "small")),
    **{color: ("color", color) for color in _COLORS},
    **dict.fromkeys(("rubber", "matte"), ("material", "rubber")),
    **dict.fromkeys(("metal", "metallic", "shiny"), ("material", "metal")),
    **dict.fromkeys(("cube", "block"), ("shape", "cube")),
    **dict.fromkeys(("sphere", "ball"), ("shape", "sphere")),
    "cylinder": ("shape", "cylinder"),
}

# Change type -> its key words. "turn" is a change of color or of material: the last word of the caption tells which.
_KEY_WORDS = {
    "add": {"added", "appeared", "new", "introduced"},
    "drop": {"removed", "disappeared", "missing", "gone", "vanished"},
    "move": {"moved", "shifted", "relocated", "position", "location", "elsewhere"},
    "none": {"no", "nothing", "same", "identical", "unchanged", "still"},
    "turn": {"became", "turned", "changed", "now"},
}
# The beginnings of further key words, for reversibility
_STEMS = {
    "add": "appear|built|constructed|created|exposed|formed|grown|placed|planted|there (?:is|are) now",
    "drop": "cleared|cut|demolished|disappear|dried|dry|no longer|replaced|taken away|torn|turned into bare",
    "move": "moved",
}


@dataclass(frozen=True)
class Slots:
    """The information in a caption; a field is None if the caption does not contain it."""

    # "color", "material", "add", "drop", "move", or "none" for no change; None if the caption has key words of no type or of two types
    change_type: str | None = None
    # attributes of the first object in the caption, in the words of the dataset's annotations ("metal" for "shiny")
    size: str | None = None
    color: str | None = None
    material: str | None = None
    shape: str | None = None
    to: str | None = None  # the new color or material


def parse_caption(caption: str) -> Slots:
    """Parse the change type and the first noun phrase of a caption.

    The noun phrase is the first sequence of attribute words. It ends with the first shape. The new value of a change of color or
    material is the last word of the caption.

    Example:
        >>> parse_caption("the big shiny cube turned red")
        Slots(change_type='color', size='large', color=None, material='metal', shape='cube', to='red')
    """
    words = re.findall(r"[a-z]+", caption.lower())
    types = [name for name, key_words in _KEY_WORDS.items() if key_words.intersection(words)]
    change_type = types[0] if len(types) == 1 else None
    new_value = None
    last_word = _ATTRIBUTE_WORDS.get(words[-1]) if words else None  # (attribute, value)
    has_new_value = last_word is not None and last_word[0] in ("color", "material")
    if change_type == "turn":
        change_type = None
        if last_word is not None and has_new_value:
            change_type, new_value = last_word
            words = words[:-1]
    turn_words = _KEY_WORDS["turn"].intersection(words)
    if types == ["none", "turn"] and turn_words == {"changed"} and not has_new_value:
        change_type = "none"  # as in "nothing has changed", which has key words of two types
    attributes: dict[str, str] = {}
    for word in words:
        if word in _ATTRIBUTE_WORDS:
            attribute, value = _ATTRIBUTE_WORDS[word]
            attributes[attribute] = value
            if attribute == "shape":
                break
        elif attributes:
            break
    return Slots(change_type=change_type, to=new_value, **attributes)


WORD_KINDS = (*ATTRIBUTES, "other object", "change", "new value", "other")


def word_kinds(words: Sequence[str]) -> list[str]:
    """Classify each word of a caption as one of `WORD_KINDS`.

    "size", "color", "material" and "shape" are attributes of the first object, "other object" is an attribute of another object. "change"
    is a key word of a change type, "new value" is the last word of a caption if this is the changed object's new color or material.
    """
    plain_words = [re.sub(r"[^a-z]", "", word.lower()) for word in words]
    all_key_words = set().union(*_KEY_WORDS.values())
    kinds = []
    phrase_started, phrase_ended = False, False
    for word in plain_words:
        attribute, _ = _ATTRIBUTE_WORDS.get(word, ("", ""))
        phrase_ended = phrase_ended or (phrase_started and not attribute)
        if attribute:
            kinds.append("other object" if phrase_ended else attribute)
            phrase_started = True
            phrase_ended = phrase_ended or attribute == "shape"
        else:
            kinds.append("change" if word in all_key_words else "other")
    if parse_caption(" ".join(plain_words)).to is not None:
        kinds[max(index for index, word in enumerate(plain_words) if word)] = "new value"
    return kinds


def slot_accuracy(predictions: Mapping[str, str], pairs: Sequence[ChangePair]) -> dict[str, float]:
    """Compare the slots of captions (id -> caption) with the annotations of their pairs.

    Args:
        pairs: `change_type` is color, material, add, drop or move (ignored for distractors, the pairs without change). For a change,
            `extra["changed"]` has "size", "color", "material", "shape" (before) and, for color and material, the new value as "to".

    Returns:
        Fractions of pairs; keys without pairs are left out. "type": the change type is right ("none" for distractors).
        Of the pairs with a change: "object": all four attributes are right; "object_said": the caption names all four, right or wrong;
        "size", "color", "material" and "shape": this attribute is right; "size_said", ...: the caption names it, right or wrong.
        Of the pairs with a change of color or material: "to": the new value is right.

    Example:
        >>> cube = {"size": "large", "color": "red", "material": "metal", "shape": "cube"}
        >>> pair = ChangePair("1", "a.png", "b.png", [], "test", "move", extra={"changed": cube})
        >>> scores = slot_accuracy({"1": "the red ball moved"}, [pair])
        >>> scores["type"], scores["color"], scores["shape"], scores["shape_said"], scores["object"]
        (1.0, 1.0, 0.0, 1.0, 0.0)
    """
    truths = {pair.id: pair.extra["changed"] for pair in pairs if not pair.is_distractor}
    is_right: dict[str, list[bool]] = defaultdict(list)  # key of the result -> one flag per counted pair
    for pair in pairs:
        slots, truth = parse_caption(predictions[pair.id]), truths.get(pair.id)
        is_right["type"].append(slots.change_type == (pair.change_type if truth else "none"))
        if truth:
            said_values = {name: getattr(slots, name) for name in ATTRIBUTES}
            is_right["object"].append(all(said_values[name] == truth[name] for name in ATTRIBUTES))
            is_right["object_said"].append(all(said_values.values()))
            for name in ATTRIBUTES:
                is_right[name].append(said_values[name] == truth[name])
                is_right[f"{name}_said"].append(said_values[name] is not None)
            if pair.change_type in ("color", "material"):
                is_right["to"].append(slots.to == truth.get("to"))
    return {key: sum(flags) / len(flags) for key, flags in is_right.items()}


def _parse_any_caption(caption: str) -> Slots:
    slots, text = parse_caption(caption), caption.lower()
    words = set(re.findall(r"[a-z]+", text))
    types = [name for name in _STEMS if _KEY_WORDS[name] & words or re.search(rf"\b(?:{_STEMS[name]})", text)]
    if is_no_change(caption):
        types = ["none"]
    return replace(slots, change_type=types[0] if len(types) == 1 else None) if types else slots


def reversibility(
    captions: Mapping[str, str], swapped: Mapping[str, str], groups: Groups
) -> dict[str, dict[str, float]]:
    """Compare captions of (before, after) with those of (after, before), id -> caption. The measure's name is from C3-Bench.

    Returns:
        group -> fractions of its pairs. "inverse": the second caption is the inverse of the first: add and drop are exchanged, and old
        and new color or material; no attribute is another one. A caption of unknown change type has no inverse. "change": the first
        caption states a change.

    Example:
        >>> captions = {"1": "the red cube appeared", "2": "the red cube turned blue"}
        >>> swapped = {"1": "the red cube is gone", "2": "the blue ball turned red"}
        >>> reversibility(captions, swapped, {"total": ["1", "2"]})
        {'total': {'inverse': 0.5, 'change': 1.0}}
    """
    flags = {}
    for id, caption in captions.items():
        first, second = _parse_any_caption(caption), _parse_any_caption(swapped[id])
        kind = first.change_type
        inverse_kind = {"add": "drop", "drop": "add"}.get(kind, kind) if kind else ""
        if kind in ("color", "material"):
            first = replace(first, to=getattr(first, kind), **{kind: first.to})
        is_inverse = second.change_type == inverse_kind
        for name in (*ATTRIBUTES, "to"):
            values = getattr(first, name), getattr(second, name)
            is_inverse = is_inverse and (None in values or values[0] == values[1])
        flags[id] = {"inverse": is_inverse, "change": kind not in (None, "none")}
    names = "inverse", "change"
    return {group: {name: fmean(flags[id][name] for id in ids) for name in names} for group, ids in groups.items()}


def check_reversible(pairs: Sequence[ChangePair], dataset: str) -> None:
    """Raise an error unless `reversibility` knows the change types of a dataset's references."""
    references = [caption for pair in pairs for caption in pair.captions]
    num_known = sum(_parse_any_caption(caption).change_type is not None for caption in references)
    if num_known < 0.9 * len(references) or not references:
        raise DiffcapError(
            f"{dataset}: the change type of only {num_known:,} of its {len(references):,} references is known; leave out EVAL=swap "
            "(--task swap), which is for captions of rendered scenes."
        )
