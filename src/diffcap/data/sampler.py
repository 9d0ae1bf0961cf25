"""Choose the samples of each training step, and the task of each step of a pre-training. Both depend only on the seed and the step.

Therefore a resumed run, or a run on another number of ranks, trains on the same batches as an uninterrupted run on one process.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from diffcap.utils.errors import DiffcapError

Batch = dict[str, Any]  # name of an entry, such as "before" or "tokens" -> its value
_BLOCK_SIZE = 4096  # number of steps whose tasks are drawn together
_TASK_STREAM = 7  # separates the random numbers of the tasks from those of the samples, which use the same seed


def step_generator(seed: int, step: int) -> torch.Generator:
    """Return the random generator of one training step, the same on every rank and in every worker process."""
    high_word, low_word = np.random.SeedSequence([seed, step]).generate_state(2, np.uint32).tolist()
    return torch.Generator().manual_seed((high_word << 31) | (low_word >> 1))  # 63 bits: torch's seeds are signed


class ShuffledEpochs:
    """An infinite sequence of sample indices with random access: one permutation of 0 ... size - 1 per epoch."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        # The permutations of two epochs are kept, because a batch may extend over both.
        self._permutation = lru_cache(2)(lambda epoch: np.random.default_rng([seed, epoch]).permutation(size))

    def take(self, start: int, count: int) -> np.ndarray:
        """Return the elements `start` ... `start + count - 1` of the sequence, (count,)."""
        positions = np.arange(start, start + count)
        epochs = positions // self.size
        parts = []
        for epoch in np.unique(epochs).tolist():
            parts.append(self._permutation(epoch)[positions[epochs == epoch] % self.size])
        return np.concatenate(parts)


class TaskSchedule:
    """One random pre-training task per step, the same on every rank. `shares` are relative frequencies, such as {"mlm": 8, "fda": 2}."""

    def __init__(self, shares: Mapping[str, int], seed: int) -> None:
        self.tasks = [task for task, share in shares.items() if share > 0]
        weights = np.array([shares[task] for task in self.tasks], dtype=float)
        if not self.tasks:
            raise DiffcapError(f"data.tasks: no share is above 0; raise that of {' or '.join(shares)}.")
        self._probabilities = weights / weights.sum()
        self._seed = seed
        self._task_indices = np.zeros(0, dtype=np.int64)  # (n,) tasks of the first n steps; `at` appends blocks

    def at(self, step: int) -> tuple[str, int]:
        """Return the task of a step, and the number of earlier steps with the same task."""
        while step >= len(self._task_indices):
            block = len(self._task_indices) // _BLOCK_SIZE
            rng = np.random.default_rng([self._seed, _TASK_STREAM, block])
            new_indices = rng.choice(len(self.tasks), _BLOCK_SIZE, p=self._probabilities)
            self._task_indices = np.concatenate([self._task_indices, new_indices])
        task_index = self._task_indices[step]
        return self.tasks[task_index], int((self._task_indices[:step] == task_index).sum())


class StepDataset(IterableDataset):
    """The batches of the training steps `first`, `first + 1`, ..., without end. Each of n workers makes every n-th batch."""

    def __init__(self, make_batch: Callable[[int], Batch], first: int) -> None:
        self.make_batch = make_batch
        self.first = first

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        offset, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        step = self.first + offset
        while True:
            yield self.make_batch(step)
            step += stride
