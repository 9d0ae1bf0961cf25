"""Hard negative captions for every training caption: `negatives.jsonl`, and `negatives.md` to look at."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from diffcap.console import run
from diffcap.errors import DiffcapError

if TYPE_CHECKING:
    from diffcap.negatives import Builder, CaptionNegatives
    from diffcap.negatives.report import Report
    from diffcap.records import ChangePair


def make_negatives(
    folder: str,
    tagger: str = "english",
    retrieve: int = 2,
    replace: int = 2,
    confuse: int = 2,
    scope: Literal["caption", "pair"] = "caption",
    seed: int = 0,
    split: Literal["train", "val", "test"] = "train",
    workers: int = 0,
    force: bool = False,
) -> None:
    """Write the hard negatives of a dataset's captions.

    Args:
        folder: data/<dataset>, with its manifest.jsonl; everything is written there.
        tagger: english (Stanza's own, downloaded at first use), blocks (ships with the package), or a folder that holds
            resources.json and one .pt file.
        retrieve: negatives a caption that are captions of other pairs.
        replace: negatives a caption with nouns and adjectives replaced.
        confuse: negatives a caption with roles exchanged or the change reversed.
        scope: negatives of its own for each caption, or the same for all captions of a pair (the released form).
        seed: of every draw.
        split: whose captions.
        workers: processes that tag; 0 for one a core.
        force: make them again even if they stand there already with the same settings.

    Raises:
        DiffcapError: the manifest is missing or has no captions in the split, or the tagger cannot be loaded.
    """
    from diffcap.negatives.build import Builder, Recipe
    from diffcap.negatives.corpus import sentence_texts, tokenised
    from diffcap.negatives.file import write_negatives
    from diffcap.negatives.report import Report
    from diffcap.records import file_hash, read_manifest, with_words, write_json
    from diffcap.text.stanza_tagger import find_tagger
    from diffcap.text.tagging import tag_sentences

    recipe = Recipe(retrieve, replace, confuse, scope, seed)
    home = Path(folder)
    target, report_path, notes = (home / f"negatives.{suffix}" for suffix in ("jsonl", "md", "json"))
    pairs = with_words(pair for pair in read_manifest(home / "manifest.jsonl") if pair.split == split)
    if not pairs:
        raise DiffcapError(
            f"{home / 'manifest.jsonl'}: no pair of the {split} split has a caption; check the manifest."
        )
    settings = {
        **recipe.settings(),
        "split": split,
        "tagger": tagger,
        "tagger_identity": find_tagger(tagger).identity,
        "manifest_sha256": file_hash(home / "manifest.jsonl"),
    }
    if not force and target.is_file() and _is_done(notes, target, settings):
        print(f"{target}: already there with these settings")
        return
    texts = {tokenised(caption) for pair in pairs for caption in pair.captions}
    with _progress("tagging sentences") as step:
        tags = tag_sentences(sentence_texts(texts), tagger, home / "tags.jsonl", workers, step)
    with _progress("looking for alike captions") as step:
        builder = Builder(pairs, tags, recipe, step)
    report = Report(seed=seed)
    with _progress("writing negatives") as step:
        rows = _rows(builder, pairs, report, step)
        write_negatives(target, rows, lambda: report.write(report_path, settings, builder.used))
    counts = {f"{kind}: {way}": count for (kind, way), count in sorted(builder.used.items())}
    done = {"settings": settings, "captions": report.captions, "ways": counts, "sha256": file_hash(target)}
    write_json(notes, done)
    print(f"{target}: negatives for {report.captions:,} captions; read {report_path}")


def _is_done(notes: Path, target: Path, settings: dict[str, Any]) -> bool:
    from diffcap.records import file_hash, read_json

    if not notes.is_file():
        return False
    done = read_json(notes, "account of the negatives", "delete it and run the stage again")
    return isinstance(done, dict) and done.get("settings") == settings and done.get("sha256") == file_hash(target)


def _rows(
    builder: "Builder", pairs: "list[ChangePair]", report: "Report", step: Callable[[int, int], None]
) -> "Iterator[CaptionNegatives]":
    for number, pair in enumerate(pairs, 1):
        for row in builder.of_pair(pair):
            report.add(row)
            yield row
        if number % 100 == 0 or number == len(pairs):
            step(number, len(pairs))


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


if __name__ == "__main__":
    run(make_negatives)
