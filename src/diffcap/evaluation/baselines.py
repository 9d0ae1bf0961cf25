"""Two baselines without training, to compare the scores of models with."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from diffcap.records import ChangePair
from diffcap.utils.errors import DiffcapError

Array = np.ndarray[Any, np.dtype[Any]]


def most_common_captions(train: Sequence[ChangePair], test: Sequence[ChangePair]) -> dict[str, str]:
    """Return the most frequent training caption, the first in the manifest of equally frequent ones, for every test pair."""
    counts = Counter(caption for pair in train for caption in pair.captions)
    if not counts:
        raise DiffcapError("the training split has no caption; check the manifest.")
    caption = counts.most_common(1)[0][0]
    return {pair.id: caption for pair in test}


def _unit(rows: Array) -> Array:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(norms == 0, 1, norms)


def pair_vectors(before: Array, after: Array) -> Array:
    """Concatenate the normalised features of the first image, and those of the difference of both images.

    The cosine similarity of two such vectors is the mean of the similarities of their halves.

    Args:
        before, after: (N, ...) features, flattened to (N, D).

    Returns:
        (N, 2D) float32.
    """
    first = np.asarray(before, dtype=np.float32).reshape(len(before), -1)
    second = np.asarray(after, dtype=np.float32).reshape(len(after), -1)
    return np.concatenate([_unit(first), _unit(second - first)], axis=1)


def nearest_rows(train: Array, test: Array, chunk: int = 1024) -> Array:
    """Return the index of the row of `train` with the highest cosine similarity to each row of `test` (the first if equal).

    Args:
        train: (N, D), N > 0; can be a memory-mapped array, because it is read in chunks.
        test: (M, D).
        chunk: rows per chunk of both arrays; about chunk x (2 D + chunk) values are in memory.

    Returns:
        (M,) int64.
    """
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
    train: Sequence[ChangePair], train_vectors: Array, test: Sequence[ChangePair], test_vectors: Array
) -> dict[str, str]:
    """Return the first caption of the nearest of the N training pairs for each of the M test pairs.

    Args:
        train: those without a caption are skipped.
        train_vectors, test_vectors: (N, D) and (M, D), see `pair_vectors`.
    """
    with_caption = [row for row, pair in enumerate(train) if pair.captions]
    if not with_caption:
        raise DiffcapError("no training pair has a caption; check the manifest.")
    vectors = train_vectors if len(with_caption) == len(train) else train_vectors[with_caption]
    nearest = nearest_rows(vectors, test_vectors)
    return {pair.id: train[with_caption[row]].captions[0] for pair, row in zip(test, nearest)}
