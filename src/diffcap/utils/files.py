"""Files that are written completely or not at all."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: str | Path, per_process: bool = True) -> Iterator[Path]:
    """Give a temporary path in the same folder to write to; the file is renamed to `path` when the block ends without error.

    If the process is killed or the disk is full, an earlier file stays unchanged. The folder is created if it does not exist.

    Args:
        path: the file.
        per_process: put the process ID into the temporary name, for files that several processes may write at the same time.
            Without it, killed processes leave at most one temporary file, which matters for large files.

    Raises:
        OSError: the file cannot be written; the error names `path`.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))  # root could replace a device
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp" if per_process else f".{path.name}.tmp")
    try:
        temporary.touch()  # torch would report a missing permission as a RuntimeError
        yield temporary
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(temporary), temporary):
            error.filename = str(path)
        raise


@contextmanager
def add_filename(path: Path) -> Iterator[None]:
    """Add the path to errors of an open file, for the message about a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            error.filename = str(path)
        raise
