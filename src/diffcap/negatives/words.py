"""Tagged captions, and word lists for hard negatives: synonyms, antonyms, and words without content."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from diffcap.text.tagging import split_sentences
from diffcap.text.vocabulary import tokenize

# attribute -> groups of synonyms in CLEVR's vocabulary, separated by commas; a word that is in no group has no synonyms. Without the
# groups, "the big ball was added" could become a negative of "the large sphere was added", which means the same.
_SYNONYM_GROUPS = {
    "size": "large big, small tiny little",
    "color": "gray grey, red, blue, green, brown, purple, cyan, yellow, black, white, orange, pink, tan, beige",
    "material": "rubber matte, metal metallic shiny",
    "shape": "cube block, sphere ball, cylinder",
    "side": "left, right",
    "change": "added appeared appears new introduced newly, removed disappeared disappears missing gone vanished, "
    "moved shifted relocated elsewhere, became turned changed, nothing same identical unchanged no still",
}

_ATTRIBUTE_AND_KEY = {  # word -> (attribute, one name for all its synonyms)
    word: (attribute, f"{attribute}:{words.split()[0]}")
    for attribute, groups in _SYNONYM_GROUPS.items()
    for words in groups.split(", ")
    for word in words.split()
}


def _word_set(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Words without content: they are never replaced and never used as replacements. Captions that differ only in them mean the same.
FUNCTION_WORDS = _word_set("""
    front back top bottom middle image images picture pictures photo photos scene scenes view position positions
    location locations place places spot way side change changes difference differences other one ones s bit lot kind
    type color colors colour colours coloring material size shape animal animals bird birds doesn don isn aren wasn weren hasn haven didn
""")
_FUNCTION_VERBS = _word_set("is are was were be been being am has have had having do does did done made make s")
_CONTENT_TAGS = frozenset(("NOUN", "PROPN", "ADJ", "NUM", "VERB"))


def attribute_of(word: str) -> str | None:
    """Return "size", "color", "material", "shape", "side" or "change" for a word of `_SYNONYM_GROUPS`, else None."""
    return _ATTRIBUTE_AND_KEY[word][0] if word in _ATTRIBUTE_AND_KEY else None


def synonym_key(word: str) -> str:
    """Return one name for all synonyms ("size:large" for "large" and "big"); the word itself if it has no synonyms."""
    return _ATTRIBUTE_AND_KEY[word][1] if word in _ATTRIBUTE_AND_KEY else word


def is_animal(word: str) -> bool:
    """Return True for "animal1" and "animal2" (birds in Birds-to-Words), also misspelt. Negatives of the kind "confuse" change them."""
    return re.fullmatch(r"\d?animals?\d.*", word) is not None


def is_replaceable(word: str, tag: str) -> bool:
    """Return True for a noun or an adjective that describes an object: not a function word, an animal or a word of change."""
    return (
        tag in ("NOUN", "ADJ")
        and word.isalpha()
        and len(word) > 2
        and word not in FUNCTION_WORDS
        and attribute_of(word) != "change"
        and not is_animal(word)
    )


def inflection(word: str, tag: str) -> str:
    """Return a word's ending: "est", "er" or "" for the part of speech "ADJ", "s" or "" for other tags."""
    if tag != "ADJ":
        return "s" if word.endswith("s") and not word.endswith("ss") else ""
    for ending in ("est", "er"):
        if word.endswith(ending) and len(word) > len(ending) + 2:
            return ending
    return ""


def fix_articles(words: list[str], indices: set[int]) -> list[str]:
    """Return the words, with "a" and "an" corrected where they precede a word at one of `indices`."""
    fixed = list(words)
    for index in indices:
        if 0 < index < len(fixed) and fixed[index - 1] in ("a", "an"):
            fixed[index - 1] = "an" if fixed[index][:1] in tuple("aeiou") else "a"
    return fixed


def _both_directions(pairs: str) -> dict[str, str]:
    """Return a dict of antonyms in both directions; if a word is in several pairs, the first pair counts."""
    antonyms: dict[str, str] = {}
    for pair in pairs.split(", "):
        first, second = pair.split()
        antonyms.setdefault(first, second)
        antonyms.setdefault(second, first)
    return antonyms


CHANGE_ANTONYMS = {
    **_both_directions(
        "added removed, appeared disappeared, appears disappears, add remove, increase decrease, brighten darken"
    ),
    **{"introduced": "removed", "vanished": "appeared", "gone": "new", "missing": "new", "new": "missing"},
    **{"nothing": "something", "same": "different", "identical": "different", "unchanged": "different", "no": "a"},
}
COMPARISON_ANTONYMS = {
    **_both_directions(
        "larger smaller, longer shorter, lighter darker, brighter duller, thicker thinner, more less, same different, "
        "wider narrower, higher lower, light dark, long short, large small, bright dull, thick thin, largest smallest, "
        "longest shortest, lightest darkest, bold faint"
    ),
    **{"bigger": "smaller", "taller": "shorter", "big": "small", "slightly": "much", "similar": "different"},
    **{"identical": "different", "without": "with", "fewer": "more", "tiny": "large"},
}


@dataclass(frozen=True)
class TaggedCaption:
    """A tokenised caption (of one or more sentences)."""

    text: str  # the words joined with spaces
    words: tuple[str, ...]
    tags: tuple[str, ...]  # the part of speech of each word (UPOS), such as "NOUN"
    content: tuple[str, ...]  # `synonym_key` of each content word (such as a noun or an adjective), for TF-IDF


def normalize_caption(caption: str) -> str:
    """Return a caption's tokens joined with spaces; captions and negatives are compared in this form."""
    return " ".join(tokenize(caption))


def sentence_texts(texts: Iterable[str]) -> Iterable[str]:
    """Yield every sentence of tokenised captions; a tagger gets sentences, not captions."""
    for text in texts:
        for words in split_sentences(text.split()):
            yield " ".join(words)


def make_tagged_caption(text: str, tags: Mapping[str, list[str]]) -> TaggedCaption:
    """Make the `TaggedCaption` of a tokenised caption. `tags`: sentence -> part of speech (UPOS) of each word."""
    words = tuple(text.split())
    word_tags = tuple(tag for sentence in split_sentences(words) for tag in tags[" ".join(sentence)])
    content = []
    for word, tag in zip(words, word_tags):
        is_function_word = tag not in _CONTENT_TAGS or word in FUNCTION_WORDS or word in _FUNCTION_VERBS
        attribute = attribute_of(word)
        # Captions that differ only in a side ("left") can both be true, so sides are not part of the content.
        if attribute != "side" and (attribute or not is_function_word):
            content.append(synonym_key(word))
    return TaggedCaption(text, words, word_tags, tuple(content))
