"""`diffcap audit`: find pairs whose change flag, captions, mask and images contradict each other."""

import filecmp
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from diffcap.datasets.no_change import is_no_change
from diffcap.evaluation.tables import print_table
from diffcap.records import SPLITS, ChangePair, JsonDict, read_dataset, write_text
from diffcap.utils.console import echo
from diffcap.utils.errors import DiffcapError
from diffcap.utils.image_io import read_image
from diffcap.utils.progress import progress_bar
from diffcap.utils.table import Cell, Table

AUDIT_FILENAME = "audit.jsonl"

# The contradictions for which a pair is listed, in the order of the rows of the printed table.
ALL_CAPTIONS = "change, but all captions say that nothing changed"
SOME_CAPTIONS = "change, but some captions say that nothing changed"
CHANGE_CAPTION = "no change, but a caption describes a change"
EMPTY_MASK = "change, but the mask is empty"
FILLED_MASK = "no change, but the mask is not empty"
EQUAL_IMAGES = "change, but both image files are equal"
REASONS = (ALL_CAPTIONS, SOME_CAPTIONS, CHANGE_CAPTION, EMPTY_MASK, FILLED_MASK, EQUAL_IMAGES)


def audit(dataset: str | None = None, folder: Path | None = None) -> None:
    """Print the pairs of a dataset whose change flag, captions, mask and images contradict each other. Write them to audit.jsonl.

    The change flag of a pair is its entry `changeflag` in the manifest: 1 for a change, 0 for no change. A pair without this entry has a
    change, unless the manifest marks the pair as a distractor (a pair without change).

    Args:
        dataset: Name of the dataset; the data stage must have prepared it.
        folder: Folder of the dataset's manifest.jsonl; data/<dataset> by default.
    """
    if folder is None and dataset is None:
        raise DiffcapError("--dataset is missing; give its name, or the folder of its manifest as --folder.")
    folder = folder or Path(f"data/{dataset}")
    prepared_dataset = read_dataset(folder)
    pairs = prepared_dataset.pairs
    if dataset not in (None, prepared_dataset.name):
        raise DiffcapError(f"{folder}: holds {prepared_dataset.name}, not {dataset}; give the folder of {dataset}.")
    rows, unchecked = find_contradictions(pairs, prepared_dataset.root)
    origin = prepared_dataset.info.get("change_types")  # how the data stage derived types and flags, or None
    if origin and not any("changeflag_derived" in pair.extra for pair in pairs):  # no flag is derived from captions
        unchecked.append(f"the flags: they are {origin}, so that only captions that disagree are found")
    echo(*(f"{row['split']} {row['id']}: {'; '.join(row['reasons'])}" for row in rows))
    write_text(folder / AUDIT_FILENAME, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    has_masks = any("mask" in pair.extra for pair in pairs)
    counts = Counter((row["split"], reason) for row in rows for reason in row["reasons"])
    lines = []
    for reason in REASONS:
        if has_masks or reason not in (EMPTY_MASK, FILLED_MASK):
            split_counts = [counts[split, reason] for split in SPLITS]
            lines.append(([reason], [Cell(f"{count:,}") for count in (*split_counts, sum(split_counts))]))
    print_table(Table([*SPLITS, "total"], lines, ["reason"], f"{prepared_dataset.name}: contradictions, in pairs"))
    echo(
        *(f"not checked: {text}" for text in unchecked),
        f"{len(rows):,} of {len(pairs):,} pairs have a contradiction, {folder / AUDIT_FILENAME}",
    )


def find_contradictions(pairs: Sequence[ChangePair], root: Path) -> tuple[list[JsonDict], list[str]]:
    """Compare the change flag of each pair (`is_distractor`) with its captions, its mask and its images.

    Returns:
        The rows of audit.jsonl: the pairs with contradictions, "reasons" of `REASONS`, and the captions that contradict the change flag;
        and a list of what could not be checked, such as "3 of 9 pairs without a mask".
    """
    if any(pair.after is None for pair in pairs):
        raise DiffcapError(f"{root}: holds single images, which have no change; audit a dataset of pairs.")
    if not any(pair.is_distractor or "changeflag" in pair.extra for pair in pairs):
        raise DiffcapError(
            f"{root}: the dataset does not mark the pairs without change, so that there is nothing to compare; audit another one."
        )
    rows: list[JsonDict] = []
    num_without = Counter[str]()  # what a pair lacks, such as "a mask" -> number of pairs that lack it
    released_flag = (
        "a flag in the dataset's files; it is derived from the captions, so that only captions that disagree are found"
    )
    with progress_bar("auditing pairs", len(pairs)) as advance:
        for pair in pairs:
            captions = [caption for caption in pair.captions if is_no_change(caption) != pair.is_distractor]
            reasons = []
            if captions and pair.is_distractor:
                reasons.append(CHANGE_CAPTION)
            elif captions:
                reasons.append(ALL_CAPTIONS if len(captions) == len(pair.captions) else SOME_CAPTIONS)
            is_mask_empty = has_equal_images = None  # None: not known
            with suppress(DiffcapError):
                mask = pair.extra.get("mask")
                is_mask_empty = read_image(root / mask).image.getbbox() is None if mask else None
            with suppress(OSError):
                has_equal_images = filecmp.cmp(root / pair.before, root / str(pair.after), shallow=False)
            num_without["captions"] += not pair.captions
            num_without["a mask" if "mask" not in pair.extra else "a readable mask"] += is_mask_empty is None
            num_without["both images"] += has_equal_images is None
            num_without[released_flag] += "changeflag_derived" in pair.extra  # derived from the captions
            if is_mask_empty is not None and is_mask_empty != pair.is_distractor:
                reasons.append(EMPTY_MASK if is_mask_empty else FILLED_MASK)
            if has_equal_images and not pair.is_distractor:
                reasons.append(EQUAL_IMAGES)
            if reasons:
                flag = {"id": pair.id, "split": pair.split, "changeflag": int(not pair.is_distractor)}
                paths = {"before": pair.before, "after": pair.after, "mask": pair.extra.get("mask")}
                rows.append({**flag, "reasons": reasons, "captions": captions, **paths})
            advance(1)
    unchecked = [f"{count:,} of {len(pairs):,} pairs without {thing}" for thing, count in num_without.items() if count]
    return rows, unchecked
