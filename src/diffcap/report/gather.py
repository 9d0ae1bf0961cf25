"""The results in a report: rows of runs, of files with other systems' captions and of two baselines; and the content of `report.html`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch.nn.functional import adaptive_avg_pool2d

from diffcap.datasets.registry import get_dataset
from diffcap.evaluation.baselines import Array, most_common_captions, nearest_captions, pair_vectors
from diffcap.evaluation.captions import cider_per_pair
from diffcap.evaluation.coco import read_other_predictions
from diffcap.evaluation.levir_cc import levir_protocol, levir_scoring
from diffcap.evaluation.protocols import evaluate_systems, remarks
from diffcap.evaluation.tables import caption_notes
from diffcap.features.store import FeatureStore
from diffcap.records import ChangePair, Dataset, file_hash, read_dataset, take_changes
from diffcap.report import rows
from diffcap.report.attention import NoAttentionError, collect_attention, extreme_pairs
from diffcap.report.charts import read_curves
from diffcap.report.drawing import LARGE, SMALL, Masks, choose_pairs, mask_counts, outline_thumbnails, thumbnails
from diffcap.report.page import Page, System
from diffcap.report.rows import Row, Run
from diffcap.report.table import decoding_of, zero_shot_text
from diffcap.run_folder import training_lineage
from diffcap.utils.provenance import provenance

MOST_COMMON, NEAREST = "most common training caption", "nearest neighbour's caption"
# Values per image. Maps of the `blocks` backbone (107 x 4 x 6) are kept; maps of 2048 x 7 x 7 would take 24 GB for the 60,000
# training pairs of CLEVR-Change.
MAX_VALUES = 4096


@dataclass(frozen=True)
class Results:
    """What the files of a report are made from."""

    dataset: Dataset
    folder: Path  # of the dataset, with the features
    pairs: Sequence[ChangePair]  # the scored ones
    runs: Mapping[str, Sequence[Run]]  # row -> its runs, one per seed; images and attention maps are of the first
    captions: Mapping[str, Sequence[Mapping[str, str]]]  # row, a baseline too -> id -> caption of each seed
    rows: Mapping[str, Row]  # means over the seeds
    row_of_each: Mapping[str, Sequence[Row]]  # row -> those of its seeds
    protocol: Mapping[str, Any]
    provenance: Mapping[str, Any]
    masks: Masks


def collect_results(
    folder: Path,
    split: str,
    runs: Mapping[str, Sequence[str]],
    files: Mapping[str, Sequence[str]],
    features: str | None,
    seed: int,
    remark: str | None,
) -> Results:
    """Read the runs, and score the baselines and the files of other systems by the same protocol; see `diffcap.commands.report`."""
    read = {name: [rows.read_run(place) for place in places] for name, places in runs.items()}
    dataset = read_dataset(folder)
    evaluations = [run for group in read.values() for run in group]
    protocol = (
        rows.common_protocol(evaluations, dataset, split) if evaluations else rows.default_protocol(dataset, split)
    )
    protocol.pop("ensemble", None)
    in_split = [pair for pair in dataset.pairs if pair.split == split]
    captioned = [pair for pair in in_split[: protocol.get("limit")] if pair.captions]
    pairs = take_changes(captioned, protocol.get("changes"))
    train = take_changes([pair for pair in dataset.pairs if pair.split == "train"], protocol.get("changes"))
    references = {pair.id: pair.captions for pair in pairs}
    known = [pair.id for pair in in_split]
    where = f"the {split} split of {dataset.name}"
    captions = {
        path: read_other_predictions(path, list(references), known, where) for group in files.values() for path in group
    }
    store = FeatureStore.open(folder / "features" / features) if features else None
    baselines = baseline_captions(train, pairs, store)
    levir_settings = levir_protocol(dataset.name, dataset.pairs)
    levir = levir_scoring(levir_settings, dataset.pairs) if levir_settings else None
    tokenizer, metrics = protocol["tokenizer"], protocol["metrics"]
    results = evaluate_systems({**baselines, **captions}, pairs, tokenizer, metrics, levir=levir)
    with_ptb = evaluate_systems(captions, pairs, "ptb", metrics) if captions and tokenizer != "ptb" else {}
    for name, paths in files.items():
        read[name] = []
        for path in paths:
            scores = {**results[path], "provenance": {"file": path, "sha256": file_hash(path)}}
            ptb_groups = with_ptb[path]["groups"] if with_ptb else None
            read[name].append(Run(Path(path), scores, captions[path], ptb_groups=ptb_groups))
    row_of_each = {name: [rows.run_row(run, pairs) for run in group] for name, group in read.items()}
    untrained = {"seconds": None, "steps": None}
    of_baselines = {name: rows.score_row(results[name], baselines[name], pairs) | untrained for name in baselines}

    scored = {name: results[name] for name in baselines}
    scored |= {name: group[0].metrics for name, group in read.items()}
    vocabularies = {name: one["id_tokens"]["protocol"] for name, one in scored.items() if "id_tokens" in one}
    about_runs = _remarks_on_runs(read, dataset, references)
    more = {
        "ensembles": about_runs.pop("ensembles"),
        "files": list(files),
        "remark": remark,
        "id_tokens": vocabularies,
        **about_runs,
    }
    predictions: dict[str, list[Mapping[str, str]]] = {name: [one] for name, one in baselines.items()}
    predictions |= {name: [run.predictions for run in group] for name, group in read.items()}
    return Results(
        dataset=dataset,
        folder=folder,
        pairs=pairs,
        runs=read,
        captions=predictions,
        rows=of_baselines | {name: rows.mean_row(group) for name, group in row_of_each.items()},
        row_of_each=row_of_each,
        protocol=protocol | {key: value for key, value in more.items() if value},
        provenance=provenance(
            seed=seed,
            manifest_sha256=dataset.info["manifest_sha256"],
            features=features,
            runs={name: [_origin(run) for run in group] for name, group in read.items()},
        ),
        masks=Masks(dataset.root),
    )


def _remarks_on_runs(
    runs: Mapping[str, Sequence[Run]], dataset: Dataset, references: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, Any]]:
    """Entries of the protocol by row: which are ensembles, what to know of the captions, and origins without training."""
    ensembles = {}
    notes = {}
    zero_shot = {}
    for name, group in runs.items():
        metrics = group[0].metrics
        if count := metrics["protocol"].get("ensemble"):
            ensembles[name] = count
        found = list(dict.fromkeys(note for run in group for note in caption_notes(run.predictions, references)))
        poor = get_dataset(dataset.name).features_note(metrics["provenance"].get("features"))
        if texts := [*found, *([f"{poor}."] if poor else [])]:
            notes[name] = texts
        if origin := rows.zero_shot_origin(group[0]):
            zero_shot[name] = origin
    return {"ensembles": ensembles, "notes": notes, "zero_shot": zero_shot}


def _origin(run: Run) -> dict[str, Any]:
    notes = run.metrics["provenance"]
    if "file" in notes:  # of another system
        return dict(notes)
    entries = {key: notes.get(key) for key in ("method", "seed", "step", "commit")}
    return {"folder": str(run.folder), **entries, **rows.zero_shot_origin(run)}


def baseline_captions(
    train: Sequence[ChangePair], test: Sequence[ChangePair], store: FeatureStore | None
) -> dict[str, dict[str, str]]:
    """{`MOST_COMMON`: id -> caption, `NEAREST`: id -> caption} of the test pairs; the second only with features."""
    captioned = [pair for pair in train if pair.captions]
    common = most_common_captions(captioned, test)
    if store is None:
        return {MOST_COMMON: common}
    nearest = nearest_captions(captioned, describe_pairs(store, captioned), test, describe_pairs(store, test))
    return {MOST_COMMON: common, NEAREST: nearest}


def describe_pairs(store: FeatureStore, pairs: Sequence[ChangePair], chunk: int = 256) -> Array:
    """One vector for each of N pairs, see `pair_vectors`, of maps (C, H, W) pooled to about `MAX_VALUES` values or fewer.

    Channels are not pooled: with more channels than `MAX_VALUES`, one position is left.

    Returns:
        (N, 2D) float16: 230 MB for 20,000 pairs of the embedded dataset.
    """
    sides = [store.rows([getattr(pair, side) for pair in pairs]) for side in ("before", "after")]
    channels, height, width = store.shape
    scale = min(1.0, math.sqrt(MAX_VALUES / (channels * height * width)))
    grid = max(1, int(height * scale)), max(1, int(width * scale))
    vectors = np.empty((len(pairs), 2 * channels * grid[0] * grid[1]), dtype=np.float16)
    for start in range(0, len(pairs), chunk):
        part = slice(start, start + chunk)
        maps = [torch.from_numpy(store.read(side[part])).float() for side in sides]
        before, after = (adaptive_avg_pool2d(of_side, grid).numpy() for of_side in maps)
        vectors[part] = pair_vectors(before, after)
    return vectors


def gather_page(
    results: Results, viewpoint: Mapping[str, Any] | None, max_pairs: int, attention_pairs: int, seed: int
) -> Page:
    """Collect the content of the page.

    Args:
        viewpoint: result of `viewpoint_scores`.
        attention_pairs: number of pairs with attention maps, which localisation is measured on; the pairs at the extremes of
            each order are added.
    """
    dataset = results.dataset
    protocol = results.protocol
    listed = list(results.pairs)
    if len(listed) > max_pairs:
        kept = set(Random(seed).sample(range(len(listed)), max_pairs))
        listed = [pair for number, pair in enumerate(listed) if number in kept]
    references = {pair.id: pair.captions for pair in results.pairs}
    captions = {name: {id: group[0].predictions[id] for id in references} for name, group in results.runs.items()}
    all_scores = cider_per_pair(captions, references, protocol["tokenizer"])  # document frequencies of all pairs
    scores = {name: {pair.id: by_id[pair.id] for pair in listed} for name, by_id in all_scores.items()}
    with_pictures = not dataset.info.get("captions_only")
    measured = choose_pairs(listed, attention_pairs, seed) if attention_pairs and with_pictures else []
    measured_ids = [pair.id for pair in measured]
    extremes = set(extreme_pairs(scores)) - set(measured_ids) if measured else set()
    inspected = [*measured, *(pair for pair in listed if pair.id in extremes)]
    frames = {path: SMALL for pair in listed for path in pair.images} if with_pictures else {}
    frames |= {path: LARGE for pair in inspected for path in pair.images}
    ranges = {path: values for pair in listed for path, values in pair.ranges.items()}
    pictures = thumbnails(dataset.root, frames, ranges)
    sizes = {path: (one.width, one.height) for path, one in pictures.items() if one}
    outlines = outline_thumbnails(results.masks, listed, sizes, frames)
    systems = {}
    for name, group in results.runs.items():
        attention: dict[str, Any] = {}
        localisation, no_attention = None, None
        if inspected:
            try:
                attention, localisation = collect_attention(
                    group[0].checkpoints, results.folder, inspected, captions[name], measured_ids, sizes, results.masks
                )
            except NoAttentionError as error:
                no_attention = str(error)
        lineages = [training_lineage(path) for run in group for path in run.checkpoints]
        curves = [read_curves(*lineage) for lineage in lineages]
        metadata = [(name, _run_text(run)) for run in group]
        if len(group) > 1:
            metadata[0] = (name, f"{metadata[0][1]}, the captions and attention maps below are this run's")
        systems[name] = System(
            captions[name], scores[name], attention, no_attention, localisation or None, curves, metadata
        )
    with_ptb = {name: [run.ptb_groups for run in group if run.ptb_groups] for name, group in results.runs.items()}
    second = {}
    all_have_ptb = all(len(with_ptb[name]) == len(group) for name, group in results.runs.items())
    if protocol["tokenizer"] != "ptb" and all_have_ptb:
        second["total, PTB tokens"] = {name: rows.mean_row(groups) for name, groups in with_ptb.items()}
    texts = f"{len(results.pairs):,} scored"
    if len(listed) < len(results.pairs):
        texts += f", {len(listed):,} of them, a random sample, in the list"
    if inspected and any(system.attention for system in systems.values()):
        texts += f", {len(inspected):,} with attention maps"
    manifest = dataset.info["manifest_sha256"]
    notes = results.provenance
    metadata = [
        ("dataset", f"{dataset.name}, {protocol['split']} split, {remarks(protocol)}manifest {manifest}"),
        ("pairs", texts),
        ("metrics", f"{', '.join(protocol['metrics'])}; {protocol['tokenizer']} tokens; {decoding_of(protocol)}"),
        *([("features", str(notes["features"]))] if notes.get("features") else []),
        ("versions", ", ".join(f"{name} {version}" for name, version in notes["versions"].items())),
        ("commit", str(notes.get("commit"))),
    ]
    return Page(
        protocol=protocol,
        rows=results.rows,
        systems=systems,
        pairs=listed,
        pictures=pictures,
        outlines=outlines,
        masks=mask_counts(results.masks, measured, sizes),
        viewpoint=viewpoint,
        second=second,
        metadata=metadata,
    )


def _run_text(run: Run) -> str:
    notes = run.metrics["provenance"]
    known = [key for key in ("method", "seed", "step", "commit", "sha256") if notes.get(key) is not None]
    parts = [str(run.folder), *(f"{key} {notes[key]}" for key in known)]
    if untrained := rows.zero_shot_origin(run):
        parts.append(f"without training: {zero_shot_text(untrained)}")
    return ", ".join(parts)
