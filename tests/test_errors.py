"""What a command says when it fails: one sentence, whatever stopped it."""

import errno
import sys
from collections.abc import Callable

import pytest

from diffcap.errors import DiffcapError, plain_errors


def interrupted() -> None:
    raise KeyboardInterrupt


def interrupted_in_lightning() -> None:
    """Lightning's trainer turns Ctrl-C into a silent exit."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        sys.exit(1)


def full_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "runs/x/last.ckpt")


def forbidden() -> None:
    raise PermissionError(errno.EACCES, "Permission denied", "data/x")


def bad_input() -> None:
    raise DiffcapError("pairs.jsonl, line 3: not JSON; mend that line.")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (interrupted, "error: interrupted; run the same command again"),
        (interrupted_in_lightning, "error: interrupted; run the same command again"),
        (full_disk, "error: no space left on the disk while writing runs/x/last.ckpt; free some"),
        (forbidden, "error: data/x: Permission denied; check the path"),
        (bad_input, "error: pairs.jsonl, line 3: not JSON; mend that line."),
    ],
)
def test_every_fault_is_one_sentence(fault: Callable[[], None], said: str) -> None:
    with pytest.raises(SystemExit) as stop, plain_errors():
        fault()
    assert isinstance(stop.value.code, str) and stop.value.code.startswith(said) and "\n" not in stop.value.code


def test_other_ends_pass() -> None:
    for code in (0, 1, 2, "error: said already"):
        with pytest.raises(SystemExit) as stop, plain_errors():
            sys.exit(code)
        assert stop.value.code == code
    with pytest.raises(ZeroDivisionError), plain_errors():
        print(1 / 0)
