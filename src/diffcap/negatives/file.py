"""`negatives.jsonl`, the hard negatives of every training caption, and `negatives.md`, a report to read before training on them."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from diffcap.records import file_hash, read_json, read_json_lines, write_text
from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import atomic_write

NEGATIVES_FILE = "negatives.jsonl"
METADATA_FILE = "negatives.json"  # the settings that the negatives were built with, and the SHA-256 of NEGATIVES_FILE
KINDS = (
    "retrieve",  # the caption of another pair with similar words
    "replace",  # some words of the caption replaced by others of the same part of speech
    "confuse",  # the same words in another order: words of the same part of speech change places
)
# The strategies that the paper describes; the others are fallbacks. The names are those of `Builder.used`.
_PAPER_STRATEGIES = {
    "retrieve": ("alike",),
    "replace": ("words replaced",),
    "confuse": ("swap_animals", "swap_animals_once", "swap_noun_phrases", "reverse_change"),
}
_HOW_TO_BUILD = "build it with `make negatives DATASET=<name>`"


@dataclass(frozen=True)
class Negative:
    """A caption that is wrong for its pair."""

    kind: str  # how it was requested, one of `KINDS`. If that way gave no caption, another way built the text.
    text: str  # tokens of `text.tokens`, joined with spaces


@dataclass(frozen=True)
class CaptionNegatives:
    """A training caption and its negatives."""

    id: str  # the pair's id in manifest.jsonl; a pair with several captions has several entries
    caption: str  # as written in manifest.jsonl, not tokenised
    negatives: list[Negative]  # in the order of `KINDS`; all captions of a file have the same number


def write_negatives(
    path: str | Path, rows: Iterable[CaptionNegatives], before_rename: Callable[[], None] = lambda: None
) -> None:
    """Write the rows to a temporary file, call `before_rename`, then rename the file.

    The `negatives.json` of an earlier `negatives.jsonl` is deleted before the renaming, so that a killed process never leaves a
    `negatives.json` that describes another file. The caller writes the new one.

    Args:
        rows: read one at a time. before_rename: if it raises an error, the earlier file stays as it was.
    """
    with atomic_write(path) as temporary:
        with temporary.open("w", encoding="utf-8") as file:
            for row in rows:
                negatives = [{"kind": negative.kind, "text": negative.text} for negative in row.negatives]
                value = {"id": row.id, "caption": row.caption, "negatives": negatives}
                file.write(json.dumps(value, ensure_ascii=False) + "\n")
        before_rename()
        if Path(path).name == NEGATIVES_FILE:
            Path(path).with_name(METADATA_FILE).unlink(missing_ok=True)


def read_negatives(path: str | Path) -> list[CaptionNegatives]:
    """All captions of a file of negatives, see `iter_negatives`."""
    return list(iter_negatives(path))


def iter_negatives(path: str | Path) -> Iterator[CaptionNegatives]:
    """Read a `negatives.jsonl`, or a file of the same form that the user wrote, which has no `negatives.json`."""
    path = Path(path)
    has_metadata = path.name == NEGATIVES_FILE and path.is_file() and path.with_name(METADATA_FILE).is_file()
    if has_metadata:
        _check_hash(path)
    fix = "build the file again with `make negatives DATASET=<name>`" if has_metadata else "fix that line"
    count = 0  # of each caption's negatives
    for where, row in read_json_lines(path, "negatives", _HOW_TO_BUILD):
        items = row.get("negatives")
        if not isinstance(row.get("id"), str) or not isinstance(row.get("caption"), str):
            raise DiffcapError(f'{where}: "id" and "caption" must be strings; {fix}.')
        if not isinstance(items, list) or not items or not all(map(_is_negative, items)):
            raise DiffcapError(
                f'{where}: "negatives" must be a non-empty list of {{"kind", "text"}} with a kind of '
                f"{', '.join(KINDS)}, found {items!r:.80}; {fix}."
            )
        count = count or len(items)
        if len(items) != count:
            raise DiffcapError(f"{where}: {len(items)} negatives, but the first line has {count}; {fix}.")
        yield CaptionNegatives(row["id"], row["caption"], [Negative(item["kind"], item["text"]) for item in items])
    if not count:
        raise DiffcapError(f"{path}: the file is empty; {_HOW_TO_BUILD}.")


def _check_hash(path: Path) -> None:
    """Compare the SHA-256 of a `negatives.jsonl` with the one in its `negatives.json`."""
    metadata = read_json(path.with_name(METADATA_FILE), "metadata of the negatives", _HOW_TO_BUILD)
    if not isinstance(metadata, dict) or metadata.get("sha256") != file_hash(path):
        settings = metadata.get("settings") if isinstance(metadata, dict) else None
        tagger = settings.get("tagger") if isinstance(settings, dict) else None
        again = f"`make negatives FOLDER='{path.parent}' TAGGER={tagger}`" if tagger else "`make negatives`"
        raise DiffcapError(f"{path}: its SHA-256 is not the one in {METADATA_FILE}; build it again with {again}.")


def _is_negative(value: object) -> bool:
    return isinstance(value, dict) and value.get("kind") in KINDS and isinstance(value.get("text"), str)


class Report:
    """Draws examples of each kind from a stream of rows (reservoir sampling), every row with the same probability.

    Args:
        examples: number of examples of each kind.
        seed: of the draws.

    Attributes:
        captions: number of rows added so far.
    """

    def __init__(self, examples: int = 20, seed: int = 0) -> None:
        self._examples, self._rng = examples, Random(seed)
        self._kept: dict[str, list[tuple[int, CaptionNegatives]]] = {kind: [] for kind in KINDS}
        self._seen = dict.fromkeys(KINDS, 0)
        self.captions = 0

    def add(self, row: CaptionNegatives) -> None:
        """Add the negatives of one caption."""
        for kind, kept in self._kept.items():
            if not any(negative.kind == kind for negative in row.negatives):
                continue
            index = len(kept) if len(kept) < self._examples else self._rng.randrange(self._seen[kind] + 1)
            self._seen[kind] += 1
            if index < self._examples:
                kept[index : index + 1] = [(self.captions, row)]
        self.captions += 1

    def write(self, path: str | Path, settings: Mapping[str, Any], used: Mapping[tuple[str, str], int]) -> None:
        """Write the settings, how often each strategy was used ((kind, strategy) -> number), and the examples as Markdown."""
        lines = ["# Negatives", "", f"{self.captions:,} captions.", "", "| setting | value |", "|---|---|"]
        lines += [f"| {key} | {value} |" for key, value in settings.items()]
        if settings.get("scope") == "pair":
            lines += ["", "All captions of a pair share the negatives of one of them, drawn at random."]
        lines += [
            "",
            "## Strategies",
            "",
            "| kind | strategy | negatives | share of the kind | |",
            "|---|---|--:|--:|---|",
        ]
        for kind in KINDS:
            strategies = sorted(
                ((count, strategy) for (of, strategy), count in used.items() if of == kind), reverse=True
            )
            total = sum(count for count, _ in strategies)
            for count, strategy in strategies:
                note = "" if strategy in _PAPER_STRATEGIES[kind] else "fallback"
                lines.append(f"| {kind} | {strategy.replace('_', ' ')} | {count:,} | {count / total:.1%} | {note} |")
        for kind, kept in self._kept.items():
            if kept:
                lines += ["", f"## {kind}: {len(kept)} examples", ""]
            for _, row in sorted(kept, key=lambda pair: pair[0]):
                lines.append(f"* {row.id}: {row.caption}")
                lines += [f"  * {negative.text}" for negative in row.negatives if negative.kind == kind]
        write_text(path, "\n".join(lines) + "\n")
