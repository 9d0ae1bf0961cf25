"""What a command says when it fails: one sentence, whatever stopped it."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest
from tests.commands import environment

from diffcap.utils.errors import DiffcapError, plain_errors


@pytest.mark.parametrize(
    ("fault", "output"),
    [
        (KeyboardInterrupt(), "interrupted; run the same command again"),
        (
            OSError(errno.ENOSPC, "", "runs/x/last.ckpt"),
            "no space left on the disk while writing runs/x/last.ckpt; free",
        ),
        (
            DiffcapError("pairs.jsonl, line 3: not JSON; fix that line."),
            "pairs.jsonl, line 3: not JSON; fix that line.",
        ),
        (
            DiffcapError(f"{Path('https://x.org/d.zip')}: no folder."),
            "https://x.org/d.zip: a URL, not a file or folder;",
        ),
        (DiffcapError("a\x1b[2J\nb\x9b\u202e[red]\té.png: no."), "a\\x1b[2J\\nb\\x9b\\u202e[red]\té.png: no."),
        (
            RuntimeError("CUDA out of memory. Tried 2 GiB.\nSee x."),
            "not enough memory (CUDA out of memory. Tried 2 GiB);",
        ),
    ],
)
def test_every_fault_is_one_sentence(fault: BaseException, output: str) -> None:
    with pytest.raises(SystemExit) as stop, plain_errors():
        raise fault
    assert isinstance(stop.value.code, str) and "\n" not in stop.value.code
    assert stop.value.code.startswith(f"error: {output}")


def test_lightnings_silent_exit_on_ctrl_c_is_an_interruption() -> None:
    with pytest.raises(SystemExit, match="interrupted"), plain_errors():
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            sys.exit(1)


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
