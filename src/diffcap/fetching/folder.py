"""The files of one dataset on disk.

data/<dataset>/official/               files in the layout that the dataset's reader expects
data/<dataset>/downloads/              archives, and unfinished downloads (*.part)
data/<dataset>/checksums.json          SHA-256 of every file when it was first fetched
data/<dataset>/fetch-failures.json     missing files and the reasons; deleted when nothing is missing
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from diffcap.fetching.checksums import Checksums
from diffcap.fetching.download import Client, PermanentError, Target, TransientError, download
from diffcap.fetching.sources import Entry
from diffcap.utils.errors import DiffcapError


@dataclass(frozen=True)
class Failure:
    """A file that could not be fetched.

    Attributes:
        name: path relative to `data/<dataset>`.
        url: where it should come from.
        reason: why it is missing.
        gone: the server does not have the file (any more).
        forbidden: every address refused it, its own with status 403, which may concern the file or the client.
    """

    name: str
    url: str
    reason: str
    gone: bool = False
    forbidden: bool = False


class DatasetFolder:
    """Paths and checksums of one dataset's folder, `data/<dataset>`."""

    def __init__(self, dataset: str, path: Path):
        self.dataset, self.checksums = dataset, Checksums(path)
        self.official, self.downloads = path / "official", path / "downloads"
        self.failures = path / "fetch-failures.json"

    def target(self, entry: Entry) -> Path:
        """Where a downloaded or manually copied file belongs."""
        return self.downloads / entry.file if entry.unpack else self.official / entry.to / entry.file

    def fetch_file(self, target: Target, urls: tuple[str, ...], client: Client) -> Failure | None:
        """Download a file that is missing, or verify one that exists, and record its checksum."""
        path, sums = target.path, self.checksums
        name, url = sums.name(path), urls[0] if urls else ""
        if path.is_file():
            if problem := sums.existing_problem(path, target.verify):
                fix = f"delete it, and the next run downloads it again; to keep it, delete its entry in {sums.path}"
                return Failure(name, url, f"{problem}; {fix}")
            sums.record(path, "")
            return None
        try:
            sums.record(path, download(urls, target, client))
        except TransientError as error:
            return Failure(name, url, str(error))
        except PermanentError as error:
            return Failure(name, url, str(error), error.gone, error.forbidden)
        return None

    def is_complete(self, entry: Entry) -> bool:
        """Whether everything that an entry provides (`gives`) exists; an empty folder does not count."""
        paths = [self.official / name for name in entry.gives]
        return all(any(path.iterdir()) if path.is_dir() else path.is_file() for path in paths)

    def marker(self, archive: Path) -> Path:
        """The file that marks an archive as extracted; it is deleted together with the extracted files."""
        return self.official / ".unpacked" / archive.name

    def is_extracted(self, entry: Entry, archive: Path) -> bool:
        """Whether the archive was extracted and its files still exist; the archive itself may be deleted."""
        return self.marker(archive).is_file() and self.is_complete(entry)


@contextmanager
def exclusive_lock(folder: Path) -> Iterator[None]:
    """Allow one process at a time to fetch into a folder; the system releases the lock when the process ends."""
    (folder / "downloads").mkdir(parents=True, exist_ok=True)
    with (folder / "downloads" / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DiffcapError(f"{folder}: another process is fetching into this folder; wait until it ends.") from None
        yield
