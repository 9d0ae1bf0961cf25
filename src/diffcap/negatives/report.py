"""`negatives.md`: what a person should read before training on negatives."""

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from diffcap.negatives.file import KINDS, CaptionNegatives
from diffcap.records import write_text

# The ways that are the recipe itself; every other one stands in for it.
_RECIPES = {
    "retrieve": ("alike",),
    "replace": ("words replaced",),
    "confuse": ("swap_animals", "swap_animals_once", "swap_noun_phrases", "reverse_change"),
}


class Report:
    """Collects examples of each kind while the rows go by, every row with the same chance.

    Args:
        examples: how many of each kind.
        seed: of the choice.
    """

    def __init__(self, examples: int = 20, seed: int = 0) -> None:
        self._examples, self._random = examples, Random(seed)
        self._kept: dict[str, list[tuple[int, CaptionNegatives]]] = {kind: [] for kind in KINDS}
        self._seen = dict.fromkeys(KINDS, 0)
        self.captions = 0

    def add(self, row: CaptionNegatives) -> None:
        """Look at one row (reservoir sampling, so that nothing else is kept)."""
        for kind, kept in self._kept.items():
            if not any(negative.kind == kind for negative in row.negatives):
                continue
            place = len(kept) if len(kept) < self._examples else self._random.randrange(self._seen[kind] + 1)
            self._seen[kind] += 1
            if place < self._examples:
                kept[place : place + 1] = [(self.captions, row)]
        self.captions += 1

    def write(self, path: str | Path, settings: Mapping[str, Any], used: Mapping[tuple[str, str], int]) -> None:
        """Write the settings, how often each way was taken, and the examples."""
        lines = ["# Negatives", "", f"{self.captions:,} captions.", "", "| setting | value |", "|---|---|"]
        lines += [f"| {key} | {value} |" for key, value in settings.items()]
        lines += [
            "",
            "## How they came about",
            "",
            "| kind | way | negatives | share of the kind | |",
            "|---|---|--:|--:|---|",
        ]
        for kind in KINDS:
            ways = sorted(((count, way) for (of, way), count in used.items() if of == kind), reverse=True)
            total = sum(count for count, _ in ways)
            for count, way in ways:
                note = "" if way in _RECIPES[kind] else "stands in"
                lines.append(f"| {kind} | {way.replace('_', ' ')} | {count:,} | {count / total:.1%} | {note} |")
        for kind, kept in self._kept.items():
            if kept:
                lines += ["", f"## {kind}: {len(kept)} examples", ""]
            for _, row in sorted(kept, key=lambda pair: pair[0]):
                lines.append(f"* {row.id}: {row.caption}")
                lines += [f"  * {negative.text}" for negative in row.negatives if negative.kind == kind]
        write_text(path, "\n".join(lines) + "\n")
