"""Progress on stderr: bars on a terminal, else one line per minute. Any thread may call the functions that the context managers yield.

Import this module inside functions: its import takes time, and `--help` does not need it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from diffcap.utils.console import echo
from diffcap.utils.errors import printable

Update = Callable[[int, int | None], None]  # gets the amount so far, and the total if it is known


class ProgressLog:
    """Prints "captioning: 120 of 5,000, about 40 min left" every minute. `done`: number of items that were done before the start."""

    def __init__(self, title: str, done: int = 0) -> None:
        self.title = title
        self.first_count = done
        self.start_time = self.latest_time = time.monotonic()

    def update(self, done: int, total: int | None) -> None:
        """Print a line, if the latest one is a minute old."""
        now = time.monotonic()
        if now - self.latest_time < 60:
            return
        self.latest_time = now
        left = ""
        if total is not None and done > self.first_count:
            left = f", about {duration((now - self.start_time) / (done - self.first_count) * (total - done))} left"
        echo(f"{self.title}: {done:,}{'' if total is None else f' of {total:,}'}{left}", err=True)


def duration(seconds: float) -> str:
    """Return a duration as text, rounded to seconds or minutes.

    Example:
        >>> duration(58.4), duration(1234), duration(45_000)
        ('58 s', '21 min', '12 h 30 min')
    """
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def progress_bars(of_bytes: bool = False) -> Iterator[Callable[[str], Update]]:
    """Yield a function that adds a bar with a name, and returns the function that updates the bar. `of_bytes`: amounts are in bytes."""
    with _progress(DownloadColumn() if of_bytes else MofNCompleteColumn()) as progress:

        def add_bar(name: str) -> Update:
            if progress.disable:  # stderr is not a terminal
                return ProgressLog(f"{name}, bytes" if of_bytes else name).update
            task = progress.add_task(printable(name), total=None)
            return lambda amount, total: progress.update(task, completed=amount, total=total)

        yield add_bar


@contextmanager
def progress_bar(title: str, total: int, done: int = 0, hidden: bool = False) -> Iterator[Callable[[int], None]]:
    """Show one bar, unless `hidden`, and yield a function that adds to its count, which starts at `done` and ends at `total`."""
    with _progress(MofNCompleteColumn(), hidden) as progress:
        task = progress.add_task(printable(title), total=total, completed=done)
        log = ProgressLog(title, done)

        def advance(more: int) -> None:
            progress.advance(task, more)
            if progress.disable and not hidden:
                log.update(int(progress.tasks[task].completed), total)

        yield advance


def _progress(last: DownloadColumn | MofNCompleteColumn, hidden: bool = False) -> Progress:
    console = Console(stderr=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), last, TimeRemainingColumn()
    return Progress(*columns, console=console, transient=True, disable=hidden or not console.is_terminal)
