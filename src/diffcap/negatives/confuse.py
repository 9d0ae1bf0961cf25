"""Build negatives of the kind "confuse": wrong captions in which words of a caption have exchanged their roles (IDC-PCL, section 3.2).

Each strategy returns a new text, or None if it does not apply. The strategies are tried in this order:

* For captions with "animal1" or "animal2" (Birds-to-Words): swap the two animals in the whole caption; swap them in one sentence
  that names both; invert each comparison ("larger" / "smaller"); swap two adjectives or two nouns.
* For other captions: swap two noun phrases of a sentence; invert the change ("added" / "removed", "from" / "to", the old and
  the new color); invert each comparison; swap two adjectives or two nouns.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from random import Random

from diffcap.negatives.words import (
    CHANGE_ANTONYMS,
    COMPARISON_ANTONYMS,
    FUNCTION_WORDS,
    TaggedCaption,
    attribute_of,  # of a word: size, color, material, shape, side or change
    fix_articles,
    inflection,
    is_animal,
    is_replaceable,
    synonym_key,  # is equal for synonyms
)
from diffcap.text.tagging import split_sentences

_SYMMETRIC_WORDS = frozenset(("same", "similar", "identical", "both", "alike", "equal", "equally", "each", "neither"))
_OTHER_ANIMAL = {"animal1": "animal2", "animal2": "animal1"}
_WORDS_AFTER_SAME = frozenset(("as", "in", "but", "and", "except", "with", "though"))  # may follow a bare "the same"
_COORDINATORS = frozenset(("and", "or", ",", "/", "-", "&"))
_BE_FORMS = frozenset(("is", "was", "are", "were", "been", "being", "be"))
# Words that describe a state. They are inverted only if the caption has no verb of change.
_STATE_WORDS = frozenset(("gone", "missing", "new", "nothing", "same", "identical", "unchanged", "no"))


def confuse(caption: TaggedCaption, rng: Random) -> Iterator[tuple[str, str]]:
    """Yield (name of the strategy, text) of every strategy that applies, best first. Two strategies may give the same text."""
    strategies = _ANIMAL_STRATEGIES if any(word in _OTHER_ANIMAL for word in caption.words) else _SCENE_STRATEGIES
    for name, strategy in strategies.items():
        text = strategy(caption, rng)
        if text is not None and text != caption.text:
            yield name, text


def swap_animals(caption: TaggedCaption, rng: Random) -> str | None:
    """Swap "animal1" and "animal2" in every sentence where that changes the meaning."""
    sentences = split_sentences(caption.words)
    swapped = [_swap_animals_of(sentence) if _swap_changes_meaning(sentence) else sentence for sentence in sentences]
    return " ".join(chain.from_iterable(swapped)) if swapped != sentences else None


def swap_animals_once(caption: TaggedCaption, rng: Random) -> str | None:
    """Swap the animals in one sentence that names both, if a swap in another sentence would also change the meaning."""
    sentences = split_sentences(caption.words)
    swappable_indices = [index for index, sentence in enumerate(sentences) if _swap_changes_meaning(sentence)]
    indices_with_both = [index for index in swappable_indices if {"animal1", "animal2"} <= set(sentences[index])]
    if len(swappable_indices) < 2 or not indices_with_both:
        return None
    chosen_index = rng.choice(indices_with_both)
    sentences[chosen_index] = _swap_animals_of(sentences[chosen_index])
    return " ".join(chain.from_iterable(sentences))


def invert_comparison(caption: TaggedCaption, rng: Random) -> str | None:
    """Replace every word of comparison by its antonym, except nouns ("light")."""
    inverted: list[str] = []
    changed_indices = set()  # indices in `inverted`, which can be shorter or longer than the caption
    for index, (word, tag) in enumerate(zip(caption.words, caption.tags)):
        if word not in COMPARISON_ANTONYMS or tag == "NOUN":
            inverted.append(word)
            continue
        if word == "same" and inverted[-1:] == ["the"]:
            inverted[-1:] = _words_for_different(caption.words[index + 1 :])
        elif word == "different" and inverted[-1:] == ["a"]:
            inverted[-1:] = ["the", "same"]
        else:
            inverted.append(COMPARISON_ANTONYMS[word])
        changed_indices.add(len(inverted) - 1)
    return " ".join(fix_articles(inverted, changed_indices)) if changed_indices else None


def swap_noun_phrases(caption: TaggedCaption, rng: Random) -> str | None:
    """Swap the first two neighbouring noun phrases (with their articles) that mean different things."""
    words = caption.words
    for (start, end), (next_start, next_end) in pairwise(_noun_phrases(caption)):
        first, between, second = words[start:end], words[end:next_start], words[next_start:next_end]
        if _synonym_keys(first) != _synonym_keys(second) and not _is_coordination(between):
            return " ".join((*words[:start], *second, *between, *first, *words[next_end:]))
    return None


def invert_change(caption: TaggedCaption, rng: Random) -> str | None:
    """Describe the opposite change. If the caption states that nothing changed, describe a change."""
    words = list(caption.words)
    for index in range(len(words) - 3):  # turn "from red to blue" into "from blue to red"
        first, old, second, new = words[index : index + 4]
        if first == "from" and second == "to" and old != new:
            words[index : index + 4] = [first, new, second, old]
            return " ".join(words)
    if swapped := _swap_old_and_new(words):
        return swapped
    # Invert one word: a word of movement if there is one, else another verb of change, a position, "still", or a state.
    for invert in (_invert_move, _invert_verb, _invert_position, _invert_still, _invert_state):
        for index, word in enumerate(words):
            inverted = invert(words, index, word)
            if inverted is not None:
                return " ".join(inverted)
    return None


def swap_words(caption: TaggedCaption, rng: Random) -> str | None:
    """Swap two adjectives, or two nouns, that mean different things and are not in one enumeration."""
    words = list(caption.words)
    for wanted_tag in ("ADJ", "NOUN"):
        tagged_words = enumerate(zip(words, caption.tags))
        indices = [index for index, (word, tag) in tagged_words if tag == wanted_tag and is_replaceable(word, tag)]
        pairs = [
            (first, second)
            for first, second in pairwise(indices)
            if second > first + 1
            and synonym_key(words[first]) != synonym_key(words[second])
            and attribute_of(words[first]) == attribute_of(words[second])
            and inflection(words[first], wanted_tag) == inflection(words[second], wanted_tag)
            and not _is_coordination(words[first + 1 : second])
        ]
        if pairs:
            first, second = rng.choice(pairs)
            words[first], words[second] = words[second], words[first]
            return " ".join(fix_articles(words, {first, second}))
    return None


# The names are keys in `negatives.json`, so they must stay as they are when a function is renamed.
_ANY_CAPTION = {"turn_comparison": invert_comparison, "exchange_words": swap_words}
_ANIMAL_STRATEGIES = {"swap_animals": swap_animals, "swap_animals_once": swap_animals_once, **_ANY_CAPTION}
_SCENE_STRATEGIES = {
    "swap_noun_phrases": swap_noun_phrases,
    "reverse_change": invert_change,
    **_ANY_CAPTION,
}


def _swap_changes_meaning(sentence: list[str]) -> bool:
    """Return False if swapping the animals keeps the meaning, as in "animal1 and animal2 are the same"."""
    animal_indices = [index for index, word in enumerate(sentence) if word in _OTHER_ANIMAL]
    is_coordinated = any(
        second - first == 2 and sentence[first + 1] in _COORDINATORS and sentence[first] != sentence[second]
        for first, second in pairwise(animal_indices)
    )
    return bool(animal_indices) and not is_coordinated and _SYMMETRIC_WORDS.isdisjoint(sentence)


def _swap_animals_of(sentence: list[str]) -> list[str]:
    return [_OTHER_ANIMAL.get(word, word) for word in sentence]


_LETTER_OF_TAG = {"DET": "D", "ADJ": "A", "NUM": "A", "NOUN": "N", "PROPN": "N"}


def _noun_phrases(caption: TaggedCaption) -> list[tuple[int, int]]:
    """Return (start, end) of each noun phrase that names an object: articles, then adjectives and nouns, the last one a noun."""
    letters = "".join(_LETTER_OF_TAG.get(tag, "-") for tag in caption.tags)
    spans = []
    for match in re.finditer("D*[AN]*N", letters):
        start, end = match.span()
        head_noun = caption.words[end - 1]
        attributes = [attribute_of(word) for word in caption.words[start:end]]
        is_object = head_noun not in FUNCTION_WORDS and not is_animal(head_noun)
        if is_object and attributes[-1] not in ("side", "color", "material") and "change" not in attributes:
            spans.append((start, end))
    return spans


def _synonym_keys(phrase: tuple[str, ...]) -> list[str]:
    return [synonym_key(word) for word in phrase if word not in ("the", "a", "an")]


def _is_coordination(between: tuple[str, ...] | list[str]) -> bool:
    """Return True if the words between two phrases only join them: "and", ","."""
    return bool(between) and all(word in _COORDINATORS for word in between)


def _swap_old_and_new(words: list[str]) -> str | None:
    """Turn "the red cube became blue" into "the blue cube became red" if the last word is a color or a material."""
    attribute = attribute_of(words[-1]) if words else None
    if attribute not in ("color", "material"):
        return None
    old_index = next(index for index, word in enumerate(words) if attribute_of(word) == attribute)
    if synonym_key(words[old_index]) == synonym_key(words[-1]):
        return None
    words = list(words)
    words[old_index], words[-1] = words[-1], words[old_index]
    return " ".join(fix_articles(words, {old_index}))


def _word_before(words: list[str], index: int) -> str:
    return words[index - 1] if index else ""


def _invert_move(words: list[str], index: int, word: str) -> list[str] | None:
    """Replace "moved", which has no opposite, by "removed" or "disappeared"."""
    if word not in ("moved", "shifted", "relocated") or words[0] in ("no", "nothing"):
        return None
    rest = [other for other in words[index + 1 :] if other != "elsewhere"]
    removal = "removed" if _word_before(words, index) in _BE_FORMS else "disappeared"
    return [*words[:index], removal, *rest]


def _invert_verb(words: list[str], index: int, word: str) -> list[str] | None:
    if word not in CHANGE_ANTONYMS or word in _STATE_WORDS or words[0] in ("no", "nothing"):
        return None
    return [*words[:index], CHANGE_ANTONYMS[word], *words[index + 1 :]]


def _invert_position(words: list[str], index: int, word: str) -> list[str] | None:
    """Turn "in a different position" into "in the same position", and "in another place" into "in the same place"."""
    rest = words[index + 1 :]
    if word not in ("another", "different", "new") or not rest or rest[0] not in FUNCTION_WORDS:
        return None
    start = index - 1 if _word_before(words, index) in ("a", "the") else index
    return [*words[:start], "the", "same", *rest]


def _invert_still(words: list[str], index: int, word: str) -> list[str] | None:
    """Turn "no longer" into "now", and "is still" into "is no longer"."""
    if word == "no" and words[index + 1 : index + 2] == ["longer"]:
        return [*words[:index], "now", *words[index + 2 :]]
    is_still = word == "still" and _word_before(words, index) in _BE_FORMS
    if is_still and words[index + 1 : index + 3] != ["the", "same"]:
        return [*words[:index], "no", "longer", *words[index + 1 :]]
    return None


def _invert_state(words: list[str], index: int, word: str) -> list[str] | None:
    if word not in _STATE_WORDS:
        return None
    rest = words[index + 1 :]
    if word == "same" and _word_before(words, index) == "the":
        replacement = [*_words_for_different(rest), *rest]
        if rest[:1] == ["as"]:  # "the same as" -> "different from"
            replacement = ["different", "from", *rest[1:]]
        return [*words[: index - 1], *replacement]
    is_plural = any(_is_plural(other) for other in rest[:3])
    antonym = "some" if word == "no" and is_plural else CHANGE_ANTONYMS[word]
    return fix_articles([*words[:index], antonym, *rest], {index, index + 1})


def _words_for_different(rest: Sequence[str]) -> list[str]:
    """Return the opposite of "the same" before the words `rest`: "a different" before a singular noun, else "different"."""
    no_noun = not rest or not rest[0].isalpha() or rest[0] in _WORDS_AFTER_SAME
    return ["different"] if no_noun or any(_is_plural(word) for word in rest[:2]) else ["a", "different"]


def _is_plural(word: str) -> bool:
    return word.endswith("s") and not word.endswith(("ss", "us", "is", "as"))
