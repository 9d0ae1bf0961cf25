"""Collect the results of a report: rows of runs, of other systems' captions and of two baselines; and the content of `report.html`."""

import itertools
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
from diffcap.evaluation.protocols import evaluate_systems, remarks
from diffcap.evaluation.remote_sensing import levir_protocol, levir_scoring
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
MAX_VALUES = 4096  # features per image for the nearest neighbour; 2048 x 7 x 7 of 60,000 pairs would take 24 GB


@dataclass(frozen=True)
class Results:
    """The data from which the files of a report are made. Runs have the name of their row in the table."""

    dataset: Dataset
    folder: Path  # folder of the dataset, with the features
    pairs: Sequence[ChangePair]  # the scored pairs
    runs: Mapping[str, Sequence[Run]]  # name -> one run per seed; images and attention maps are of the first
    captions: Mapping[str, Sequence[Mapping[str, str]]]  # name of a run or a baseline -> id -> caption, for each seed
    rows: Mapping[str, Row]  # name -> mean over the seeds
    run_rows: Mapping[str, Sequence[Row]]  # name -> row of each seed
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
    all_runs = {name: [rows.read_run(path) for path in paths] for name, paths in runs.items()}
    dataset = read_dataset(folder)
    if all_runs:
        protocol = rows.common_protocol([run for group in all_runs.values() for run in group], dataset, split)
    else:
        protocol = rows.default_protocol(dataset, split)
    protocol.pop("ensemble", None)
    in_split = [pair for pair in dataset.pairs if pair.split == split]
    captioned = [pair for pair in in_split[: protocol.get("limit")] if pair.captions]
    pairs = take_changes(captioned, protocol.get("changes"))
    train = take_changes([pair for pair in dataset.pairs if pair.split == "train"], protocol.get("changes"))
    references = {pair.id: pair.captions for pair in pairs}
    split_ids = [pair.id for pair in in_split]
    where = f"the {split} split of {dataset.name}"
    captions = {}
    for path in itertools.chain.from_iterable(files.values()):
        captions[path] = read_other_predictions(path, list(references), split_ids, where)
    store = FeatureStore.open(folder / "features" / features) if features else None
    baselines = baseline_captions(train, pairs, store)
    levir_settings = levir_protocol(dataset.name, dataset.pairs)
    levir = levir_scoring(levir_settings, dataset.pairs) if levir_settings else None
    tokenizer, metrics = protocol["tokenizer"], protocol["metrics"]
    results = evaluate_systems({**baselines, **captions}, pairs, tokenizer, metrics, levir=levir)
    with_ptb = evaluate_systems(captions, pairs, "ptb", metrics) if captions and tokenizer != "ptb" else {}
    for name, paths in files.items():
        all_runs[name] = []
        for path in paths:
            scores = {**results[path], "provenance": {"file": path, "sha256": file_hash(path)}}
            ptb_groups = with_ptb[path]["groups"] if with_ptb else None
            all_runs[name].append(Run(Path(path), scores, captions[path], ptb_groups=ptb_groups))
    run_rows = {name: [rows.run_row(run, pairs) for run in group] for name, group in all_runs.items()}
    untrained = {"seconds": None, "steps": None}
    table_rows = {name: rows.score_row(results[name], baselines[name], pairs) | untrained for name in baselines}
    table_rows |= {name: rows.mean_row(group) for name, group in run_rows.items()}
    scored = {name: results[name] for name in baselines}
    scored |= {name: group[0].metrics for name, group in all_runs.items()}
    vocabularies = {name: scores["id_tokens"]["protocol"] for name, scores in scored.items() if "id_tokens" in scores}
    ensembles, notes, zero_shot = _describe_runs(all_runs, dataset, references)
    entries = {"ensembles": ensembles, "files": list(files), "remark": remark, "id_tokens": vocabularies}
    entries |= {"notes": notes, "zero_shot": zero_shot}
    predictions: dict[str, list[Mapping[str, str]]] = {name: [by_id] for name, by_id in baselines.items()}
    predictions |= {name: [run.predictions for run in group] for name, group in all_runs.items()}
    return Results(
        dataset=dataset,
        folder=folder,
        pairs=pairs,
        runs=all_runs,
        captions=predictions,
        rows=table_rows,
        run_rows=run_rows,
        protocol=protocol | {key: value for key, value in entries.items() if value},
        provenance=provenance(
            seed=seed,
            manifest_sha256=dataset.info["manifest_sha256"],
            features=features,
            runs={name: [_origin(run) for run in group] for name, group in all_runs.items()},
        ),
        masks=Masks(dataset.root),
    )


def _describe_runs(
    runs: Mapping[str, Sequence[Run]], dataset: Dataset, references: Mapping[str, Sequence[str]]
) -> tuple[dict[str, int], dict[str, list[str]], dict[str, dict[str, Any]]]:
    """Return by name: the number of members of ensembles, notes on the captions, and the origin of models without training."""
    ensembles = {}
    notes = {}
    zero_shot = {}
    for name, group in runs.items():
        metrics = group[0].metrics
        if count := metrics["protocol"].get("ensemble"):
            ensembles[name] = count
        run_notes = [note for run in group for note in caption_notes(run.predictions, references)]
        if features_note := get_dataset(dataset.name).features_note(metrics["provenance"].get("features")):
            run_notes.append(f"{features_note}.")
        if run_notes:
            notes[name] = list(dict.fromkeys(run_notes))
        if origin := rows.zero_shot_origin(group[0]):
            zero_shot[name] = origin
    return ensembles, notes, zero_shot


def _origin(run: Run) -> dict[str, Any]:
    origin = run.metrics["provenance"]
    if "file" in origin:  # the captions of another system
        return dict(origin)
    entries = {key: origin.get(key) for key in ("method", "seed", "step", "commit")}
    return {"folder": str(run.folder), **entries, **rows.zero_shot_origin(run)}


def baseline_captions(
    train: Sequence[ChangePair], test: Sequence[ChangePair], store: FeatureStore | None
) -> dict[str, dict[str, str]]:
    """Caption the test pairs: {`MOST_COMMON`: id -> caption} and, with features, {`NEAREST`: id -> caption}."""
    captioned = [pair for pair in train if pair.captions]
    common = most_common_captions(captioned, test)
    if store is None:
        return {MOST_COMMON: common}
    nearest = nearest_captions(captioned, describe_pairs(store, captioned), test, describe_pairs(store, test))
    return {MOST_COMMON: common, NEAREST: nearest}


def describe_pairs(store: FeatureStore, pairs: Sequence[ChangePair], chunk: int = 256) -> Array:
    """Compute the `pair_vectors` of N pairs from maps (C, H, W), whose positions are pooled to about `MAX_VALUES` values.

    Returns:
        (N, 2D) float16, D = C h w after pooling: 230 MB for 20,000 pairs of the embedded dataset.
    """
    sides = [store.rows([getattr(pair, side) for pair in pairs]) for side in ("before", "after")]
    channels, height, width = store.shape
    scale = min(1.0, math.sqrt(MAX_VALUES / (channels * height * width)))
    grid = max(1, int(height * scale)), max(1, int(width * scale))
    vectors = np.empty((len(pairs), 2 * channels * grid[0] * grid[1]), dtype=np.float16)
    for start in range(0, len(pairs), chunk):
        part = slice(start, start + chunk)
        maps = [torch.from_numpy(store.read(side[part])).float() for side in sides]
        before, after = (adaptive_avg_pool2d(side_maps, grid).numpy() for side_maps in maps)
        vectors[part] = pair_vectors(before, after)
    return vectors


def gather_page(
    results: Results, viewpoint: Mapping[str, Any] | None, max_pairs: int, attention_pairs: int, seed: int
) -> Page:
    """Collect the content of the page.

    Args:
        viewpoint: result of `viewpoint_scores`.
        attention_pairs: number of pairs for the localisation; attention maps are also computed for `extreme_pairs`.
    """
    dataset = results.dataset
    protocol = results.protocol
    listed = list(results.pairs)
    if len(listed) > max_pairs:
        indices = Random(seed).sample(range(len(listed)), max_pairs)
        listed = [listed[index] for index in sorted(indices)]
    references = {pair.id: pair.captions for pair in results.pairs}
    captions = {name: {id: group[0].predictions[id] for id in references} for name, group in results.runs.items()}
    all_scores = cider_per_pair(captions, references, protocol["tokenizer"])  # document frequencies of all pairs
    scores = {name: {pair.id: by_id[pair.id] for pair in listed} for name, by_id in all_scores.items()}
    has_images = not dataset.info.get("captions_only")
    measured = choose_pairs(listed, attention_pairs, seed) if attention_pairs and has_images else []
    measured_ids = [pair.id for pair in measured]
    extremes = set(extreme_pairs(scores)) - set(measured_ids) if measured else set()
    with_maps = [*measured, *(pair for pair in listed if pair.id in extremes)]
    frames = {path: SMALL for pair in listed for path in pair.images} if has_images else {}
    frames |= {path: LARGE for pair in with_maps for path in pair.images}
    ranges = {path: value_range for pair in listed for path, value_range in pair.ranges.items()}
    pictures = thumbnails(dataset.root, frames, ranges)
    sizes = {path: (picture.width, picture.height) for path, picture in pictures.items() if picture}
    outlines = outline_thumbnails(results.masks, listed, sizes, frames)
    systems = {}
    for name, group in results.runs.items():
        attention: dict[str, Any] = {}
        localisation, no_attention = None, None
        if with_maps:
            try:
                attention, localisation = collect_attention(
                    group[0].checkpoints, results.folder, with_maps, captions[name], measured_ids, sizes, results.masks
                )
            except NoAttentionError as error:
                no_attention = str(error)
        lineages = [training_lineage(path) for run in group for path in run.checkpoints]
        curves = [read_curves(*lineage) for lineage in lineages]
        metadata = [(name, _run_text(run)) for run in group]
        if len(group) > 1:
            metadata[0] = (name, f"{_run_text(group[0])}, the captions and attention maps below are this run's")
        systems[name] = System(
            captions[name], scores[name], attention, no_attention, localisation or None, curves, metadata
        )
    with_ptb = {name: [run.ptb_groups for run in group if run.ptb_groups] for name, group in results.runs.items()}
    extra_tables = {}
    all_have_ptb = all(len(with_ptb[name]) == len(group) for name, group in results.runs.items())
    if protocol["tokenizer"] != "ptb" and all_have_ptb:
        extra_tables["total, PTB tokens"] = {name: rows.mean_row(groups) for name, groups in with_ptb.items()}
    pair_counts = f"{len(results.pairs):,} scored"
    if len(listed) < len(results.pairs):
        pair_counts += f", {len(listed):,} of them, a random sample, in the list"
    if with_maps and any(system.attention for system in systems.values()):
        pair_counts += f", {len(with_maps):,} with attention maps"
    manifest = dataset.info["manifest_sha256"]
    origin = results.provenance
    metadata = [
        ("dataset", f"{dataset.name}, {protocol['split']} split, {remarks(protocol)}manifest {manifest}"),
        ("pairs", pair_counts),
        ("metrics", f"{', '.join(protocol['metrics'])}; {protocol['tokenizer']} tokens; {decoding_of(protocol)}"),
        *([("features", str(origin["features"]))] if origin.get("features") else []),
        ("versions", ", ".join(f"{name} {version}" for name, version in origin["versions"].items())),
        ("commit", str(origin.get("commit"))),
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
        extra_tables=extra_tables,
        metadata=metadata,
    )


def _run_text(run: Run) -> str:
    origin = run.metrics["provenance"]
    keys = [key for key in ("method", "seed", "step", "commit", "sha256") if origin.get(key) is not None]
    parts = [str(run.folder), *(f"{key} {origin[key]}" for key in keys)]
    if untrained := rows.zero_shot_origin(run):
        parts.append(f"without training: {zero_shot_text(untrained)}")
    return ", ".join(parts)
