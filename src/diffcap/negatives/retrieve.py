"""Retrieved negatives: the captions of other pairs that are most alike by TF-IDF (IDC-PCL, section 3.2)."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import scipy.sparse as sp

# Chunks whose scores stay in the cache: twice as fast as bigger ones, and 420,000 distinct captions take some ten
# minutes on one core (measured, 76 words).
_QUERIES = 64
_DOCUMENTS = 32768
_CELLS = 1 << 26  # most numbers in the dense block of documents: 256 MB
_STRIPES = 32  # documents that share one maximum in the first look for the best


def tfidf(documents: Sequence[Sequence[str]], idf: Mapping[str, float]) -> sp.csr_matrix:
    """Rows of term count times inverse frequency, each of length 1 (0 for a document without a known term).

    Args:
        documents: N lists of terms.
        idf: weight of each of the V terms, in the order of the columns.

    Returns:
        (N, V) float32.
    """
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
    """The best documents of every query by inner product, in chunks, so that memory does not grow with N x N.

    A sparse row times a dense block of documents costs the row's few terms only; the best are then found by the
    maxima of stripes, which reads every score once.

    Args:
        queries: (Q, V).
        documents: (N, V).
        count: K, cut to N.
        progress: called with (scored, in all), in queries times documents.

    Returns:
        (Q, K) document numbers, best first and the lower number first among equals, and (Q, K) float32 scores.
    """
    total, count = documents.shape[0], min(count, documents.shape[0])
    best = np.zeros((queries.shape[0], count), dtype=np.int64)
    scores = np.full((queries.shape[0], count), -1.0, dtype=np.float32)
    width = min(_DOCUMENTS, max(1024, _CELLS // max(1, documents.shape[1])))
    for first in range(0, total, width):
        block = np.ascontiguousarray(documents[first : first + width].T.toarray())  # (V, block)
        for start in range(0, queries.shape[0], _QUERIES):
            rows = slice(start, start + _QUERIES)
            found = queries[rows] @ block  # (rows, block)
            places = _largest(found, min(count, found.shape[1]))
            values = np.take_along_axis(found, places, 1)
            if first:
                places = np.concatenate([best[rows], places + first], 1)
                values = np.concatenate([scores[rows], values], 1)
            order = np.lexsort((places, -values), axis=1)[:, :count]
            kept = order.shape[1]  # less than K while the blocks so far hold fewer documents
            best[rows, :kept] = np.take_along_axis(places, order, 1)
            scores[rows, :kept] = np.take_along_axis(values, order, 1)
            if progress:
                progress(first * queries.shape[0] + min(start + _QUERIES, queries.shape[0]) * block.shape[1],
                         total * queries.shape[0])  # fmt: skip
    return best, scores


def _largest(scores: np.ndarray, count: int) -> np.ndarray:
    """Places of the `count` largest of each row, unordered. Every one of them lies in a stripe among the best `count`."""
    rows, width = scores.shape
    stripes = width // _STRIPES
    if stripes <= 2 * count:
        return np.argpartition(scores, width - count, axis=1)[:, width - count :]
    body = stripes * _STRIPES
    maxima = scores[:, :body].reshape(rows, _STRIPES, stripes).max(1)  # stripe s holds s, s + stripes, ...
    chosen = np.argpartition(maxima, stripes - count, axis=1)[:, stripes - count :]
    candidates = (chosen[:, :, None] + stripes * np.arange(_STRIPES)).reshape(rows, -1)
    rest = np.broadcast_to(np.arange(body, width), (rows, width - body))
    candidates = np.concatenate([candidates, rest], 1)
    values = np.take_along_axis(scores, candidates, 1)
    places = np.argpartition(values, values.shape[1] - count, axis=1)[:, values.shape[1] - count :]
    return np.take_along_axis(candidates, places, 1)
