"""METEOR 1.5 (Denkowski and Lavie, 2014), computed by its Java program.

The program takes seconds to start, since it reads a table of paraphrases: `running_meteor` starts it once for many calls.
"""

import contextlib
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any, NamedTuple

import numpy as np

from diffcap.evaluation.java import jar, java_command, java_failure
from diffcap.utils.errors import DiffcapError

Array = np.ndarray[Any, np.dtype[Any]]

# Maximum of words of a caption times words of its longest reference; METEOR's time and memory grow with this product.
MAX_WORD_PAIRS = 1_000_000
# Indices in METEOR's 23 counts of a pair: words of the hypothesis and of the reference, chunks, matched words of both.
_WORDS, _REFERENCE_WORDS, _CHUNKS, _MATCHED, _REFERENCE_MATCHED = 0, 1, 20, 21, 22


def _send(stream: IO[bytes], lines: Iterable[str]) -> None:
    with contextlib.suppress(BrokenPipeError):  # if the program has died, reading its answer raises the error
        for line in lines:
            stream.write(line.encode() + b"\n")
        stream.flush()


class Meteor(NamedTuple):
    """A running METEOR program, which answers each line of input.

    Attributes:
        stderr: file with the program's error messages. known: request -> counts, of the requests answered so far.
    """

    process: "subprocess.Popen[bytes]"
    stderr: IO[bytes]
    known: dict[str, str]

    def read(self) -> str:
        """Return the next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode().strip()
        if not line:
            self.process.wait()
            self.stderr.seek(0)
            raise java_failure("METEOR", self.stderr.read().decode(errors="replace"))
        return line

    def counts(self, hypotheses: Mapping[str, str], references: Mapping[str, list[str]]) -> dict[str, str]:
        """Return each pair's counts of matches, in the program's format; equal pairs are sent once."""
        for id, hypothesis in hypotheses.items():
            words, longest = len(hypothesis.split()), max(len(text.split()) for text in references[id])
            if words * longest > MAX_WORD_PAIRS:
                raise DiffcapError(
                    f"METEOR cannot score the pair {id!r}, whose caption has {words:,} words and whose longest reference has "
                    f"{longest:,}: the product may be {MAX_WORD_PAIRS:,}; shorten them, or leave METEOR out of the metrics."
                )

        def clean(text: str) -> str:
            return text.replace("|||", "").replace("  ", " ")  # METEOR's separator

        requests = {
            id: " ||| ".join(["SCORE", *map(clean, references[id]), clean(hypothesis)])
            for id, hypothesis in hypotheses.items()
        }
        new = [request for request in dict.fromkeys(requests.values()) if request not in self.known]
        # A thread writes while this one reads; otherwise both processes could wait for full pipes.
        writer = threading.Thread(target=_send, args=(self.process.stdin, new), daemon=True)
        writer.start()
        for request in new:
            self.known[request] = self.read()
        writer.join()
        return {id: self.known[request] for id, request in requests.items()}

    def scores(self, counts: list[str]) -> tuple[list[float], float]:
        """Return the score of each of some counts, and the score of their sum."""
        assert self.process.stdin is not None
        _send(self.process.stdin, [" ||| ".join(["EVAL", *counts])])
        return [float(self.read()) for _ in counts], float(self.read())


@contextlib.contextmanager
def running_meteor() -> Iterator[Meteor]:
    """Start METEOR and stop it on exit.

    Raises:
        DiffcapError: there is no Java.
    """
    arguments = ["-Xmx2G", "-jar", str(jar("meteor/meteor-1.5.jar")), "-", "-", "-stdio", "-l", "en", "-norm"]
    with tempfile.TemporaryDirectory(prefix="diffcap-java-") as folder, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            java_command(*arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, cwd=folder
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            yield Meteor(process, stderr, {})
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


def meteor(
    hypotheses: Mapping[str, str], references: Mapping[str, list[str]], groups: Mapping[str, list[str]]
) -> dict[str, float]:
    """Compute the corpus score of each group of pairs.

    METEOR's corpus score is not a mean over pairs; it is computed from the sums of counts of matches. The counts of each pair are
    computed once for all groups.

    Args:
        hypotheses: id -> tokens joined by spaces.
        references: id -> at least one such string.
        groups: name -> ids, not empty.

    Returns:
        name -> score, a fraction.

    Raises:
        DiffcapError: there is no Java, the program failed, or a caption and its reference are too long, see `MAX_WORD_PAIRS`.

    Example:
        >>> hypotheses = {"1": "the cube moved", "2": "nothing changed"}
        >>> references = {"1": ["the red cube moved"], "2": ["nothing changed", "no change"]}
        >>> meteor(hypotheses, references, {"total": ["1", "2"]})  # needs Java # doctest: +SKIP
        {'total': 0.41839774805565205}
    """
    with running_meteor() as running:
        counts = running.counts(hypotheses, references)
        return {name: running.scores([counts[id] for id in ids])[1] for name, ids in groups.items()}


def meteor_counts(hypotheses: Mapping[str, str], references: Mapping[str, list[str]], running: Meteor) -> Array:
    """Return each pair's counts, (N, 23) in the order of `hypotheses`; `meteor_of_sums` of their sum is the corpus score.

    Arguments and errors as for `meteor`. When METEOR adds up counts, a hypothesis that matches its reference completely adds no
    chunk, so its number of chunks is 0 here.

    Example:
        >>> with running_meteor() as running:  # needs Java # doctest: +SKIP
        ...     counts = meteor_counts({"1": "the cube moved"}, {"1": ["the red cube moved"]}, running)
        ...     meteor_of_sums(counts.sum(0, keepdims=True), running)
        array([0.32744992])
    """
    counts = running.counts(hypotheses, references)
    rows = np.array([[float(number) for number in line.split()] for line in counts.values()])
    complete = (rows[:, _MATCHED] == rows[:, _WORDS]) & (rows[:, _REFERENCE_MATCHED] == rows[:, _REFERENCE_WORDS])
    rows[complete & (rows[:, _CHUNKS] == 1), _CHUNKS] = 0
    return rows


def meteor_of_sums(sums: Array, running: Meteor) -> Array:
    """Return the corpus score of each of several sums of `meteor_counts`: (S, 23) to (S,) fractions."""
    return np.array(running.scores([" ".join(map(repr, row)) for row in sums.tolist()])[0])
