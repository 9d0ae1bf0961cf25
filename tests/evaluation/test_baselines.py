"""The two captioners that learn nothing, against naive loops."""

import numpy as np
import pytest

from diffcap.evaluation.baselines import (
    leave_one_out,
    most_common_captions,
    most_typical,
    nearest_captions,
    nearest_rows,
    pair_vectors,
)
from diffcap.records import ChangePair
from diffcap.utils.errors import DiffcapError


def pair(id: str, *captions: str) -> ChangePair:
    return ChangePair(id, "b", "a", list(captions), "train")


def test_most_common_caption_goes_to_every_pair() -> None:
    train = [pair("1", "x moved", "no change"), pair("2", "no change"), pair("3", "x moved", "x moved")]
    assert most_common_captions(train, [pair("8"), pair("9")]) == {"8": "x moved", "9": "x moved"}
    with pytest.raises(DiffcapError, match="the training split has no caption"):
        most_common_captions([pair("1")], [pair("8")])
    assert most_common_captions([pair("1", "b"), pair("2", "a")], [pair("8")]) == {"8": "b"}  # the first of equals


def test_a_reference_is_scored_against_the_others_of_its_pair() -> None:
    others, captions = leave_one_out([pair("1", "a", "b", "a"), pair("2", "c"), pair("3", "d", "e")])
    found = [(captions[other.id], other.captions) for other in others]
    typical = most_typical({"1": ["x y", "a b c", "a b d", "a b c"], "2": ["u", "v w", "v w"]}, "raw")
    assert typical == {"1": "a b c", "2": "v w"}
    assert found == [("a", ["b", "a"]), ("b", ["a", "a"]), ("a", ["a", "b"]), ("d", ["e"]), ("e", ["d"])]


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_nearest_rows_equal_a_loop_over_all(chunk: int) -> None:
    rng = np.random.default_rng(0)
    train, test = rng.normal(size=(13, 5)), rng.normal(size=(9, 5))
    train[7] = train[2]  # equals: the first is taken
    test[0] = 3 * train[2]
    expected = []
    for row in test:
        cosines = [row @ other / np.linalg.norm(row) / np.linalg.norm(other) for other in train]
        expected.append(max(range(13), key=lambda n: (round(cosines[n], 6), -n)))
    assert nearest_rows(train, test, chunk).tolist() == expected
    assert expected[0] == 2


def test_pair_vectors_weigh_the_difference_as_much_as_the_image() -> None:
    rng = np.random.default_rng(1)
    before, after = rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 3, 4))
    first, second = pair_vectors(before, after)
    cosine = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
    b, d = before.reshape(2, -1), (after - before).reshape(2, -1)
    halves = [x @ y / np.linalg.norm(x) / np.linalg.norm(y) for x, y in (b, d)]
    assert cosine == pytest.approx(np.mean(halves), abs=1e-6)
    assert np.isfinite(pair_vectors(before, before)).all()  # no difference at all


def test_nearest_pairs_first_caption_is_taken_over() -> None:
    train = [pair("2", "two", "deux"), pair("3", "three")]
    test = [pair("8"), pair("9")]
    captions = nearest_captions(train, np.array([[0.9, 0.1], [0, 1]]), test, np.array([[1.0, 0], [0.1, 1]]))
    assert captions == {"8": "two", "9": "three"}
