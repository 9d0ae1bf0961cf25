"""Pairs of images with class labels, half of one class and half of two: what fine-grained classification trains on."""

from typing import NamedTuple

import numpy as np

from diffcap.data.sampler import Stream

EACH = 4  # pairs an image and epoch; decided here, IDC-PCL says "half and half by random sampling" only


class Drawn(NamedTuple):
    """Numbers of the two images of each pair, (n,) each."""

    first: np.ndarray
    second: np.ndarray


class LabelledPairs:
    """An endless row of pairs, open at any place: every epoch has each image first in four, twice with an image of its class
    and twice with one of another, drawn anew by the seed and the epoch.

    Args:
        classes: (images,) labels; two of them at least. An image that is alone in its class has others beside it only.
        seed: of the draws.
    """

    def __init__(self, classes: np.ndarray, seed: int) -> None:
        self.classes, self.seed = classes, seed
        self.order = Stream(EACH * len(classes), seed)
        self._by_class = np.argsort(classes, kind="stable")
        _, group, sizes = np.unique(classes, return_inverse=True, return_counts=True)
        self._begin, self._size = (np.cumsum(sizes) - sizes)[group], sizes[group]  # of each image's class
        self._place = np.argsort(self._by_class) - self._begin  # of each image in its class
        self._drawn: dict[int, np.ndarray] = {}

    def take(self, start: int, count: int) -> Drawn:
        """The pairs at places `start` ... `start + count - 1`."""
        numbers = self.order.take(start, count)
        first, which = numbers // EACH, numbers % EACH
        epochs = (start + np.arange(count)) // self.order.size
        second = np.empty_like(first)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            second[rows] = self._partners(int(epoch))[first[rows], which[rows]]
        return Drawn(first, second)

    def _partners(self, epoch: int) -> np.ndarray:
        """(images, 4) the second image of each pair of an epoch."""
        if epoch not in self._drawn:
            self._drawn = {number: pairs for number, pairs in self._drawn.items() if number == epoch - 1}
            random = np.random.default_rng([self.seed, 11, epoch])
            begin, size = self._begin[:, None], self._size[:, None]
            draw = random.random((len(self.classes), EACH))
            # Of the same class: any but itself. Of another: any but those of its class, which stand side by side.
            step = 1 + (draw * (size - 1)).astype(np.int64)
            same = begin + (self._place[:, None] + step) % size
            other = (draw * (len(self.classes) - size)).astype(np.int64)
            other += np.where(other >= begin, size, 0)
            wants_same = (np.arange(EACH) < EACH // 2) & (size > 1)
            self._drawn[epoch] = self._by_class[np.where(wants_same, same, other)]
        return self._drawn[epoch]
