"""Files that are written completely or not at all, and paths as users write them."""

import errno
import functools
import os
import re
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SERVED = "openai:"  # start of the name of a model behind a server, see `served_name`


@contextmanager
def atomic_write(path: str | Path, per_process: bool = True) -> Iterator[Path]:
    """Yield a temporary path in the same folder. The file written there is renamed to `path` when the block ends without error.

    If the process is killed or the disk is full, an earlier file stays unchanged. The folder is created if it does not exist.
    The temporary name has the process ID, because several processes may write the file at the same time. For large files,
    `per_process` is false: killed processes then leave at most one temporary file.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))  # root could replace a device, such as /dev/null
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
    """Add the path of an open file to its errors, so that the message about a full disk names the file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            error.filename = str(path)
        raise


def expand_home(path: str) -> str:
    """Replace `~` at the start of a path by the home folder, because make does not."""
    return path.replace("~", str(Path.home()), 1) if path == "~" or path.startswith("~/") else path


def url_of(path: str | Path) -> str | None:
    """Return the URL that a user gave instead of a path, even if `Path` has removed one of its slashes; None if `path` is no URL."""
    found = re.search(r"(?:^|[/=])((?:https?|ftp|s3|gs):)/+(.+)", str(path))
    return f"{found[1]}//{found[2]}" if found else None


def served_name(source: str | Path) -> str | None:
    """Return "openai:MODEL" for "openai:MODEL@http://HOST/v1", which is a model behind a server; None for any other source."""
    if not isinstance(source, str) or not source.startswith(SERVED):
        return None
    return source.rpartition("@http")[0] or source


def existing_path(path: Path) -> Path:
    """Return a path as it is spelled on the disk. Names of files from macOS may have the same letters in another Unicode normal form."""
    if str(path).isascii() or os.path.exists(path):  # noqa: PTH110 (Path.exists raises an error for a long name)
        return path
    found = Path(path.anchor)
    for name in path.relative_to(found).parts:
        if not os.path.exists(found / name) and os.path.isdir(found):  # noqa: PTH110, PTH112
            name = _names(found, found.stat().st_mtime_ns).get(unicodedata.normalize("NFC", name), name)
        found /= name
    return found


@functools.lru_cache(maxsize=32)
def _names(folder: Path, _changed: int) -> dict[str, str]:
    """Return names in a folder by their Unicode normal form NFC. Results are cached by the folder and `_changed`, its time in ns."""
    return {unicodedata.normalize("NFC", path.name): path.name for path in folder.iterdir()}
