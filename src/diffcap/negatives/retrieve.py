"""Retrieved negatives: the captions of other pairs with the most similar TF-IDF vectors (IDC-PCL, section 3.2)."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import scipy.sparse as sp

from diffcap.negatives.words import TaggedCaption

# The scores of one chunk fit into the processor's cache, which is twice as fast as bigger chunks: 420,000 distinct captions
# of 76 words take about ten minutes on one core (measured).
_QUERY_CHUNK = 64
_DOCUMENT_CHUNK = 32768
_MAX_BLOCK_VALUES = 1 << 26  # in a dense block of documents: 256 MB
_GROUP_SIZE = 32  # documents whose maximum is computed first


def inverse_document_frequencies(captions: Iterable[TaggedCaption]) -> dict[str, float]:
    """Return the smoothed inverse document frequency of every term: ln((1 + n) / (1 + df)) + 1 for n captions."""
    frequencies: Counter[str] = Counter()
    count = 0
    for caption in captions:
        frequencies.update(set(caption.content))
        count += 1
    return {term: math.log((1 + count) / (1 + df)) + 1 for term, df in sorted(frequencies.items())}


def tfidf(documents: Sequence[Sequence[str]], idf: Mapping[str, float]) -> sp.csr_matrix:
    """Return the L2-normalised TF-IDF vectors of N documents: (N, V) float32; a row without any of the V terms of `idf` is 0."""
    columns = {term: column for column, term in enumerate(idf)}
    weights = np.array(list(idf.values()), dtype=np.float64)
    indices = [columns[term] for document in documents for term in document if term in columns]
    lengths = [sum(term in columns for term in document) for document in documents]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    matrix = sp.csr_matrix((np.ones(len(indices)), indices, starts), shape=(len(documents), len(weights)))
    matrix.sum_duplicates()
    matrix = matrix.multiply(weights[None, :]).tocsr() if len(weights) else matrix
    norms = np.sqrt(np.asarray(matrix.multiply(matrix).sum(1)).ravel())
    scale = np.divide(1.0, norms, out=np.zeros_like(norms), where=norms > 0)
    return sp.csr_matrix(sp.diags(scale) @ matrix, dtype=np.float32)


def most_similar(
    queries: sp.csr_matrix,
    documents: sp.csr_matrix,
    count: int,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the documents with the largest inner product for every query, in chunks, so that memory does not grow with Q x N.

    Args:
        queries: (Q, V). documents: (N, V). count: K; at most N are returned.
        progress: called with (scores computed, Q x N).

    Returns:
        (Q, K) indices of documents, best first (the lower index first if scores are equal), and (Q, K) float32 scores.
    """
    total, count = documents.shape[0], min(count, documents.shape[0])
    best = np.zeros((queries.shape[0], count), dtype=np.int64)
    scores = np.full((queries.shape[0], count), -1.0, dtype=np.float32)
    width = min(_DOCUMENT_CHUNK, max(1024, _MAX_BLOCK_VALUES // max(1, documents.shape[1])))
    for first in range(0, total, width):
        block = np.ascontiguousarray(documents[first : first + width].T.toarray())  # (V, block)
        for start in range(0, queries.shape[0], _QUERY_CHUNK):
            rows = slice(start, start + _QUERY_CHUNK)
            found = queries[rows] @ block  # (rows, block)
            indices = _largest(found, min(count, found.shape[1]))
            values = np.take_along_axis(found, indices, 1)
            if first:
                indices = np.concatenate([best[rows], indices + first], 1)
                values = np.concatenate([scores[rows], values], 1)
            order = np.lexsort((indices, -values), axis=1)[:, :count]
            kept = order.shape[1]  # less than K while the blocks so far hold fewer documents
            best[rows, :kept] = np.take_along_axis(indices, order, 1)
            scores[rows, :kept] = np.take_along_axis(values, order, 1)
            if progress:
                done = first * queries.shape[0] + min(start + _QUERY_CHUNK, queries.shape[0]) * block.shape[1]
                progress(done, total * queries.shape[0])
    return best, scores


def _largest(scores: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the `count` largest scores of each row, unordered.

    Only the `count` groups of columns with the largest maxima can hold them, so `argpartition` sorts the scores of these groups only.
    """
    rows, width = scores.shape
    groups = width // _GROUP_SIZE
    if groups <= 2 * count:
        return np.argpartition(scores, width - count, axis=1)[:, width - count :]
    body = groups * _GROUP_SIZE
    maxima = scores[:, :body].reshape(rows, _GROUP_SIZE, groups).max(1)  # group g holds columns g, g + groups, ...
    chosen = np.argpartition(maxima, groups - count, axis=1)[:, groups - count :]
    candidates = (chosen[:, :, None] + groups * np.arange(_GROUP_SIZE)).reshape(rows, -1)
    rest = np.broadcast_to(np.arange(body, width), (rows, width - body))
    candidates = np.concatenate([candidates, rest], 1)
    values = np.take_along_axis(scores, candidates, 1)
    best = np.argpartition(values, values.shape[1] - count, axis=1)[:, values.shape[1] - count :]
    return np.take_along_axis(candidates, best, 1)
