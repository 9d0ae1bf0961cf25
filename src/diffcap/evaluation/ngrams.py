"""BLEU-1 to BLEU-4, ROUGE-L and CIDEr-D of tokenised captions, with the same scores as pycocoevalcap.

* BLEU (Papineni et al., ACL 2002) is computed from counts that can be added up over pairs.
* ROUGE-L (Lin, 2004) of a corpus is the mean of its pairs.
* CIDEr-D (Vedantam, Zitnick and Parikh, CVPR 2015) of a hypothesis is 10 times the mean, over n-gram orders 1 to 4 and over
  references, of the cosine similarity of TF-IDF vectors with clipped counts. Each similarity is multiplied by a Gaussian penalty
  (sigma 6) for the difference of lengths, which pycocoevalcap counts in bigrams.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from diffcap.utils.errors import DiffcapError

Array = np.ndarray[Any, np.dtype[Any]]
Hypotheses = Mapping[str, str]  # id -> tokenised caption
References = Mapping[str, list[str]]  # id -> tokenised captions
Groups = Mapping[str, Sequence[str]]  # name of a group of pairs, such as "total" -> ids

BLEU = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4")
_SMALL, _TINY = 1e-9, 1e-15  # pycocoevalcap's constants against division by 0 and scores of 0
MAX_ORDER = 4
SIGMA = 6.0  # of the Gaussian length penalty
MAX_WORDS = 55_108  # the largest number whose fourth power fits into 63 bits, see `_NGrams.key`


def bleu_counts(hypotheses: Hypotheses, references: References) -> Array:
    """Count what BLEU adds up over a corpus, (N, 10) for N hypotheses.

    Columns: number of words of the hypothesis; number of words of the reference with the closest length; numbers of n-grams of the
    hypothesis (4 columns, orders 1 to 4); numbers of those n-grams that occur in a reference (4 columns, orders 1 to 4).
    """
    from pycocoevalcap.bleu.bleu_scorer import cook_refs, cook_test

    rows = []
    for id, text in hypotheses.items():
        counts = cook_test(text, cook_refs(references[id]))
        num_words = counts["testlen"]
        _, closest_length = min((abs(length - num_words), length) for length in counts["reflen"])
        rows.append([num_words, closest_length, *counts["guess"], *counts["correct"]])
    return np.array(rows, dtype=float)


def bleu_of_sums(sums: Array) -> Array:
    """Compute BLEU-1 to BLEU-4 of S corpora, (S, 4), as fractions. `sums` (S, 10) are each corpus's summed rows of `bleu_counts`."""
    words, reference_words = sums[:, 0], sums[:, 1]
    ngrams, matches = sums[:, 2:6], sums[:, 6:10]
    precisions = (matches + _TINY) / (ngrams + _SMALL)
    geometric_means = np.cumprod(precisions, axis=1) ** (1 / np.arange(1, 5))  # for BLEU-n, of orders 1 to n
    ratio = (words + _TINY) / (reference_words + _SMALL)
    brevity_penalty = np.where(ratio < 1, np.exp(1 - 1 / ratio), 1.0)
    return geometric_means * brevity_penalty[:, None]


def rouge_l(hypotheses: Hypotheses, references: References) -> dict[str, float]:
    """Compute ROUGE-L of each pair: the F score (beta = 1.2) of the longest common subsequence, a fraction."""
    from pycocoevalcap.rouge.rouge import Rouge

    rouge = Rouge()
    return {id: float(rouge.calc_score([text], references[id])) for id, text in hypotheses.items()}


class _NGrams(NamedTuple):
    """The M distinct n-grams of several captions, sorted by caption and then by their first occurrence. Arrays are (M,)."""

    caption: Array  # index of the caption
    key: Array  # the n-gram as a number, whose digits to the base `MAX_WORDS` are the word ids
    counts: Array  # occurrences in the caption


class _OrderVectors(NamedTuple):
    """TF-IDF vectors of the references for one n-gram order."""

    keys: Array  # (K,) the distinct n-grams of the references, sorted
    idf: Array  # (K,) log(images / document frequency)
    codes: Array  # (M,) sorted; for each n-gram of a distinct reference: index of the reference * K + index in `keys`
    weights: Array  # (M,) TF-IDF weights of the n-grams, in the order of `codes`
    norms: Array  # (U + 1,) norms of the vectors of the U distinct references, then 0 for the padding "no reference"


class CiderD:
    """CIDEr-D of hypotheses against the references of their images.

    Args:
        references: id of an image or pair -> its references, at least one, tokens joined by spaces. The document
            frequencies are those of all images, even if only some of them are scored.

    Example:
        >>> cider = CiderD({"1": ["the cube moved", "the red cube moved"], "2": ["nothing changed"]})
        >>> cider(["1", "1", "2"], ["the cube moved", "a cube moved", "the cube moved"]).round(3)
        array([5.321, 2.673, 0.   ])
    """

    def __init__(self, references: Mapping[str, Sequence[str]]) -> None:
        if without_reference := [image for image, captions in references.items() if not captions]:
            raise ValueError(f"{without_reference[0]!r} has no reference")
        distinct = dict.fromkeys(chain.from_iterable(references.values()))  # many captions from templates are equal
        row_of_caption = {caption: row for row, caption in enumerate(distinct)}
        no_reference = len(distinct)  # the row after the last one
        self._words: dict[str, int] = {}  # word -> id
        word_ids, caption_starts = self._look_up_words(list(distinct), self._words)
        self._image_index = {image: index for index, image in enumerate(references)}
        max_references = max((len(captions) for captions in references.values()), default=0)
        # For each image, the rows of its references, padded with `no_reference`.
        self._reference_rows = np.full((len(references), max_references), no_reference, dtype=np.int64)
        for index, captions in enumerate(references.values()):
            self._reference_rows[index, : len(captions)] = [row_of_caption[caption] for caption in captions]
        is_reference = self._reference_rows < no_reference
        self._reference_counts = is_reference.sum(1)
        images = np.repeat(np.arange(len(references)), self._reference_counts)
        rows = self._reference_rows[is_reference]
        self._log_images = np.log(float(max(1, len(references))))
        bigram_counts = np.maximum(np.diff(caption_starts) - 1, 0)
        self._bigram_counts = np.append(bigram_counts, 0)  # of each distinct reference; 0 for `no_reference`
        all_ngrams = (_count_ngrams(word_ids, caption_starts, order) for order in range(1, MAX_ORDER + 1))
        self._order_vectors = [self._build_vectors(ngrams, images, rows) for ngrams in all_ngrams]

    def _look_up_words(self, captions: Sequence[str], ids: dict[str, int]) -> tuple[Array, Array]:
        """Return the word ids of all captions, concatenated, and the starts of the captions, then the end; adds new words to `ids`."""
        split = [caption.split() for caption in captions]
        word_ids = np.array([ids.setdefault(word, len(ids)) for word in chain.from_iterable(split)], dtype=np.int64)
        if len(ids) > MAX_WORDS:
            raise DiffcapError(
                f"CIDEr-D cannot score captions of {len(ids):,} different words (at most {MAX_WORDS:,}); leave CIDEr-D out of "
                "the metrics."
            )
        return word_ids, np.cumsum([0, *map(len, split)])

    def _build_vectors(self, ngrams: _NGrams, images: Array, rows: Array) -> _OrderVectors:
        """Compute TF-IDF vectors of the distinct references, whose n-grams are `ngrams`; image `images[i]` has the reference `rows[i]`."""
        keys, ngram_index = np.unique(ngrams.key, return_inverse=True)
        num_references = len(self._bigram_counts) - 1
        num_ngrams = np.bincount(ngrams.caption, minlength=num_references)  # distinct n-grams of each caption
        first_ngram = np.cumsum(num_ngrams) - num_ngrams
        # A document is the set of all references of an image.
        documents = np.repeat(images, num_ngrams[rows])
        document_ngrams = np.unique(documents * len(keys) + ngram_index[_ranges(first_ngram[rows], num_ngrams[rows])])
        document_frequency = np.bincount(document_ngrams % max(1, len(keys)), minlength=len(keys))
        idf = self._log_images - np.log(np.maximum(1.0, document_frequency))
        weights = ngrams.counts * idf[ngram_index]
        squares = np.bincount(ngrams.caption, weights**2, minlength=len(num_ngrams) + 1)
        codes = ngrams.caption * len(keys) + ngram_index
        sorting = np.argsort(codes)
        return _OrderVectors(keys, idf, codes[sorting], weights[sorting], np.sqrt(squares))

    def __call__(self, images: Sequence[str], hypotheses: Sequence[str]) -> Array:
        """Score B hypotheses (tokens joined by spaces) of B images, which can be equal: (B,) float64, from 0 to 10."""
        pairs = [(self._image_index[image], text) for image, text in zip(images, hypotheses, strict=True)]
        if not pairs:
            return np.zeros(0)
        distinct: dict[tuple[int, str], int] = {}  # equal hypotheses of an image are scored once
        inverse = np.array([distinct.setdefault(pair, len(distinct)) for pair in pairs])
        image_indices = np.array([image for image, _ in distinct])
        word_ids, caption_starts = self._look_up_words([text for _, text in distinct], dict(self._words))
        references = self._reference_rows[image_indices]  # (b, R): b distinct hypotheses, R references (padded)
        cosines = []
        for order, vectors in enumerate(self._order_vectors, 1):
            ngrams = _count_ngrams(word_ids, caption_starts, order)
            cosines.append(self._similarities(vectors, ngrams, references))
        bigram_counts = np.maximum(np.diff(caption_starts) - 1, 0)
        differences = np.abs(bigram_counts[:, None] - self._bigram_counts[references])
        lengths = map(float, range(int(differences.max()) + 1))  # possible differences
        penalties = np.array([np.e ** (-(length**2) / (2 * SIGMA**2)) for length in lengths])
        similarities = np.stack(cosines, -1) * penalties[differences][..., None]  # (b, R, 4)
        # Summed in the same order as in pycocoevalcap, so that the last digits are equal.
        sums = np.cumsum(similarities, axis=1)[:, -1]
        return (sums.mean(-1) / self._reference_counts[image_indices] * 10.0)[inverse]

    def _similarities(self, vectors: _OrderVectors, ngrams: _NGrams, references: Array) -> Array:
        """Return the clipped cosine similarities (b, R) of b hypotheses and their references, whose rows are `references` (b, R)."""
        num_keys = len(vectors.keys)
        if not num_keys:
            return np.zeros(references.shape)
        ngram_index = np.minimum(np.searchsorted(vectors.keys, ngrams.key), num_keys - 1)
        is_known = vectors.keys[ngram_index] == ngrams.key
        weights = ngrams.counts * np.where(is_known, vectors.idf[ngram_index], self._log_images)
        norms = np.sqrt(np.bincount(ngrams.caption, weights**2, minlength=len(references)))
        # Above, an n-gram that occurs in no reference has the weight of an n-gram of one image. From here on, these n-grams are left out.
        hypothesis = ngrams.caption[is_known]
        weights = weights[is_known]
        codes = references[hypothesis] * num_keys + ngram_index[is_known][:, None]  # (M, R)
        position = np.minimum(np.searchsorted(vectors.codes, codes), len(vectors.codes) - 1)
        reference_weights = np.where(vectors.codes[position] == codes, vectors.weights[position], 0.0)
        products = np.minimum(weights[:, None], reference_weights) * reference_weights
        dot_products = np.zeros(references.shape)
        np.add.at(dot_products, hypothesis, products)
        scale = norms[:, None] * vectors.norms[references]
        return np.divide(dot_products, scale, out=np.zeros_like(dot_products), where=scale > 0)


def _count_ngrams(word_ids: Array, caption_starts: Array, order: int) -> _NGrams:
    """Count the n-grams of one order in concatenated captions, which begin at `caption_starts`."""
    num_ngrams = np.maximum(np.diff(caption_starts) - order + 1, 0)  # of each caption, with repetitions
    caption = np.repeat(np.arange(len(num_ngrams)), num_ngrams)
    first_word = _ranges(caption_starts[:-1], num_ngrams)
    key = np.zeros(len(first_word), dtype=np.int64)
    for offset in range(order):
        key = key * MAX_WORDS + word_ids[first_word + offset]
    sorting = np.lexsort((key, caption))
    caption, key = caption[sorting], key[sorting]
    is_new = np.ones(len(key), dtype=bool)
    is_new[1:] = (caption[1:] != caption[:-1]) | (key[1:] != key[:-1])
    begins = np.flatnonzero(is_new)
    by_occurrence = np.argsort(sorting[begins])  # the sort is stable: `sorting[begins]` are first occurrences
    counts = np.diff(np.append(begins, len(key)))
    return _NGrams(caption[begins][by_occurrence], key[begins][by_occurrence], counts[by_occurrence])


def _ranges(starts: Array, lengths: Array) -> Array:
    """Concatenate `range(start, start + length)` of all starts and lengths."""
    return np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
