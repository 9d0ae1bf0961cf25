"""Readers: official files in, manifest records out.

A reader is a function `read(folder) -> list[ChangePair]`: every pair of the dataset, in an order that depends on the files' content
alone, image paths relative to `folder`. The data stage opens the images (`diffcap.datasets.images`). A new dataset is a reader, an entry
in `registry`, and one in `official.OFFICIAL` where its authors say its sizes.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from diffcap.datasets.checks import check_inside
from diffcap.datasets.official import compare, repetitions
from diffcap.datasets.registry import get_dataset
from diffcap.records import ChangePair, is_blank
from diffcap.registry import import_object
from diffcap.text.vocabulary import missing_blanks
from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import existing_path


def read_pairs(dataset: str, folder: str | Path, augmented: bool = False) -> list[ChangePair]:
    """Read the official files of `dataset` in `folder`, and check what no dataset may break.

    `dataset` is a name in `registry.datasets()`, or any other name for one's own dataset (`diffcap.datasets.pairs`); `augmented`: whether
    to keep the augmented training views of a dataset that has them.
    """
    folder, spec = Path(folder), get_dataset(dataset)
    if folder.is_file():
        raise DiffcapError(f"{folder}: a file, not a folder; extract it if it is an archive, and give its folder.")
    if not folder.is_dir():
        raise DiffcapError(f"{folder}: no such folder; give the one that holds the files of {dataset}.")
    if augmented and not spec.augmented:
        raise DiffcapError(f"--augmented is for second_cc, and {dataset} has no augmented views; omit the option.")
    pairs: list[ChangePair] = import_object(spec.reader)(folder, **({"augmented": True} if augmented else {}))
    _check(pairs, folder, spec.blank_captions)
    return [_with_names_on_disk(pair, folder) for pair in pairs]


def _with_names_on_disk(pair: ChangePair, folder: Path) -> ChangePair:
    """A pair whose files have the names of the disk, which may have another Unicode normal form than those in the file of pairs."""

    def name(path: str) -> str:
        return path if path.isascii() else existing_path(folder / path).relative_to(folder).as_posix()

    extra = {**pair.extra, "mask": name(pair.extra["mask"])} if "mask" in pair.extra else pair.extra
    return replace(pair, before=name(pair.before), after=pair.after and name(pair.after), extra=extra)


def describe(
    dataset: str, pairs: list[ChangePair], folder: str | Path, has_skipped_pairs: bool = False
) -> dict[str, Any]:
    """What `dataset.json` says of a dataset's files beside the counts: "official" and "repetitions" (see `official`), "notes", `info`."""
    spec, having = get_dataset(dataset), Counter(key for pair in pairs for key in pair.extra)
    masks = f"{having['mask']:,}" if having["mask"] == len(pairs) else f"{having['mask']:,} of {len(pairs):,}"
    notes = {
        "augmented": f"{having['augmented']:,} augmented training views",
        "changeflag_derived": f"{having['changeflag_derived']:,} pairs have no changeflag; it is derived from their captions",
        "mask": f"{masks} pairs have a mask of the change",
    }
    blanks = missing_blanks(caption for pair in pairs for caption in pair.captions)
    return {
        "official": compare(dataset, pairs, Path(folder), has_skipped_pairs),
        "repetitions": repetitions(pairs),
        "notes": [
            *(note for key, note in notes.items() if having[key]),
            *(import_object(spec.notes)(pairs) if spec.notes else []),
            *([blanks] if blanks else []),
        ],
        **spec.info,
    }


def _check(pairs: list[ChangePair], folder: Path, blanks: bool) -> None:
    if not pairs:
        raise DiffcapError(f"{folder}: the files there name no pair; check that they are whole.")
    seen: dict[str, str] = {}
    for pair in pairs:
        if pair.id in seen:
            raise DiffcapError(
                f"{folder}: id {pair.id!r} is duplicated (in {seen[pair.id]} and {pair.split}); keep one of the two pairs."
            )
        seen[pair.id] = pair.split
        for path in (*pair.images, *([pair.extra["mask"]] if "mask" in pair.extra else [])):
            check_inside(path, f"{folder}, the pair {pair.id!r:.60}")
        if pair.split == "train" and not pair.captions and "class" not in pair.extra:
            raise DiffcapError(f"{folder}: the training pair {pair.id!r} has no caption; give it one or take it out.")
        if not blanks and any(map(is_blank, pair.captions)):
            raise DiffcapError(f"{folder}: the pair {pair.id!r} has a blank caption; fill it or take it out.")
