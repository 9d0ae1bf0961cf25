"""`checksums.json`: the SHA-256 of every file at its first fetch, which it must have ever after.

    {"CUB_200_2011.tgz": {"sha256": "...", "size": 1150585339, "stamp": 1763..., "url": "https://..."}, ...}

A file whose size and time of change are as noted is not read again.
"""

import threading
import time
from pathlib import Path
from typing import Any

from diffcap.errors import DiffcapError
from diffcap.records import file_hash, read_json, write_json

_PAUSE = 1.0  # seconds between two writes: thousands of photos share one file


class Ledger:
    """The checksums of one dataset; safe to use from several threads."""

    def __init__(self, path: Path):
        """Read the file at `path`, where there is one.

        Raises:
            DiffcapError: it is not what this class writes.
        """
        self.path, self._lock, self._written = path, threading.Lock(), time.monotonic()
        self._rows: dict[str, Any] = {}
        if path.is_file():
            remedy = "fix it, or delete it to note the checksums of the files as they are now"
            self._rows = read_json(path, "checksums", remedy)
            if not isinstance(self._rows, dict) or not all(
                isinstance(row, dict) and isinstance(row.get("sha256"), str) for row in self._rows.values()
            ):
                raise DiffcapError(f"{path}: not a list of checksums by file; {remedy}.")

    def sha256(self, name: str) -> str:
        """The checksum noted for `name`, "" where there is none."""
        return self._rows.get(name, {}).get("sha256", "")

    def url(self, name: str) -> str:
        """Where the file `name` came from, "" where that is not noted."""
        return str(self._rows.get(name, {}).get("url", ""))

    def changed(self, name: str, file: Path) -> bool | None:
        """Whether `file` differs from what was noted for `name`; None where nothing was noted."""
        row = self._rows.get(name)
        if row is None:
            return None
        status = file.stat()
        if (row.get("size"), row.get("stamp")) == (status.st_size, status.st_mtime_ns):
            return False
        if file_hash(file) != row["sha256"]:
            return True
        self.note(name, file, row["sha256"], row.get("url", ""))  # copied or touched
        return False

    def note(self, name: str, file: Path, sha256: str, url: str) -> None:
        """Note the checksum of a whole file; written to the disk at once, or within a second of the last time."""
        status = file.stat()
        with self._lock:
            self._rows[name] = {
                "sha256": sha256,
                "size": status.st_size,
                "stamp": status.st_mtime_ns,
                **({"url": url} if url else {}),
            }
            if time.monotonic() - self._written >= _PAUSE:
                self._write()

    def forget(self, name: str) -> None:
        """Take out what was noted of a file that turned out damaged; another one may come in its place."""
        with self._lock:
            self._rows.pop(name, None)

    def flush(self) -> None:
        """Write what was noted."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        rows = dict(sorted(self._rows.items()))
        if rows != (read_json(self.path) if self.path.is_file() else {}):
            write_json(self.path, rows)
        self._written = time.monotonic()
