"""What a command says when it fails: one sentence, whatever stopped it."""

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.commands import environment

from diffcap.utils.errors import DiffcapError, plain_errors


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


def bad_input() -> None:
    raise DiffcapError("pairs.jsonl, line 3: not JSON; fix that line.")


def url() -> None:
    raise DiffcapError(f"{Path('https://x.org/d.zip')}: no such folder; give another one.")


def hostile_name() -> None:
    raise DiffcapError("a\x1b[2J\nb\x9b\u202e[red]\té.png: no image there.")


def too_many_beams() -> None:
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation.")


@pytest.mark.parametrize(
    ("fault", "output"),
    [
        (interrupted, "error: interrupted; run the same command again"),
        (interrupted_in_lightning, "error: interrupted; run the same command again"),
        (full_disk, "error: no space left on the disk while writing runs/x/last.ckpt; free some"),
        (bad_input, "error: pairs.jsonl, line 3: not JSON; fix that line."),
        (url, "error: https://x.org/d.zip: a URL, not a file or folder; download it"),
        (hostile_name, "error: a\\x1b[2J\\nb\\x9b\\u202e[red]\té.png: no image there."),
        (
            too_many_beams,
            "error: not enough memory (CUDA out of memory. Tried to allocate 2.00 GiB); use a smaller batch",
        ),
    ],
)
def test_every_fault_is_one_sentence(fault: Callable[[], None], output: str) -> None:
    with pytest.raises(SystemExit) as stop, plain_errors():
        fault()
    assert isinstance(stop.value.code, str) and stop.value.code.startswith(output) and "\n" not in stop.value.code


def test_other_ends_pass() -> None:
    for code in (0, 1, 2, "error: said already"):
        with pytest.raises(SystemExit) as stop, plain_errors():
            sys.exit(code)
        assert stop.value.code == code
    for error in (ZeroDivisionError, RuntimeError):
        with pytest.raises(error), plain_errors():
            raise error


@pytest.mark.parametrize(
    "body",
    ["for _ in iter(int, 1): print('a line', flush=True)", "print('a line', flush=True); input(); print('another')"],
)
def test_where_nobody_reads_any_more_it_ends_without_a_word(body: str) -> None:
    code = f"from diffcap.utils.errors import plain_errors\nwith plain_errors(): \n    {body}"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, env=environment(), **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "a line\n"
        process.stdout.close()
        process.stdin.write("\n")
        process.stdin.close()
        assert process.stderr.read() == "" and process.wait(60) == 128 + 13


def test_a_pipe_of_its_own_that_breaks_is_a_fault() -> None:
    with pytest.raises(BrokenPipeError), plain_errors():
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")
