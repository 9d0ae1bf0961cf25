"""Collect the results of a report: rows of runs, of other systems' captions, of baselines and ceilings; the content of `report.html`."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch.nn.functional import adaptive_avg_pool2d

from diffcap.datasets.registry import get_dataset
from diffcap.evaluation.baselines import (
    Array,
    leave_one_out,
    most_common_captions,
    most_typical,
    nearest_captions,
    pair_vectors,
)
from diffcap.evaluation.captions import cider_per_pair
from diffcap.evaluation.coco import read_other_predictions
from diffcap.evaluation.protocols import evaluate_systems, remarks
from diffcap.evaluation.remote_sensing import word_id_protocol, word_id_scoring
from diffcap.evaluation.tables import caption_notes
from diffcap.features.store import FeatureStore
from diffcap.records import ChangePair, Dataset, JsonDict, file_hash, read_dataset, take_changes
from diffcap.registry import import_object
from diffcap.report import drawing, rows
from diffcap.report.attention import NoAttentionError, collect_attention, extreme_pairs
from diffcap.report.charts import read_curves
from diffcap.report.page import Page, System
from diffcap.report.rows import Captions, Row, Run
from diffcap.report.table import LEFT_OUT, ORACLE, TYPICAL, decoding_text, zero_shot_text
from diffcap.run_folder import training_lineage
from diffcap.utils.provenance import provenance

MOST_COMMON, NEAREST = "most common training caption", "nearest neighbour's caption"
MAX_FEATURE_VALUES = 4096  # of an image, to find neighbours; with all 2048 x 7 x 7, 60,000 pairs would take 24 GB


@dataclass(frozen=True)
class Results:
    """The data from which the files of a report are made. A system (a method or a baseline) has one row in the table."""

    dataset: Dataset
    dataset_folder: Path  # contains the features
    pairs: Sequence[ChangePair]  # the scored pairs
    runs: Mapping[str, Sequence[Run]]  # system -> one run per seed; the page shows captions and maps of the first run
    captions: Mapping[str, Sequence[Captions]]  # system -> for each seed, id -> caption
    rows: Mapping[str, Row]  # system -> mean over the seeds
    seed_rows: Mapping[str, Sequence[Row]]  # system -> row of each seed; without baselines
    protocol: JsonDict  # how the scores were computed: "dataset", "split", "tokenizer", ...
    provenance: JsonDict  # origin of the report: versions, commit, the evaluated runs
    masks: drawing.Masks  # images that mark the changed area


def collect_results(
    dataset_folder: Path,
    split: str,
    run_folders: Mapping[str, Sequence[str]],
    caption_files: Mapping[str, Sequence[str]],
    store_name: str | None,  # name of the features for the nearest-neighbour baseline; None leaves the baseline out
    seed: int,
    remark: str | None,  # sentence below the table
) -> Results:
    """Read the runs (system -> one folder per seed), and score other systems' captions and the baselines with the same protocol."""
    runs = {name: [rows.read_run(path) for path in paths] for name, paths in run_folders.items()}
    dataset = read_dataset(dataset_folder)
    if runs:
        protocol = rows.common_protocol([run for seed_runs in runs.values() for run in seed_runs], dataset, split)
    else:
        protocol = rows.default_protocol(dataset, split)
    protocol.pop("ensemble", None)  # it can differ between systems, so the entry "ensembles" below has it
    split_pairs = [pair for pair in dataset.pairs if pair.split == split]
    captioned_pairs = [pair for pair in split_pairs[: protocol.get("limit")] if pair.captions]
    pairs = take_changes(captioned_pairs, protocol.get("changes"))  # "multi": joins them to one reference
    train_pairs = take_changes([pair for pair in dataset.pairs if pair.split == "train"], protocol.get("changes"))
    references = {pair.id: pair.captions for pair in pairs}
    split_ids = [pair.id for pair in split_pairs]
    split_title = f"the {split} split of {dataset.name}"
    file_captions = {}
    for path in itertools.chain.from_iterable(caption_files.values()):
        file_captions[path] = read_other_predictions(path, list(references), split_ids, split_title)
    store = FeatureStore.open(dataset_folder / "features" / store_name) if store_name else None
    baselines = baseline_captions(train_pairs, pairs, store)
    id_protocol = word_id_protocol(dataset.name, dataset.pairs)  # more scores for remote sensing
    id_scoring = word_id_scoring(id_protocol, dataset.pairs) if id_protocol else None
    tokenizer, metrics = protocol["tokenizer"], protocol["metrics"]
    oracle = get_dataset(dataset.name).oracle
    ceilings = {}  # what a system can reach
    if sentences := import_object(oracle)(dataset.root, pairs) if oracle else {}:
        ceilings[ORACLE] = {id: texts[0] for id, texts in sentences.items()}
        ceilings[TYPICAL] = most_typical(sentences, tokenizer)
    unscored = {**baselines, **ceilings, **file_captions}
    scored = evaluate_systems(unscored, pairs, tokenizer, metrics, id_scoring=id_scoring)
    needs_ptb = file_captions and tokenizer != "ptb"  # runs with other tokens also have PTB scores
    scored_with_ptb = evaluate_systems(file_captions, pairs, "ptb", metrics) if needs_ptb else {}
    for name, paths in caption_files.items():
        runs[name] = []
        for path in paths:
            content = {**scored[path], "provenance": {"file": path, "sha256": file_hash(path)}}
            # Group of pairs ("total", a change type, ...) -> metric -> score.
            ptb_scores = scored_with_ptb[path]["groups"] if scored_with_ptb else None
            runs[name].append(Run(Path(path), content, file_captions[path], ptb_scores=ptb_scores))
    seed_rows = {name: [rows.run_row(run, pairs) for run in seed_runs] for name, seed_runs in runs.items()}
    no_training = {"seconds": None, "steps": None}
    mean_rows = {name: rows.score_row(scored[name], baselines[name], pairs) | no_training for name in baselines}
    mean_rows |= {name: rows.mean_row(system_rows) for name, system_rows in seed_rows.items()}
    left_pairs, left_out = leave_one_out(pairs)
    if ceilings and left_out:
        left_scored = evaluate_systems({LEFT_OUT: left_out}, left_pairs, tokenizer, metrics, id_scoring=id_scoring)
        mean_rows[LEFT_OUT] = rows.score_row(left_scored[LEFT_OUT], left_out, left_pairs) | no_training
    mean_rows |= {name: rows.score_row(scored[name], ceilings[name], pairs) | no_training for name in ceilings}
    contents = {name: scored[name] for name in baselines}  # system -> content of metrics.json
    contents |= {name: seed_runs[0].metrics for name, seed_runs in runs.items()}
    id_protocols = {name: entry["id_tokens"]["protocol"] for name, entry in contents.items() if "id_tokens" in entry}
    entries = {**_describe_runs(runs, dataset, references), "files": list(caption_files), "remark": remark}
    entries["id_tokens"] = id_protocols
    captions: dict[str, list[Captions]] = {name: [by_id] for name, by_id in baselines.items()}
    captions |= {name: [run.predictions for run in seed_runs] for name, seed_runs in runs.items()}
    return Results(
        dataset=dataset,
        dataset_folder=dataset_folder,
        pairs=pairs,
        runs=runs,
        captions=captions,
        rows=mean_rows,
        seed_rows=seed_rows,
        protocol=protocol | {key: value for key, value in entries.items() if value},
        provenance=provenance(
            seed=seed,
            manifest_sha256=dataset.info["manifest_sha256"],
            features=store_name,
            runs={name: [_run_origin(run) for run in seed_runs] for name, seed_runs in runs.items()},
        ),
        masks=drawing.Masks(dataset.root),
    )


def _describe_runs(
    runs: Mapping[str, Sequence[Run]], dataset: Dataset, references: Mapping[str, Sequence[str]]
) -> JsonDict:
    """Return three dicts by system: number of ensemble members, notes on the captions, origin of a model without training."""
    described: dict[str, JsonDict] = {"ensembles": {}, "notes": {}, "zero_shot": {}}
    for name, seed_runs in runs.items():
        metrics = seed_runs[0].metrics
        if num_members := metrics["protocol"].get("ensemble"):
            described["ensembles"][name] = num_members
        run_notes = [note for run in seed_runs for note in caption_notes(run.predictions, references)]
        if features_warning := get_dataset(dataset.name).features_note(metrics["provenance"].get("features")):
            run_notes.append(f"{features_warning}.")
        if run_notes:
            described["notes"][name] = list(dict.fromkeys(run_notes))
        if origin := rows.zero_shot_origin(seed_runs[0]):
            described["zero_shot"][name] = origin
    return described


def _run_origin(run: Run) -> JsonDict:
    run_provenance = run.metrics["provenance"]
    if "file" in run_provenance:  # the captions of another system
        return dict(run_provenance)
    entries = {key: run_provenance.get(key) for key in ("method", "seed", "step", "commit")}
    return {"folder": str(run.path), **entries, **rows.zero_shot_origin(run)}


def baseline_captions(
    train_pairs: Sequence[ChangePair], test_pairs: Sequence[ChangePair], store: FeatureStore | None
) -> dict[str, dict[str, str]]:
    """Return baseline -> id -> caption of the test pairs. The baselines are `MOST_COMMON` and, with a `store` of features, `NEAREST`."""
    captioned_pairs = [pair for pair in train_pairs if pair.captions]
    common = most_common_captions(captioned_pairs, test_pairs)
    if store is None:
        return {MOST_COMMON: common}
    vectors, test_vectors = (vectors_of_pairs(store, pairs) for pairs in (captioned_pairs, test_pairs))
    return {MOST_COMMON: common, NEAREST: nearest_captions(captioned_pairs, vectors, test_pairs, test_vectors)}


def vectors_of_pairs(store: FeatureStore, pairs: Sequence[ChangePair], chunk_size: int = 256) -> Array:
    """Compute the `pair_vectors` of N pairs. Feature maps (C, H, W) are pooled to about `MAX_FEATURE_VALUES` values if they have more.

    Returns:
        (N, 2D) float16. D is C h w, where h x w is the size after pooling. 20,000 pairs of diffcap's own dataset blocks take 230 MB.
    """
    side_rows = [store.rows([getattr(pair, side) for pair in pairs]) for side in ("before", "after")]
    channels, height, width = store.shape
    scale = min(1.0, math.sqrt(MAX_FEATURE_VALUES / (channels * height * width)))
    grid = max(1, int(height * scale)), max(1, int(width * scale))
    vectors = np.empty((len(pairs), 2 * channels * grid[0] * grid[1]), dtype=np.float16)
    for start in range(0, len(pairs), chunk_size):
        chunk = slice(start, start + chunk_size)
        maps = [torch.from_numpy(store.read(store_rows[chunk])).float() for store_rows in side_rows]
        before, after = (adaptive_avg_pool2d(side_maps, grid).numpy() for side_maps in maps)
        vectors[chunk] = pair_vectors(before, after)
    return vectors


def gather_page(
    results: Results, viewpoint: JsonDict | None, max_pairs: int, num_localisation_pairs: int, seed: int
) -> Page:
    """Collect the content of report.html.

    Args:
        viewpoint: scores by viewpoint, the result of `rows.viewpoint_scores`; None leaves them out.
        num_localisation_pairs: number of pairs on which localisation (is the attention on the change?) is measured. Attention
            maps are also computed for the pairs with the best and the worst scores (`extreme_pairs`).
    """
    dataset = results.dataset
    protocol = results.protocol
    listed_pairs = list(results.pairs)
    if len(listed_pairs) > max_pairs:
        indices = Random(seed).sample(range(len(listed_pairs)), max_pairs)
        listed_pairs = [listed_pairs[index] for index in sorted(indices)]
    references = {pair.id: pair.captions for pair in results.pairs}
    first_runs = {name: seed_runs[0] for name, seed_runs in results.runs.items()}
    captions = {name: {id: run.predictions[id] for id in references} for name, run in first_runs.items()}
    all_scores = cider_per_pair(captions, references, protocol["tokenizer"])  # document frequencies of all pairs
    scores = {name: {pair.id: by_id[pair.id] for pair in listed_pairs} for name, by_id in all_scores.items()}
    has_images = not dataset.info.get("captions_only")
    num_measured = num_localisation_pairs if has_images else 0
    measured_pairs = drawing.choose_pairs(listed_pairs, num_measured, seed)
    measured_ids = [pair.id for pair in measured_pairs]
    extreme_ids = set(extreme_pairs(scores)) - set(measured_ids) if measured_pairs else set()
    pairs_with_maps = [*measured_pairs, *(pair for pair in listed_pairs if pair.id in extreme_ids)]
    frames = {path: drawing.SMALL_FRAME for pair in listed_pairs for path in pair.images} if has_images else {}
    frames |= {path: drawing.LARGE_FRAME for pair in pairs_with_maps for path in pair.images}
    pixel_ranges = {path: value_range for pair in listed_pairs for path, value_range in pair.ranges.items()}
    pictures = drawing.thumbnails(dataset.root, frames, pixel_ranges)
    sizes = {path: (picture.width, picture.height) for path, picture in pictures.items() if picture}
    outlines = drawing.outline_thumbnails(results.masks, listed_pairs, sizes, frames)
    systems = {}
    for name, seed_runs in results.runs.items():
        attention: JsonDict = {}
        localisation, no_attention_reason = None, None
        if pairs_with_maps:
            checkpoints, folder = first_runs[name].checkpoints, results.dataset_folder
            try:
                attention, localisation = collect_attention(
                    checkpoints, folder, pairs_with_maps, captions[name], measured_ids, sizes, results.masks
                )
            except NoAttentionError as error:
                no_attention_reason = str(error)
        # Run folder and training stages that led to each checkpoint; their curves are shown one after the other.
        lineages = [training_lineage(path) for run in seed_runs for path in run.checkpoints]
        curves = [read_curves(*lineage) for lineage in lineages]
        metadata = [(name, _run_text(run)) for run in seed_runs]
        if len(seed_runs) > 1:
            metadata[0] = (name, f"{metadata[0][1]}, the captions and attention maps below are this run's")
        systems[name] = System(
            captions[name], scores[name], attention, no_attention_reason, localisation or None, curves, metadata
        )
    ptb_scores = {name: [run.ptb_scores or {} for run in seed_runs] for name, seed_runs in results.runs.items()}
    extra_rows = {}
    if protocol["tokenizer"] != "ptb" and all(map(all, ptb_scores.values())):  # all runs have PTB scores
        extra_rows["total, PTB tokens"] = {name: rows.mean_row(seeds) for name, seeds in ptb_scores.items()}
    pair_counts = f"{len(results.pairs):,} scored"
    if len(listed_pairs) < len(results.pairs):
        pair_counts += f", {len(listed_pairs):,} of them, a random sample, in the list"
    if pairs_with_maps and any(system.attention for system in systems.values()):
        pair_counts += f", {len(pairs_with_maps):,} with attention maps"
    manifest_hash = dataset.info["manifest_sha256"]
    store_name, versions = results.provenance.get("features"), results.provenance["versions"]
    metadata = [
        ("dataset", f"{dataset.name}, {protocol['split']} split, {remarks(protocol)}manifest {manifest_hash}"),
        ("pairs", pair_counts),
        ("metrics", f"{', '.join(protocol['metrics'])}; {protocol['tokenizer']} tokens; {decoding_text(protocol)}"),
        *([("features", str(store_name))] if store_name else []),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("commit", str(results.provenance.get("commit"))),
    ]
    return Page(
        protocol=protocol,
        rows=results.rows,
        systems=systems,
        pairs=listed_pairs,
        pictures=pictures,
        outlines=outlines,
        mask_counts=drawing.mask_counts(results.masks, measured_pairs, sizes),  # usable, empty and unreadable masks
        viewpoint=viewpoint,
        extra_rows=extra_rows,
        metadata=metadata,
    )


def _run_text(run: Run) -> str:
    run_provenance = run.metrics["provenance"]
    keys = [key for key in ("method", "seed", "step", "commit", "sha256") if run_provenance.get(key) is not None]
    parts = [str(run.path), *(f"{key} {run_provenance[key]}" for key in keys)]
    if origin := rows.zero_shot_origin(run):
        parts.append(f"without training: {zero_shot_text(origin)}")
    return ", ".join(parts)
