"""Put runs side by side with the baselines that learn nothing: table.json, table.md and pairs.png."""

from pathlib import Path
from typing import Literal

from diffcap.console import run
from diffcap.errors import DiffcapError


def report(
    folder: str,
    features: str,
    runs: dict[str, str | list[str]],
    out: str,
    split: Literal["test", "val", "train"] = "test",
    pictures: int = 8,
    seed: int = 0,
) -> None:
    """Collect the scores of runs, score two trivial baselines in the same way, print and write the table, draw pairs.

    Args:
        folder: data/<dataset>, with its manifest and its features.
        features: name of the feature store in it, where the nearest neighbours are looked for.
        runs: what each row is called and its run's folder, or the folders of several seeds, which give a mean and a
            standard deviation: '{"IDC-PCL": "runs/blocks/pcl"}', '{"IDC-PCL": ["runs/a", "runs/b"]}'.
        out: folder for table.json, table.md and pairs.png.
        split: which pairs; the one that the runs were evaluated on.
        pictures: how many pairs pairs.png shows; 0 for none.
        seed: of the choice of these pairs.

    Raises:
        DiffcapError: a run is not evaluated yet, two runs were not scored in the same way, or a file is missing.
    """
    from diffcap.evaluation.protocols import evaluate as score
    from diffcap.evaluation.tables import print_table
    from diffcap.features.store import FeatureStore
    from diffcap.provenance import provenance
    from diffcap.records import read_dataset, write_json, write_text
    from diffcap.report.baselines import baseline_captions
    from diffcap.report.rows import common_protocol, mean_row, read_run, run_row, score_row
    from diffcap.report.table import caption_of, report_text, rich_table, system_lines, type_lines

    read = {
        name: [read_run(place) for place in ([places] if isinstance(places, str) else places)]
        for name, places in runs.items()
    }
    if not all(read.values()) or not read:
        raise DiffcapError('--runs names no folder; give at least one, as in \'{"IDC-PCL": "runs/blocks/pcl"}\'.')
    dataset = read_dataset(folder)
    protocol = common_protocol([run for group in read.values() for run in group], dataset, split)
    test = [pair for pair in dataset.pairs if pair.split == split][: protocol.get("limit")]
    train = [pair for pair in dataset.pairs if pair.split == "train"]
    store = FeatureStore.open(Path(folder) / "features" / features)
    rows = {}
    for name, captions in baseline_captions(train, test, store).items():
        result = score(captions, test, protocol["tokenizer"], protocol["metrics"])
        rows[name] = {**score_row(result, captions, test), "seconds": None, "steps": None}
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
        from diffcap.report.pictures import choose_pairs, draw_pairs, write_pairs

        said = {name: group[0].predictions for name, group in read.items()}
        write_pairs(target / "pairs.png", draw_pairs(choose_pairs(test, pictures, seed), dataset.root, said))
        written.append("pairs.png")
    print_table(rich_table(system_lines(rows, spread="\n± "), f"{dataset.name} {split}"))
    by_type = type_lines({name: rows[name] for name in read}, spread="\n± ")
    if by_type:
        print_table(rich_table(by_type, "by change type", words=2))
    print(caption_of(protocol, rows))
    print(f"{target}: {', '.join(written)}")


def _origin(notes: dict[str, object]) -> dict[str, object]:
    return {key: notes.get(key) for key in ("method", "seed", "step", "commit")}


if __name__ == "__main__":
    run(report)
