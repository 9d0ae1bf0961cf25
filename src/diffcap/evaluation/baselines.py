"""Two baselines without a model: the most frequent training caption, and the caption of the most similar training pair.

`leave_one_out` and `most_typical` serve for rows that show what a score can reach.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from diffcap.evaluation.captions import Tokenizer, cider_per_pair
from diffcap.evaluation.ngrams import Array
from diffcap.records import ChangePair
from diffcap.utils.errors import DiffcapError


def most_common_captions(train_pairs: Sequence[ChangePair], test_pairs: Sequence[ChangePair]) -> dict[str, str]:
    """Return the most frequent training caption for every test pair; of equally frequent captions, the first in `train_pairs`."""
    counts = Counter(caption for pair in train_pairs for caption in pair.captions)
    if not counts:
        raise DiffcapError("the training split has no caption; check the manifest.")
    most_common_caption, _ = counts.most_common(1)[0]
    return {pair.id: most_common_caption for pair in test_pairs}


def leave_one_out(pairs: Sequence[ChangePair]) -> tuple[list[ChangePair], dict[str, str]]:
    """Return a pair for each reference of each pair, with the other references, and the left-out reference as its caption by id."""
    others, captions = [], {}
    for pair in pairs:
        for index, caption in enumerate(pair.captions if len(pair.captions) > 1 else ()):
            id = f"{pair.id}/{index}"
            others.append(replace(pair, id=id, captions=[*pair.captions[:index], *pair.captions[index + 1 :]]))
            captions[id] = caption
    return others, captions


def most_typical(sentences: Mapping[str, Sequence[str]], tokenizer: Tokenizer) -> dict[str, str]:
    """Return, of each pair's `sentences` (by id), the one with the highest CIDEr-D with all of them as references."""
    most = max(map(len, sentences.values()))
    candidates = {str(n): {id: texts[n % len(texts)] for id, texts in sentences.items()} for n in range(most)}
    scores = cider_per_pair(candidates, sentences, tokenizer)
    best = {id: max(candidates, key=lambda name: scores[name][id]) for id in sentences}
    return {id: candidates[name][id] for id, name in best.items()}


def _normalise_rows(rows: Array) -> Array:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(norms == 0, 1, norms)


def pair_vectors(before: Array, after: Array) -> Array:
    """Concatenate the normalised features of the "before" image and the normalised difference of the features of both images.

    The features (N, ...) are flattened to (N, D), and the result is (N, 2D) float32. The cosine similarity of two of these vectors
    is the mean of the cosine similarities of their halves.
    """
    before_rows = np.asarray(before, dtype=np.float32).reshape(len(before), -1)
    after_rows = np.asarray(after, dtype=np.float32).reshape(len(after), -1)
    difference = after_rows - before_rows
    return np.concatenate([_normalise_rows(before_rows), _normalise_rows(difference)], axis=1)


def nearest_rows(train_vectors: Array, test_vectors: Array, chunk_size: int = 1024) -> Array:
    """Return, for each row of `test_vectors` (M, D), the row of `train_vectors` (N, D) with the highest cosine similarity: (M,) int64.

    Of several equal rows, it is the first. `chunk_size` rows of each array are compared at once, so that about
    chunk_size x (2 D + chunk_size) float32 values are in memory.
    """
    nearest = np.zeros(len(test_vectors), dtype=np.int64)
    highest = np.full(len(test_vectors), -np.inf, dtype=np.float32)  # similarity of `nearest`
    for train_start in range(0, len(train_vectors), chunk_size):
        chunk = train_vectors[train_start : train_start + chunk_size]
        candidates = _normalise_rows(np.asarray(chunk, dtype=np.float32))
        for test_start in range(0, len(test_vectors), chunk_size):
            test_rows = slice(test_start, test_start + chunk_size)
            queries = _normalise_rows(np.asarray(test_vectors[test_rows], dtype=np.float32))
            similarities = queries @ candidates.T  # (chunk_size, chunk_size)
            best_column = similarities.argmax(axis=1)
            best_similarity = similarities[np.arange(len(similarities)), best_column]
            is_better = best_similarity > highest[test_rows]
            nearest[test_rows][is_better] = train_start + best_column[is_better]
            highest[test_rows][is_better] = best_similarity[is_better]
    return nearest


def nearest_captions(
    train_pairs: Sequence[ChangePair], train_vectors: Array, test_pairs: Sequence[ChangePair], test_vectors: Array
) -> dict[str, str]:
    """Return the first caption of the nearest training pair for each test pair. The vectors are the `pair_vectors` of the pairs."""
    nearest = nearest_rows(train_vectors, test_vectors)
    return {pair.id: train_pairs[row].captions[0] for pair, row in zip(test_pairs, nearest)}
