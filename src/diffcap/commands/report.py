"""Put runs side by side with the baselines that learn nothing: a page for the browser, a table, pictures of pairs."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Literal

from diffcap.utils.console import echo, run
from diffcap.utils.errors import DiffcapError


def report(
    folder: str,
    features: str,
    runs: dict[str, str | list[str]],
    out: str,
    split: Literal["test", "val", "train"] = "test",
    pictures: int = 8,
    attention: int = 4,
    bins: int = 5,
    page: int = 10_000,
    looks: int = 300,
    seed: int = 0,
    remark: str | None = None,
) -> None:
    """Collect the scores of runs, score two trivial baselines in the same way, print and write the table, draw pictures.

    report.html holds all of it and every pair, one file that needs no network: see what was said, and where a word looked.

    Args:
        folder: data/<dataset>, with its manifest and its features.
        features: name of the feature store in it, where the nearest neighbours are looked for.
        runs: what each row is called and its run's folder, or the folders of several seeds, which give a mean and a
            standard deviation: '{"IDC-PCL": "runs/blocks/pcl"}', '{"IDC-PCL": ["runs/a", "runs/b"]}'. A run stands for its
            eval; other evaluations are named themselves: '{"reinforced": "runs/blocks/pcl/reinforce-eval"}'.
        out: folder for report.html, table.json, table.md, pairs.png, attention.png, viewpoint.json and viewpoint.png.
        split: which pairs; the one that the runs were evaluated on.
        pictures: how many pairs pairs.png shows; 0 for none.
        attention: how many pairs of each run (of several seeds, the first) attention.png shows, where the method knows
            where it looked; 0 for none.
        bins: into how many bins of viewpoint IoU viewpoint.png parts the pairs, where they know it; 0 for none.
        page: how many pairs report.html lists, drawn by chance if there are more, about 2 kB each; 0 for no page.
        looks: at how many of these, drawn evenly over the change types, report.html can show where each word looked, and
            measures whether it found the changed object; the best and the worst pairs are added. 0 for none.
        seed: of the choice of the pairs that are shown.
        remark: a sentence to put under the table.

    Raises:
        DiffcapError: a run is not evaluated yet, two runs were not scored in the same way, or a file is missing.
    """
    from diffcap.evaluation.protocols import evaluate_systems
    from diffcap.evaluation.tables import print_table
    from diffcap.features.store import FeatureStore
    from diffcap.records import read_dataset, take_changes, write_json, write_text
    from diffcap.report.baselines import baseline_captions
    from diffcap.report.rows import common_protocol, mean_row, read_run, run_row, score_row
    from diffcap.report.table import caption_of, notes_of, report_text, rich_table, system_lines, type_lines
    from diffcap.utils.provenance import provenance

    read = {
        name: [read_run(place) for place in ([places] if isinstance(places, str) else places)]
        for name, places in runs.items()
    }
    for name, number in {
        "pictures": pictures,
        "attention": attention,
        "bins": bins,
        "page": page,
        "looks": looks,
    }.items():
        if number < 0:
            raise DiffcapError(f"--{name} is {number}; it must be at least 0.")
    if not all(read.values()) or not read:
        raise DiffcapError('--runs names no folder; give at least one, as in \'{"IDC-PCL": "runs/blocks/pcl"}\'.')
    dataset = read_dataset(folder)
    protocol = common_protocol([run for group in read.values() for run in group], dataset, split)
    protocol |= {"remark": remark} if remark else {}
    test = [pair for pair in dataset.pairs if pair.split == split][: protocol.get("limit")]
    test = take_changes([pair for pair in test if pair.captions], protocol.get("changes"))
    train = take_changes([pair for pair in dataset.pairs if pair.split == "train"], protocol.get("changes"))
    store = FeatureStore.open(Path(folder) / "features" / features)
    rows, systems = {}, {}
    baseline_runs = baseline_captions(train, test, store)
    results = evaluate_systems(baseline_runs, test, protocol["tokenizer"], protocol["metrics"])
    for name, captions in baseline_runs.items():
        result = results[name]
        rows[name] = {**score_row(result, captions, test), "seconds": None, "steps": None}
        systems[name] = [captions]
    baselines = list(systems)
    systems.update({name: [run.predictions for run in group] for name, group in read.items()})
    rows.update({name: mean_row([run_row(run, test) for run in group]) for name, group in read.items()})

    origin = {
        name: [{"folder": str(run.folder), **_origin(run.metrics["provenance"])} for run in group]
        for name, group in read.items()
    }
    manifest = dataset.info["manifest_sha256"]
    notes = provenance(seed=seed, manifest_sha256=manifest, features=features, runs=origin)
    target = Path(out)
    write_json(target / "table.json", {"protocol": protocol, "rows": rows, "provenance": notes})
    write_text(target / "table.md", report_text(protocol, rows, list(read)))
    written = ["table.json", "table.md"]
    if pictures and not dataset.info.get("captions_only"):
        from diffcap.report.drawing import write_png
        from diffcap.report.pictures import choose_pairs, draw_pairs

        said = {name: group[0].predictions for name, group in read.items()}
        write_png(target / "pairs.png", draw_pairs(choose_pairs(test, pictures, seed), dataset.root, said))
        written.append("pairs.png")
    if attention and not dataset.info.get("captions_only"):
        from diffcap.report.attention import draw_attention, list_attention
        from diffcap.report.drawing import write_png
        from diffcap.report.pictures import choose_pairs

        chosen, seen = choose_pairs(test, attention, seed), {}
        for name, group in read.items():
            looked = list_attention(group[0].checkpoints, Path(folder), chosen, group[0].predictions)
            if isinstance(looked, str):
                echo(f"attention.png leaves out {name}: {looked}")
            else:
                seen[name] = looked
        if seen:
            write_png(target / "attention.png", draw_attention(seen, dataset.root))
            written.append("attention.png")
    by_viewpoint = None
    if bins:
        from diffcap.report.drawing import write_png
        from diffcap.report.viewpoint import draw_viewpoint, quantile_bins, viewpoint_scores

        parts = quantile_bins(test, bins)
        if parts:
            by_viewpoint = viewpoint_scores(systems, parts, protocol["tokenizer"])
            scored_by = {**protocol, "metrics": ["CIDEr-D"]}
            write_json(target / "viewpoint.json", {"protocol": scored_by, **by_viewpoint, "provenance": notes})
            write_png(target / "viewpoint.png", draw_viewpoint(by_viewpoint, baselines))
            written += ["viewpoint.json", "viewpoint.png"]
        else:
            print("viewpoint.png is left out: the pairs do not know their viewpoint IoU, or all have the same")
    if page:
        from diffcap.report.gather import gather
        from diffcap.report.page import render

        gathered = gather(dataset, Path(folder), test, read, rows, protocol, notes, by_viewpoint, page, looks, seed)
        write_text(target / "report.html", render(gathered))
        measured = {name: system.localisation for name, system in gathered.systems.items() if system.localisation}
        if measured:
            write_json(target / "localisation.json", {"systems": measured, "provenance": notes})
            written.append("localisation.json")
        lost = sum(picture is None for picture in gathered.pictures.values())
        if lost:
            print(f"report.html goes without {lost:,} of {len(gathered.pictures):,} pictures, which cannot be read")
        written.append("report.html")
    print_table(rich_table(system_lines(rows, spread="\n± "), f"{dataset.name} {split}"))
    by_type = type_lines({name: rows[name] for name in read}, spread="\n± ")
    if by_type:
        print_table(rich_table(by_type, "by change type", words=2))
    echo(*(line for text in (caption_of(protocol, rows), *notes_of(protocol, rows)) for line in wrap(text, 100)))
    print(f"{target}: {', '.join(written)}")


def _origin(notes: dict[str, object]) -> dict[str, object]:
    return {key: notes.get(key) for key in ("method", "seed", "step", "commit")}


def main(arguments: Sequence[str]) -> None:
    """Run the stage with its own options."""
    run(report, arguments)
