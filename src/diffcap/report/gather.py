"""Everything that `report.html` shows, out of the runs' folders and the dataset."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from diffcap.evaluation.captions import score_pairs
from diffcap.evaluation.protocols import remarks
from diffcap.records import ChangePair, Dataset
from diffcap.report.attention_data import collect_attention, extreme_pairs
from diffcap.report.curves import read_curves
from diffcap.report.page import Page, System
from diffcap.report.pictures import choose_pairs
from diffcap.report.rows import Row, Run, mean_row, read_metrics
from diffcap.report.table import Rows
from diffcap.report.thumbnails import LARGE, SMALL, thumbnails
from diffcap.run_folder import metrics_by

_SECOND = {metrics_by("ptb"): "total, PTB tokens"}


def gather(
    dataset: Dataset,
    folder: Path,
    test: Sequence[ChangePair],
    runs: Mapping[str, Sequence[Run]],
    rows: Rows,
    protocol: Mapping[str, Any],
    notes: Mapping[str, Any],
    viewpoint: Mapping[str, Any] | None,
    most: int,
    looks: int,
    seed: int,
) -> Page:
    """Read, score and shrink what the page shows.

    Args:
        folder: the dataset's, with the features. test: the scored pairs. runs: row -> its runs, one a seed; captions and looks
            are the first one's. rows: the results table. notes: provenance. viewpoint: as `viewpoint_scores` returns it.
        most: pairs to list; if there are more, so many by chance. looks: pairs, of those, that can be looked into, besides the
            ends of the list; localisation is measured on them. seed: of both choices.

    Raises:
        DiffcapError: a checkpoint or the features are damaged.
    """
    listed = list(test)
    if len(test) > most:
        kept = set(Random(seed).sample(range(len(test)), most))
        listed = [pair for number, pair in enumerate(test) if number in kept]
    references = {pair.id: pair.captions for pair in test}
    said = {name: {id: group[0].predictions[id] for id in references} for name, group in runs.items()}
    scores = score_pairs(said, references, protocol["tokenizer"])  # the words' weights are of all pairs
    ids = {pair.id for pair in listed}
    scores = {name: {id: score for id, score in of.items() if id in ids} for name, of in scores.items()}
    with_pictures = not dataset.info.get("captions_only")
    measured = choose_pairs(listed, looks, seed) if looks and with_pictures else []
    ends = set(extreme_pairs(scores)) if measured else set()
    into = [*measured, *(pair for pair in listed if pair.id in ends - {pair.id for pair in measured})]
    frames = {path: SMALL for pair in listed for path in pair.images} if with_pictures else {}
    frames |= {path: LARGE for pair in into for path in pair.images}
    pictures = thumbnails(dataset.root, frames)
    sizes = {path: (one.width, one.height) for path, one in pictures.items() if one}
    systems = {}
    for name, group in runs.items():
        found: Any = ({}, None) if not into else None
        if into:
            found = collect_attention(
                group[0].checkpoints, folder, into, said[name], [pair.id for pair in measured], sizes
            )
        systems[name] = System(
            captions=said[name],
            scores=scores[name],
            looks={} if isinstance(found, str) else found[0],
            why=found if isinstance(found, str) else None,
            localised=None if isinstance(found, str) or not found[1] or not found[1]["kinds"] else found[1],
            curves=[read_curves(*chain) for run in group for chain in run.chains],
            facts=_facts_of(name, group),
        )
    return Page(
        dataset=dataset.name,
        split=protocol["split"],
        protocol=protocol,
        rows=rows,
        systems=systems,
        pairs=listed,
        pictures=pictures,
        viewpoint=viewpoint,
        second=_second(runs, protocol["tokenizer"]),
        facts=_facts(dataset, test, listed, into, protocol, notes),
    )


def _second(runs: Mapping[str, Sequence[Run]], tokenizer: str) -> dict[str, dict[str, Row]]:
    """The scores by a protocol beside the main one, where every run has them."""
    tables = {}
    for file, heading in _SECOND.items():
        paths = {name: [run.evaluation / file for run in group] for name, group in runs.items()}
        if tokenizer != "ptb" and all(path.is_file() for of in paths.values() for path in of):
            tables[heading] = {
                name: mean_row([read_metrics(path.parent, path.name)["groups"] for path in of])
                for name, of in paths.items()
            }
    return tables


def _facts_of(name: str, group: Sequence[Run]) -> list[tuple[str, str]]:
    facts = []
    for number, run in enumerate(group):
        notes = run.metrics["provenance"]
        told = [
            str(run.folder),
            *(f"{key} {notes[key]}" for key in ("method", "seed", "step", "commit") if notes.get(key) is not None),
        ]
        if len(group) > 1 and number == 0:
            told.append("the captions and looks below are this run's")
        facts.append((name, ", ".join(told)))
    return facts


def _facts(
    dataset: Dataset,
    test: Sequence[ChangePair],
    listed: Sequence[ChangePair],
    into: Sequence[ChangePair],
    protocol: Mapping[str, Any],
    notes: Mapping[str, Any],
) -> list[tuple[str, str]]:
    pairs = f"{len(test):,} scored"
    if len(listed) < len(test):
        pairs += f", {len(listed):,} of them, by chance, in the list"
    if into:
        pairs += f", {len(into):,} with looks"
    versions = ", ".join(f"{name} {version}" for name, version in notes["versions"].items())
    return [
        (
            "dataset",
            f"{dataset.name}, {protocol['split']} split, {remarks(protocol)}manifest {dataset.info['manifest_sha256']}",
        ),
        ("pairs", pairs),
        ("metrics", f"{', '.join(protocol['metrics'])}; {protocol['tokenizer']} tokens; beams {protocol.get('beams')}"),
        ("features", str(notes.get("features"))),
        ("versions", versions),
        ("commit", str(notes.get("commit"))),
    ]
