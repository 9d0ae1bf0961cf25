"""SPICE (Anderson et al., 2016), where the two CoreNLP jars that it needs are there; diffcap never downloads them."""

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from diffcap.errors import DiffcapError
from diffcap.evaluation.java import jar, run_java

JARS = ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar")
FOLDER_VARIABLE = "DIFFCAP_CORENLP"

# CoreNLP 3.6.0 and the serialisers beside it reach into the runtime's own classes, closed since Java 16.
_OPENED = ("java.lang", "java.util", "java.util.concurrent", "java.text", "java.math", "java.nio", "sun.nio.ch")


def _corenlp_folder() -> Path | None:
    places = [jar("spice/spice-1.0.jar").parent / "lib"]
    if os.environ.get(FOLDER_VARIABLE):
        places.insert(0, Path(os.environ[FOLDER_VARIABLE]).absolute())
    return next((place for place in places if all((place / name).is_file() for name in JARS)), None)


def spice_remedy() -> str | None:
    """What to do to get SPICE, in one sentence; None when it is ready."""
    if _corenlp_folder() is not None:
        return None
    return (
        f"put {JARS[0]} and {JARS[1]} (from "
        "https://nlp.stanford.edu/software/stanford-corenlp-full-2015-12-09.zip) into a folder "
        f"and set {FOLDER_VARIABLE} to it"
    )


def spice(hypotheses: Mapping[str, str], references: Mapping[str, list[str]]) -> dict[str, float]:
    """Each pair's SPICE; a group's score is the mean over its pairs.

    Args:
        hypotheses: id -> tokens joined by blanks.
        references: id -> at least one such string.

    Returns:
        id -> F score, a fraction; NaN where the caption and its references hold no tuple.

    Raises:
        DiffcapError: the jars are missing (with the way to get them), or they failed.
    """
    folder = _corenlp_folder()
    if folder is None:
        raise DiffcapError(f"SPICE is unavailable: {spice_remedy()}.")
    own = jar("spice/spice-1.0.jar")
    classes = os.pathsep.join(map(str, [own, folder / JARS[0], folder / JARS[1], own.parent / "lib" / "*"]))
    opened = [part for package in _OPENED for part in ("--add-opens", f"java.base/{package}=ALL-UNNAMED")]
    with tempfile.TemporaryDirectory(prefix="diffcap-spice-") as scratch:
        asked, answered = Path(scratch, "in.json"), Path(scratch, "out.json")
        rows = [{"image_id": id, "test": text, "refs": references[id]} for id, text in hypotheses.items()]
        asked.write_text(json.dumps(rows), encoding="utf-8")
        # No `-cache`: its database is native code for one machine type, and one run scores each caption once.
        run_java(
            "SPICE", "-Xmx8G", *opened, "-cp", classes, "edu.anu.spice.SpiceScorer", asked, "-out", answered, "-silent"
        )
        if not answered.is_file():
            raise DiffcapError(f"SPICE wrote no result; check the jars in {folder}.")
        results = json.loads(answered.read_text(encoding="utf-8"))
    scores = {str(row["image_id"]): row["scores"]["All"]["f"] for row in results}
    return {id: math.nan if scores.get(id) is None else float(scores[id]) for id in hypotheses}
