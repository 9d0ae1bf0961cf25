"""Replaced negatives: the most telling nouns and adjectives of a caption give way to others (IDC-PCL, section 3.2)."""

from collections import Counter
from collections.abc import Mapping
from random import Random

from diffcap.negatives.corpus import Sentence, WordPool, is_replaceable
from diffcap.negatives.words import meaning, with_article


def telling_words(sentence: Sentence, idf: Mapping[str, float]) -> list[str]:
    """The nouns and adjectives to replace: the top half by TF-IDF within the caption, rounded up, best first."""
    first: dict[str, int] = {}
    for place, (word, tag) in enumerate(zip(sentence.words, sentence.tags)):
        if is_replaceable(word, tag):
            first.setdefault(word, place)
    counts = Counter(map(meaning, sentence.words))
    ranked = sorted(first, key=lambda word: (-counts[meaning(word)] * idf.get(meaning(word), 0.0), first[word]))
    return ranked[: (len(ranked) + 1) // 2]


def replace_words(
    sentence: Sentence, idf: Mapping[str, float], pool: WordPool, said: frozenset[str], random: Random
) -> str | None:
    """Replace the telling words by others of the same tag.

    Args:
        sentence: a caption.
        idf: how rare each meaning is.
        pool: the words to draw from.
        said: meanings of all references of the pair; a word that says none of them is preferred, because then the new
            caption says something that no reference does.
        random: the caption's own generator.

    Returns:
        The new text; None when no word of a new meaning was found, so that it could still be true.
    """
    own = frozenset(sentence.content)
    new_words: dict[tuple[str, str], str] = {}
    wrong = False
    tags = dict(zip(sentence.words, sentence.tags))
    for word in telling_words(sentence, idf):
        slot, used = (word, tags[word]), frozenset(map(meaning, new_words.values()))
        drawn = pool.draw(word, tags[word], said | own | used, random)
        if drawn is None:
            drawn = pool.draw(word, tags[word], own | used, random)
        if drawn is not None:
            new_words[slot] = drawn
            wrong = wrong or meaning(drawn) not in said
    if not wrong:
        return None
    words, changed = list(sentence.words), set()
    for place, slot in enumerate(zip(sentence.words, sentence.tags)):
        if slot in new_words:
            words[place] = new_words[slot]
            changed.add(place)
    return " ".join(with_article(words, changed))
