"""The negatives stage: hard negatives (wrong but similar captions) for every training caption, and a report with examples."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from diffcap.negatives.file import CaptionNegatives, Report, authors_negatives, write_negatives
from diffcap.negatives.words import normalize_caption, sentence_texts
from diffcap.records import file_hash, read_json, read_manifest, take_changes, with_words, write_json
from diffcap.text.stanza_tagger import find_tagger
from diffcap.text.tagging import tag_sentences
from diffcap.utils.errors import DiffcapError
from diffcap.utils.settings import CONFIGS, get_config_value


def make_negatives(
    folder: str,
    tagger: str = "english",
    retrieve: int = 2,
    replace: int = 2,
    confuse: int = 2,
    scope: Literal["pair", "caption"] = "pair",
    replacement: Literal["uniform", "matched"] = "uniform",
    seed: int = 0,
    split: Literal["train", "val", "test"] = "train",
    changes: Literal["single", "multi"] | None = None,
    workers: int = 0,
    force: bool = False,
    authors: str | None = None,
) -> None:
    """Write the hard negatives of a dataset's captions to negatives.jsonl, and a report to negatives.md.

    Args:
        folder: data/<dataset>, with its manifest.jsonl; the output folder.
        tagger: Part-of-speech tagger: english (Stanza's model, downloaded at first use), blocks or tiles (both ship with the
            package), or a folder with resources.json and one .pt file.
        retrieve: Number of negatives per caption that are captions of other pairs.
        replace: Number of negatives per caption with nouns and adjectives replaced.
        confuse: Number of negatives per caption in which two phrases or words have swapped places, or the change is inverted.
        scope: pair: all captions of a pair share the same negatives (as in the authors' files). caption: each caption has its own.
        replacement: How replacement words are sampled. uniform: any other word of the same part of speech (paper). matched: words of
            the same inflection, drawn in proportion to their frequency, without synonyms of a reference's words. With matched,
            confuse also takes captions of no change as negatives.
        seed: Seed of all random choices.
        split: Split whose captions get negatives.
        changes: For a dataset with several changes per pair (Spot-the-Diff): single, each sentence is a caption, or multi, all
            sentences are one; the same value as in training. By default the value in configs/dataset/<dataset>.yaml, or else in the
            dataset.json.
        workers: Number of processes that tag; 0 for one per core.
        force: Make the negatives again even if they exist with the same settings.
        authors: Import IDC-PCL's negatives from this file, <split>_neg_tfidf6.json, instead.
    """
    from diffcap.negatives.build import Builder, Recipe
    from diffcap.utils.progress import progress_bars

    recipe = Recipe(retrieve, replace, confuse, scope, seed, replacement)
    dataset_folder = Path(folder)
    manifest_file = dataset_folder / "manifest.jsonl"
    negatives_file = dataset_folder / "negatives.jsonl"
    report_file = dataset_folder / "negatives.md"
    metadata_file = dataset_folder / "negatives.json"
    split_pairs = [pair for pair in read_manifest(manifest_file) if pair.split == split]
    if changes is None:
        info_file = dataset_folder / "dataset.json"
        info = read_json(info_file, "dataset", "write it again with `make data`") if info_file.is_file() else {}
        settings_file = CONFIGS / f"dataset/{info.get('name')}.yaml"
        changes = get_config_value([settings_file], "data", "changes") or info.get("changes")
    pairs = with_words(take_changes(split_pairs, changes))  # without blank captions
    if not pairs:
        raise DiffcapError(f"{manifest_file}: no pair of the {split} split has a caption; check the manifest.")
    authors_rows = list(authors_negatives(Path(authors), pairs)) if authors else []
    settings: dict[str, Any]
    if authors:
        settings = {"authors": Path(authors).name, "authors_sha256": file_hash(authors)}
    else:
        settings = {**asdict(recipe), "split": split}
        if changes:
            settings["changes"] = changes
        settings["tagger"] = tagger
        settings["tagger_identity"] = find_tagger(tagger).identity  # hash of its weights
    settings["manifest_sha256"] = file_hash(manifest_file)
    with suppress(DiffcapError):  # negatives.json is missing or damaged
        metadata = {} if force else read_json(metadata_file)
        has_same_settings = metadata.get("settings") == settings
        if has_same_settings and negatives_file.is_file() and metadata["sha256"] == file_hash(negatives_file):
            print(f"{negatives_file}: exists already with these settings")
            return
    if authors:
        # `write_negatives` calls the function in its last argument when the file is complete, before the file gets its final name.
        write_negatives(negatives_file, authors_rows, lambda: report_file.unlink(missing_ok=True))
        metadata = {"settings": settings, "captions": len(authors_rows), "sha256": file_hash(negatives_file)}
        write_json(metadata_file, metadata)
        num_captions = sum(len(pair.captions) for pair in pairs)
        print(f"{negatives_file}: the negatives of {authors} for {len(authors_rows):,} of {num_captions:,} captions")
        return
    texts = {normalize_caption(caption) for pair in pairs for caption in pair.captions}  # tokens joined with spaces
    tag_file = dataset_folder / "tags.jsonl"
    with progress_bars() as bar:  # bar(title) adds a progress bar and returns the function that updates it
        tags = tag_sentences(sentence_texts(texts), tagger, tag_file, workers, bar("tagging sentences"))
        builder = Builder(pairs, tags, recipe, bar("searching similar captions"))
        report = Report(seed=seed)
        show_progress = bar("writing negatives")

        def build_rows() -> Iterator[CaptionNegatives]:
            for number, pair in enumerate(pairs, 1):
                for row in builder.build(pair):
                    report.add(row)
                    yield row
                if number % 100 == 0 or number == len(pairs):
                    show_progress(number, len(pairs))

        write_negatives(negatives_file, build_rows(), lambda: report.write(report_file, settings, builder.counts))
    # Kind: retrieve, replace or confuse. Strategy: how a negative of this kind was made.
    strategy_counts = {f"{kind}: {strategy}": count for (kind, strategy), count in sorted(builder.counts.items())}
    metadata = {"settings": settings, "captions": report.num_rows, "ways": strategy_counts}
    write_json(metadata_file, {**metadata, "sha256": file_hash(negatives_file)})
    print(f"{negatives_file}: negatives for {report.num_rows:,} captions; read {report_file}")
