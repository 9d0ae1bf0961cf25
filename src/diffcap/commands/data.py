"""The data stage: read the official files of a dataset, check its images, write `manifest.jsonl` and `dataset.json`."""

import difflib
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from diffcap.datasets import describe, read_pairs
from diffcap.datasets.images import Ranges, check_images, with_ranges, write_fitted
from diffcap.datasets.registry import OWN_READER, datasets, get_dataset
from diffcap.evaluation.tables import print_table
from diffcap.fetching.sources import FetchSettings
from diffcap.records import SPLITS, ChangePair, Dataset, JsonDict, read_json, read_manifest, write_dataset, write_text
from diffcap.registry import import_object
from diffcap.text.vocabulary import build_vocabulary, write_vocabulary
from diffcap.utils.console import echo
from diffcap.utils.errors import DiffcapError
from diffcap.utils.settings import CONFIGS
from diffcap.utils.table import Cell, Table

DEFAULT_FETCH = FetchSettings()
MIN_SPLIT_PAIRS = 10  # the scores of a val or test split of fewer pairs are not reliable


def prepare(
    dataset: str,
    source: str | None = None,
    out: str | None = None,
    missing: Literal["refuse", "skip"] = "refuse",
    check: Literal["decode", "exists"] = "decode",
    captions_only: bool = False,
    pairs: int | None = None,
    seed: int | None = None,
    jitter: float | None = None,
    augmented: bool = False,
    fit: Literal["stretch", "pad", "crop", "register"] = "stretch",
    strict: bool = False,
    fetch: FetchSettings = DEFAULT_FETCH,
) -> None:
    """Read and check the files of a dataset. Write its manifest (the list of pairs), and dataset.json with its counts.

    Args:
        dataset: clevr_change, clevr_dc, spot_the_diff, image_editing_request, birds2words, levir_cc, levir_mci, whu_cdc,
            second_cc, dubai_cc, blocks and tiles (rendered here); for pre-training cub and nabirds; any other name for your own dataset.
        source: Folder with the dataset's files; by default they are downloaded if their licence allows it. Not for rendered datasets.
        out: Output folder; data/<dataset> by default.
        missing: What to do with a pair whose image is missing or broken: refuse the dataset, or skip the pair. In both cases
            problems.txt in the output folder lists the images. Pairs whose photos no longer exist on the web are always skipped.
        check: decode: decode every image completely; the results are stored for the next run. exists: only check that the file exists.
        captions_only: Check no image. Then the manifest is only for stages that read no images, such as negatives.
        pairs: Rendered datasets only: number of pairs, half of them without a change; 6000 by default.
        seed: Rendered datasets only: seed of scenes, captions and splits; 0 by default.
        jitter: Rendered datasets only: variation of camera and light; 0 is none, 1 (default) is about that of CLEVR-Change.
        augmented: second_cc only: keep the augmented views of the training pairs, to train as its authors do.
        fit: Your own pairs only: write both images of each pair, fitted to each other as by `diffcap caption --fit`, to the output folder.
        strict: With --fit register: refuse images that cannot be registered. Otherwise they are used as they are.
        fetch: Options of the download.
    """
    folder = Path(out or f"data/{dataset}")
    with _lock_folder(folder):
        spec = get_dataset(dataset)
        render_options = {"pairs": pairs, "seed": seed, "jitter": jitter}
        settings: JsonDict = {key: value for key, value in render_options.items() if value is not None}
        gone_images: frozenset[str] = frozenset()  # paths of images that no longer exist on the web
        if fit != "stretch" and spec.reader != OWN_READER:
            raise DiffcapError(f"--fit {fit} is for your own pairs; the images of {dataset} are used as published.")
        if strict and fit != "register":
            raise DiffcapError("--strict is for --fit register; add it, or remove --strict.")
        if spec.rendered:
            if source is not None:
                raise DiffcapError(f"{dataset} is rendered and has no source files; omit --source (DATA=).")
            root = folder / "official"
            import_object(spec.renderer or "")(root, **settings)
            settings = read_json(root / f"{dataset}.json")
        elif settings:
            raise DiffcapError(f"--{next(iter(settings))} is for rendered datasets, not {dataset}; omit the option.")
        elif source is None:
            root, gone_images = _fetch(dataset, folder, fetch, captions_only, missing)
        else:
            root = Path(source)
        records = read_pairs(dataset, root, augmented)
        describe(dataset, records, root)  # only to raise an error for wrong files before images are checked
        skipped = {"pairs": 0, "images": 0}
        ranges: Ranges = {}
        if captions_only:
            (folder / "problems.txt").unlink(missing_ok=True)
        else:
            records, skipped, ranges = _check_images(records, root, folder, missing, check, gone_images, spec.rendered)
            # A dataset of pairs needs val pairs to select a checkpoint. Datasets of single images are for pre-training only.
            captioned_splits = {pair.split for pair in records if pair.captions}
            if spec.pairs and "train" in captioned_splits and "val" not in captioned_splits:
                raise DiffcapError(
                    f'{root}: has train pairs and no val pairs with captions, which select a checkpoint; give some pairs the split "val".'
                )
            if fit != "stretch":
                records, ranges = write_fitted(records, root, folder / "fitted", fit, strict), {}
                root = folder / "fitted"
        options: JsonDict = {"missing": missing, "check": check}
        options |= {"augmented": True} if augmented else {}
        options |= {"fit": fit, "strict": strict} if fit != "stretch" else {}
        notes = {  # entries of dataset.json
            "captions_only": captions_only,
            "skipped": skipped,
            "settings": {**options, **settings},
            **describe(dataset, records, root, has_skipped_pairs=bool(skipped["pairs"])),
        }
        # The vocabulary is written before the manifest, because a folder with a manifest counts as complete.
        vocabulary = build_vocabulary(caption for pair in records if pair.split == "train" for caption in pair.captions)
        vocabulary_file = folder / "vocabulary.json"
        if not vocabulary.words:  # a dataset with classes instead of captions
            vocabulary_file.unlink(missing_ok=True)
        else:
            write_vocabulary(vocabulary_file, vocabulary)
        num_moved = 0  # pairs with another split than in the earlier manifest
        if spec.reader == OWN_READER:  # a user's own dataset
            with suppress(DiffcapError):  # there is no manifest, or it is malformed
                splits = {(pair.id, *pair.images): pair.split for pair in read_manifest(folder / "manifest.jsonl")}
                num_moved = sum(splits.get((pair.id, *pair.images), pair.split) != pair.split for pair in records)
        _print_counts(write_dataset(folder, dataset, root, with_ranges(records, ranges), notes), folder)
        if num_moved:
            echo(
                f"warning: {num_moved:,} {'pair has' if num_moved == 1 else 'pairs have'} another split than in the earlier manifest, so "
                'an older checkpoint may be tested on pairs it was trained on: train again, or write the earlier "split" on every line'
            )
        if vocabulary.words:
            print(f"{len(vocabulary.words):,} words in the training captions, {vocabulary_file}")


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Wait until no other process prepares this folder, then lock it. The operating system releases the lock when the process ends."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems lock no folders
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                echo(f"{folder}: another process prepares this folder; waiting until it ends", err=True)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
        if is_new and not any(folder.iterdir()):  # the command has ended with an error
            folder.rmdir()


def _fetch(
    dataset: str, folder: Path, settings: FetchSettings, captions_only: bool, missing: str
) -> tuple[Path, frozenset[str]]:
    """Download the dataset; return the folder of its files, and the paths of the images that no longer exist on the web."""
    from diffcap.fetching.fetch import fetch

    # configs/sources has a file for each dataset that can be downloaded.
    sources_file = Path(settings.sources or CONFIGS / f"sources/{dataset}.yaml")
    if not settings.sources and not sources_file.is_file():
        own_names = {path.parent.name for path in folder.parent.glob("*/manifest.jsonl")}
        names = sorted({*datasets(), *own_names})
        if dataset in names:
            raise DiffcapError(f"{dataset} cannot be downloaded; give the folder of its files as DATA=<folder>.")
        similar_names = difflib.get_close_matches(dataset, names, n=1)
        hint = f", did you mean {similar_names[0]}" if similar_names else ""
        raise DiffcapError(
            f"DATASET={dataset} is unknown{hint}; known datasets: {', '.join(names)}. For your own dataset give "
            "DATA=<folder with pairs.jsonl, or a JSON file of images>."
        )
    return fetch(dataset, folder, sources_file, settings, captions_only, allow_missing_photos=missing == "skip")


def _check_images(
    pairs: list[ChangePair],
    root: Path,
    folder: Path,
    missing: str,
    check: Literal["decode", "exists"],
    gone_images: frozenset[str],
    is_rendered: bool,
) -> tuple[list[ChangePair], dict[str, int], Ranges]:
    """Check the images and masks; return the pairs with readable files, the numbers of skipped pairs and files, and the ranges."""
    masks = {pair.id: pair.extra["mask"] for pair in pairs if "mask" in pair.extra}
    paths = sorted({*(path for pair in pairs for path in pair.images), *masks.values()})
    problems_file = folder / "problems.txt"
    problems, ranges = check_images(root, paths, check, cache_file=folder / "checked.json")
    if not problems:
        problems_file.unlink(missing_ok=True)
        return pairs, {"pairs": 0, "images": 0}, ranges
    write_text(problems_file, "".join(f"{path}\t{reason}\n" for path, reason in problems.items()))
    usable_pairs = [pair for pair in pairs if problems.keys().isdisjoint((*pair.images, masks.get(pair.id)))]
    paths_of_fault: dict[str, list[str]] = {"missing": [], "broken": []}
    for path, reason in problems.items():
        paths_of_fault[reason.partition(":")[0]].append(path)
    counts = " and ".join(
        f"{len(bad_paths)} {fault} (first {', '.join(bad_paths[:3])})"
        for fault, bad_paths in paths_of_fault.items()
        if bad_paths
    )
    num_unusable = len(pairs) - len(usable_pairs)
    summary = (
        f"{root}: of {len(paths)} {'images and masks' if masks else 'images'} {counts}, so {num_unusable} of {len(pairs)} pairs are "
        f"unusable; {problems_file} lists them"
    )
    if missing == "refuse" and is_rendered:
        from diffcap.worlds.rendering import delete_images

        delete_images(root, problems)
        raise DiffcapError(f"{summary}. Run the same command again; it renders those images again.")
    if missing == "refuse" and not gone_images.issuperset(problems):
        raise DiffcapError(f"{summary}. Get those images again, or skip the pairs with --missing skip.")
    if not usable_pairs:
        raise DiffcapError(f"{summary}. No pair is left; check the folder.")
    echo(f"skipped: {summary}.")
    return usable_pairs, {"pairs": num_unusable, "images": len(problems)}, ranges


def _print_counts(dataset: Dataset, folder: Path) -> None:
    """Print a table with the counts of each split, and below it the totals and remarks."""
    unit = "image" if all(pair.after is None for pair in dataset.pairs) else "pair"
    distractors = "no change" if any(pair.group == "no_change" for pair in dataset.pairs) else "distractors"
    lines = []
    for split in SPLITS:
        counts = dataset.info["splits"][split]
        types = ", ".join(f"{change_type} {count:,}" for change_type, count in counts["change_types"].items()) or "-"
        cells = [Cell(f"{counts[key]:,}") for key in ("pairs", "distractors", "captions")]
        lines.append(([split, types], cells))
    info = dataset.info
    images = "images not checked" if info["captions_only"] else f"{info['images']:,} images, all present"
    title = f"{dataset.name}: {folder / 'manifest.jsonl'}"
    print_table(Table([f"{unit}s", distractors, "captions"], lines, ["split", "change types"], title))
    echo(
        f"{info['pairs']:,} {unit}s, {info['captions_per_pair']} captions per {unit}, {images}, "
        f"{info['skipped']['pairs']:,} {unit}s skipped",
        *_remarks(info),
    )


def _remarks(info: JsonDict) -> list[str]:
    """Return lines on `info`, the content of dataset.json: its counts compared with the official ones, duplicates, notes and warnings."""
    lines = []
    official = info["official"]  # "state" (whole or part), "splits" (split -> (number, official number)), ...; or None
    repetitions = info["repetitions"]  # numbers of repeated image pairs and captions
    if official and official["state"] == "whole":
        subject = "every split" if official["splits"] else "the dataset"
        lines.append(f"complete: {subject} has its official number of {official['unit']}")
    elif official:
        counts = official["splits"] or {"all splits together": official["total"]}
        parts = ", ".join(f"{split} {count:,} of {total:,}" for split, (count, total) in counts.items())
        lines.append(
            f"part of the official dataset: {parts} {official['unit']}; its scores cannot be compared with published ones"
        )
    for split, count in repetitions["image_pairs"].items():
        has_pair_counts = official and official["splits"] and official["unit"] == "pairs"
        num_pairs = official["splits"][split][0] if has_pair_counts else count
        if num_pairs > count:
            lines.append(f"{split}: {num_pairs:,} pairs, but only {count:,} distinct image pairs")
    for key in ("image_pairs_in_two_splits", "repeated_captions", "blank_captions"):
        if repetitions[key]:
            lines.append(f"{key.replace('_', ' ')}: {repetitions[key]:,}")
    lines += info["notes"]
    if get_dataset(info["name"]).reader == OWN_READER:
        counts = {split: info["splits"][split]["pairs"] for split in SPLITS}
        effects = {"train": "the dataset serves for evaluation only", "test": "eval and report have nothing to score"}
        lines += [f"warning: no {split} pairs, so {effect}" for split, effect in effects.items() if not counts[split]]
        small_splits = [f"{counts[split]} {split}" for split in SPLITS[1:] if 0 < counts[split] < MIN_SPLIT_PAIRS]
        if small_splits:
            lines.append(
                f"warning: only {' and '.join(small_splits)} pairs; scores of fewer than {MIN_SPLIT_PAIRS} depend on the choice of the "
                'pairs: add pairs, or write "split" on every line yourself'
            )
    return lines
