"""The training captions as the recipes see them: words, tags, content words, and how rare each content word is."""

import math
from bisect import bisect
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from diffcap.negatives.words import FRAME, ending, is_animal, is_content, kind_of, meaning
from diffcap.text.tagging import split_sentences
from diffcap.text.vocabulary import tokenize


@dataclass(frozen=True)
class Sentence:
    """A tokenised caption (of one or more sentences).

    Attributes:
        text: the words joined with blanks.
        words, tags: the words and their UPOS tags.
        content: the meanings of the content words, in the order of the caption; what TF-IDF counts.
    """

    text: str
    words: tuple[str, ...]
    tags: tuple[str, ...]
    content: tuple[str, ...]


def tokenised(caption: str) -> str:
    """A caption's tokens joined with blanks: the form in which captions and negatives are compared."""
    return " ".join(tokenize(caption))


def sentence_texts(texts: Iterable[str]) -> Iterable[str]:
    """Every sentence of tokenised captions, the pieces that a tagger sees."""
    for text in texts:
        for words in split_sentences(text.split()):
            yield " ".join(words)


def read_sentence(text: str, tags: Mapping[str, list[str]]) -> Sentence:
    """Put a tokenised caption together from the tags of its sentences."""
    words = tuple(text.split())
    found = tuple(tag for part in split_sentences(words) for tag in tags[" ".join(part)])
    content = tuple(meaning(word) for word, tag in zip(words, found) if is_content(word, tag))
    return Sentence(text, words, found, content)


def inverse_frequencies(sentences: Iterable[Sentence]) -> dict[str, float]:
    """Smoothed inverse document frequency of every content word: ln((1 + n) / (1 + df)) + 1 over n captions."""
    frequencies: Counter[str] = Counter()
    count = 0
    for sentence in sentences:
        frequencies.update(set(sentence.content))
        count += 1
    return {term: math.log((1 + count) / (1 + df)) + 1 for term, df in sorted(frequencies.items())}


_LOOKS = frozenset(
    ("look", "looks", "appear", "appears", "seem", "seems", "species", "different", "visible", "noticeable")
)


class WordPool:
    """The corpus vocabulary by tag, to draw replacements from, each word as often as captions use it.

    Frequent words are drawn often, so that a negative cannot be told by its rare words. Rare words (often misspelt: fewer
    than one in a thousand captions, but five are enough), words that mostly have another tag, animals, frame words and
    words of change are not drawn.

    Args:
        sentences: the distinct training captions.
    """

    def __init__(self, sentences: Collection[Sentence]) -> None:
        counts = Counter(pair for sentence in sentences for pair in zip(sentence.words, sentence.tags))
        totals = Counter(word for sentence in sentences for word in sentence.words)
        least = min(5, len(sentences) / 1000)
        pools: dict[tuple[str, str | None, str], list[tuple[str, int]]] = {}
        for (word, tag), count in sorted(counts.items()):
            if is_replaceable(word, tag) and count >= least and 2 * count > totals[word]:
                pools.setdefault(_slot(word, tag), []).append((word, count))
        self._pools = {
            slot: ([word for word, _ in pool], list(accumulate(count for _, count in pool)))
            for slot, pool in pools.items()
        }

    def draw(self, word: str, tag: str, avoid: frozenset[str], random: Random) -> str | None:
        """A word of the same tag, kind and ending whose meaning is not in `avoid`; None where there is none."""
        words, totals = self._pools.get(_slot(word, tag), ([], [0]))
        for _ in range(4 if words else 0):  # nearly always enough, and cheaper than to look at every word
            drawn = words[bisect(totals, random.random() * totals[-1])]
            if meaning(drawn) not in avoid:
                return drawn
        free = [place for place, other in enumerate(words) if meaning(other) not in avoid]
        weights = [totals[place] - (totals[place - 1] if place else 0) for place in free]
        return words[random.choices(free, weights)[0]] if free else None


def says_the_same(sentence: Sentence) -> bool:
    """Whether a caption says little more than, in one of countless ways, that two things look alike."""
    words = set(sentence.words)
    no_difference = words & {"no", "not", "t"} and any(word.startswith("differen") for word in words)
    if not no_difference and not words & {"same", "identical", "unchanged", "alike"}:
        return False
    return sum(not is_animal(term) and kind_of(term) is None for term in set(sentence.content) - _LOOKS) <= 2


def is_replaceable(word: str, tag: str) -> bool:
    """Nouns and adjectives that say something about what is seen."""
    return (
        tag in ("NOUN", "ADJ")
        and word.isalpha()
        and len(word) > 2
        and word not in FRAME
        and kind_of(word) != "change"
        and not is_animal(word)
    )


def _slot(word: str, tag: str) -> tuple[str, str | None, str]:
    kind = kind_of(word)
    return (tag, kind, "") if kind else (tag, None, ending(word, tag))
