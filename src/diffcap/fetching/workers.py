"""Work shared out to threads that do not hold the process up when it ends: a server may keep one of them waiting."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_parallel(
    work: Callable[[Item], Result], items: Sequence[Item], jobs: int, stop: threading.Event
) -> Iterator[tuple[Item, Result]]:
    """Each item with what `work` made of it, in the order in which they get ready.

    Args:
        work: called in `jobs` threads; whatever it raises is raised here, and ends everything.
        items: what there is to do.
        jobs: number of threads.
        stop: set when everything is to end: by us after an error or when nobody asks for more results.
    """
    waiting, done = queue.SimpleQueue[Item](), queue.SimpleQueue[tuple[Item, Result | None, BaseException | None]]()
    for item in items:
        waiting.put(item)

    def labour() -> None:
        while not stop.is_set():
            try:
                item = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((item, work(item), None))
            except BaseException as error:
                done.put((item, None, error))

    for _ in range(min(jobs, len(items))):
        threading.Thread(target=labour, daemon=True).start()
    try:
        for _ in range(len(items)):
            item, result, error = done.get()
            if error is not None:
                raise error
            yield item, result  # type: ignore[misc]
    finally:
        stop.set()
