"""What words mean to the negatives: synonyms, opposites, and words that are no content.

The synonyms are those of CLEVR's vocabulary (CLEVR-Change, CLEVR-DC, blocks); without them "the big ball was added" would
be offered as a wrong caption for "the large sphere was added". In other captions they do no harm.
"""

import re

# kind -> groups of words that say the same; a word without a group is a meaning of its own
_GROUPS: dict[str, tuple[str, ...]] = {
    "size": ("large big", "small tiny little"),
    "color": (
        "gray grey", "red", "blue", "green", "brown", "purple", "cyan", "yellow",
        "black", "white", "orange", "pink", "tan", "beige",
    ),
    "material": ("rubber matte", "metal metallic shiny"),
    "shape": ("cube block", "sphere ball", "cylinder"),
    "side": ("left", "right"),
    "change": (
        "added appeared appears new introduced newly",
        "removed disappeared disappears missing gone vanished",
        "moved shifted relocated elsewhere",
        "became turned changed",
        "nothing same identical unchanged no still",
    ),
}  # fmt: skip

_MEANING = {
    word: (kind, f"{kind}:{words.split()[0]}")
    for kind, groups in _GROUPS.items()
    for words in groups
    for word in words.split()
}


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Words that hold a sentence together: never replaced, never drawn, no evidence that a caption is wrong.
FRAME = _set("""
    front back top bottom middle image images picture pictures photo photos scene scenes view position positions
    location locations place places spot way side change changes difference differences other one ones s bit lot kind
    type color colors colour colours coloring material size shape animal animals bird birds doesn don isn aren wasn weren hasn haven didn
""")
_FUNCTION_VERBS = _set("is are was were be been being am has have had having do does did done made make s")
_CONTENT_TAGS = frozenset(("NOUN", "PROPN", "ADJ", "NUM", "VERB"))
_ANIMAL = re.compile(r"\d?animals?\d.*")


def kind_of(word: str) -> str | None:
    """ "color", "shape", ... of a word of the table above, None for every other word."""
    return _MEANING[word][0] if word in _MEANING else None


def meaning(word: str) -> str:
    """One name for all words that say the same."""
    return _MEANING[word][1] if word in _MEANING else word


def is_animal(word: str) -> bool:
    """True for "animal1", "animal2" and their misspellings, which only the confused negatives touch."""
    return _ANIMAL.fullmatch(word) is not None


def is_content(word: str, tag: str) -> bool:
    """Whether a word says something about the images that could be wrong."""
    kind = kind_of(word)
    if kind is not None:
        return kind != "side"  # several directions can be true at once
    return tag in _CONTENT_TAGS and word not in FRAME and word not in _FUNCTION_VERBS


def ending(word: str, tag: str) -> str:
    """A rough inflection, so that a plural is replaced by a plural and a comparative by a comparative."""
    if tag == "ADJ":
        return next((end for end in ("est", "er") if word.endswith(end) and len(word) > len(end) + 2), "")
    return "s" if word.endswith("s") and not word.endswith("ss") else ""


def with_article(words: list[str], places: set[int]) -> list[str]:
    """The words with "a" or "an" as the words at `places` ask for."""
    fixed = list(words)
    for place in places:
        if 0 < place < len(fixed) and fixed[place - 1] in ("a", "an"):
            fixed[place - 1] = "an" if fixed[place][:1] in tuple("aeiou") else "a"
    return fixed


def _both_ways(pairs: str) -> dict[str, str]:
    table: dict[str, str] = {}
    for pair in pairs.split(", "):
        first, second = pair.split()
        table.setdefault(first, second)
        table.setdefault(second, first)
    return table


# A change, or its absence, said the other way round. The first pair that holds a word is the one that counts.
REVERSED = {
    **_both_ways(
        "added removed, appeared disappeared, appears disappears, add remove, increase decrease, brighten darken"
    ),
    **{"introduced": "removed", "vanished": "appeared", "gone": "new", "missing": "new", "new": "missing"},
    **{"nothing": "something", "same": "different", "identical": "different", "unchanged": "different", "no": "a"},
}
# A comparison said the other way round.
COMPARED = {
    **_both_ways(
        "larger smaller, longer shorter, lighter darker, brighter duller, thicker thinner, more less, same different, "
        "wider narrower, higher lower, light dark, long short, large small, bright dull, thick thin, largest smallest, "
        "longest shortest, lightest darkest, bold faint"
    ),
    **{"bigger": "smaller", "taller": "shorter", "big": "small", "slightly": "much", "similar": "different"},
    **{"identical": "different", "without": "with", "fewer": "more", "tiny": "large"},
}
