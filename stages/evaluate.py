"""Caption a split with a checkpoint and score the captions: predictions.json, references.json and metrics.json."""

from pathlib import Path
from typing import Literal

from diffcap.console import run
from diffcap.errors import DiffcapError


def evaluate(
    checkpoint: str,
    out: str,
    folder: str | None = None,
    features: str | None = None,
    split: Literal["test", "val", "train"] = "test",
    tokenizer: Literal["ptb", "raw"] | None = None,
    metrics: list[str] | None = None,
    batch_size: int = 128,
    beams: int = 1,
    length_penalty: float = 0.0,
    limit: int | None = None,
    devices: int = 1,
    accelerator: str = "auto",
) -> None:
    """Decode every pair of a split, write the captions, score them by the dataset's protocol, print the table.

    Where the protocol's tokens are raw (IDC-PCL on Birds-to-Words), the PTB scores stand beside in metrics-ptb.json.

    Args:
        checkpoint: best.ckpt of the finetune stage.
        out: folder for predictions.json, references.json and metrics.json.
        folder: the dataset's folder; data/<dataset the checkpoint was trained on> by default.
        features: name of the feature store in it; the one the checkpoint was trained on by default.
        split: which pairs.
        tokenizer: of the metrics; the one the checkpoint was selected with by default.
        metrics: names of the metrics; all that this machine can compute by default.
        batch_size: pairs decoded at once; the captions do not depend on it.
        beams: width of the beam search; 1 is greedy decoding, as in all the papers.
        length_penalty: of the beam search, see diffcap.models.generation.
        limit: only the first pairs of the split.
        devices: processes that decode.
        accelerator: cpu, gpu, auto.

    Raises:
        DiffcapError: a file is missing or does not fit.
    """
    from diffcap.captioner import load
    from diffcap.evaluation.captions import ALL_METRICS
    from diffcap.evaluation.coco import write_predictions, write_references
    from diffcap.evaluation.protocols import evaluate as score
    from diffcap.evaluation.slots import ATTRIBUTES
    from diffcap.evaluation.tables import metrics_table, print_table
    from diffcap.lit.cli import quiet
    from diffcap.lit.decoding import decode
    from diffcap.provenance import provenance
    from diffcap.records import read_dataset, write_json

    quiet()
    trained = load(checkpoint)
    place = Path(folder or f"data/{trained.facts['dataset']}")
    dataset = read_dataset(place)
    pairs = [pair for pair in dataset.pairs if pair.split == split][:limit]
    if not pairs:
        raise DiffcapError(f"{dataset.name} has no {split} pairs; choose another --split.")
    first = tokenizer or trained.facts["tokenizer"]
    protocol = {
        "dataset": dataset.name,
        "split": split,
        "beams": beams,
        "length_penalty": length_penalty,
        "limit": limit,
    }
    notes = provenance(
        method=trained.facts["method"],
        seed=trained.facts["seed"],
        step=trained.facts["step"],
        features=features or trained.features["name"],
        manifest_sha256=dataset.info.get("manifest_sha256"),
    )
    target = Path(out)
    target.mkdir(parents=True, exist_ok=True)
    captions = decode(
        trained,
        pairs,
        place / "features" / (features or trained.features["name"]),
        batch_size,
        beams,
        length_penalty,
        devices=devices,
        accelerator=accelerator,
    )
    if captions is None:  # another rank writes
        return
    write_predictions(target / "predictions.json", captions)
    write_references(target / "references.json", {pair.id: pair.captions for pair in pairs})
    results = {
        kind: score(
            captions, pairs, tokenizer=kind, metrics=metrics or ALL_METRICS, protocol=protocol, provenance=notes
        )
        for kind in dict.fromkeys([first, "ptb"])
    }
    for kind, result in results.items():
        title = f"{trained.facts['method']} on {dataset.name} {split}, {kind} tokens"
        print_table(metrics_table(result["groups"], title=title))
        if kind != first:
            write_json(target / f"metrics-{kind}.json", result)
    if "slots" in results[first]:
        names = [name for name in ("type", "object", "to", *ATTRIBUTES) if name in results[first]["slots"]]
        slots = {name: results[first]["slots"][name] for name in names}
        print_table(metrics_table({"slots": slots}, title="slot accuracy"))
    write_json(target / "metrics.json", results[first])  # last: Make takes it for the whole


if __name__ == "__main__":
    run(evaluate)
