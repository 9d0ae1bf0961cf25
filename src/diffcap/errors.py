"""One clear sentence for every bad input, and a non-zero exit."""

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class DiffcapError(Exception):
    """Bad input from outside (a file, a key, a checkpoint): the message says what, where, and what to do next."""


@contextmanager
def told_of(where: object, fault: str, remedy: str) -> Iterator[None]:
    """Whatever damaged or foreign content makes a piece of code stumble over, as one sentence around the reason.

    Raises:
        DiffcapError: the code raised anything; its own DiffcapError stays as it is.
    """
    try:
        yield
    except DiffcapError:
        raise
    except Exception as error:  # foreign content may fail in any way at all
        reason = " ".join(str(error).split())[:200].rstrip(". ") or type(error).__name__
        if isinstance(error, KeyError):
            reason += " is missing"
        raise DiffcapError(f"{where}: {fault} ({reason}); {remedy}.") from None


_INTERRUPTED = "error: interrupted; run the same command again, what is done already is kept."


@contextmanager
def plain_errors() -> Iterator[None]:
    """Wrap a command's body: a `DiffcapError`, a file that the system refuses, or Ctrl-C is one line and exit status 1."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except SystemExit as stop:
        if stop.code == 1 and isinstance(stop.__context__, KeyboardInterrupt):  # Lightning's, which says nothing
            sys.exit(_INTERRUPTED)
        raise
    except DiffcapError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = error.filename or "the output folder"
            sys.exit(
                f"error: no space left on the disk while writing {where}; "
                "free some and run the same command again: it goes on where it stopped."
            )
        if error.filename is None:
            raise
        sys.exit(f"error: {error.filename}: {error.strerror}; check the path and its permissions.")
