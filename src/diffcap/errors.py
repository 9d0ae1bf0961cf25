"""One clear sentence for every bad input, and a non-zero exit."""

import errno
import io
import os
import re
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_BROKEN_PIPE = 128 + 13  # what shells give for a command that SIGPIPE has ended
_INTERRUPTED = "error: interrupted; run the same command again, what is done already is kept."
# Characters that a terminal interprets: control characters except the tab, and those that change the text's direction.
CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class DiffcapError(Exception):
    """Bad input from outside (a file, a key, a checkpoint): the message says what, where, and what to do next."""


def printable(text: object) -> str:
    """Text from a file or a name as one line for a terminal: control characters are escaped as in Python's string literals."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


@contextmanager
def wrap_errors(where: object, fault: str, remedy: str) -> Iterator[None]:
    """Turn any error from damaged or foreign content into one sentence that contains the reason.

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


@contextmanager
def plain_errors() -> Iterator[None]:
    """Wrap a command's body: a `DiffcapError`, a refused file, too little memory, or Ctrl-C is one line and exit status 1.

    Where nobody reads its output any more (`| head`), it ends without a word. Letters that the output does not have, as in a
    file name that is not UTF-8, are escaped.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
        sys.stdout.flush()  # here, and not as Python ends, which would complain
    except BrokenPipeError:
        if not _unread():
            raise
        sys.exit(_BROKEN_PIPE)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except SystemExit as stop:
        if stop.code == 1 and isinstance(stop.__context__, KeyboardInterrupt):  # Lightning's, which says nothing
            sys.exit(_INTERRUPTED)
        raise
    except DiffcapError as error:
        # From a data loading worker, torch raises it again with the worker's whole traceback as its message.
        sentence = str(error).rpartition(f"{DiffcapError.__name__}: ")[2].rstrip()
        sys.exit(f"error: {printable(sentence)}")
    except (MemoryError, RuntimeError) as error:  # torch's are RuntimeErrors
        if not isinstance(error, MemoryError) and not re.search("out of memory|can't allocate memory", str(error)):
            raise
        reason = str(error).partition("\n")[0][:120].rstrip(". ") or "MemoryError"
        sys.exit(f"error: not enough memory ({printable(reason)}); use a smaller batch, fewer beams or fewer draws.")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = error.filename or "the output folder"
            sys.exit(
                f"error: no space left on the disk while writing {printable(where)}; "
                "free some and run the same command again: it goes on where it stopped."
            )
        if error.filename is None:
            raise
        sys.exit(f"error: {printable(error.filename)}: {error.strerror}; check the path and its permissions.")


def _unread() -> bool:
    """Whether stdout or stderr has no reader any more; what is still to be written there goes nowhere."""
    gone = [stream for stream in (sys.stdout, sys.stderr) if _has_lost_its_reader(stream)]
    for stream in gone:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    return bool(gone)


def _has_lost_its_reader(stream: TextIO) -> bool:
    try:
        number = stream.fileno()
    except OSError:  # no file of the system's
        return False
    poll = select.poll()
    poll.register(number, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
