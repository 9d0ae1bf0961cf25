"""Progress bars on stderr if it is a terminal. The functions that the context managers give may be called from any thread.

Import this module inside functions: `--help` does not need it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from diffcap.utils.errors import printable

Update = Callable[[int, int | None], None]  # gets the amount so far, and the total if it is known


@contextmanager
def progress_bars(of_bytes: bool = False) -> Iterator[Callable[[str], Update]]:
    """Gives a function that adds a bar with the given name, and returns the function that updates it."""
    with _progress(DownloadColumn() if of_bytes else MofNCompleteColumn()) as progress:

        def bar(name: str) -> Update:
            task = progress.add_task(printable(name), total=None)
            return lambda there, total: progress.update(task, completed=there, total=total)

        yield bar


@contextmanager
def progress_bar(what: str, total: int, done: int = 0, hidden: bool = False) -> Iterator[Callable[[int], None]]:
    """Show one bar; gives a function that adds to the count, which starts at `done` and ends at `total`."""
    with _progress(MofNCompleteColumn(), hidden) as progress:
        task = progress.add_task(printable(what), total=total, completed=done)
        yield lambda more: progress.advance(task, more)


def _progress(last: DownloadColumn | MofNCompleteColumn, hidden: bool = False) -> Progress:
    console = Console(stderr=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), last, TimeRemainingColumn()
    return Progress(*columns, console=console, transient=True, disable=hidden or not console.is_terminal)
