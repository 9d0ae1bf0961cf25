"""Tokenised and tagged training captions, their content words, and the document frequencies of these words."""

import math
from bisect import bisect
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from diffcap.negatives.words import FUNCTION_WORDS, inflection, is_animal, is_content, kind_of, meaning
from diffcap.text.tagging import split_sentences
from diffcap.text.vocabulary import tokenize


@dataclass(frozen=True)
class Sentence:
    """A tokenised caption (of one or more sentences).

    Attributes:
        text: the words joined with blanks.
        words, tags: the words and their UPOS tags.
        content: the meanings (`words.meaning`) of the content words in the order of the caption; the terms of TF-IDF.
    """

    text: str
    words: tuple[str, ...]
    tags: tuple[str, ...]
    content: tuple[str, ...]


def tokenised(caption: str) -> str:
    """Return a caption's tokens joined with spaces; captions and negatives are compared in this form."""
    return " ".join(tokenize(caption))


def sentence_texts(texts: Iterable[str]) -> Iterable[str]:
    """Yield every sentence of tokenised captions; a tagger gets sentences, not captions."""
    for text in texts:
        for words in split_sentences(text.split()):
            yield " ".join(words)


def read_sentence(text: str, tags: Mapping[str, list[str]]) -> Sentence:
    """Build the `Sentence` of a tokenised caption from the tags of its sentences.

    Args:
        text: tokens joined with spaces. tags: sentence -> UPOS tags, for every sentence of the text.
    """
    words = tuple(text.split())
    found = tuple(tag for part in split_sentences(words) for tag in tags[" ".join(part)])
    content = tuple(meaning(word) for word, tag in zip(words, found) if is_content(word, tag))
    return Sentence(text, words, found, content)


def inverse_document_frequencies(sentences: Iterable[Sentence]) -> dict[str, float]:
    """Return the smoothed inverse document frequency of every term: ln((1 + n) / (1 + df)) + 1 for n captions."""
    frequencies: Counter[str] = Counter()
    count = 0
    for sentence in sentences:
        frequencies.update(set(sentence.content))
        count += 1
    return {term: math.log((1 + count) / (1 + df)) + 1 for term, df in sorted(frequencies.items())}


class WordPool:
    """Draws replacement words from the captions; only words that are replaceable (see `is_replaceable`).

    `draw_uniform` draws from all words of the same tag, each with the same probability (IDC-PCL, section 3.2).

    `draw_matched` (ours) draws from the words of the same tag, kind and inflection, with a probability proportional to their
    frequency, so that neither grammar nor rare words give a negative away. Words that mostly have another tag, and words that
    occur fewer than five times and in fewer than one of a thousand captions (they are often misspelt), are never drawn.

    Args:
        sentences: the distinct training captions.
    """

    def __init__(self, sentences: Collection[Sentence]) -> None:
        counts = Counter(pair for sentence in sentences for pair in zip(sentence.words, sentence.tags))
        totals = Counter(word for sentence in sentences for word in sentence.words)
        min_count = min(5, len(sentences) / 1000)
        self._words: dict[str, list[str]] = {}  # tag -> distinct words, sorted
        pools: dict[tuple[str, str | None, str], list[tuple[str, int]]] = {}
        for (word, tag), count in sorted(counts.items()):
            if not is_replaceable(word, tag):
                continue
            self._words.setdefault(tag, []).append(word)
            if count >= min_count and 2 * count > totals[word]:
                pools.setdefault(_slot(word, tag), []).append((word, count))
        # For each slot: the words, and the cumulative sums of their counts.
        self._pools = {
            slot: ([word for word, _ in pool], list(accumulate(count for _, count in pool)))
            for slot, pool in pools.items()
        }

    def draw_uniform(self, word: str, tag: str, rng: Random) -> str | None:
        """Draw another word of the same tag; None if there is none."""
        others = [other for other in self._words.get(tag, []) if other != word]
        return rng.choice(others) if others else None

    def draw_matched(self, word: str, tag: str, avoid: frozenset[str], rng: Random) -> str | None:
        """Draw a word of the same tag, kind and inflection whose meaning is not in `avoid`; None if there is none."""
        words, cumulative = self._pools.get(_slot(word, tag), ([], [0]))
        for _ in range(4 if words else 0):  # faster than filtering all words, and nearly always enough
            drawn = words[bisect(cumulative, rng.random() * cumulative[-1])]
            if meaning(drawn) not in avoid:
                return drawn
        allowed = [index for index, other in enumerate(words) if meaning(other) not in avoid]
        weights = [cumulative[index] - (cumulative[index - 1] if index else 0) for index in allowed]
        return words[rng.choices(allowed, weights)[0]] if allowed else None


def is_replaceable(word: str, tag: str) -> bool:
    """Whether a word is a noun or an adjective that describes an object: no function word, no animal, no word of change."""
    return (
        tag in ("NOUN", "ADJ")
        and word.isalpha()
        and len(word) > 2
        and word not in FUNCTION_WORDS
        and kind_of(word) != "change"
        and not is_animal(word)
    )


def _slot(word: str, tag: str) -> tuple[str, str | None, str]:
    """(tag, kind, inflection): words with equal slots can replace each other."""
    kind = kind_of(word)
    return (tag, kind, "") if kind else (tag, None, inflection(word, tag))
