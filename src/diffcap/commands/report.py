"""The report stage: compare runs with trivial baselines in a table, figures and an HTML page."""

from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal

from diffcap.evaluation.tables import further_tables, print_table
from diffcap.records import write_json, write_text
from diffcap.utils.console import echo
from diffcap.utils.errors import DiffcapError
from diffcap.utils.table import escape_markdown

if TYPE_CHECKING:
    from diffcap.report.gather import Results


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
    """Collect the scores of runs, score other systems' captions and two trivial baselines by the same protocol; write report.html.

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
        attention: Number of pairs per run (the first of several seeds) in attention.png, for methods with attention maps; 0 for no file.
        bins: Number of bins of viewpoint IoU (overlap of the views) in viewpoint.png, if the pairs have this value; 0 for no file.
        curves: Whether to write curves.json and curves.png, if the runs have logs.
        page: Maximal number of pairs in report.html, chosen at random; 0 for no page. A pair takes about 2 kB.
        localisation_pairs: Number of pairs with attention maps in report.html, evenly chosen over the change types; the pairs
            with the best and the worst scores are added. Pairs with a mask show whether the attention is on the changed object. 0: none.
        seed: Seed of the random choice of the shown pairs.
        remark: Sentence to add below the table.
    """
    from diffcap.report import charts, table
    from diffcap.report.gather import collect_results, gather_page
    from diffcap.report.page import render
    from diffcap.report.rows import quantile_bins, viewpoint_scores, zero_shot_origin

    counts = {"pictures": pictures, "attention": attention, "bins": bins, "page": page}
    for option, count in {**counts, "localisation_pairs": localisation_pairs}.items():
        if count < 0:
            raise DiffcapError(f"--{option} is {count}; it must be at least 0.")
    run_folders, caption_files = (
        {name: [paths] if isinstance(paths, str) else paths for name, paths in (named_paths or {}).items()}
        for named_paths in (runs, predictions)
    )
    if not all(run_folders.values()) or not (run_folders or caption_files):
        raise DiffcapError('--runs names no folder; give at least one, as in \'{"NAME": "runs/DATASET/METHOD"}\'.')
    if not all(caption_files.values()):
        raise DiffcapError("--predictions has a name without a file; give --predictions.NAME=FILE.")
    if shared := [name for name in caption_files if name in run_folders]:
        raise DiffcapError(f"--predictions.{shared[0]}: a run also has this name; give the file another one.")
    results = collect_results(Path(folder), split, run_folders, caption_files, features, seed, remark)
    rows, protocol, provenance = results.rows, results.protocol, results.provenance
    report_folder = Path(out)
    written_files = ["table.json", "table.md", "table.tex"]
    run_entries: dict[str, list[dict[str, object]]] = {}
    for name, seed_runs in results.runs.items():
        run_entries[name] = []
        for run, row in zip(seed_runs, results.seed_rows[name]):
            run_seed = run.metrics["provenance"].get("seed")
            label = {"run": str(run.path), **({} if run_seed is None else {"seed": run_seed})}
            run_entries[name].append({**label, **zero_shot_origin(run), **row})  # base model, prompt
    content: dict[str, Any] = {"protocol": protocol, "rows": rows, "runs": run_entries, "provenance": provenance}
    write_json(report_folder / "table.json", content)
    write_text(report_folder / "table.tex", table.system_table(rows).latex() + "\n")
    if not results.dataset.info.get("captions_only"):
        written_files += _draw_sheets(results, report_folder, pictures, attention, seed)
    binned_scores = None
    if bins and (binned_pairs := quantile_bins(results.pairs, bins)):  # by viewpoint IoU (overlap of the views)
        binned_scores = viewpoint_scores(results.captions, binned_pairs, protocol["tokenizer"])
        content = {"protocol": {**protocol, "metrics": ["CIDEr-D"]}, **binned_scores, "provenance": provenance}
        write_json(report_folder / "viewpoint.json", content)
        baselines = [name for name in rows if name not in results.runs]
        charts.write_viewpoint(report_folder / "viewpoint.png", binned_scores, baselines)
        written_files += ["viewpoint.json", "viewpoint.png"]
    elif bins:
        print("viewpoint.png is not written: the pairs have no viewpoint IoU, or all have the same")
    curves_by_system = {name: charts.run_curves(seed_runs) for name, seed_runs in results.runs.items()}
    if curves and any(curves_by_system.values()):
        content = {"value": charts.VALIDATION_SCORE, "systems": curves_by_system, "provenance": provenance}
        write_json(report_folder / "curves.json", content)
        charts.write_curves(report_folder / "curves.png", curves_by_system)
        written_files += ["curves.json", "curves.png"]
    localisation = {}  # system -> scores of the attention on the changed area
    mask_counts = None  # numbers of masks of the changed area that are used and left out
    if page:
        page_content = gather_page(results, binned_scores, page, localisation_pairs, seed)
        write_text(report_folder / "report.html", render(page_content))
        mask_counts, systems, images = page_content.mask_counts, page_content.systems, page_content.pictures.values()
        localisation = {name: system.localisation for name, system in systems.items() if system.localisation}
        if localisation:
            content = {"systems": localisation, "masks": mask_counts, "provenance": provenance}
            write_json(report_folder / "localisation.json", content)
            written_files.append("localisation.json")
        if num_unreadable := sum(image is None for image in images):
            print(f"report.html does not show {num_unreadable:,} of {len(images):,} images, which cannot be read")
        written_files.append("report.html")
    markdown = table.report_text(protocol, rows, list(results.runs), localisation, mask_counts)
    further = []  # scores beside n-grams
    for name, seed_runs in results.runs.items():
        for run in seed_runs:
            further += further_tables(run.metrics, f"{name}: ")
    for further_table in further:
        caption = escape_markdown(f"{further_table.title}, {further_table.note}")
        markdown += f"\n{caption}\n\n{further_table.markdown()}\n"
    write_text(report_folder / "table.md", markdown)
    if problems := results.masks.problems:  # path of a mask that cannot be used -> reason
        masks_are = "masks are" if len(problems) > 1 else "mask is"
        echo(f"{len(problems):,} {masks_are} left out; the first: {next(iter(problems.values()))}")
    tables = [
        table.system_table(rows, f"{results.dataset.name} {protocol['split']}"),
        table.group_table(table.word_id_rows(rows), "word ids", min_groups=1),
        table.type_table({name: rows[name] for name in results.runs}, "by change type"),
        table.localisation_table(localisation) if localisation else None,
        *further,
    ]
    for shown_table in filter(None, tables):
        print_table(shown_table)
    notes = [table.protocol_text(protocol, rows), *table.footnotes(protocol, rows)]
    if "id_tokens" in protocol:
        notes.append(table.word_id_note(protocol["id_tokens"]))
    if localisation:
        notes.append(table.localisation_note(mask_counts))
    for note in notes:
        echo(*wrap(note, 100))
    echo(*wrap(f"{report_folder}: {', '.join(written_files)}", 100))


def _draw_sheets(results: "Results", report_folder: Path, num_pairs: int, num_maps: int, seed: int) -> list[str]:
    """Write pairs.png with `num_pairs` pairs and attention.png with `num_maps` pairs; return the names of the written files."""
    from diffcap.report.attention import NoAttentionError, iter_attention
    from diffcap.report.drawing import choose_pairs, draw_pairs, write_png
    from diffcap.report.heatmaps import draw_attention

    first_runs = {name: seed_runs[0] for name, seed_runs in results.runs.items()}
    captions = {name: run.predictions for name, run in first_runs.items()}
    written_files = []
    if num_pairs:
        pairs = choose_pairs(results.pairs, num_pairs, seed)
        write_png(report_folder / "pairs.png", draw_pairs(pairs, captions, results.masks).save)
        written_files.append("pairs.png")
    pairs = choose_pairs(results.pairs, num_maps, seed)
    maps = {}
    for name, run in first_runs.items() if pairs else ():
        try:
            maps[name] = list(iter_attention(run.checkpoints, results.dataset_folder, pairs, run.predictions))
        except NoAttentionError as reason:
            echo(f"attention.png does not show {name}: {reason}")
    if maps:
        write_png(report_folder / "attention.png", draw_attention(maps, captions, results.masks).save)
        written_files.append("attention.png")
    return written_files
