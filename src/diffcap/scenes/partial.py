"""The results of an unfinished run, a JSON Lines file beside the output: a header, then a line for each batch of tiles."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import add_filename

SUFFIX = ".partial.jsonl"


class PartialResults:
    """The batches that are done, and a file to which further ones are appended. Each `append` reaches the file before it returns."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """Read the file, or start it; `header` is what the results depend on (JSON values)."""
        self.path = path
        self.batches: list[Any] = []  # the content of the lines after the header
        path.parent.mkdir(parents=True, exist_ok=True)
        with add_filename(path):
            self._file = path.open("a+b")
            try:
                self._resume(dict(header))
            except BaseException:
                self._file.close()
                raise

    def _resume(self, header: dict[str, Any]) -> None:
        self._file.seek(0)
        complete, newline, _ = self._file.read().rpartition(b"\n")
        self._file.truncate(len(complete) + len(newline))  # the last line may have been cut by a kill or a full disk
        try:
            found, *self.batches = [json.loads(line) for line in complete.splitlines()] or [None]
        except ValueError:
            raise DiffcapError(
                f"{self.path}: a damaged file of an unfinished run; delete it to start from the first tile."
            ) from None
        if found is None:
            self._write(header)
        elif found != header:
            names = [key for key in header if not isinstance(found, dict) or found.get(key) != header[key]]
            raise DiffcapError(
                f"{self.path}: belongs to an unfinished run with another value of {', '.join(names) or 'an option'}; repeat that "
                "command, or delete the file to start from the first tile."
            )

    def append(self, batch: Any) -> None:
        """Add a batch."""
        self._write(batch)
        self.batches.append(batch)

    def _write(self, line: Any) -> None:
        with add_filename(self.path):
            self._file.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with add_filename(self.path):
            self._file.close()
