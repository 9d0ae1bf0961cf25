"""Progress bars on a terminal's stderr, nothing anywhere else; their functions may be called from any thread."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def byte_bars() -> Iterator[Callable[[str], Callable[[int, int | None], None]]]:
    """Gives a function that makes a bar for a file: called with the bytes that are there and with how many there will be."""
    with _bars(DownloadColumn()) as progress:

        def bar(name: str) -> Callable[[int, int | None], None]:
            task = progress.add_task(f"fetching {name}", total=None)
            return lambda there, total: progress.update(task, completed=there, total=total)

        yield bar


@contextmanager
def count_bar(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Gives a function that counts one more."""
    with _bars(MofNCompleteColumn()) as progress:
        task = progress.add_task(f"fetching {what}", total=total)
        yield lambda: progress.advance(task)


def _bars(last: DownloadColumn | MofNCompleteColumn) -> Progress:
    console = Console(stderr=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), last, TimeRemainingColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
