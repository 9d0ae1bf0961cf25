"""Readers of the datasets.

A reader is a function `read(folder) -> list[ChangePair]`. It returns every pair of the dataset in an order that depends only on the content
of the files. The image paths of the pairs are relative to `folder`. A new dataset needs a reader and an entry in `registry.BUILT_IN`. If
the authors of the dataset publish the sizes of the splits, it also needs an entry in `official.OFFICIAL`.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from diffcap.datasets.checks import check_relative_path
from diffcap.datasets.official import compare_sizes, count_repetitions
from diffcap.datasets.registry import get_dataset
from diffcap.records import ChangePair, is_blank
from diffcap.registry import import_object
from diffcap.text.characters import split_characters, uses_characters
from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import existing_path

CHARACTERS_NOTE = (
    "the words of the captions are single characters, because their script, such as Chinese, has no blanks between words; published "
    "scores count words"
)


def read_pairs(dataset: str, folder: str | Path, augmented: bool = False) -> list[ChangePair]:
    """Read the pairs of `dataset` from its files in `folder`, and check the rules that hold for every dataset, such as distinct ids.

    If `registry.datasets()` has no entry with the name `dataset`, this is a user's own dataset, which `diffcap.datasets.pairs` reads.
    Training pairs that the authors made by augmentation are left out, unless `augmented` is True. Captions in a script without blanks
    between words are split into characters.
    """
    folder, spec = Path(folder), get_dataset(dataset)
    if folder.is_file():
        raise DiffcapError(f"{folder}: a file, not a folder; extract it if it is an archive, and give the folder.")
    if not folder.is_dir():
        raise DiffcapError(f"{folder}: no such folder; give the folder that holds the files of {dataset}.")
    if augmented and not spec.augmented:
        raise DiffcapError(f"--augmented is for second_cc, and {dataset} has no augmented views; omit the option.")
    pairs: list[ChangePair] = import_object(spec.reader)(folder, **({"augmented": True} if augmented else {}))
    _check_pairs(pairs, folder, spec.blank_captions)

    if uses_characters(caption for pair in pairs for caption in pair.captions):
        pairs = [replace(pair, captions=list(map(split_characters, pair.captions))) for pair in pairs]

    def on_disk(path: str) -> str:  # the disk may have "é" as two Unicode characters
        return path if path.isascii() else existing_path(folder / path).relative_to(folder).as_posix()

    for index, pair in enumerate(pairs):
        if "mask" in pair.extra:
            pair.extra["mask"] = on_disk(pair.extra["mask"])
        pairs[index] = replace(pair, before=on_disk(pair.before), after=pair.after and on_disk(pair.after))
    return pairs


def describe(dataset: str, pairs: list[ChangePair], folder: Path, has_skipped_pairs: bool = False) -> dict[str, Any]:
    """Return entries of `dataset.json`, which the data stage writes: sizes, repetitions, remarks, and `DatasetSpec.info`.

    `has_skipped_pairs` is True if pairs with missing images were removed from `pairs`.
    """
    spec, num_by_key = get_dataset(dataset), Counter(key for pair in pairs for key in pair.extra)
    num_masks = f"{num_by_key['mask']:,}" + (f" of {len(pairs):,}" if num_by_key["mask"] < len(pairs) else "")
    notes = {
        "augmented": f"{num_by_key['augmented']:,} augmented training views",
        "changeflag_derived": f"{num_by_key['changeflag_derived']:,} pairs have no changeflag; it is derived from their captions",
        "mask": f"{num_masks} pairs have a mask of the change",
    }
    captions = [caption for pair in pairs for caption in pair.captions]
    return {
        "official": compare_sizes(dataset, pairs, folder, has_skipped_pairs),
        "repetitions": count_repetitions(pairs),
        "notes": [
            *(note for key, note in notes.items() if num_by_key[key]),
            *(import_object(spec.notes)(pairs) if spec.notes else []),
            *([CHARACTERS_NOTE] if uses_characters(captions) else []),
        ],
        **spec.info,
    }


def _check_pairs(pairs: list[ChangePair], folder: Path, allows_blank_captions: bool) -> None:
    if not pairs:
        raise DiffcapError(f"{folder}: the files there name no pair; check that they are complete.")
    split_of_id: dict[str, str] = {}
    for pair in pairs:
        if pair.id in split_of_id:
            raise DiffcapError(
                f"{folder}: id {pair.id!r} is duplicated (in {split_of_id[pair.id]} and {pair.split}); keep one of the two pairs."
            )
        split_of_id[pair.id] = pair.split
        for path in (*pair.images, pair.extra.get("mask", pair.before)):
            check_relative_path(path, f"{folder}, the pair {pair.id!r:.60}")
        if pair.split == "train" and not pair.captions and "class" not in pair.extra:
            raise DiffcapError(f"{folder}: the training pair {pair.id!r} has no caption; add one or remove the pair.")
        if not allows_blank_captions and any(map(is_blank, pair.captions)):
            raise DiffcapError(f"{folder}: the pair {pair.id!r} has a blank caption; write its text or remove it.")
