"""The CPU cores that this process may use, work on several processes, and work that threads do in advance."""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from typing import Any, TypeVar

MAX_THREADS = 16  # threads that decode images, per device
Item = TypeVar("Item")
Result = TypeVar("Result")


def available_cores() -> int:
    """Return the number of CPU cores that this process may use. taskset, batch systems and containers may restrict it."""
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


def map_on_processes(
    function: Callable[..., Result], arguments: list[tuple[Any, ...]], num_workers: int
) -> Iterator[Result]:
    """Yield `function(*values)` for each tuple of `arguments`, in order. If `num_workers` is 1, this process calls the function.

    Each process uses one thread of torch, so the results do not depend on the number of processes.
    """
    if num_workers > 1:
        # Processes are spawned, not forked, because threads that torch has started do not exist in a forked process.
        with ProcessPoolExecutor(num_workers, get_context("spawn"), _start_worker) as pool:
            yield from pool.map(function, *zip(*arguments))
        return
    torch = sys.modules.get("torch")
    num_threads = torch.get_num_threads() if torch else 1
    try:
        if torch:
            torch.set_num_threads(1)
        yield from (function(*values) for values in arguments)
    finally:
        if torch:
            torch.set_num_threads(num_threads)


def _start_worker() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # for torch, if the worker imports it later
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    parent = parent_process()
    assert parent is not None
    # If the parent is killed, this thread ends the worker. Without the thread, the worker would wait for ever.
    threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
