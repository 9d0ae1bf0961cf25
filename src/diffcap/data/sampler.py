"""Which samples and which task belong to a training step: functions of the seed and the step alone.

So a run that was killed and resumed, or spread over another number of ranks, sees what an undisturbed run on one process
sees.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from diffcap.errors import DiffcapError

Batch = dict[str, Any]


def step_generator(seed: int, step: int, purpose: int = 0) -> torch.Generator:
    """The random numbers of one step, the same on every rank and in every process; (seed, step, purpose) tell it apart."""
    words = np.random.SeedSequence([seed, step, purpose]).generate_state(2, np.uint32)
    return torch.Generator().manual_seed(int(words[0]) << 31 | int(words[1]) >> 1)


class Stream:
    """Sample numbers 0 ... size - 1 in an endless row of shuffled epochs, open at any place.

    Args:
        size: samples of an epoch. seed: of the shuffles.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self._orders: dict[int, np.ndarray] = {}

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            self._orders = {number: order for number, order in self._orders.items() if number == epoch - 1}
            self._orders[epoch] = np.random.default_rng([self.seed, epoch]).permutation(self.size)
        return self._orders[epoch]

    def take(self, start: int, count: int) -> np.ndarray:
        """Numbers at places `start` ... `start + count - 1`, (count,)."""
        places = np.arange(start, start + count)
        epochs = places // self.size
        parts = [self._order(int(epoch))[places[epochs == epoch] % self.size] for epoch in np.unique(epochs)]
        return np.concatenate(parts)


class TaskSchedule:
    """One task a step, drawn by the tasks' shares; the same on every rank.

    Args:
        shares: task name to its share, e.g. `{"mlm": 8, "mvcl": 1, "fda": 2}`. seed: of the draws.
    """

    def __init__(self, shares: Mapping[str, int], seed: int) -> None:
        self.tasks = [task for task, share in shares.items() if share > 0]
        weights = np.array([shares[task] for task in self.tasks], dtype=float)
        if not self.tasks:
            raise DiffcapError("data.tasks gives no task a share above 0; name at least one of mlm, mvcl, fda.")
        self._shares, self._seed = weights / weights.sum(), seed
        self._drawn = np.zeros(0, dtype=np.int64)

    def at(self, step: int) -> tuple[str, int]:
        """The task of a step, and how many steps before it had the same one."""
        while step >= len(self._drawn):
            block = len(self._drawn) // 4096
            more = np.random.default_rng([self._seed, 7, block]).choice(len(self.tasks), 4096, p=self._shares)
            self._drawn = np.concatenate([self._drawn, more])
        task = self._drawn[step]
        return self.tasks[task], int((self._drawn[:step] == task).sum())


class StepBatches(IterableDataset):
    """Batch s for s = first, first + 1, ... without end, from a function of s."""

    def __init__(self, make: Callable[[int], Batch], first: int) -> None:
        self.make, self.first = make, first

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        offset, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        step = self.first + offset
        while True:
            yield self.make(step)
            step += stride
