"""Pairs of labelled images: half of one class, every image in four an epoch, the same from any place on."""

import numpy as np
import pytest

from diffcap.data.pretraining import LabelledPairs

CLASSES = np.array([2, 0, 1, 0, 2, 2, 0, 1, 2])  # sizes 3, 2, 4


def test_an_epoch_has_every_image_first_in_four_pairs_half_of_one_class() -> None:
    pairs = LabelledPairs(CLASSES, seed=0)
    first, second = pairs.take(0, 4 * len(CLASSES))
    assert np.array_equal(np.bincount(first), np.full(len(CLASSES), 4))
    assert (first != second).all()
    same = CLASSES[first] == CLASSES[second]
    assert all(same[first == image].sum() == 2 for image in range(len(CLASSES)))


def test_partners_are_drawn_evenly_and_anew_each_epoch() -> None:
    pairs, size = LabelledPairs(CLASSES, seed=0), 4 * len(CLASSES)
    first, second = pairs.take(0, 600 * size)
    counts = np.zeros((len(CLASSES), len(CLASSES)))
    np.add.at(counts, (first, second), 1)
    for one in range(len(CLASSES)):
        alike = (CLASSES[one] == CLASSES) & (np.arange(len(CLASSES)) != one)
        assert counts[one, alike] == pytest.approx(1200 / alike.sum(), rel=0.2)
        others = CLASSES[one] != CLASSES
        assert counts[one, others] == pytest.approx(1200 / others.sum(), rel=0.2)
        assert counts[one, one] == 0
    epochs = {tuple(sorted(zip(*pairs.take(epoch * size, size)))) for epoch in range(5)}
    assert len(epochs) == 5


def test_any_place_gives_what_the_whole_row_has_there() -> None:
    whole = LabelledPairs(CLASSES, seed=4).take(0, 150)
    pairs = LabelledPairs(CLASSES, seed=4)
    for start in (140, 3, 70, 30):  # across the ends of epochs, forwards and back
        assert all(np.array_equal(part, rows[start : start + 10]) for part, rows in zip(pairs.take(start, 10), whole))
    assert not np.array_equal(LabelledPairs(CLASSES, seed=5).take(0, 150).second, whole.second)


def test_an_image_alone_in_its_class_has_others_beside_it() -> None:
    classes = np.array([0, 1, 1])
    first, second = LabelledPairs(classes, seed=0).take(0, 12)
    assert set(second[first == 0]) <= {1, 2} and (first != second).all()
