"""Read and write the files of hard negatives: `negatives.jsonl`, the report `negatives.md`, and the files that authors released."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path, PurePosixPath
from random import Random
from typing import Any

from diffcap.datasets.checks import check_sentences
from diffcap.negatives.words import normalize_caption
from diffcap.records import ChangePair, file_hash, read_json, read_json_lines, write_text
from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import atomic_write

NEGATIVES_FILE = "negatives.jsonl"
METADATA_FILE = "negatives.json"  # the settings that the negatives were built with, and the SHA-256 of NEGATIVES_FILE
KINDS = (
    "retrieve",  # the caption of another pair with similar words
    "replace",  # the caption, in which some words are replaced by others of the same part of speech
    "confuse",  # the caption, in which words have changed places or the change is reversed
)
# Kind -> its strategies in the paper of IDC-PCL (swap_animals_once: in one sentence). Others are fallbacks for too few negatives.
_PAPER_STRATEGIES = {
    "retrieve": ("alike",),
    "replace": ("words replaced",),
    "confuse": ("swap_animals", "swap_animals_once", "swap_noun_phrases", "reverse_change"),
}
_HOW_TO_BUILD = "build it with `make negatives DATASET=<name>`"


@dataclass(frozen=True)
class Negative:
    """A caption that is wrong for its pair."""

    kind: str  # one of `KINDS`; if the strategies of this kind gave too few texts, a fallback made this text
    text: str  # tokens of `normalize_caption`, joined with spaces


@dataclass(frozen=True)
class CaptionNegatives:
    """A training caption and its negatives."""

    id: str  # the pair's id in manifest.jsonl; a pair with several captions has several entries
    caption: str  # as written in manifest.jsonl, not tokenised
    negatives: list[Negative]  # in the order of `KINDS`; every caption of a file has the same number of negatives


def write_negatives(
    path: str | Path, rows: Iterable[CaptionNegatives], before_rename: Callable[[], None] = lambda: None
) -> None:
    """Write the rows to a temporary file, call `before_rename`, delete the earlier `negatives.json`, then rename the file to `path`.

    So a killed process never leaves a `negatives.json` that describes other negatives. Afterwards, the caller writes a new one.
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
    """Read a `negatives.jsonl`, or a file of the same form that the user wrote without a `negatives.json`."""
    path = Path(path)
    has_metadata = path.name == NEGATIVES_FILE and path.is_file() and path.with_name(METADATA_FILE).is_file()
    if has_metadata:
        metadata = read_json(path.with_name(METADATA_FILE), "metadata of the negatives", _HOW_TO_BUILD)
        if metadata["sha256"] != file_hash(path):
            tagger = metadata["settings"].get("tagger")  # name of the part-of-speech tagger
            command = f"`make negatives FOLDER='{path.parent}' TAGGER={tagger}`" if tagger else "`make negatives`"
            raise DiffcapError(f"{path}: its SHA-256 is not the one in {METADATA_FILE}; build it again with {command}.")
    remedy = "build the file again with `make negatives DATASET=<name>`" if has_metadata else "fix that line"
    num_negatives = 0  # of each caption; 0 before the first line
    for where, row in read_json_lines(path, "negatives", _HOW_TO_BUILD):
        entries = row.get("negatives")
        if not isinstance(row.get("id"), str) or not isinstance(row.get("caption"), str):
            raise DiffcapError(f'{where}: "id" and "caption" must be strings; {remedy}.')
        if not isinstance(entries, list) or not entries or not all(map(_is_negative, entries)):
            raise DiffcapError(
                f'{where}: "negatives" must be a non-empty list of {{"kind", "text"}} with a kind of '
                f"{', '.join(KINDS)}, found {entries!r:.80}; {remedy}."
            )
        num_negatives = num_negatives or len(entries)
        if len(entries) != num_negatives:
            raise DiffcapError(f"{where}: {len(entries)} negatives, but the first line has {num_negatives}; {remedy}.")
        negatives = [Negative(entry["kind"], entry["text"]) for entry in entries]
        yield CaptionNegatives(row["id"], row["caption"], negatives)
    if not num_negatives:
        raise DiffcapError(f"{path}: the file is empty; {_HOW_TO_BUILD}.")


def _is_negative(entry: object) -> bool:
    return isinstance(entry, dict) and entry.get("kind") in KINDS and isinstance(entry.get("text"), str)


def authors_negatives(path: Path, pairs: Sequence[ChangePair]) -> Iterator[CaptionNegatives]:
    """Yield the negatives of every caption of `pairs` that occurs in IDC-PCL's released `<split>_neg_tfidf6.json`.

    Each line of the file contains the negatives that all captions of one pair share:

        {"img1": "CLEVR_default_000123", "img2": "CLEVR_semantic_000123", "sentences": [...], "neg_samples": [six sentences]}
        {"img": "Black_Footed_Albatross_0046_18", "sentences": [...], "neg_samples": [...]}   (CUB)

    The files do not say how each negative was made. All negatives get the kind "retrieve", because the file names contain "tfidf".
    """
    pair_by_stems = {tuple(map(_stem, pair.images)): pair for pair in pairs}
    has_caption = False
    for where, row in read_json_lines(path, "hard negatives"):
        negatives = check_sentences(row.get("neg_samples"), where, "neg_samples")
        sentences = check_sentences(row.get("sentences"), where, "sentences")
        captions = {normalize_caption(sentence) for sentence in sentences}
        names = [row["img"]] if "img" in row else [row.get("img1"), row.get("img2")]
        pair = pair_by_stems.get(tuple(_stem(str(name)) for name in names))
        if pair is None:
            continue  # the dataset can be incomplete, for example if a photo is no longer online
        shared = [Negative("retrieve", normalize_caption(text)) for text in negatives]
        for caption in pair.captions:
            if normalize_caption(caption) in captions:
                has_caption = True
                yield CaptionNegatives(pair.id, caption, shared)
    if not has_caption:
        raise DiffcapError(
            f"{path}: none of its sentences is a caption of these pairs; use the file of the same dataset and split."
        )


def _stem(name: str) -> str:
    """Return an image's name without folder and extension."""
    path = PurePosixPath(name)
    return path.stem if path.suffix.lower() in (".png", ".jpg", ".jpeg") else path.name


class Report:
    """Collects examples of negatives from a stream of rows by reservoir sampling: all rows have the same probability."""

    def __init__(self, num_examples: int = 20, seed: int = 0) -> None:
        self._num_examples = num_examples
        self._rng = Random(seed)
        self._examples: list[tuple[int, CaptionNegatives]] = []  # (index of the row, row)
        self.num_rows = 0

    def add(self, row: CaptionNegatives) -> None:
        """Add the negatives of one caption."""
        is_full = len(self._examples) == self._num_examples
        index = self._rng.randrange(self.num_rows + 1) if is_full else self.num_rows
        if index < self._num_examples:
            self._examples[index : index + 1] = [(self.num_rows, row)]
        self.num_rows += 1

    def write(self, path: str | Path, settings: Mapping[str, Any], counts: Mapping[tuple[str, str], int]) -> None:
        """Write the settings, the number of negatives of each (kind, strategy), and the examples as Markdown."""
        lines = ["# Negatives", "", f"{self.num_rows:,} captions.", "", "| setting | value |", "|---|---|"]
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
            strategies = [(count, strategy) for (used_kind, strategy), count in counts.items() if used_kind == kind]
            total = sum(count for count, _ in strategies)
            for count, strategy in sorted(strategies, reverse=True):
                note = "" if strategy in _PAPER_STRATEGIES[kind] else "fallback"
                lines.append(f"| {kind} | {strategy.replace('_', ' ')} | {count:,} | {count / total:.1%} | {note} |")
        rows = [row for _, row in sorted(self._examples, key=itemgetter(0))]
        for kind in KINDS:
            examples = [row for row in rows if kind in {negative.kind for negative in row.negatives}]
            if examples:
                lines += ["", f"## {kind}: {len(examples)} examples", ""]
            for row in examples:
                lines.append(f"* {row.id}: {row.caption}")
                lines += [f"  * {negative.text}" for negative in row.negatives if negative.kind == kind]
        write_text(path, "\n".join(lines) + "\n")
