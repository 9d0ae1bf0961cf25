"""Replaced negatives: the most informative nouns and adjectives of a caption are replaced (IDC-PCL, section 3.2)."""

from bisect import bisect
from collections import Counter
from collections.abc import Collection, Mapping
from itertools import accumulate
from random import Random

from diffcap.negatives.words import TaggedCaption, attribute_of, fix_articles, inflection, is_replaceable, synonym_key


class WordPool:
    """Draws replacement words from the captions; only words that are replaceable (see `is_replaceable`)."""

    def __init__(self, captions: Collection[TaggedCaption]) -> None:
        counts = Counter(pair for caption in captions for pair in zip(caption.words, caption.tags))
        totals = Counter(word for caption in captions for word in caption.words)
        min_count = min(5, len(captions) / 1000)
        self._words: dict[str, list[str]] = {}  # tag -> distinct words, sorted
        pools: dict[tuple[str, str | None, str], list[tuple[str, int]]] = {}
        for (word, tag), count in sorted(counts.items()):
            if not is_replaceable(word, tag):
                continue
            self._words.setdefault(tag, []).append(word)
            if count >= min_count and 2 * count > totals[word]:
                pools.setdefault(_pool_key(word, tag), []).append((word, count))
        # For each key: the words, and the cumulative sums of their counts.
        self._pools = {
            key: ([word for word, _ in pool], list(accumulate(count for _, count in pool)))
            for key, pool in pools.items()
        }

    def draw_uniform(self, word: str, tag: str, rng: Random) -> str | None:
        """Draw another word of the same tag, each with the same probability (IDC-PCL, section 3.2); None if there is none."""
        others = [other for other in self._words.get(tag, []) if other != word]
        return rng.choice(others) if others else None

    def draw_matched(self, word: str, tag: str, avoid: frozenset[str], rng: Random) -> str | None:
        """Draw a word of the same tag, attribute and inflection whose meaning is not in `avoid` (ours); None if there is none.

        The probability is proportional to the frequency, so that neither grammar nor rare words give a negative away. Words that
        mostly have another tag, and words that occur fewer than five times and in fewer than one of a thousand captions (they are
        often misspelt), are never drawn.
        """
        words, cumulative = self._pools.get(_pool_key(word, tag), ([], [0]))
        for _ in range(4 if words else 0):  # faster than filtering all words, and nearly always enough
            drawn = words[bisect(cumulative, rng.random() * cumulative[-1])]
            if synonym_key(drawn) not in avoid:
                return drawn
        allowed = [index for index, other in enumerate(words) if synonym_key(other) not in avoid]
        weights = [cumulative[index] - (cumulative[index - 1] if index else 0) for index in allowed]
        return words[rng.choices(allowed, weights)[0]] if allowed else None


def _pool_key(word: str, tag: str) -> tuple[str, str | None, str]:
    """(tag, attribute, inflection): words with equal keys can replace each other."""
    attribute = attribute_of(word)
    return (tag, attribute, "") if attribute else (tag, None, inflection(word, tag))


def most_informative_words(caption: TaggedCaption, idf: Mapping[str, float]) -> list[str]:
    """Return the nouns and adjectives to replace: the half with the highest TF-IDF, rounded up, best first."""
    first_index: dict[str, int] = {}
    for index, (word, tag) in enumerate(zip(caption.words, caption.tags)):
        if is_replaceable(word, tag):
            first_index.setdefault(word, index)
    counts = Counter(map(synonym_key, caption.words))
    ranked = sorted(
        first_index, key=lambda word: (-counts[synonym_key(word)] * idf.get(synonym_key(word), 0.0), first_index[word])
    )
    return ranked[: (len(ranked) + 1) // 2]


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
        reference_content: None draws any other word of the same tag (the paper's way). The `content` of all references of the pair
            draws words of the same tag, attribute and inflection that say something else (ours), if possible something that no
            reference says.

    Returns:
        The new text; None if no word can be replaced, or if every new word has a meaning of a reference.
    """
    own = frozenset(caption.content)
    new_words: dict[tuple[str, str], str] = {}
    is_wrong = False
    tags = dict(zip(caption.words, caption.tags))
    for word in most_informative_words(caption, idf):
        if reference_content is None:
            drawn = pool.draw_uniform(word, tags[word], rng)
        else:
            used = own | frozenset(map(synonym_key, new_words.values()))
            drawn = pool.draw_matched(word, tags[word], reference_content | used, rng)
            if drawn is None:
                drawn = pool.draw_matched(word, tags[word], used, rng)
        if drawn is not None:
            new_words[word, tags[word]] = drawn
            is_wrong |= reference_content is None or synonym_key(drawn) not in reference_content
    if not is_wrong:
        return None
    words, changed = list(caption.words), set()
    for index, word_and_tag in enumerate(zip(caption.words, caption.tags)):
        if word_and_tag in new_words:
            words[index] = new_words[word_and_tag]
            changed.add(index)
    return " ".join(fix_articles(words, changed))
