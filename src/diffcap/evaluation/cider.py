"""CIDEr-D (Vedantam, Zitnick and Parikh, CVPR 2015) against references that are counted once.

The figures are pycocoevalcap's, which all papers print: n-grams of up to four words, clipped counts, a Gaussian penalty of
sigma 6 on the difference of lengths, which it counts in bigrams, the mean over n-grams and references, times 10. Where that
counts every reference of every image again for every group of hypotheses, here the n-grams of the references, and in how
many images' references each occurs, are made once; scoring is a few array operations for all hypotheses together. So it serves as
the reward of self-critical training, many hypotheses of few images at a time.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from diffcap.errors import DiffcapError

Array = np.ndarray[Any, np.dtype[Any]]

ORDERS, SIGMA = 4, 6.0
BASE = 55_108  # the largest number whose fourth power fits into 63 bits: so many different words can be told apart


class _Grams(NamedTuple):
    """The different n-grams of some captions, by caption, in the order in which they first occur: (M,) each."""

    caption: Array
    key: Array  # the words' numbers as digits to `BASE`
    times: Array


class _Order(NamedTuple):
    """What is known of the n-grams of one order.

    Attributes:
        keys, rarity: (K,) the references' n-grams, sorted, and the logarithm of images over document frequency.
        codes, weights: (M,) `caption * K + n-gram`, sorted, and count times rarity, of every distinct reference.
        norms: (R + 1,) of the references' weights; the last one is of no reference.
    """

    keys: Array
    rarity: Array
    codes: Array
    weights: Array
    norms: Array


class CiderD:
    """Scores hypotheses against the references of their images.

    Args:
        references: image -> its references, at least one, tokens joined by blanks. All of them are the corpus from which
            the document frequencies come, whichever images are scored.

    Raises:
        ValueError: an image has no reference.
        DiffcapError: the references have more than 55,108 different words.
    """

    def __init__(self, references: Mapping[str, Sequence[str]]) -> None:
        bare = next((image for image, captions in references.items() if not captions), None)
        if bare is not None:
            raise ValueError(f"{bare!r} has no reference")
        row: dict[str, int] = {}  # most captions of a rendered dataset stand in many places
        for captions in references.values():
            for caption in captions:
                row.setdefault(caption, len(row))
        self._words: dict[str, int] = {}
        words, starts = self._numbers(list(row), self._words)
        self._image = {image: number for number, image in enumerate(references)}
        self._most = max((len(captions) for captions in references.values()), default=0)
        # Of each image: the rows of its references, and after them the row of no reference.
        self._rows = np.full((len(references), self._most), len(row), dtype=np.int64)
        for number, captions in enumerate(references.values()):
            self._rows[number, : len(captions)] = [row[caption] for caption in captions]
        self._counts = (self._rows < len(row)).sum(1)
        images = np.repeat(np.arange(len(references)), self._counts)
        rows = self._rows[self._rows < len(row)]
        self._log_images = np.log(float(max(1, len(references))))
        self._bigrams = np.append(np.maximum(np.diff(starts) - 1, 0), 0)
        self._orders = [self._learn(_grams(words, starts, order), images, rows) for order in range(1, ORDERS + 1)]

    def _numbers(self, captions: Sequence[str], table: dict[str, int]) -> tuple[Array, Array]:
        """The words of captions as numbers, one caption after another, and where each begins; new words join `table`."""
        split = [caption.split() for caption in captions]
        words = np.fromiter((table.setdefault(word, len(table)) for text in split for word in text), dtype=np.int64)
        if len(table) > BASE:
            raise DiffcapError(
                f"CIDEr-D cannot score captions of {len(table):,} different words (at most {BASE:,}); leave CIDEr-D out of "
                "the metrics."
            )
        return words, np.cumsum([0, *map(len, split)])

    def _learn(self, grams: _Grams, images: Array, rows: Array) -> _Order:
        """Document frequencies and weights of the references' n-grams; image `images[i]` has the reference `rows[i]`."""
        keys, place = np.unique(grams.key, return_inverse=True)
        count = np.bincount(grams.caption, minlength=len(self._bigrams) - 1)  # different n-grams of each caption
        first = np.cumsum(count) - count
        # Every n-gram of every reference of every image; an image's equal ones count once.
        seen = np.unique(np.repeat(images, count[rows]) * len(keys) + place[_ranges(first[rows], count[rows])])
        frequency = np.bincount(seen % max(1, len(keys)), minlength=len(keys))
        rarity = self._log_images - np.log(np.maximum(1.0, frequency))
        weights = grams.times * rarity[place]
        norms = np.sqrt(np.bincount(grams.caption, weights**2, minlength=len(count) + 1))
        codes = grams.caption * len(keys) + place
        sorting = np.argsort(codes)
        return _Order(keys, rarity, codes[sorting], weights[sorting], norms)

    def __call__(self, images: Sequence[str], hypotheses: Sequence[str]) -> Array:
        """Score hypotheses, any number of each image's.

        Args:
            images: (B,) names out of the references'. hypotheses: (B,) tokens joined by blanks.

        Returns:
            (B,) float64, 0 to 10.

        Raises:
            ValueError: not as many images as hypotheses. KeyError: an image has no references.
            DiffcapError: references and hypotheses have more than 55,108 different words.
        """
        if len(images) != len(hypotheses):
            raise ValueError(f"got {len(images)} images and {len(hypotheses)} hypotheses")
        if not len(images):
            return np.zeros(0)
        distinct: dict[tuple[int, str], int] = {}  # an image's equal hypotheses are scored once
        pairs = [(self._image[image], text) for image, text in zip(images, hypotheses)]
        said = np.array([distinct.setdefault(pair, len(distinct)) for pair in pairs])
        owners = np.array([image for image, _ in distinct])
        words, starts = self._numbers([text for _, text in distinct], dict(self._words))
        references = self._rows[owners]  # (b, R)
        cosines = [
            self._similarities(order, _grams(words, starts, number), references)
            for number, order in enumerate(self._orders, 1)
        ]
        difference = np.abs(np.maximum(np.diff(starts) - 1, 0)[:, None] - self._bigrams[references])
        penalty = np.array([np.e ** (-(float(d) ** 2) / (2 * SIGMA**2)) for d in range(int(difference.max()) + 1)])
        similarities = np.stack(cosines, -1) * penalty[difference][..., None]  # (b, R, 4)
        # Reference by reference, then the mean over the orders: pycocoevalcap's order, for its sums to the last digit.
        scores = np.cumsum(similarities, axis=1)[:, -1].mean(-1) / self._counts[owners] * 10.0
        return scores[said]

    def _similarities(self, order: _Order, grams: _Grams, references: Array) -> Array:
        """Clipped cosines of hypotheses and their references (b, R): (b, R)."""
        size = len(order.keys)
        if not size:
            return np.zeros(references.shape)
        place = np.minimum(np.searchsorted(order.keys, grams.key), size - 1)
        known = order.keys[place] == grams.key
        weights = grams.times * np.where(known, order.rarity[place], self._log_images)
        norms = np.sqrt(np.bincount(grams.caption, weights**2, minlength=len(references)))
        owner, place, weights = grams.caption[known], place[known], weights[known]
        codes = references[owner] * size + place[:, None]  # (M, R)
        found = np.minimum(np.searchsorted(order.codes, codes), len(order.codes) - 1)
        theirs = np.where(order.codes[found] == codes, order.weights[found], 0.0)
        products = np.minimum(weights[:, None], theirs) * theirs
        sums = np.zeros(references.shape)
        np.add.at(sums, owner, products)
        scale = norms[:, None] * order.norms[references]
        return np.divide(sums, scale, out=np.zeros_like(sums), where=scale > 0)


def _grams(words: Array, starts: Array, order: int) -> _Grams:
    """The n-grams of one order of captions that stand one after another, from `starts` on."""
    places = np.maximum(np.diff(starts) - order + 1, 0)
    caption = np.repeat(np.arange(len(places)), places)
    first = _ranges(starts[:-1], places)
    key = np.zeros(len(first), dtype=np.int64)
    for offset in range(order):
        key = key * BASE + words[first + offset]
    sorting = np.lexsort((key, caption))
    caption, key = caption[sorting], key[sorting]
    new = np.ones(len(key), dtype=bool)
    new[1:] = (caption[1:] != caption[:-1]) | (key[1:] != key[:-1])
    begins = np.flatnonzero(new)
    first_seen = np.argsort(sorting[begins])  # the sort is stable: `sorting[begins]` are first occurrences
    times = np.diff(np.append(begins, len(key)))
    return _Grams(caption[begins][first_seen], key[begins][first_seen], times[first_seen])


def _ranges(starts: Array, lengths: Array) -> Array:
    """The numbers `start ... start + length - 1` of every start, one after another."""
    return np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
