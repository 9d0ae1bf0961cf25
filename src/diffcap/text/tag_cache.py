"""`tags.jsonl`: a cache of part-of-speech (UPOS) tags of sentences, valid for one tagger."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from diffcap.records import write_text
from diffcap.text.stanza_tagger import TaggerModel


class TagCache:
    """UPOS tags of sentences, in memory and in an append-only file.

    The first line of the file identifies the tagger (`{"tagger", "identity"}`). Every other line is `{"sentence", "tags"}`: the
    words joined with spaces, and one tag per word, joined with spaces. If another tagger wrote the file, it is emptied on
    opening. Malformed lines are ignored, and an incomplete last line, left by a killed process, is removed. Only one process at a
    time may use a file.

    Args:
        path: the file, or None to keep the tags in memory only.
        model: the tagger.

    Attributes:
        path: as given.
        tags: sentence -> UPOS tags.
    """

    def __init__(self, path: Path | None, model: TaggerModel) -> None:
        self.path = path
        self.tags: dict[str, list[str]] = {}
        if path is not None:
            self._load_or_reset(path, model)

    def _load_or_reset(self, path: Path, model: TaggerModel) -> None:
        header = {"tagger": model.name, "identity": model.identity}
        rows = _rows(path) if path.is_file() else []
        if not rows or rows[0].get("identity") != model.identity:
            write_text(path, json.dumps(header) + "\n")
            return
        for row in rows[1:]:
            sentence, tags = row.get("sentence"), row.get("tags")
            if isinstance(sentence, str) and isinstance(tags, str) and sentence.count(" ") == tags.count(" "):
                self.tags[sentence] = tags.split(" ")
        complete_bytes = path.read_bytes().rfind(b"\n") + 1
        if complete_bytes < path.stat().st_size:
            os.truncate(path, complete_bytes)

    def add(self, tagged: Iterable[tuple[str, list[str]]]) -> None:
        """Store tagged sentences; one write appends all of them to the file and flushes them to disk (fsync).

        Args:
            tagged: (sentence, one UPOS tag per word).
        """
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
    """The JSON objects of all complete lines."""
    rows = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            row = json.loads(line)
        except ValueError:  # damaged, or not UTF-8
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows
