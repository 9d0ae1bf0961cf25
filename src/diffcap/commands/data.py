"""Official files of a dataset in, `manifest.jsonl` and `dataset.json` out, every image looked at on the way."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from diffcap.datasets.registry import datasets, get_dataset
from diffcap.fetching.settings import FetchSettings
from diffcap.methods import import_object
from diffcap.records import SPLITS, ChangePair, Dataset
from diffcap.utils.console import echo, run
from diffcap.utils.errors import DiffcapError
from diffcap.utils.settings import CONFIGS

SOURCES = CONFIGS / "sources"
FETCH = FetchSettings()


def prepare(
    dataset: str,
    source: str | None = None,
    out: str | None = None,
    missing: Literal["refuse", "skip"] = "refuse",
    check: Literal["decode", "exists"] = "decode",
    captions_only: bool = False,
    pairs: int | None = None,
    images: int | None = None,
    seed: int | None = None,
    jitter: float | None = None,
    fetch: FetchSettings = FETCH,
) -> None:
    """Write the manifest of a dataset, and dataset.json with its counts beside it.

    Args:
        dataset: clevr_change, clevr_dc, spot_the_diff, image_editing_request, birds2words, blocks (rendered here), cub and
            nabirds or their stand-ins blocks_cub and blocks_nabirds (rendered here) for pre-training, or any other name for
            your own pairs.jsonl.
        source: the folder that holds the dataset's files; without it they are fetched, as far as they may be. Not for what
            is rendered.
        out: where the manifest goes; data/<dataset> by default.
        missing: what to do with a pair whose image is missing or broken: refuse the dataset, or skip the pair. Either
            way problems.txt in the output folder lists the images.
        check: decode every image to its last pixel (remembered, so that the next run is quick), or only ask whether
            the file exists.
        captions_only: look at no image at all; the manifest then serves the stages that read captions only (negatives,
            vocabulary), and dataset.json says so.
        pairs: blocks only: how many pairs to render, half of them changes and half distractors; 6000 by default.
        images: blocks_cub and blocks_nabirds only: how many pictures to render; 4000 and 3840 by default.
        seed: of what is rendered: of scenes, captions and splits; 0 by default.
        jitter: of what is rendered: how far camera and light stray; 0 keeps them, 1, the default, is about CLEVR-Change's.
        fetch: how the files are fetched where no source is given.

    Raises:
        DiffcapError: a file is missing or malformed, or images are and `missing` is "refuse"; pairs whose photos are gone
            from the web are left out all the same, and counted.
    """
    from diffcap.datasets import describe, read_pairs
    from diffcap.records import write_dataset
    from diffcap.text.vocabulary import build_vocabulary, write_vocabulary

    folder = Path(out or f"data/{dataset}")
    wanted = {"pairs": pairs, "images": images, "seed": seed, "jitter": jitter}
    render = {key: value for key, value in wanted.items() if value is not None}
    gone: frozenset[str] = frozenset()
    rendered = get_dataset(dataset).rendered
    if rendered:
        root, render = _render(dataset, folder, source, render)
    elif render:
        raise DiffcapError(
            f"--{next(iter(render))} is for blocks only, and {dataset} is read, not rendered; leave it out."
        )
    elif source is None:
        root, gone = _fetch(dataset, folder, fetch, captions_only, missing)
    else:
        root = Path(source)
    try:
        records = read_pairs(dataset, root)
        describe(dataset, records, root)  # refuses what cannot be the dataset before its images are looked at
    except DiffcapError as error:
        if not rendered:
            raise
        fault = str(error).partition(";")[0]
        raise DiffcapError(f"{fault}; delete {root}, and run the same command again to render it again.") from None
    skipped = {"pairs": 0, "images": 0}
    if captions_only:
        (folder / "problems.txt").unlink(missing_ok=True)
    else:
        records, skipped = _check(records, root, folder, missing, check, gone, rendered)
    settings = {"missing": missing, "check": check, **render}
    notes = {
        "captions_only": captions_only,
        "skipped": skipped,
        "settings": settings,
        **describe(dataset, records, root, left_out=bool(skipped["pairs"])),
    }
    # Before the manifest, which is what Make looks for; untouched where it is the same already.
    vocabulary = build_vocabulary(caption for pair in records if pair.split == "train" for caption in pair.captions)
    words = folder / "vocabulary.json"
    if not vocabulary.words:  # classes and no captions
        words.unlink(missing_ok=True)
    else:
        write_vocabulary(words, vocabulary)
    _show(write_dataset(folder, dataset, root, records, notes), folder)
    if vocabulary.words:
        print(f"{len(vocabulary.words):,} words in the training captions, {words}")


def _render(dataset: str, folder: Path, source: str | None, settings: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """The folder of the rendered files, and every setting that they were rendered with."""
    if source is not None:
        raise DiffcapError(f"{dataset} is rendered, not read: leave --source (DATA=) out.")
    spec = get_dataset(dataset)
    other = "images" if spec.pairs else "pairs"
    if other in settings:
        raise DiffcapError(f"--{other} is not for {dataset}; leave it out.")
    from diffcap.datasets.blocks.chunks import STAMP
    from diffcap.records import read_json

    official = folder / "official"
    assert spec.renderer is not None
    import_object(spec.renderer)(official, **settings)
    return official, read_json(official / STAMP)


def _fetch(
    dataset: str, folder: Path, settings: FetchSettings, captions_only: bool, missing: str
) -> tuple[Path, frozenset[str]]:
    """The folder of the fetched files, and the images that are gone from the web."""
    from diffcap.fetching.fetch import fetch

    sources = Path(settings.sources or SOURCES / f"{dataset}.yaml")
    if not settings.sources and not sources.is_file():
        own = {path.parent.name for path in folder.parent.glob("*/manifest.jsonl")}
        known = sorted({*datasets(), *own})
        if dataset in known:
            raise DiffcapError(f"{dataset} needs its files; give their folder as DATA=<folder> (--source).")
        near = difflib.get_close_matches(dataset, known, n=1)
        raise DiffcapError(
            f"DATASET={dataset} is unknown{f', did you mean {near[0]}' if near else ''}; known are {', '.join(known)}. For a "
            "dataset of your own give DATA=<folder with pairs.jsonl>."
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
) -> tuple[list[ChangePair], dict[str, int]]:
    """The pairs whose images are both good, and what was left out; refuses unless told to skip, or all that lack are `gone`."""
    from diffcap.datasets.images import MISSING, check_images, image_paths
    from diffcap.records import write_text

    paths, report = image_paths(pairs), folder / "problems.txt"
    problems = dict(check_images(root, paths, check, memory=folder / "checked.json"))
    if not problems:
        report.unlink(missing_ok=True)
        return pairs, {"pairs": 0, "images": 0}
    write_text(report, "".join(f"{path}\t{what}\n" for path, what in problems.items()))
    good = [pair for pair in pairs if not any(image in problems for image in pair.images)]
    absent = [path for path, what in problems.items() if what == MISSING]
    broken = [path for path, what in problems.items() if what != MISSING]
    said = " and ".join(
        f"{len(names)} {word} (first {', '.join(names[:3])})"
        for names, word in ((absent, "missing"), (broken, "broken"))
        if names
    )
    lost = len(pairs) - len(good)
    summary = f"{root}: of {len(paths)} images {said}, so {lost} of {len(pairs)} pairs are lost; all are in {report}"
    if missing == "refuse" and rendered:
        from diffcap.datasets.blocks.chunks import reopen

        reopen(root, problems)
        raise DiffcapError(f"{summary}: run the same command again, which renders those images again.")
    if missing == "refuse" and not gone.issuperset(problems):
        raise DiffcapError(f"{summary}: fetch them again, or leave those pairs out with --missing skip.")
    if not good:
        raise DiffcapError(f"{summary}, and no pair is left; check the folder.")
    echo(f"skipped: {summary}.")
    return good, {"pairs": lost, "images": len(problems)}


def _show(dataset: Dataset, folder: Path) -> None:
    from rich.table import Table

    from diffcap.evaluation.tables import print_table

    table = Table(title=f"{dataset.name}: {folder / 'manifest.jsonl'}", title_justify="left")
    single = all(pair.after is None for pair in dataset.pairs)
    records, one = ("images", "an image") if single else ("pairs", "a pair")
    for column in ("split", records, "distractors", "captions", "change types"):
        table.add_column(column, justify="left" if column in ("split", "change types") else "right")
    for split in SPLITS:
        row = dataset.info["splits"][split]
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in row["change_types"].items()) or "-"
        table.add_row(split, *(f"{row[key]:,}" for key in ("pairs", "distractors", "captions")), kinds)
    info = dataset.info
    looked = "images not looked at" if info["captions_only"] else f"{info['images']:,} images, all there"
    print_table(table)
    echo(
        f"{info['pairs']:,} {records}, {info['captions_per_pair']} captions {one}, {looked}, "
        f"{info['skipped']['pairs']:,} {records} skipped",
        *_remarks(info),
    )


def _remarks(info: dict[str, Any]) -> list[str]:
    """The size beside the official one, what is duplicated, and the notes of the reader."""
    lines = []
    official, twice = info["official"], info["repetitions"]
    if official and official["state"] == "whole":
        lines.append(f"whole: every split has its official number of {official['unit']}")
    elif official:
        parts = ", ".join(f"{split} {found:,} of {all_:,}" for split, (found, all_) in official["splits"].items())
        lines.append(f"part of the official dataset: {parts} {official['unit']}; its scores compare with no paper's")
    for split, count in twice["image_pairs"].items():
        ids = official["splits"][split][0] if official and official["unit"] == "pairs" else count
        if ids > count:
            lines.append(f"{split}: {ids:,} pairs of {count:,} different image pairs")
    for key in ("image_pairs_in_two_splits", "repeated_captions", "blank_captions"):
        if twice[key]:
            lines.append(f"{key.replace('_', ' ')}: {twice[key]:,}")
    return lines + info["notes"]


def main(arguments: Sequence[str]) -> None:
    """Run the stage with its own options."""
    run(prepare, arguments)
