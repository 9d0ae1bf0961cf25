"""Pairs of images with class labels for fine-grained classification: half of the pairs have one class, half have two."""

from typing import NamedTuple

import numpy as np

from diffcap.data.sampler import ShuffledEpochs

PAIRS_PER_IMAGE = 4  # per epoch; ours, IDC-PCL only says "half and half by random sampling"


class PairIndices(NamedTuple):
    """Indices of the first and the second image of each pair, (n,) each."""

    first: np.ndarray
    second: np.ndarray


class LabelledPairs:
    """An infinite sequence of pairs with random access.

    In each epoch every image is the first image of four pairs: two with an image of the same class, and two with an image of
    another class. Partners and order are drawn anew in each epoch. An image whose class has no other image gets partners of
    other classes only.

    Args:
        labels: (images,) integers, with at least two different values. seed: of the random choices.
    """

    def __init__(self, labels: np.ndarray, seed: int) -> None:
        self.labels, self.seed = labels, seed
        self.order = ShuffledEpochs(PAIRS_PER_IMAGE * len(labels), seed)
        self._by_class = np.argsort(labels, kind="stable")  # image indices, those of one class next to each other
        _, class_index, class_sizes = np.unique(labels, return_inverse=True, return_counts=True)
        class_starts = np.cumsum(class_sizes) - class_sizes
        self._class_start, self._class_size = class_starts[class_index], class_sizes[class_index]  # (images,) each
        position = np.empty_like(self._by_class)  # of each image in `_by_class`
        position[self._by_class] = np.arange(len(labels))
        self._rank_in_class = position - self._class_start
        self._partner_cache: dict[int, np.ndarray] = {}

    def take(self, start: int, count: int) -> PairIndices:
        """Pairs `start` ... `start + count - 1` of the sequence."""
        numbers = self.order.take(start, count)
        first, slot = numbers // PAIRS_PER_IMAGE, numbers % PAIRS_PER_IMAGE
        epochs = (start + np.arange(count)) // self.order.size
        second = np.empty_like(first)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            second[rows] = self._partners(int(epoch))[first[rows], slot[rows]]
        return PairIndices(first, second)

    def _partners(self, epoch: int) -> np.ndarray:
        """(images, PAIRS_PER_IMAGE) second image of each pair in an epoch."""
        if epoch not in self._partner_cache:
            for cached in list(self._partner_cache):
                if cached != epoch - 1:  # a batch may need the end of one epoch and the beginning of the next
                    del self._partner_cache[cached]
            self._partner_cache[epoch] = self._draw_partners(epoch)
        return self._partner_cache[epoch]

    def _draw_partners(self, epoch: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, 11, epoch])
        start, size = self._class_start[:, None], self._class_size[:, None]
        draw = rng.random((len(self.labels), PAIRS_PER_IMAGE))
        # Positions in `_by_class`. Same class: any but the image itself. Another class: skip the block of its own class.
        offset = 1 + (draw * (size - 1)).astype(np.int64)
        same = start + (self._rank_in_class[:, None] + offset) % size
        other = (draw * (len(self.labels) - size)).astype(np.int64)
        other += np.where(other >= start, size, 0)
        wants_same = (np.arange(PAIRS_PER_IMAGE) < PAIRS_PER_IMAGE // 2) & (size > 1)
        return self._by_class[np.where(wants_same, same, other)]
