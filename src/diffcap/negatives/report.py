"""`negatives.md`: settings, statistics and examples of the negatives, to read before training on them."""

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from diffcap.negatives.file import KINDS, CaptionNegatives
from diffcap.records import write_text

# The strategies that the paper describes; the others are fallbacks. The names are those of `Builder.used`.
_PAPER_STRATEGIES = {
    "retrieve": ("alike",),
    "replace": ("words replaced",),
    "confuse": ("swap_animals", "swap_animals_once", "swap_noun_phrases", "reverse_change"),
}


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
        """Write the settings, how often each strategy was used, and the examples.

        Args:
            path: of the Markdown file. settings: name -> value. used: (kind, strategy) -> number of negatives.
        """
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
