"""`negatives.jsonl`, the hard negatives of every training caption, its report `negatives.md`, and the authors' released negatives."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from random import Random
from typing import Any

from diffcap.datasets.checks import sentences
from diffcap.negatives.words import normalize_caption
from diffcap.records import ChangePair, file_hash, read_json, read_json_lines, write_text
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
_EXTENSIONS = (".png", ".jpg", ".jpeg")
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
    """Write the rows to a temporary file, call `before_rename`, delete the earlier `negatives.json`, then rename the file.

    So a killed process never leaves a `negatives.json` that describes another file. The caller writes the new one.
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


def iter_negatives(path: str | Path) -> Iterator[CaptionNegatives]:
    """Read a `negatives.jsonl`, or a file of the same form that the user wrote, which has no `negatives.json`."""
    path = Path(path)
    has_metadata = path.name == NEGATIVES_FILE and path.is_file() and path.with_name(METADATA_FILE).is_file()
    if has_metadata:
        metadata = read_json(path.with_name(METADATA_FILE), "metadata of the negatives", _HOW_TO_BUILD)
        if metadata["sha256"] != file_hash(path):
            tagger = metadata["settings"].get("tagger")
            again = f"`make negatives FOLDER='{path.parent}' TAGGER={tagger}`" if tagger else "`make negatives`"
            raise DiffcapError(f"{path}: its SHA-256 is not the one in {METADATA_FILE}; build it again with {again}.")
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


def _is_negative(value: object) -> bool:
    return isinstance(value, dict) and value.get("kind") in KINDS and isinstance(value.get("text"), str)


def authors_negatives(path: Path, pairs: Sequence[ChangePair]) -> Iterator[CaptionNegatives]:
    """Yield the negatives of every caption of `pairs` that occurs in IDC-PCL's released `<split>_neg_tfidf6.json`.

    A line of it belongs to a pair, and all captions of the pair have its negatives:

        {"img1": "CLEVR_default_000123", "img2": "CLEVR_semantic_000123", "sentences": [...], "neg_samples": [six sentences]}
        {"img": "Black_Footed_Albatross_0046_18", "sentences": [...], "neg_samples": [...]}   (CUB)

    The files do not say how each negative was made; because of the "tfidf" in their names, all get the kind "retrieve".
    """
    known = {tuple(map(_stem, pair.images)): pair for pair in pairs}
    count, found = 0, 0
    for where, row in read_json_lines(path, "hard negatives"):
        negatives = sentences(row.get("neg_samples"), where, "neg_samples")
        count = count or len(negatives)
        if not negatives or len(negatives) != count:
            raise DiffcapError(
                f"{where}: {len(negatives)} negatives, but the first line has {count}; download the file again."
            )
        captions = {normalize_caption(sentence) for sentence in sentences(row.get("sentences"), where, "sentences")}
        names = [row["img"]] if "img" in row else [row.get("img1"), row.get("img2")]
        if not all(isinstance(name, str) and name for name in names):
            raise DiffcapError(
                f'{where}: needs "img1" and "img2", or "img" (strings), found {row!r:.60}; fix that line.'
            )
        pair = known.get(tuple(_stem(str(name)) for name in names))
        if pair is None:
            continue  # the dataset can be incomplete, for example if a photo is no longer online
        shared = [Negative("retrieve", normalize_caption(text)) for text in negatives]
        for caption in pair.captions:
            if normalize_caption(caption) in captions:
                found += 1
                yield CaptionNegatives(pair.id, caption, shared)
    if not found:
        raise DiffcapError(
            f"{path}: none of its sentences is a caption of these pairs; use the file of the same dataset and split."
        )


def _stem(name: str) -> str:
    """Return an image's name without folder and extension."""
    path = PurePosixPath(name)
    return path.stem if path.suffix.lower() in _EXTENSIONS else path.name


class Report:
    """Draws examples of each kind from a stream of rows (reservoir sampling), every row with the same probability."""

    def __init__(self, examples: int = 20, seed: int = 0) -> None:
        self._examples, self._rng = examples, Random(seed)
        self._kept: dict[str, list[tuple[int, CaptionNegatives]]] = {kind: [] for kind in KINDS}
        self._seen = dict.fromkeys(KINDS, 0)
        self.captions = 0  # rows added so far

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
