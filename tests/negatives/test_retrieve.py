import math
import random

import numpy as np
import pytest

from diffcap.negatives import retrieve
from diffcap.negatives.retrieve import inverse_document_frequencies, most_similar, tfidf
from diffcap.negatives.words import TaggedCaption


def corpus(count: int, words: int, seed: int) -> list[TaggedCaption]:
    rng = random.Random(seed)
    contents = [tuple(f"w{int(rng.random() ** 2 * words)}" for _ in range(rng.randint(1, 9))) for _ in range(count)]
    return [TaggedCaption(" ".join(content), content, ("NOUN",) * len(content), content) for content in contents]


def naive_vector(content: tuple[str, ...], sentences: list[TaggedCaption]) -> dict[str, float]:
    vector = {}
    for term in set(content):
        containing = sum(term in sentence.content for sentence in sentences)
        vector[term] = content.count(term) * (math.log((1 + len(sentences)) / (1 + containing)) + 1)
    length = math.sqrt(sum(value * value for value in vector.values()))
    return {term: value / length for term, value in vector.items()}


def test_best_documents_equal_a_naive_loop() -> None:
    sentences = corpus(80, 30, seed=0)
    contents = [sentence.content for sentence in sentences]
    matrix = tfidf(contents, inverse_document_frequencies(sentences))
    places, scores = most_similar(matrix[:20], matrix, 6)
    vectors = [naive_vector(content, sentences) for content in contents]
    for row in range(20):
        naive = [sum(vectors[row].get(term, 0.0) * value for term, value in other.items()) for other in vectors]
        assert scores[row].tolist() == pytest.approx(sorted(naive, reverse=True)[:6], abs=1e-6)
        assert [naive[place] for place in places[row]] == pytest.approx(scores[row].tolist(), abs=1e-6)
        assert len(set(places[row].tolist())) == 6


@pytest.mark.slow
@pytest.mark.parametrize(("queries", "documents"), [(7, 50), (64, 200), (3, 1), (64, 1000)])
def test_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch, queries: int, documents: int) -> None:
    sentences = corpus(700, 40, seed=2)
    matrix = tfidf([sentence.content for sentence in sentences], inverse_document_frequencies(sentences))
    dense = (matrix[:100] @ matrix.T).toarray()
    best = np.sort(dense, axis=1)[:, ::-1][:, :9]
    monkeypatch.setattr(retrieve, "_QUERIES_PER_CHUNK", queries)
    monkeypatch.setattr(retrieve, "_DOCUMENTS_PER_BLOCK", documents)
    seen: list[tuple[int, int]] = []
    places, scores = most_similar(matrix[:100], matrix, 9, lambda *done: seen.append(done))
    np.testing.assert_allclose(scores, best, atol=1e-6)
    np.testing.assert_allclose(np.take_along_axis(dense, places, 1), best, atol=1e-6)
    assert all(len(set(row)) == 9 for row in places.tolist())
    assert seen == sorted(seen) and seen[-1] == (70000, 70000)
