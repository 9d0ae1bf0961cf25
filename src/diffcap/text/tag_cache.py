"""`tags.jsonl`: a cache of tagged sentences, valid for one tagger."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from diffcap.records import write_text
from diffcap.text.stanza_tagger import TaggerModel


class TagCache:
    """Tags of sentences, in memory and in an append-only file.

    The first line identifies the tagger (`{"tagger", "identity"}`); the file of another tagger is overwritten. Every other
    line is `{"sentence", "tags"}`, words and tags joined with spaces. An incomplete last line, left by a killed process, is
    removed.

    Args:
        path: of the file; None: the tags are only kept in memory.
        model: the tagger.

    Attributes:
        path: as given. tags: sentence -> UPOS tags.
    """

    def __init__(self, path: Path | None, model: TaggerModel) -> None:
        self.path = path
        self.tags: dict[str, list[str]] = {}
        if path is not None:
            self._open(path, model)

    def _open(self, path: Path, model: TaggerModel) -> None:
        header = {"tagger": model.name, "identity": model.identity}
        rows = _rows(path) if path.is_file() else []
        if not rows or rows[0].get("identity") != model.identity:
            write_text(path, json.dumps(header) + "\n")
            return
        for row in rows[1:]:
            sentence, tags = row.get("sentence"), row.get("tags")
            if isinstance(sentence, str) and isinstance(tags, str) and sentence.count(" ") == tags.count(" "):
                self.tags[sentence] = tags.split(" ")
        complete = path.read_bytes().rfind(b"\n") + 1
        if complete < path.stat().st_size:
            os.truncate(path, complete)

    def add(self, tagged: Iterable[tuple[str, list[str]]]) -> None:
        """Add (sentence, tags); the file is written once and synchronised."""
        lines = []
        for sentence, tags in tagged:
            self.tags[sentence] = tags
            lines.append(json.dumps({"sentence": sentence, "tags": " ".join(tags)}, ensure_ascii=False) + "\n")
        if self.path is not None:
            with self.path.open("ab") as file:
                file.write("".join(lines).encode())
                file.flush()
                os.fsync(file.fileno())


def _rows(path: Path) -> list[dict[str, object]]:
    rows = []
    for line in path.read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
        except ValueError:  # incomplete, or not UTF-8
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows
