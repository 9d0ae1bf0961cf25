"""Where the files of one dataset go, and what is known of them.

data/<dataset>/official/               the files, in the layout that the reader takes
data/<dataset>/downloads/              archives, and the unfinished parts of them
data/<dataset>/checksums.json          SHA-256 of everything at its first fetch
data/<dataset>/fetch-failures.json     what is missing now, and why; not there where nothing is
"""

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from diffcap.errors import DiffcapError
from diffcap.fetching.ledger import Ledger
from diffcap.fetching.sources import Entry
from diffcap.records import file_hash


@dataclass(frozen=True)
class Failure:
    """A file that is not there: where it should come from, why it does not, and whether its server has none (any more)."""

    name: str
    url: str
    why: str
    gone: bool = False


class Place:
    """The folders of one dataset."""

    def __init__(self, dataset: str, folder: Path):
        """`folder` is `data/<dataset>`; its checksums are read."""
        self.dataset, self.folder = dataset, folder
        self.official, self.downloads = folder / "official", folder / "downloads"
        self.ledger = Ledger(folder / "checksums.json")

    def name(self, path: Path) -> str:
        """What a file is called in the ledger and in messages."""
        return path.relative_to(self.folder).as_posix()

    def target(self, entry: Entry) -> Path:
        """Where a file goes, fetched or put there by hand."""
        return self.downloads / entry.file if entry.unpack else self.official / entry.to / entry.file

    def gives(self, entry: Entry) -> bool:
        """Whether everything that an entry brings is there, and no folder of it empty."""
        paths = [self.official / name for name in entry.gives]
        return all(any(path.iterdir()) if path.is_dir() else path.is_file() for path in paths)

    def stamp(self, archive: Path) -> Path:
        """The file that says that an archive was taken apart; it goes when the unpacked files go."""
        return self.official / ".unpacked" / archive.name

    def present(self, path: Path, check: Callable[[Path], str]) -> str:
        """What is wrong with a file that is there already, "" for nothing.

        What was noted at its first fetch decides; one of which nothing was noted (put there by hand, or fetched by a
        process that was killed) is checked.
        """
        changed = self.ledger.changed(self.name(path), path)
        if changed is None:
            return check(path)
        return f"not the file any more whose checksum stands in {self.ledger.path}" if changed else ""

    def note(self, path: Path, url: str) -> None:
        """Note the checksum of a file that turned out good, unless it is known."""
        if not self.ledger.sha256(self.name(path)):
            self.ledger.note(self.name(path), path, file_hash(path), url)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Two processes would write into the same parts; the lock goes with its process, however that ends.

    Raises:
        DiffcapError: another process is at it.
    """
    (folder / "downloads").mkdir(parents=True, exist_ok=True)
    with (folder / "downloads" / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DiffcapError(f"{folder}: another process is fetching into this folder; wait for it.") from None
        yield
