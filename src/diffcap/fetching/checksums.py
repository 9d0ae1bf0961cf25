"""`checksums.json`: the SHA-256 of every file when it was first fetched. Later copies must have the same content.

    {"downloads/CUB_200_2011.tgz": {"sha256": "...", "size": 1150585339, "stamp": 1763..., "url": "https://..."}, ...}

`stamp` is the modification time in nanoseconds. A file that still has the recorded size and time is not hashed again.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffcap.records import file_hash, read_json, write_json


class Checksums:
    """Checksums of the files below `folder`; several threads may record files."""

    def __init__(self, folder: Path):
        """Read `checksums.json` if it exists."""
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
