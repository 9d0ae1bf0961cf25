"""SPICE (Anderson et al., 2016), computed by its Java program. It needs two CoreNLP files, which diffcap does not download."""

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from diffcap.evaluation.java import jar, run_java
from diffcap.utils.errors import DiffcapError

JARS = ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar")
FOLDER_VARIABLE = "DIFFCAP_CORENLP"

# CoreNLP 3.6.0 and its serialisers access internal classes of Java, which is forbidden by default since Java 16.
_OPENED = ("java.lang", "java.util", "java.util.concurrent", "java.text", "java.math", "java.nio", "sun.nio.ch")


def _corenlp_folder() -> Path | None:
    folders = [jar("spice/spice-1.0.jar").parent / "lib"]
    if os.environ.get(FOLDER_VARIABLE):
        folders.insert(0, Path(os.environ[FOLDER_VARIABLE]).absolute())
    return next((folder for folder in folders if all((folder / name).is_file() for name in JARS)), None)


def spice_install_hint() -> str | None:
    """Return how to install the files for SPICE; None if they are installed."""
    if _corenlp_folder() is not None:
        return None
    return (
        f"put {JARS[0]} and {JARS[1]} (from "
        "https://nlp.stanford.edu/software/stanford-corenlp-full-2015-12-09.zip) into a folder "
        f"and set {FOLDER_VARIABLE} to it"
    )


def spice(hypotheses: Mapping[str, str], references: Mapping[str, list[str]]) -> dict[str, float]:
    """Compute SPICE of each pair; the score of a group is the mean of its pairs.

    Returns:
        id -> F score, a fraction; NaN if caption and references contain no tuple.

    Example:
        >>> scores = spice({"1": "the red cube moved"}, {"1": ["the red cube moved"]})  # doctest: +SKIP
        >>> scores  # needs the CoreNLP files # doctest: +SKIP
        {'1': 1.0}
    """
    folder = _corenlp_folder()
    if folder is None:
        raise DiffcapError(f"SPICE is unavailable: {spice_install_hint()}.")
    program = jar("spice/spice-1.0.jar")
    classes = os.pathsep.join(map(str, [program, folder / JARS[0], folder / JARS[1], program.parent / "lib" / "*"]))
    opened = [part for package in _OPENED for part in ("--add-opens", f"java.base/{package}=ALL-UNNAMED")]
    with tempfile.TemporaryDirectory(prefix="diffcap-spice-") as scratch:
        source, target = Path(scratch, "in.json"), Path(scratch, "out.json")
        rows = [{"image_id": id, "test": text, "refs": references[id]} for id, text in hypotheses.items()]
        source.write_text(json.dumps(rows), encoding="utf-8")
        # Without `-cache`: its database has native code for one processor type, and every caption is scored only once.
        run_java(
            "SPICE", "-Xmx8G", *opened, "-cp", classes, "edu.anu.spice.SpiceScorer", source, "-out", target, "-silent"
        )
        if not target.is_file():
            raise DiffcapError(f"SPICE wrote no result; check the jars in {folder}.")
        results = json.loads(target.read_text(encoding="utf-8"))
    scores = {str(row["image_id"]): row["scores"]["All"]["f"] for row in results}
    return {id: math.nan if scores.get(id) is None else float(scores[id]) for id in hypotheses}
