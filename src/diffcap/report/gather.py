"""The content of `report.html`, from the runs' folders and the dataset."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from diffcap.evaluation.captions import cider_per_pair
from diffcap.evaluation.protocols import remarks
from diffcap.records import ChangePair, Dataset
from diffcap.report.attention import collect_attention, extreme_pairs
from diffcap.report.curves import read_curves
from diffcap.report.drawing import LARGE, SMALL, thumbnails
from diffcap.report.masks import Masks, mask_counts, outline_thumbnails
from diffcap.report.page import Page, System
from diffcap.report.pictures import choose_pairs
from diffcap.report.rows import Run, mean_row, zero_shot_origin
from diffcap.report.table import Rows, decoding_of, zero_shot_text

_RUN_NOTES = ("method", "seed", "step", "commit", "sha256")  # the last: of the file of another system


def gather(
    dataset: Dataset,
    folder: Path,
    test: Sequence[ChangePair],
    runs: Mapping[str, Sequence[Run]],
    rows: Rows,
    protocol: Mapping[str, Any],
    notes: Mapping[str, Any],
    viewpoint: Mapping[str, Any] | None,
    max_pairs: int,
    attention_pairs: int,
    seed: int,
    masks: Masks,
) -> Page:
    """Collect the content of the page.

    Args:
        folder: the dataset's, with the features. test: the scored pairs. runs: row -> its runs, one per seed; captions and
            attention maps are those of the first. rows: the results table. notes: provenance. viewpoint: result of
            `viewpoint_scores`.
        max_pairs: pairs to list; of more pairs, a random sample. attention_pairs: number of these with attention maps, which
            localisation is measured on; the pairs at the extremes of each order are added. seed: of both samples.
        masks: of the dataset; collects what is wrong with them.
    """
    listed = list(test)
    if len(test) > max_pairs:
        kept = set(Random(seed).sample(range(len(test)), max_pairs))
        listed = [pair for number, pair in enumerate(test) if number in kept]
    references = {pair.id: pair.captions for pair in test}
    captions = {name: {id: group[0].predictions[id] for id in references} for name, group in runs.items()}
    scores = cider_per_pair(captions, references, protocol["tokenizer"])  # document frequencies of all pairs
    ids = {pair.id for pair in listed}
    scores = {name: {id: score for id, score in by_id.items() if id in ids} for name, by_id in scores.items()}
    with_pictures = not dataset.info.get("captions_only")
    measured = choose_pairs(listed, attention_pairs, seed) if attention_pairs and with_pictures else []
    extremes = set(extreme_pairs(scores)) if measured else set()
    inspected = [*measured, *(pair for pair in listed if pair.id in extremes - {pair.id for pair in measured})]
    frames = {path: SMALL for pair in listed for path in pair.images} if with_pictures else {}
    frames |= {path: LARGE for pair in inspected for path in pair.images}
    ranges = {path: values for pair in listed for path, values in pair.ranges.items()}
    pictures = thumbnails(dataset.root, frames, ranges)
    sizes = {path: (one.width, one.height) for path, one in pictures.items() if one}
    outlines = outline_thumbnails(masks, listed, sizes, frames)
    systems = {}
    for name, group in runs.items():
        found: Any = ({}, None)
        if inspected:
            found = collect_attention(
                group[0].checkpoints, folder, inspected, captions[name], [pair.id for pair in measured], sizes, masks
            )
        systems[name] = System(
            captions=captions[name],
            scores=scores[name],
            attention={} if isinstance(found, str) else found[0],
            no_attention=found if isinstance(found, str) else None,
            localisation=None if isinstance(found, str) or not found[1] else found[1],
            curves=[read_curves(*lineage) for run in group for lineage in run.lineages],
            metadata=_run_metadata(name, group),
        )
    with_ptb = {name: [run.ptb_groups for run in group if run.ptb_groups] for name, group in runs.items()}
    second = {}
    if protocol["tokenizer"] != "ptb" and all(len(with_ptb[name]) == len(group) for name, group in runs.items()):
        second["total, PTB tokens"] = {name: mean_row(groups) for name, groups in with_ptb.items()}
    return Page(
        dataset=dataset.name,
        split=protocol["split"],
        protocol=protocol,
        rows=rows,
        systems=systems,
        pairs=listed,
        pictures=pictures,
        outlines=outlines,
        masks=mask_counts(masks, measured, sizes),
        viewpoint=viewpoint,
        second=second,
        metadata=_metadata(
            dataset, test, listed, inspected if any(one.attention for one in systems.values()) else [], protocol, notes
        ),
    )


def _run_metadata(name: str, group: Sequence[Run]) -> list[tuple[str, str]]:
    entries = []
    for number, run in enumerate(group):
        notes = run.metrics["provenance"]
        parts = [
            str(run.folder),
            *(f"{key} {notes[key]}" for key in _RUN_NOTES if notes.get(key) is not None),
        ]
        if untrained := zero_shot_origin(run):
            parts.append(f"without training: {zero_shot_text(untrained)}")
        if len(group) > 1 and number == 0:
            parts.append("the captions and attention maps below are this run's")
        entries.append((name, ", ".join(parts)))
    return entries


def _metadata(
    dataset: Dataset,
    test: Sequence[ChangePair],
    listed: Sequence[ChangePair],
    inspected: Sequence[ChangePair],
    protocol: Mapping[str, Any],
    notes: Mapping[str, Any],
) -> list[tuple[str, str]]:
    pairs = f"{len(test):,} scored"
    if len(listed) < len(test):
        pairs += f", {len(listed):,} of them, a random sample, in the list"
    if inspected:
        pairs += f", {len(inspected):,} with attention maps"
    versions = ", ".join(f"{name} {version}" for name, version in notes["versions"].items())
    return [
        (
            "dataset",
            f"{dataset.name}, {protocol['split']} split, {remarks(protocol)}manifest {dataset.info['manifest_sha256']}",
        ),
        ("pairs", pairs),
        ("metrics", f"{', '.join(protocol['metrics'])}; {protocol['tokenizer']} tokens; {decoding_of(protocol)}"),
        *([("features", str(notes["features"]))] if notes.get("features") else []),
        ("versions", versions),
        ("commit", str(notes.get("commit"))),
    ]
