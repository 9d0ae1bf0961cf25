"""Confused negatives: the same words with their roles exchanged (IDC-PCL, section 3.2).

The ways, in the order of preference; each gives a text or nothing:

* captions with "animal1" or "animal2": the two are exchanged throughout; then in one sentence only that holds both;
  then a comparison is turned ("larger" / "smaller"); then two adjectives or nouns change places;
* other captions: the noun phrases of a sentence change places; the change is said the other way round ("added" /
  "removed", "from" / "to", the old and the new colour); then as above.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from random import Random

from diffcap.negatives.corpus import Sentence, is_replaceable
from diffcap.negatives.words import COMPARED, FRAME, REVERSED, ending, is_animal, kind_of, meaning, with_article
from diffcap.text.tagging import split_sentences

_SYMMETRIC = frozenset(("same", "similar", "identical", "both", "alike", "equal", "equally", "each", "neither"))
_OTHER = {"animal1": "animal2", "animal2": "animal1"}
_JOINING = frozenset(("and", "or", ",", "/", "-", "&"))
_PASSIVE = frozenset(("is", "was", "are", "were", "been", "being", "be"))


def confuse(sentence: Sentence, random: Random) -> Iterator[tuple[str, str]]:
    """Yield (name of the way, text) for every way that applies, the best first; a text may come twice."""
    ways: tuple[Callable[[Sentence, Random], str | None], ...]
    if any(word in _OTHER for word in sentence.words):
        ways = (swap_animals, swap_animals_once, turn_comparison, exchange_words)
    else:
        ways = (swap_noun_phrases, reverse_change, turn_comparison, exchange_words)
    for way in ways:
        text = way(sentence, random)
        if text is not None and text != sentence.text:
            yield way.__name__, text


def swap_animals(sentence: Sentence, random: Random) -> str | None:
    """Exchange "animal1" and "animal2" in every sentence where that changes what is said."""
    parts = split_sentences(sentence.words)
    swapped = [_exchanged(part) if _tells_apart(part) else part for part in parts]
    return _joined(swapped) if swapped != parts else None


def swap_animals_once(sentence: Sentence, random: Random) -> str | None:
    """Exchange the two in one sentence that holds both, of a caption that holds other such sentences too."""
    parts = split_sentences(sentence.words)
    able = [place for place, part in enumerate(parts) if _tells_apart(part)]
    both = [place for place in able if {"animal1", "animal2"} <= set(parts[place])]
    if len(able) < 2 or not both:
        return None
    chosen = random.choice(both)
    return _joined([_exchanged(part) if place == chosen else part for place, part in enumerate(parts)])


def turn_comparison(sentence: Sentence, random: Random) -> str | None:
    """Say every comparison the other way round; nouns ("light") stay."""
    turned: list[str] = []
    places = set()
    for place, (word, tag) in enumerate(zip(sentence.words, sentence.tags)):
        if word not in COMPARED or tag == "NOUN":
            turned.append(word)
            continue
        if word == "same" and turned[-1:] == ["the"]:
            turned[-1:] = _a_different(sentence.words[place + 1 :])
        elif word == "different" and turned[-1:] == ["a"]:
            turned[-1:] = ["the", "same"]
        else:
            turned.append(COMPARED[word])
        places.add(len(turned) - 1)
    return " ".join(with_article(turned, places)) if places else None


def swap_noun_phrases(sentence: Sentence, random: Random) -> str | None:
    """Exchange the first two noun phrases (with their articles) of a sentence that mean different things."""
    phrases = _noun_phrases(sentence)
    for (start, end), (later, last) in pairwise(phrases):
        first, second = sentence.words[start:end], sentence.words[later:last]
        if _named(first) != _named(second) and not _in_a_list(sentence.words[end:later]):
            words = (*sentence.words[:start], *second, *sentence.words[end:later], *first, *sentence.words[last:])
            return " ".join(words)
    return None


def reverse_change(sentence: Sentence, random: Random) -> str | None:
    """Say the change, or that there is none, the other way round."""
    words = list(sentence.words)
    return _from_to(words) or _old_and_new(words) or _opposite(words)


def exchange_words(sentence: Sentence, random: Random) -> str | None:
    """Exchange two adjectives, or two nouns, that mean different things and are not members of one list."""
    words = list(sentence.words)
    for wanted in ("ADJ", "NOUN"):
        places = [
            place
            for place, (word, tag) in enumerate(zip(words, sentence.tags))
            if tag == wanted and is_replaceable(word, tag)
        ]
        pairs = [
            (first, second)
            for first, second in pairwise(places)
            if second > first + 1
            and meaning(words[first]) != meaning(words[second])
            and kind_of(words[first]) == kind_of(words[second])
            and ending(words[first], wanted) == ending(words[second], wanted)
            and not _in_a_list(words[first + 1 : second])
        ]
        if pairs:
            first, second = random.choice(pairs)
            words[first], words[second] = words[second], words[first]
            return " ".join(with_article(words, {first, second}))
    return None


def _tells_apart(part: list[str]) -> bool:
    """False where exchanging the animals says the same again: "animal1 and animal2 are the same"."""
    animals = [place for place, word in enumerate(part) if word in _OTHER]
    joined = any(
        second - first == 2 and part[first + 1] in _JOINING and part[first] != part[second]
        for first, second in pairwise(animals)
    )
    return bool(animals) and not joined and not _SYMMETRIC & set(part)


def _exchanged(part: list[str]) -> list[str]:
    return [_OTHER.get(word, word) for word in part]


def _joined(parts: list[list[str]]) -> str:
    return " ".join(word for part in parts for word in part)


def _noun_phrases(sentence: Sentence) -> list[tuple[int, int]]:
    """(start, end) of each run of adjectives and nouns that ends in a noun, with its article, but for frame words."""
    phrases, place, tags = [], 0, sentence.tags
    while place < len(tags):
        start = place
        while place < len(tags) and tags[place] == "DET":
            place += 1
        body = place
        while place < len(tags) and tags[place] in ("ADJ", "NOUN", "PROPN", "NUM"):
            place += 1
        end = place
        while end > body and tags[end - 1] not in ("NOUN", "PROPN"):
            end -= 1
        if end > body and _names_a_thing(sentence.words[start:end]):
            phrases.append((start, end))
        place = max(place, start + 1)
    return phrases


def _names_a_thing(phrase: tuple[str, ...]) -> bool:
    head = phrase[-1]
    if head in FRAME or is_animal(head) or kind_of(head) in ("side", "color", "material"):
        return False
    return not any(kind_of(word) == "change" for word in phrase)


def _named(phrase: tuple[str, ...]) -> list[str]:
    return [meaning(word) for word in phrase if word not in ("the", "a", "an")]


def _in_a_list(between: tuple[str, ...] | list[str]) -> bool:
    return bool(between) and all(word in _JOINING for word in between)


def _from_to(words: list[str]) -> str | None:
    """ "from red to blue" becomes "from blue to red"."""
    for place in range(len(words) - 3):
        if words[place] == "from" and words[place + 2] == "to" and words[place + 1] != words[place + 3]:
            words = list(words)
            words[place + 1], words[place + 3] = words[place + 3], words[place + 1]
            return " ".join(words)
    return None


def _old_and_new(words: list[str]) -> str | None:
    """ "the red cube became blue": the last word is the new value, the first of its kind the old one."""
    kind = kind_of(words[-1]) if words else None
    if kind not in ("color", "material"):
        return None
    old = next((place for place, word in enumerate(words[:-1]) if kind_of(word) == kind), None)
    if old is None or meaning(words[old]) == meaning(words[-1]):
        return None
    words = list(words)
    words[old], words[-1] = words[-1], words[old]
    return " ".join(with_article(words, {old}))


def _opposite(words: list[str]) -> str | None:
    """The first word of change turned, verbs before adjectives before words of sameness."""
    for turn in (_moved, _verb_turned, _place_turned, _still_turned, _rest_turned):
        for place, word in enumerate(words):
            turned = turn(words, place, word)
            if turned is not None:
                return " ".join(turned)
    return None


def _moved(words: list[str], place: int, word: str) -> list[str] | None:
    """A move has no opposite of its own: let the object go."""
    if word not in ("moved", "shifted", "relocated") or words[:1] in (["no"], ["nothing"]):
        return None
    rest = [other for other in words[place + 1 :] if other != "elsewhere"]
    return [*words[:place], "removed" if words[place - 1] in _PASSIVE else "disappeared", *rest]


def _verb_turned(words: list[str], place: int, word: str) -> list[str] | None:
    if word not in REVERSED or word in _ADJECTIVES or words[:1] in (["no"], ["nothing"]):
        return None
    return [*words[:place], REVERSED[word], *words[place + 1 :]]


def _place_turned(words: list[str], place: int, word: str) -> list[str] | None:
    """ "in a different position", "in another place": in the same."""
    if (
        word not in ("another", "different", "new")
        or words[place + 1 : place + 2] == []
        or words[place + 1] not in FRAME
    ):
        return None
    start = place - 1 if words[place - 1] in ("a", "the") else place
    return [*words[:start], "the", "same", *words[place + 1 :]]


def _still_turned(words: list[str], place: int, word: str) -> list[str] | None:
    if word == "no" and words[place + 1 : place + 2] == ["longer"]:
        return [*words[:place], "now", *words[place + 2 :]]
    if word == "still" and place and words[place - 1] in _PASSIVE and words[place + 1 : place + 3] != ["the", "same"]:
        return [*words[:place], "no", "longer", *words[place + 1 :]]
    return None


def _rest_turned(words: list[str], place: int, word: str) -> list[str] | None:
    if word not in _ADJECTIVES:
        return None
    rest = words[place + 1 :]
    if word == "same" and words[place - 1] == "the":
        like = ["different", "from", *rest[1:]] if rest[:1] == ["as"] else [*_a_different(rest), *rest]
        return [*words[: place - 1], *like]
    plural = any(_is_plural(other) for other in rest[:3])
    turned = "some" if word == "no" and plural else REVERSED[word]
    return with_article([*words[:place], turned, *rest], {place, place + 1})


def _a_different(rest: Sequence[str]) -> list[str]:
    """What takes the place of "the same" before these words."""
    alone = not rest or not rest[0].isalpha() or rest[0] in ("as", "in", "but", "and", "except", "with", "though")
    return ["different"] if alone or any(_is_plural(word) for word in rest[:2]) else ["a", "different"]


def _is_plural(word: str) -> bool:
    return word.endswith("s") and not word.endswith(("ss", "us", "is", "as"))


_ADJECTIVES = frozenset(("gone", "missing", "new", "nothing", "same", "identical", "unchanged", "no"))
