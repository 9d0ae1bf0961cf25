"""Progress bars on a terminal's stderr, nothing anywhere else; their functions may be called from any thread.

Imported where a bar begins, not above: `--help` needs none.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from diffcap.errors import printable

Update = Callable[[int, int | None], None]  # gets what there is so far, and how much there will be if that is known


@contextmanager
def bars(of_bytes: bool = False) -> Iterator[Callable[[str], Update]]:
    """Gives a function that makes a bar for what it is given the name of, counted one by one or in bytes."""
    with _bars(DownloadColumn() if of_bytes else MofNCompleteColumn()) as progress:

        def bar(name: str) -> Update:
            task = progress.add_task(printable(name), total=None)
            return lambda there, total: progress.update(task, completed=there, total=total)

        yield bar


@contextmanager
def count_bar(what: str, total: int, done: int = 0, hidden: bool = False) -> Iterator[Callable[[int], None]]:
    """Gives a function that counts some more of `total`, of which `done` are there already."""
    with _bars(MofNCompleteColumn(), hidden) as progress:
        task = progress.add_task(printable(what), total=total, completed=done)
        yield lambda more: progress.advance(task, more)


def _bars(last: DownloadColumn | MofNCompleteColumn, hidden: bool = False) -> Progress:
    console = Console(stderr=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), last, TimeRemainingColumn()
    return Progress(*columns, console=console, transient=True, disable=hidden or not console.is_terminal)
