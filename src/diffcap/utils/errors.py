"""End a command with one clear sentence and a non-zero exit status if its input is bad."""

import errno
import io
import os
import re
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from diffcap.utils.files import url_of

_INTERRUPTED_MESSAGE = "error: interrupted; run the same command again, what it has written to files is kept."
# Names of the errors of torch.distributed. Its library gloo raises RuntimeErrors, whose text contains /gloo/.
_DISTRIBUTED_ERRORS = ("DistBackendError", "DistNetworkError", "DistStoreError")
# Characters that a terminal interprets: control characters except the tab, and those that change the text's direction.
CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class DiffcapError(Exception):
    """Bad input from outside (a file, a key, a checkpoint): the message says where it is, what is wrong, and what to do next."""


def printable(text: object) -> str:
    """Return text from a file or a name as one line for a terminal. Control characters are escaped as in Python's string literals."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


def one_line(error: BaseException, limit: int = 200) -> str:
    """Return the text of an error as one line of at most `limit` characters, without a full stop; its class if it has no text."""
    return " ".join(str(error).split())[:limit].rstrip(". ") or type(error).__name__


def lost_process(reason: str) -> str:
    """Return the message of a process that cannot reach another process of a distributed run."""
    return (
        f"error: another process of this run has ended or cannot be reached ({printable(reason)}); correct the error that it "
        "printed, if there is one, and run the same command again to resume."
    )


@contextmanager
def wrap_errors(where: object, fault: str, remedy: str) -> Iterator[None]:
    """Turn any error except a full disk into a `DiffcapError` with the message `<where>: <fault> (<reason>); <remedy>.`"""
    try:
        yield
    except Exception as error:  # foreign content may raise any error
        if isinstance(error, DiffcapError) or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise
        reason = one_line(error)
        if isinstance(error, KeyError):
            reason += " is missing"
        raise DiffcapError(f"{where}: {fault} ({reason}); {remedy}.") from None


@contextmanager
def plain_errors() -> Iterator[None]:
    """Wrap a command. On an error that a user can correct, too little memory, a lost process or Ctrl-C, print one line and exit with 1.

    If the program that reads the output has ended (`| head`), the command ends silently. Letters that stdout cannot encode, as in
    a file name that is not UTF-8, are escaped.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
        sys.stdout.flush()  # if this failed at Python's exit, Python would print a traceback
    except BrokenPipeError:
        poll = select.poll()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # not a file of the operating system
                poll.register(stream.fileno(), 0)
        closed = [number for number, event in poll.poll(0) if event & (select.POLLERR | select.POLLHUP)]
        if not closed:
            raise
        for number in closed:  # the stream has lost its reader
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        sys.exit(128 + 13)  # the status that shells give a command ended by SIGPIPE
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED_MESSAGE)
    except SystemExit as stop:
        if stop.code == 1 and isinstance(stop.__context__, KeyboardInterrupt):  # Lightning's exit on Ctrl-C
            sys.exit(_INTERRUPTED_MESSAGE)
        raise
    except DiffcapError as error:
        # torch raises an error of a data loading worker again, with the worker's traceback as its message.
        sentence = str(error).rpartition(f"{DiffcapError.__name__}: ")[2].rstrip()
        where = sentence.partition(": ")[0]
        if (url := url_of(where)) and url not in where:  # `Path` has removed a slash of the URL
            sentence = f"{url}: a URL, not a file or folder; download it and give its path."
        sys.exit(f"error: {printable(sentence)}")
    except (MemoryError, RuntimeError) as error:  # torch raises RuntimeErrors for too little memory
        if type(error).__name__ in _DISTRIBUTED_ERRORS or "/gloo/" in str(error):
            if port := re.search(r"failed to listen.*?port: (\d+)", str(error), re.DOTALL):
                sys.exit(
                    f"error: port {port[1]} of this machine is in use; set MASTER_PORT to another port, or end the process that uses it."
                )
            reason = re.sub(r"^\[\S+\] ", "", str(error).partition("\n")[0])  # without the place in gloo's source
            sys.exit(lost_process(reason.partition(". ")[0][:200]))
        if not isinstance(error, MemoryError) and not re.search("out of memory|can't allocate memory", str(error)):
            raise
        reason = str(error).partition("\n")[0][:120].rstrip(". ") or "MemoryError"
        sys.exit(
            f"error: not enough memory ({printable(reason)}); use a smaller batch, fewer beams or fewer sampled captions."
        )
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
