"""Files that are written whole or not at all."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: str | Path, numbered: bool = True) -> Iterator[Path]:
    """Give a name beside a file's place to write to; the file gets its own name once that is done.

    A kill or a full disk leaves the earlier file unchanged. The folder is made if it is not there.

    Args:
        path: of the file. numbered: with the process's number in the other name, for what several processes may write at the
            same time; without, large files that kills have left behind are not more than one.

    Raises:
        OSError: the disk refuses; it names `path`.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))  # a device, which root could replace
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp" if numbered else f".{path.name}.tmp")
    try:
        temporary.touch()  # torch reports a folder without permission as a RuntimeError
        yield temporary
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(temporary), temporary):
            error.filename = str(path)
        raise
