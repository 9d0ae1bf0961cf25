"""The folder of one dataset's fetched files:

data/<dataset>/official/               files in the layout that the dataset's reader expects
data/<dataset>/downloads/              archives, and unfinished downloads (*.part)
data/<dataset>/checksums.json          SHA-256 of every file when it was first fetched; later copies must have the same content
data/<dataset>/fetch-failures.json     missing files and the reasons; deleted when nothing is missing
"""

import fcntl
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffcap.fetching.download import Client, PermanentError, Target, TransientError, download
from diffcap.fetching.sources import Entry
from diffcap.records import file_hash, read_json, write_json
from diffcap.utils.errors import DiffcapError


@dataclass(frozen=True)
class Failure:
    """A file that could not be fetched."""

    name: str  # path relative to `data/<dataset>`
    url: str  # where it should come from
    reason: str
    gone: bool = False  # the server does not have the file (any more)
    # Every address refused it, its own with status 403, which may concern the file or the client.
    forbidden: bool = False


class Checksums:
    """Checksums of the files below `folder`, in `checksums.json`; several threads may record files.

        {"downloads/CUB_200_2011.tgz": {"sha256": "...", "size": 1150585339, "stamp": 1763..., "url": "https://..."}, ...}

    `stamp` is the modification time in nanoseconds. A file that still has the recorded size and time is not hashed again.
    """

    def __init__(self, folder: Path):
        self.folder, self.path = folder, folder / "checksums.json"
        self._rows: dict[str, Any] = {}
        if self.path.is_file():
            self._rows = read_json(
                self.path, "checksums", "fix it, or delete it to record the checksums of the present files"
            )

    def name(self, path: Path) -> str:
        """The name of a file in `checksums.json` and in messages."""
        return path.relative_to(self.folder).as_posix()

    def sha256(self, path: Path) -> str:
        """The recorded checksum; "" if there is none."""
        return str(self._rows.get(self.name(path), {}).get("sha256", ""))

    def url(self, path: Path) -> str:
        """The URL that a file came from; "" if it was not downloaded."""
        return str(self._rows.get(self.name(path), {}).get("url", ""))

    def record(self, path: Path, url: str) -> None:
        """Record the checksum of a verified file, unless one is recorded already."""
        if not self.sha256(path):
            status = path.stat()
            row = {"sha256": file_hash(path), "size": status.st_size, "stamp": status.st_mtime_ns}
            self._rows[self.name(path)] = {**row, "url": url} if url else row

    def remove(self, path: Path) -> None:
        """Delete the record of a damaged file, so that another content may replace it."""
        self._rows.pop(self.name(path), None)

    def save(self) -> None:
        """Write the file, if there is anything to write."""
        if self._rows or self.path.is_file():
            write_json(self.path, dict(sorted(self._rows.copy().items())))

    def existing_problem(self, path: Path, verify: Callable[[Path], str]) -> str:
        """What is wrong with an existing file, "" for nothing.

        A recorded file must be unchanged. A file without a record (copied by hand, or the process was killed) is verified.
        """
        row, status = self._rows.get(self.name(path)), path.stat()
        if row is None:
            return verify(path)
        if (row.get("size"), row.get("stamp")) != (status.st_size, status.st_mtime_ns):
            if file_hash(path) != row["sha256"]:
                return f"its content differs from the checksum in {self.path}"
            row.update(size=status.st_size, stamp=status.st_mtime_ns)  # copied or touched
        return ""

    def download_problem(self, file: Path, path: Path, sha256: str = "", md5: str = "") -> str:
        """How a downloaded `file`, which belongs to `path`, differs from the publisher's checksums or the recorded one."""
        if md5:
            with file.open("rb") as content:
                if (found := hashlib.file_digest(content, "md5").hexdigest()) != md5.lower():
                    return f"its MD5 is {found}, but the publisher's is {md5.lower()}"
        first = self.sha256(path)
        found = file_hash(file) if sha256 or first else ""
        if sha256 and found != sha256.lower():
            return f"its SHA-256 is {found}, but the publisher's is {sha256.lower()}"
        if first and found != first:
            name = self.name(path)
            return f"its SHA-256 is {found}, but it was {first} at the first fetch; to accept it, delete {name} from {self.path}"
        return ""


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
