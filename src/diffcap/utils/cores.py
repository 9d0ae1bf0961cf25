"""The CPU cores that this process may use, and work that threads do in advance."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

MAX_THREADS = 16  # that decode images for one device
Item = TypeVar("Item")
Result = TypeVar("Result")


def available_cores() -> int:
    """Return the number of CPU cores that this process may use, as restricted by taskset, batch systems or containers; else of all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def map_ahead(
    pool: Executor, function: Callable[[Item], Result], items: Iterable[Item], count: int
) -> Iterator[Result]:
    """Yield `function(item)` of each item, in order. The pool computes the results of the next `count` items in advance."""
    futures: deque[Future[Result]] = deque()
    for item in items:
        futures.append(pool.submit(function, item))
        if len(futures) > count:
            yield futures.popleft().result()
    while futures:
        yield futures.popleft().result()
