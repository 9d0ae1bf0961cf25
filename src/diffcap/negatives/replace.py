"""Replaced negatives: the most informative nouns and adjectives of a caption are replaced (IDC-PCL, section 3.2)."""

from collections import Counter
from collections.abc import Mapping
from random import Random

from diffcap.negatives.corpus import Sentence, WordPool, is_replaceable
from diffcap.negatives.words import fix_articles, meaning


def most_informative_words(sentence: Sentence, idf: Mapping[str, float]) -> list[str]:
    """Return the nouns and adjectives to replace: the half with the highest TF-IDF, rounded up, best first."""
    first_index: dict[str, int] = {}
    for index, (word, tag) in enumerate(zip(sentence.words, sentence.tags)):
        if is_replaceable(word, tag):
            first_index.setdefault(word, index)
    counts = Counter(map(meaning, sentence.words))
    ranked = sorted(
        first_index, key=lambda word: (-counts[meaning(word)] * idf.get(meaning(word), 0.0), first_index[word])
    )
    return ranked[: (len(ranked) + 1) // 2]


def replace_uniform(sentence: Sentence, idf: Mapping[str, float], pool: WordPool, rng: Random) -> str | None:
    """Replace the most informative words by any others of the same tag (the paper's way).

    Args:
        sentence: a caption.
        idf: inverse document frequency of each meaning.
        pool: the words to draw from.
        rng: generator of this caption.

    Returns:
        The new text, which can be true if the new words are synonyms; None if no word can be replaced.
    """
    new_words: dict[tuple[str, str], str] = {}
    tags = dict(zip(sentence.words, sentence.tags))
    for word in most_informative_words(sentence, idf):
        drawn = pool.draw_uniform(word, tags[word], rng)
        if drawn is not None:
            new_words[word, tags[word]] = drawn
    return _substitute(sentence, new_words) if new_words else None


def replace_matched(
    sentence: Sentence, idf: Mapping[str, float], pool: WordPool, reference_content: frozenset[str], rng: Random
) -> str | None:
    """Replace the most informative words by others of the same tag, kind and inflection that say something else (ours).

    Args:
        sentence: a caption.
        idf: inverse document frequency of each meaning.
        pool: the words to draw from.
        reference_content: meanings of the content words of all references of the pair. Words with other meanings are
            preferred, so that the new caption contradicts every reference.
        rng: generator of this caption.

    Returns:
        The new text; None if every new word has a meaning of a reference, because then the text could be true.
    """
    own = frozenset(sentence.content)
    new_words: dict[tuple[str, str], str] = {}
    is_wrong = False
    tags = dict(zip(sentence.words, sentence.tags))
    for word in most_informative_words(sentence, idf):
        used = frozenset(map(meaning, new_words.values()))
        drawn = pool.draw_matched(word, tags[word], reference_content | own | used, rng)
        if drawn is None:
            drawn = pool.draw_matched(word, tags[word], own | used, rng)
        if drawn is not None:
            new_words[word, tags[word]] = drawn
            is_wrong = is_wrong or meaning(drawn) not in reference_content
    return _substitute(sentence, new_words) if is_wrong else None


def _substitute(sentence: Sentence, new_words: Mapping[tuple[str, str], str]) -> str:
    """Return the text with the new word for each (word, tag), and with the right articles before them."""
    words, changed = list(sentence.words), set()
    for index, word_and_tag in enumerate(zip(sentence.words, sentence.tags)):
        if word_and_tag in new_words:
            words[index] = new_words[word_and_tag]
            changed.add(index)
    return " ".join(fix_articles(words, changed))
