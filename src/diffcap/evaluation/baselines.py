"""Two captioners that learn nothing, printed beside a model: what a score is worth shows against them."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from diffcap.errors import DiffcapError
from diffcap.records import ChangePair

Array = np.ndarray[Any, np.dtype[Any]]


def most_common_captions(train: Sequence[ChangePair], test: Sequence[ChangePair]) -> dict[str, str]:
    """Give every test pair the training caption that occurs most often (of equals, the first in the manifest).

    Raises:
        DiffcapError: there is no training caption.
    """
    counts = Counter(caption for pair in train for caption in pair.captions)
    if not counts:
        raise DiffcapError("the training split has no caption to repeat; check the manifest.")
    caption = counts.most_common(1)[0][0]
    return {pair.id: caption for pair in test}


def _unit(rows: Array) -> Array:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(norms == 0, 1, norms)


def pair_vectors(before: Array, after: Array) -> Array:
    """Describe each pair by its first image and by what differs in the second.

    Each half is scaled to length 1, so that the difference, small beside the image, weighs as much: the cosine of two
    such vectors is the mean of the halves' cosines.

    Args:
        before, after: (N, ...) features, any shape; flattened.

    Returns:
        (N, 2D) float32.
    """
    first = np.asarray(before, dtype=np.float32).reshape(len(before), -1)
    second = np.asarray(after, dtype=np.float32).reshape(len(after), -1)
    if first.shape != second.shape:
        raise ValueError(f"before and after must have one shape, got {first.shape} and {second.shape}")
    return np.concatenate([_unit(first), _unit(second - first)], axis=1)


def nearest_rows(train: Array, test: Array, chunk: int = 1024) -> Array:
    """The row of `train` with the highest cosine to each row of `test`; of equals, the first.

    Args:
        train: (N, D), N > 0; may be a memory-mapped array, it is read chunk by chunk.
        test: (M, D).
        chunk: rows taken at once from either side; memory is about chunk x (2 D + chunk) numbers.

    Returns:
        (M,) int64.
    """
    if len(train) == 0 or train.shape[1] != test.shape[1]:
        raise ValueError(f"need training rows of the tests' width, got {train.shape} and {test.shape}")
    best = np.zeros(len(test), dtype=np.int64)
    highest = np.full(len(test), -np.inf, dtype=np.float32)
    for start in range(0, len(train), chunk):
        candidates = _unit(np.asarray(train[start : start + chunk], dtype=np.float32))
        for first in range(0, len(test), chunk):
            rows = slice(first, first + chunk)
            scores = _unit(np.asarray(test[rows], dtype=np.float32)) @ candidates.T  # (chunk, chunk)
            winner = scores.argmax(axis=1)
            score = scores[np.arange(len(scores)), winner]
            better = score > highest[rows]
            best[rows][better] = start + winner[better]
            highest[rows][better] = score[better]
    return best


def nearest_captions(
    train: Sequence[ChangePair],
    train_vectors: Array,
    test: Sequence[ChangePair],
    test_vectors: Array,
    chunk: int = 1024,
) -> dict[str, str]:
    """Give every test pair the first caption of the training pair nearest to it in feature space.

    Args:
        train: N pairs; those without a caption are passed over.
        train_vectors: (N, D), such as `pair_vectors` makes.
        test: M pairs.
        test_vectors: (M, D).
        chunk: see `nearest_rows`.

    Raises:
        DiffcapError: no training pair has a caption.
    """
    if len(train) != len(train_vectors) or len(test) != len(test_vectors):
        raise ValueError(
            f"got {len(train)} and {len(test)} pairs for {len(train_vectors)} and {len(test_vectors)} vectors"
        )
    told = [row for row, pair in enumerate(train) if pair.captions]
    if not told:
        raise DiffcapError("no training pair has a caption to take over; check the manifest.")
    vectors = train_vectors if len(told) == len(train) else train_vectors[told]
    nearest = nearest_rows(vectors, test_vectors, chunk)
    return {pair.id: train[told[row]].captions[0] for pair, row in zip(test, nearest)}
