"""`tags.jsonl`: the tags of sentences, kept from run to run, tied to the tagger that gave them."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from diffcap.records import write_text
from diffcap.text.stanza_tagger import TaggerModel


class TagCache:
    """Tags by sentence, in memory and in a file that is only ever appended to.

    The first line names the tagger (`{"tagger", "identity"}`); a file of another tagger is started afresh. Every other
    line is `{"sentence", "tags"}`, words and tags joined with blanks. A last line that a killed run left torn is cut off.

    Args:
        path: the file, None to keep nothing.
        model: the tagger whose tags these are.
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
        whole = path.read_bytes().rfind(b"\n") + 1
        if whole < path.stat().st_size:
            os.truncate(path, whole)

    def add(self, found: Iterable[tuple[str, list[str]]]) -> None:
        """Remember new tags; the file gets them in one write."""
        lines = []
        for sentence, tags in found:
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
        except ValueError:  # torn, or not UTF-8
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows
