"""METEOR 1.5 (Denkowski and Lavie, 2014) over one run of its jar, whatever the number of groups."""

import contextlib
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Mapping
from typing import IO

from diffcap.evaluation.java import jar, java_command, java_failure


def _send(stream: IO[bytes], lines: Iterable[str]) -> None:
    with contextlib.suppress(BrokenPipeError):  # when the jar has died, the reader finds out and says so
        for line in lines:
            stream.write(line.encode() + b"\n")
        stream.flush()


def meteor(
    hypotheses: Mapping[str, str], references: Mapping[str, list[str]], groups: Mapping[str, list[str]]
) -> dict[str, float]:
    """The corpus score of each group of pairs.

    METEOR's corpus score is no mean over pairs: it comes from the summed counts of matches. Each pair's counts are made
    once, and the jar then combines them group by group.

    Args:
        hypotheses: id -> tokens joined by blanks.
        references: id -> at least one such string.
        groups: name -> ids, each group non-empty.

    Returns:
        name -> score, a fraction.

    Raises:
        DiffcapError: no Java, or the jar failed.
    """

    def clean(text: str) -> str:
        return text.replace("|||", "").replace("  ", " ")  # the jar's own separator

    requests = {
        id: " ||| ".join(["SCORE", *map(clean, references[id]), clean(hypothesis)])
        for id, hypothesis in hypotheses.items()
    }
    distinct = list(dict.fromkeys(requests.values()))
    arguments = ["-Xmx2G", "-jar", str(jar("meteor/meteor-1.5.jar")), "-", "-", "-stdio", "-l", "en", "-norm"]
    with tempfile.TemporaryDirectory(prefix="diffcap-java-") as folder, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            java_command(*arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, cwd=folder
        )
        assert process.stdin is not None and process.stdout is not None
        answers = process.stdout

        def read() -> str:
            line = answers.readline().decode().strip()
            if not line:
                process.wait()
                stderr.seek(0)
                raise java_failure("METEOR", stderr.read().decode(errors="replace"))
            return line

        try:
            # Written beside the reading, or both sides would wait on full pipes.
            writer = threading.Thread(target=_send, args=(process.stdin, distinct), daemon=True)
            writer.start()
            counts = {request: read() for request in distinct}
            writer.join()
            scores = {}
            for name, ids in groups.items():
                _send(process.stdin, [" ||| ".join(["EVAL", *(counts[requests[id]] for id in ids)])])
                for _ in ids:
                    read()  # a score a pair comes before the corpus score
                scores[name] = float(read())
            return scores
        finally:
            process.kill()
            process.wait()
            answers.close()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
