"""METEOR 1.5 (Denkowski and Lavie, 2014), computed by its Java program.

The program takes seconds to start, since it reads a table of paraphrases: `running_meteor` starts it once for many calls.
"""

import contextlib
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

import numpy as np

from diffcap.evaluation.java import jar, java_call, java_failure
from diffcap.utils.errors import DiffcapError

Array = np.ndarray[Any, np.dtype[Any]]

# Maximum of words of a caption times words of its longest reference; METEOR's time and memory grow with this product.
MAX_WORD_PAIRS = 1_000_000
# Columns of METEOR's 23 counts of a pair: words of the hypothesis and of the reference, chunks, matched words of both.
_WORDS, _REFERENCE_WORDS, _CHUNKS, _MATCHED, _REFERENCE_MATCHED = 0, 1, 20, 21, 22


def _send(stream: IO[bytes], lines: Iterable[str]) -> None:
    with contextlib.suppress(BrokenPipeError):  # if the program has ended, `MeteorProcess.read` raises the error
        for line in lines:
            stream.write(line.encode() + b"\n")
        stream.flush()


class MeteorProcess(NamedTuple):
    """A running METEOR program, which reads requests and writes answers, one per line.

    Example:
        >>> with running_meteor() as process:  # needs Java # doctest: +SKIP
        ...     counts = process.counts({"1": "the cube moved"}, {"1": ["the red cube moved"]})
        ...     process.scores([counts["1"]])  # of each pair, and of the corpus
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

    def counts(self, hypotheses: Mapping[str, str], references: Mapping[str, list[str]]) -> dict[str, str]:
        """Return each pair's counts, 23 numbers separated by spaces, by id. Pairs with the same texts are computed once."""
        for id, hypothesis in hypotheses.items():
            words, longest = len(hypothesis.split()), max(len(text.split()) for text in references[id])
            if words * longest > MAX_WORD_PAIRS:
                raise DiffcapError(
                    f"METEOR cannot score the pair {id!r}, whose caption has {words:,} words and whose longest reference has "
                    f"{longest:,}: their product may be at most {MAX_WORD_PAIRS:,}; shorten them, or leave METEOR out of the metrics."
                )

        def clean(text: str) -> str:
            return text.replace("|||", "").replace("  ", " ")  # "|||" separates the texts of a request

        requests = {
            id: " ||| ".join(["SCORE", *map(clean, references[id]), clean(hypothesis)])
            for id, hypothesis in hypotheses.items()
        }
        new = [request for request in dict.fromkeys(requests.values()) if request not in self.cache]
        # Written by another thread: if both pipes were full, both processes would wait forever.
        writer = threading.Thread(target=_send, args=(self.process.stdin, new), daemon=True)
        writer.start()
        for request in new:
            self.cache[request] = self.read()
        writer.join()
        return {id: self.cache[request] for id, request in requests.items()}

    def scores(self, counts: list[str]) -> tuple[list[float], float]:
        """Return the score of each item of `counts`, and the corpus score, which is that of their sum; fractions."""
        assert self.process.stdin is not None
        _send(self.process.stdin, [" ||| ".join(["EVAL", *counts])])
        return [float(self.read()) for _ in counts], float(self.read())


@contextlib.contextmanager
def running_meteor() -> Iterator[MeteorProcess]:
    """Start METEOR for the block of a `with` statement, and stop it at the end."""
    program, paraphrases = jar("meteor/meteor-1.5.jar"), jar("meteor/data/paraphrase-en.gz")
    # With `-a`: where its path has a blank or an umlaut, the program does not find its own table of paraphrases.
    call = java_call("-Xmx2G", "-jar", program, "-", "-", "-stdio", "-l", "en", "-norm", "-a", paraphrases)
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


def meteor(
    hypotheses: Mapping[str, str], references: Mapping[str, list[str]], groups: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """Compute the corpus score of each group of pairs.

    METEOR's corpus score is not a mean over pairs; it is computed from the sums of counts of matches. The counts of each pair are
    computed once for all groups.

    Returns:
        group -> corpus score, a fraction.

    Example:
        >>> hypotheses = {"1": "the cube moved", "2": "nothing changed"}
        >>> references = {"1": ["the red cube moved"], "2": ["nothing changed", "no change"]}
        >>> meteor(hypotheses, references, {"total": ["1", "2"]})  # needs Java # doctest: +SKIP
        {'total': 0.41839774805565205}
    """
    with running_meteor() as process:
        counts = process.counts(hypotheses, references)
        return {name: process.scores([counts[id] for id in ids])[1] for name, ids in groups.items()}


def meteor_counts(hypotheses: Mapping[str, str], references: Mapping[str, list[str]], process: MeteorProcess) -> Array:
    """Return each pair's counts, (N, 23) in the order of `hypotheses`; `meteor_of_sums` of their sum is the corpus score.

    If a hypothesis matches its reference completely in one chunk, METEOR does not add this chunk to the sum of a corpus; the number
    of chunks of such a pair is therefore 0 here.

    Example:
        >>> with running_meteor() as process:  # needs Java # doctest: +SKIP
        ...     counts = meteor_counts({"1": "the cube moved"}, {"1": ["the red cube moved"]}, process)
        ...     meteor_of_sums(counts.sum(0, keepdims=True), process)
        array([0.32744992])
    """
    counts = process.counts(hypotheses, references)
    rows = np.array([[float(number) for number in line.split()] for line in counts.values()])
    complete = (rows[:, _MATCHED] == rows[:, _WORDS]) & (rows[:, _REFERENCE_MATCHED] == rows[:, _REFERENCE_WORDS])
    rows[complete & (rows[:, _CHUNKS] == 1), _CHUNKS] = 0
    return rows


def meteor_of_sums(sums: Array, process: MeteorProcess) -> Array:
    """Compute corpus scores (S,), fractions, from sums (S, 23) of rows of `meteor_counts`."""
    return np.array(process.scores([" ".join(map(repr, row)) for row in sums.tolist()])[0])
