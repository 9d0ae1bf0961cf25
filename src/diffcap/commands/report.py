"""The report stage: compare runs with trivial baselines in a table, figures and an HTML page."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Literal

from diffcap.utils.console import echo, run
from diffcap.utils.errors import DiffcapError

if TYPE_CHECKING:
    from diffcap.report.rows import Run


def report(
    folder: str,
    out: str,
    runs: dict[str, str | list[str]] | None = None,
    predictions: dict[str, str | list[str]] | None = None,
    features: str | None = None,
    split: Literal["test", "val", "train"] = "test",
    pictures: int = 8,
    attention: int = 4,
    bins: int = 5,
    curves: bool = True,
    page: int = 10_000,
    localisation_pairs: int = 300,
    seed: int = 0,
    remark: str | None = None,
) -> None:
    """Collect the scores of runs, score other systems' captions and two trivial baselines by the same protocol, and write a table,
    figures and report.html.

    report.html is one file that needs no network; it shows the captions of every pair and the attention of their words.

    Args:
        folder: data/<dataset>, with its manifest and its features.
        out: Folder for report.html, table.json, table.md, table.tex, pairs.png, attention.png, viewpoint.json, viewpoint.png, and
            curves.json and curves.png with the validation scores during the training.
        runs: Name of each row and its run's folder, or the folders of several seeds, which give a mean and a standard deviation:
            '{"IDC-PCL": "runs/blocks/pcl"}', '{"IDC-PCL": ["runs/a", "runs/b"]}'. The eval folder of a run is used; give the
            folder of another evaluation as in '{"reinforced": "runs/blocks/pcl/reinforce-eval"}'.
        predictions: Name of each row of another system and the file with its captions, or several files as several seeds:
            '{"API, zero-shot": "captions.json"}', or --predictions.NAME=FILE. A .json file is a list of {"image_id", "caption"} or
            an object from id to caption; a .jsonl file has {"id", "caption"} on every line. Every pair of the split needs a caption.
        features: Name of the feature store in the folder, for the nearest-neighbour baseline, which is left out without it.
        split: The split that the runs were evaluated on.
        pictures: Number of pairs in pairs.png; 0 for no file.
        attention: Number of pairs per run (the first of several seeds) in attention.png, for methods with attention maps; 0 for
            no file.
        bins: Number of bins of viewpoint IoU in viewpoint.png, if the pairs have it; 0 for no file.
        curves: Whether to write curves.json and curves.png, if the runs have logs.
        page: Maximal number of pairs in report.html, chosen at random, about 2 kB each; 0 for no page.
        localisation_pairs: Number of these pairs, evenly chosen over the change types, with attention maps in report.html; the best and the
            worst pairs are added. It is also measured whether the attention is on the changed object. 0 for none.
        seed: Seed of the choice of pairs.
        remark: Sentence to add below the table.
    """
    from diffcap.datasets.registry import get_dataset
    from diffcap.evaluation.levir_cc import levir_scoring, protocol_of
    from diffcap.evaluation.protocols import evaluate_systems
    from diffcap.evaluation.tables import caption_notes, print_table
    from diffcap.features.store import FeatureStore
    from diffcap.records import read_dataset, take_changes, write_json, write_text
    from diffcap.report.baselines import baseline_captions
    from diffcap.report.curves import MONITORED, run_curves
    from diffcap.report.masks import Masks
    from diffcap.report.rows import (
        common_protocol,
        default_protocol,
        file_run,
        mean_row,
        read_files,
        read_run,
        run_row,
        score_row,
        zero_shot_origin,
    )
    from diffcap.report.table import (
        caption_of,
        group_table,
        id_note,
        id_rows,
        localisation_note,
        localisation_table,
        notes_of,
        report_text,
        system_table,
        type_table,
    )
    from diffcap.utils.provenance import provenance

    files = _as_lists(predictions)
    read = {name: [read_run(place) for place in places] for name, places in _as_lists(runs).items()}
    for name, number in {
        "pictures": pictures,
        "attention": attention,
        "bins": bins,
        "page": page,
        "localisation_pairs": localisation_pairs,
    }.items():
        if number < 0:
            raise DiffcapError(f"--{name} is {number}; it must be at least 0.")
    if not all(read.values()) or not (read or files):
        raise DiffcapError('--runs names no folder; give at least one, as in \'{"IDC-PCL": "runs/blocks/pcl"}\'.')
    if not all(files.values()):
        raise DiffcapError("--predictions has a name without a file; give --predictions.NAME=FILE.")
    if both := [name for name in files if name in read]:
        raise DiffcapError(f"--predictions: {both[0]!r} is also the name of a run; give the file another name.")
    dataset = read_dataset(folder)
    evaluations = [run for group in read.values() for run in group]
    protocol = common_protocol(evaluations, dataset, split) if read else default_protocol(dataset, split)
    protocol.pop("ensemble", None)
    ensembles = {name: n for name, group in read.items() if (n := group[0].metrics["protocol"].get("ensemble"))}
    protocol |= {"ensembles": ensembles} if ensembles else {}
    protocol |= {"files": list(files)} if files else {}
    protocol |= {"remark": remark} if remark else {}
    test = [pair for pair in dataset.pairs if pair.split == split][: protocol.get("limit")]
    test = take_changes([pair for pair in test if pair.captions], protocol.get("changes"))
    train = take_changes([pair for pair in dataset.pairs if pair.split == "train"], protocol.get("changes"))
    captions = read_files(files, test, dataset, split)
    store = FeatureStore.open(Path(folder) / "features" / features) if features else None
    rows, systems = {}, {}
    baseline_runs = baseline_captions(train, test, store)
    spec = protocol_of(dataset.name, dataset.pairs)
    levir = levir_scoring(spec, dataset.pairs) if spec else None
    results = evaluate_systems(
        {**baseline_runs, **captions}, test, protocol["tokenizer"], protocol["metrics"], levir=levir
    )
    for name, baseline in baseline_runs.items():
        rows[name] = {**score_row(results[name], baseline, test), "seconds": None, "steps": None}
        systems[name] = [baseline]
    baselines = list(systems)
    is_raw = bool(captions) and protocol["tokenizer"] != "ptb"
    with_ptb = evaluate_systems(captions, test, "ptb", protocol["metrics"]) if is_raw else {}
    read |= {
        name: [file_run(path, captions[path], results[path], with_ptb.get(path)) for path in paths]
        for name, paths in files.items()
    }
    systems.update({name: [run.predictions for run in group] for name, group in read.items()})
    each = {name: [run_row(run, test) for run in group] for name, group in read.items()}
    rows.update({name: mean_row(group) for name, group in each.items()})

    vocabularies = {name: results[name] for name in baseline_runs} | {
        name: group[0].metrics for name, group in read.items()
    }
    vocabularies = {name: one["id_tokens"]["protocol"] for name, one in vocabularies.items() if "id_tokens" in one}
    protocol |= {"id_tokens": vocabularies} if vocabularies else {}
    references = {pair.id: pair.captions for pair in test}
    of_captions = {
        name: list(dict.fromkeys(note for run in group for note in caption_notes(run.predictions, references)))
        for name, group in read.items()
    }
    for run_name, notes_of_run in of_captions.items():
        poor = get_dataset(dataset.name).features_note(read[run_name][0].metrics["provenance"].get("features"))
        notes_of_run += [f"{poor}."] if poor else []
    protocol |= {"notes": found} if (found := {name: texts for name, texts in of_captions.items() if texts}) else {}
    untrained = {name: one for name, group in read.items() if (one := zero_shot_origin(group[0]))}
    protocol |= {"zero_shot": untrained} if untrained else {}
    masks = Masks(dataset.root)
    origin = {name: [_origin(run) for run in group] for name, group in read.items()}
    manifest = dataset.info["manifest_sha256"]
    notes = provenance(seed=seed, manifest_sha256=manifest, features=features, runs=origin)
    target = Path(out)
    runs_of = {name: [{**_label(run), **row} for run, row in zip(read[name], group)] for name, group in each.items()}
    write_json(target / "table.json", {"protocol": protocol, "rows": rows, "runs": runs_of, "provenance": notes})
    write_text(target / "table.md", report_text(protocol, rows, list(read)))
    write_text(target / "table.tex", system_table(rows).latex() + "\n")
    written = ["table.json", "table.md", "table.tex"]
    if pictures and not dataset.info.get("captions_only"):
        from diffcap.report.drawing import write_png
        from diffcap.report.pictures import choose_pairs, draw_pairs

        captions_by_run = {name: group[0].predictions for name, group in read.items()}
        write_png(
            target / "pairs.png", draw_pairs(choose_pairs(test, pictures, seed), dataset.root, captions_by_run, masks)
        )
        written.append("pairs.png")
    if attention and not dataset.info.get("captions_only"):
        from diffcap.report.attention import iter_attention
        from diffcap.report.drawing import write_png
        from diffcap.report.heatmaps import draw_attention
        from diffcap.report.pictures import choose_pairs

        chosen, maps_by_run = choose_pairs(test, attention, seed), {}
        for name, group in read.items():
            maps = iter_attention(group[0].checkpoints, Path(folder), chosen, group[0].predictions)
            if isinstance(maps, str):
                echo(f"attention.png does not show {name}: {maps}")
            else:
                maps_by_run[name] = list(maps)
        if maps_by_run:
            write_png(target / "attention.png", draw_attention(maps_by_run, dataset.root, masks))
            written.append("attention.png")
    by_viewpoint = None
    if bins:
        from diffcap.report.charts import write_viewpoint
        from diffcap.report.viewpoint import quantile_bins, viewpoint_scores

        parts = quantile_bins(test, bins)
        if parts:
            by_viewpoint = viewpoint_scores(systems, parts, protocol["tokenizer"])
            scored_by = {**protocol, "metrics": ["CIDEr-D"]}
            write_json(target / "viewpoint.json", {"protocol": scored_by, **by_viewpoint, "provenance": notes})
            write_viewpoint(target / "viewpoint.png", by_viewpoint, baselines)
            written += ["viewpoint.json", "viewpoint.png"]
        else:
            print("viewpoint.png is not written: the pairs have no viewpoint IoU, or all have the same")
    logged = {name: [curve for run in group for curve in run_curves(run.lineages)] for name, group in read.items()}
    if curves and any(logged.values()):
        from diffcap.report.charts import write_curves

        write_json(target / "curves.json", {"value": MONITORED, "systems": logged, "provenance": notes})
        write_curves(target / "curves.png", logged)
        written += ["curves.json", "curves.png"]
    measured, mask_counts = {}, None
    if page:
        from diffcap.report.gather import gather
        from diffcap.report.page import render

        gathered = gather(
            dataset,
            Path(folder),
            test,
            read,
            rows,
            protocol,
            notes,
            by_viewpoint,
            page,
            localisation_pairs,
            seed,
            masks,
        )
        write_text(target / "report.html", render(gathered))
        measured = {name: system.localisation for name, system in gathered.systems.items() if system.localisation}
        mask_counts = gathered.masks
        if measured:
            write_json(target / "localisation.json", {"systems": measured, "masks": mask_counts, "provenance": notes})
            write_text(target / "table.md", report_text(protocol, rows, list(read), measured, mask_counts))
            written.append("localisation.json")
        lost = sum(picture is None for picture in gathered.pictures.values())
        if lost:
            print(f"report.html does not show {lost:,} of {len(gathered.pictures):,} images, which cannot be read")
        written.append("report.html")
    if masks.problems:
        count, sentence = len(masks.problems), next(iter(masks.problems.values()))
        echo(f"{count:,} {'masks are' if count > 1 else 'mask is'} left out; the first: {sentence}")
    tables = [
        system_table(rows, f"{dataset.name} {split}"),
        group_table(id_rows(rows), "word ids", min_groups=1),
        type_table({name: rows[name] for name in read}, "by change type"),
    ]
    remarks = [caption_of(protocol, rows), *notes_of(protocol, rows)]
    remarks += [id_note(vocabularies)] if vocabularies else []
    if measured:
        tables.append(localisation_table(measured))
        remarks.append(localisation_note(mask_counts))
    for table in filter(None, tables):
        print_table(table)
    echo(*(line for text in remarks for line in wrap(text, 100)))
    echo(*wrap(f"{target}: {', '.join(written)}", 100))


def _as_lists(places: dict[str, str | list[str]] | None) -> dict[str, list[str]]:
    return {name: [place] if isinstance(place, str) else place for name, place in (places or {}).items()}


def _label(run: "Run") -> dict[str, object]:
    """The folder or the file of a run in table.json, its seed where it is known, and its model and prompt without training."""
    from diffcap.report.rows import zero_shot_origin

    seed = run.metrics["provenance"].get("seed")
    return {"run": str(run.folder), **({} if seed is None else {"seed": seed}), **(zero_shot_origin(run) or {})}


def _origin(run: "Run") -> dict[str, object]:
    notes = run.metrics["provenance"]
    if "file" in notes:  # of another system
        return dict(notes)
    from diffcap.report.rows import zero_shot_origin

    entries = {key: notes.get(key) for key in ("method", "seed", "step", "commit")}
    return {"folder": str(run.folder), **entries, **(zero_shot_origin(run) or {})}


def main(arguments: Sequence[str]) -> None:
    """Run the stage with its own options."""
    run(report, arguments)
