"""The data stage: read the official files of a dataset, check its images, write `manifest.jsonl` and `dataset.json`."""

import difflib
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from diffcap.datasets.registry import OWN_READER, datasets, get_dataset
from diffcap.fetching.sources import FetchSettings
from diffcap.records import SPLITS, ChangePair, Dataset, read_json, read_manifest, write_dataset, write_text
from diffcap.registry import import_object
from diffcap.utils.console import echo, run
from diffcap.utils.errors import DiffcapError
from diffcap.utils.settings import CONFIGS

SOURCES = CONFIGS / "sources"
FETCH = FetchSettings()
FEW = 10  # pairs of one's own val or test split; the scores of fewer are not reliable


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
    fetch: FetchSettings = FETCH,
) -> None:
    """Write the manifest of a dataset, and dataset.json with its counts.

    Args:
        dataset: clevr_change, clevr_dc, spot_the_diff, image_editing_request, birds2words, levir_cc, levir_mci, whu_cdc,
            second_cc, dubai_cc, blocks and tiles (rendered here); for pre-training cub and nabirds; any other name: your own files.
        source: Folder with the dataset's files; by default they are downloaded if their licence allows it. Not for rendered datasets.
        out: Output folder; data/<dataset> by default.
        missing: What to do with a pair whose image is missing or broken: refuse the dataset, or skip the pair. In both cases
            problems.txt in the output folder lists the images. Pairs whose photos no longer exist on the web are always skipped.
        check: Decode every image completely (results are stored for the next run), or only check that the file exists.
        captions_only: Check no image; the manifest then is for stages that read captions only (negatives, vocabulary).
        pairs: blocks and tiles only: number of pairs to render, half of them without a change; 6000 by default.
        seed: Rendered datasets only: seed of scenes, captions and splits; 0 by default.
        jitter: Rendered datasets only: variation of camera and light; 0 is none, 1 (default) is about that of CLEVR-Change.
        augmented: second_cc only: keep the augmented views of the training pairs, to train as its authors do.
        fetch: Options of the download.
    """
    from diffcap.datasets import describe, read_pairs
    from diffcap.datasets.images import with_ranges
    from diffcap.text.vocabulary import build_vocabulary, write_vocabulary

    folder = Path(out or f"data/{dataset}")
    with _one_at_a_time(folder):
        wanted = {"pairs": pairs, "seed": seed, "jitter": jitter}
        render = {key: value for key, value in wanted.items() if value is not None}
        gone: frozenset[str] = frozenset()
        rendered = get_dataset(dataset).rendered
        if rendered:
            if source is not None:
                raise DiffcapError(f"{dataset} is rendered and has no source files; omit --source (DATA=).")
            root = folder / "official"
            import_object(get_dataset(dataset).renderer or "")(root, **render)
            render = read_json(root / f"{dataset}.json")
        elif render:
            raise DiffcapError(f"--{next(iter(render))} is for rendered datasets, not {dataset}; omit the option.")
        elif source is None:
            root, gone = _fetch(dataset, folder, fetch, captions_only, missing)
        else:
            root = Path(source)
        try:
            records = read_pairs(dataset, root, augmented)
            describe(dataset, records, root)  # refuses wrong files before the images are checked
        except DiffcapError as error:
            if not rendered:
                raise
            fault = str(error).partition(";")[0]
            raise DiffcapError(f"{fault}; delete {root}, and run the same command again to render it again.") from None
        skipped = {"pairs": 0, "images": 0}
        ranges = dict[str, Any]()
        if captions_only:
            (folder / "problems.txt").unlink(missing_ok=True)
        else:
            records, skipped = _check(records, root, folder, missing, check, gone, rendered, ranges)
            captioned = {pair.split for pair in records if pair.captions}
            if get_dataset(dataset).pairs and "train" in captioned and "val" not in captioned:
                raise DiffcapError(
                    f'{root}: has train pairs and no val pairs with captions, which select a checkpoint; give some pairs the split "val".'
                )
        settings = {"missing": missing, "check": check, **({"augmented": True} if augmented else {}), **render}
        notes = {
            "captions_only": captions_only,
            "skipped": skipped,
            "settings": settings,
            **describe(dataset, records, root, has_skipped_pairs=bool(skipped["pairs"])),
        }
        # The vocabulary is written before the manifest, which Make takes as the mark of a complete stage.
        vocabulary = build_vocabulary(caption for pair in records if pair.split == "train" for caption in pair.captions)
        words = folder / "vocabulary.json"
        if not vocabulary.words:  # a dataset with classes instead of captions
            words.unlink(missing_ok=True)
        else:
            write_vocabulary(words, vocabulary)
        earlier: dict[tuple[str, ...], str] = {}
        if get_dataset(dataset).reader == OWN_READER:
            with suppress(DiffcapError):  # there is no manifest, or it is malformed
                earlier = {(pair.id, *pair.images): pair.split for pair in read_manifest(folder / "manifest.jsonl")}
        moved = sum(earlier.get((pair.id, *pair.images), pair.split) != pair.split for pair in records)
        _show(write_dataset(folder, dataset, root, with_ranges(records, ranges), notes), folder)
        if moved:
            echo(
                f"warning: {moved:,} {'pair has' if moved == 1 else 'pairs have'} another split than in the earlier manifest, so an "
                'older checkpoint may be tested on pairs it was trained on: train again, or write the earlier "split" on every line'
            )
        if vocabulary.words:
            print(f"{len(vocabulary.words):,} words in the training captions, {words}")


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait until no other process prepares this folder; the system releases the lock when a process ends."""
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
        if is_new and not any(folder.iterdir()):  # the command was refused
            folder.rmdir()


def _fetch(
    dataset: str, folder: Path, settings: FetchSettings, captions_only: bool, missing: str
) -> tuple[Path, frozenset[str]]:
    """Download the dataset; returns the folder of the files, and the images that no longer exist on the web."""
    from diffcap.fetching.fetch import fetch

    sources = Path(settings.sources or SOURCES / f"{dataset}.yaml")
    if not settings.sources and not sources.is_file():
        own = {path.parent.name for path in folder.parent.glob("*/manifest.jsonl")}
        known = sorted({*datasets(), *own})
        if dataset in known:
            raise DiffcapError(f"{dataset} cannot be downloaded; give the folder of its files as DATA=<folder>.")
        near = difflib.get_close_matches(dataset, known, n=1)
        raise DiffcapError(
            f"DATASET={dataset} is unknown{f', did you mean {near[0]}' if near else ''}; known datasets: {', '.join(known)}. For "
            "your own dataset give DATA=<folder with pairs.jsonl, or a JSON file of images>."
        )
    return fetch(dataset, folder, sources, settings, captions_only, incomplete=missing == "skip")


def _check(
    pairs: list[ChangePair],
    root: Path,
    folder: Path,
    missing: str,
    check: Literal["decode", "exists"],
    gone: frozenset[str],
    rendered: bool,
    ranges: dict[str, Any],
) -> tuple[list[ChangePair], dict[str, int]]:
    """Check the images and the masks; returns the pairs whose files are all readable, and the numbers of skipped pairs and files.

    `ranges` is filled, see `check_images`.
    """
    from diffcap.datasets.images import MISSING, check_images, image_paths

    masks = {pair.id: pair.extra["mask"] for pair in pairs if "mask" in pair.extra}
    paths = sorted({*image_paths(pairs), *masks.values()})
    report = folder / "problems.txt"
    problems = dict(check_images(root, paths, check, cache=folder / "checked.json", ranges=ranges))
    if not problems:
        report.unlink(missing_ok=True)
        return pairs, {"pairs": 0, "images": 0}
    write_text(report, "".join(f"{path}\t{reason}\n" for path, reason in problems.items()))
    good = [pair for pair in pairs if problems.keys().isdisjoint((*pair.images, masks.get(pair.id)))]
    absent = [path for path, reason in problems.items() if reason == MISSING]
    broken = [path for path, reason in problems.items() if reason != MISSING]
    counts = " and ".join(
        f"{len(names)} {word} (first {', '.join(names[:3])})"
        for names, word in ((absent, "missing"), (broken, "broken"))
        if names
    )
    lost = len(pairs) - len(good)
    files = "images and masks" if masks else "images"
    summary = (
        f"{root}: of {len(paths)} {files} {counts}, so {lost} of {len(pairs)} pairs are unusable; {report} lists them"
    )
    if missing == "refuse" and rendered:
        from diffcap.worlds.rendering import reopen

        reopen(root, problems)
        raise DiffcapError(f"{summary}. Run the same command again; it renders those images again.")
    if missing == "refuse" and not gone.issuperset(problems):
        raise DiffcapError(f"{summary}. Get those images again, or skip the pairs with --missing skip.")
    if not good:
        raise DiffcapError(f"{summary}. No pair is left; check the folder.")
    echo(f"skipped: {summary}.")
    return good, {"pairs": lost, "images": len(problems)}


def _show(dataset: Dataset, folder: Path) -> None:
    from diffcap.evaluation.tables import print_table
    from diffcap.utils.table import Cell, Table

    single = all(pair.after is None for pair in dataset.pairs)
    records, record = ("images", "image") if single else ("pairs", "pair")
    unchanged = "no change" if any(pair.group == "no_change" for pair in dataset.pairs) else "distractors"
    lines = []
    for split in SPLITS:
        row = dataset.info["splits"][split]
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in row["change_types"].items()) or "-"
        cells = [Cell(f"{row[key]:,}") for key in ("pairs", "distractors", "captions")]
        lines.append(([split, kinds], cells))
    info = dataset.info
    images = "images not checked" if info["captions_only"] else f"{info['images']:,} images, all present"
    title = f"{dataset.name}: {folder / 'manifest.jsonl'}"
    print_table(Table([records, unchanged, "captions"], lines, ["split", "change types"], title))
    echo(
        f"{info['pairs']:,} {records}, {info['captions_per_pair']} captions per {record}, {images}, "
        f"{info['skipped']['pairs']:,} {records} skipped",
        *_remarks(info),
    )


def _remarks(info: dict[str, Any]) -> list[str]:
    """Comparison with the official sizes, counts of duplicates, and the notes of the reader."""
    lines = []
    official = info["official"]
    repetitions = info["repetitions"]
    if official and official["state"] == "whole":
        what = "every split" if official["splits"] else "the dataset"
        lines.append(f"complete: {what} has its official number of {official['unit']}")
    elif official:
        counts = official["splits"] or {"all splits together": official["total"]}
        parts = ", ".join(f"{split} {found:,} of {all_:,}" for split, (found, all_) in counts.items())
        lines.append(
            f"part of the official dataset: {parts} {official['unit']}; its scores cannot be compared with published ones"
        )
    for split, count in repetitions["image_pairs"].items():
        ids = official["splits"][split][0] if official and official["splits"] and official["unit"] == "pairs" else count
        if ids > count:
            lines.append(f"{split}: {ids:,} pairs, but only {count:,} distinct image pairs")
    for key in ("image_pairs_in_two_splits", "repeated_captions", "blank_captions"):
        if repetitions[key]:
            lines.append(f"{key.replace('_', ' ')}: {repetitions[key]:,}")
    lines += info["notes"]
    if get_dataset(info["name"]).reader == OWN_READER:
        counts = {split: info["splits"][split]["pairs"] for split in SPLITS}
        uses = {"train": "the dataset serves for evaluation only", "test": "eval and report have nothing to score"}
        lines += [f"warning: no {split} pairs, so {use}" for split, use in uses.items() if not counts[split]]
        few = " and ".join(f"{counts[split]} {split}" for split in SPLITS[1:] if 0 < counts[split] < FEW)
        if few:
            lines.append(
                f"warning: only {few} pairs; scores of fewer than {FEW} depend on the choice of the pairs: add pairs, or write "
                '"split" on every line yourself'
            )
    return lines


def main(arguments: Sequence[str]) -> None:
    """Run the stage with its own options."""
    run(prepare, arguments)
