"""Build negatives of the kind "replace": replace the most informative nouns and adjectives of a caption (IDC-PCL, section 3.2)."""

import math
from bisect import bisect
from collections import Counter
from collections.abc import Collection, Mapping
from itertools import accumulate
from random import Random

from diffcap.negatives.words import TaggedCaption, attribute_of, fix_articles, inflection, is_replaceable, synonym_key


class WordPool:
    """The words of the captions that can replace others: nouns and adjectives that describe an object (`is_replaceable`)."""

    def __init__(self, captions: Collection[TaggedCaption]) -> None:
        counts = Counter(word_and_tag for caption in captions for word_and_tag in zip(caption.words, caption.tags))
        word_counts = Counter(word for caption in captions for word in caption.words)
        min_count = min(5, len(captions) / 1000)  # `sample_matched` gives the reasons for both limits
        self._words: dict[str, list[str]] = {}  # tag -> distinct words, sorted
        pools: dict[_PoolKey, dict[str, int]] = {}  # key -> word -> count
        for (word, tag), count in sorted(counts.items()):
            if not is_replaceable(word, tag):
                continue
            self._words.setdefault(tag, []).append(word)
            if count >= min_count and 2 * count > word_counts[word]:
                pools.setdefault(_pool_key(word, tag), {})[word] = count
        # For each key: the words, and the cumulative sums of their counts.
        self._pools = {key: (list(pool), list(accumulate(pool.values()))) for key, pool in pools.items()}

    def sample_uniform(self, word: str, tag: str, rng: Random) -> str | None:
        """Sample another word of the same tag (part of speech), each with the same probability (paper). None if no other exists."""
        others = [other for other in self._words.get(tag, []) if other != word]
        return rng.choice(others) if others else None

    def sample_matched(self, word: str, tag: str, excluded: frozenset[str], rng: Random) -> str | None:
        """Sample a word with the same `_pool_key` and a `synonym_key` not in `excluded`. None if no such word exists.

        The probability is proportional to the frequency, so that a model cannot recognise a negative by its grammar or its rare
        words. Words that mostly have another tag are never sampled. Words that occur fewer than five times and less than once per
        thousand captions are never sampled either, because they are often misspelt.
        """
        words, cumulative_counts = self._pools.get(_pool_key(word, tag), ([], [0]))
        for _ in range(4 if words else 0):  # faster than filtering all words, and nearly always enough
            sampled = words[bisect(cumulative_counts, rng.random() * cumulative_counts[-1])]
            if synonym_key(sampled) not in excluded:
                return sampled
        indices = [index for index, other in enumerate(words) if synonym_key(other) not in excluded]
        if not indices:
            return None
        counts = [cumulative_counts[index] - (cumulative_counts[index - 1] if index else 0) for index in indices]
        return words[rng.choices(indices, counts)[0]]


_PoolKey = tuple[str, str | None, str]  # tag ("NOUN"), attribute ("size") or, without one, inflection (ending "s")


def _pool_key(word: str, tag: str) -> _PoolKey:
    """Return a key that is equal for words that can replace each other."""
    attribute = attribute_of(word)
    return (tag, attribute, "") if attribute else (tag, None, inflection(word, tag))


def most_informative_words(caption: TaggedCaption, idf: Mapping[str, float]) -> list[str]:
    """Return the nouns and adjectives to replace: the half with the highest TF-IDF, rounded up, best first."""
    words = [word for word, tag in zip(caption.words, caption.tags) if is_replaceable(word, tag)]
    counts = Counter(map(synonym_key, caption.words))
    scores = {word: counts[synonym_key(word)] * idf.get(synonym_key(word), 0.0) for word in words}
    ranked = sorted(scores, key=scores.__getitem__, reverse=True)  # words with equal scores stay in the caption's order
    return ranked[: math.ceil(len(ranked) / 2)]


def replace_words(
    caption: TaggedCaption,
    idf: Mapping[str, float],
    pool: WordPool,
    reference_content: frozenset[str] | None,
    rng: Random,
) -> str | None:
    """Replace the most informative words by others.

    Args:
        idf: inverse document frequency of each `synonym_key`.
        reference_content: `synonym_key` of each content word of the pair's references. A new word has the same tag and
            form, and a meaning that no word of the caption has. If possible, no word of the references has this meaning either. With None,
            a new word is any other word with the same tag (paper).

    Returns:
        The new text; None if no word can be replaced, or if every new word has a meaning of a reference.
    """
    caption_content = frozenset(caption.content)
    words_and_tags = list(zip(caption.words, caption.tags))
    tags = dict(words_and_tags)
    new_words: dict[tuple[str, str], str] = {}  # (word, tag) -> the word that replaces it
    is_wrong = False  # True if a new word has a meaning that no reference has
    for word in most_informative_words(caption, idf):
        tag = tags[word]
        if reference_content is None:
            new_word = pool.sample_uniform(word, tag, rng)
        else:
            excluded = caption_content | frozenset(map(synonym_key, new_words.values()))
            new_word = pool.sample_matched(word, tag, reference_content | excluded, rng)
            if new_word is None:
                new_word = pool.sample_matched(word, tag, excluded, rng)
        if new_word is not None:
            new_words[word, tag] = new_word
            is_wrong |= reference_content is None or synonym_key(new_word) not in reference_content
    if not is_wrong:
        return None
    words = [new_words.get((word, tag), word) for word, tag in words_and_tags]
    changed_indices = {index for index, word_and_tag in enumerate(words_and_tags) if word_and_tag in new_words}
    return " ".join(fix_articles(words, changed_indices))
