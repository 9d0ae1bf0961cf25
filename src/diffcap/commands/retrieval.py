"""Retrieve between the change pairs of a split and their captions with CLIP4IDC's adapted CLIP; writes metrics.json."""

from pathlib import Path
from typing import Literal

from diffcap.utils.errors import DiffcapError

DIRECTIONS = {"t2p": "caption to pair", "p2t": "pair to caption"}


def evaluate_retrieval(
    checkpoint: str,
    out: str,
    folder: str | None,
    features: str | None,
    split: Literal["test", "val", "train"],
    changes: Literal["single", "multi"] | None,
    batch_size: int,
    limit: int | None,
    devices: int,
    accelerator: str,
    pair_to_text: Literal["pairs", "captions"],
) -> None:
    """Compute recall and mean rank in both directions, print them, and write them to metrics.json.

    `checkpoint` is best.ckpt of the pre-training; `limit` counts change pairs. The other arguments are those of `evaluate`.
    """
    from diffcap.checkpoints.loading import load_retriever
    from diffcap.checkpoints.reading import checkpoint_record
    from diffcap.evaluation.protocols import dataset_protocol
    from diffcap.evaluation.retrieval import RECALL_KS
    from diffcap.evaluation.tables import metrics_table, print_table
    from diffcap.lit.stage_cli import hide_lightning_messages
    from diffcap.methods.clip4idc.retrieval import retrieve
    from diffcap.records import read_dataset, take_changes, write_json
    from diffcap.run_folder import METRICS, check_finished
    from diffcap.utils.provenance import provenance

    hide_lightning_messages()
    check_finished([checkpoint])
    retriever = load_retriever(checkpoint)
    place, target = Path(folder or f"data/{retriever.metadata['dataset']}"), Path(out)
    dataset = read_dataset(place)
    changes = changes or retriever.metadata.get("changes") or dataset.info.get("changes")
    pairs = [
        pair
        for pair in take_changes([pair for pair in dataset.pairs if pair.split == split], changes)
        if pair.captions and not pair.is_distractor
    ][:limit]
    if not pairs:
        raise DiffcapError(f"{dataset.name} has no {split} change pair with a caption; choose another --split.")
    name = features or retriever.features["name"]
    scores = retrieve(retriever, pairs, place / "features" / name, batch_size, devices, accelerator, pair_to_text)
    if scores is None:  # rank 0 writes
        return
    captions = sum(len(pair.captions) for pair in pairs)
    notes = provenance(
        method=retriever.metadata["method"],
        seed=retriever.metadata["seed"],
        step=retriever.metadata["step"],
        features=name,
        manifest_sha256=dataset.info.get("manifest_sha256"),
        checkpoints=[checkpoint_record(checkpoint, target)],
    )
    protocol = {
        "dataset": dataset.name,
        "split": split,
        "limit": limit,
        **({"changes": changes} if changes else {}),
        **dataset_protocol(dataset.info),
        "pairs": len(pairs),
        "captions": captions,
        "pair_to_text": pair_to_text,
    }
    target.mkdir(parents=True, exist_ok=True)
    rows = {
        title: {f"R@{k}": scores[f"{direction}_R@{k}"] for k in RECALL_KS} for direction, title in DIRECTIONS.items()
    }
    title = f"retrieval on {dataset.name} {split}, {len(pairs):,} change pairs, {captions:,} captions"
    print_table(metrics_table(rows, title=title))
    ranks = ", ".join(f"{title} {scores[f'{direction}_mean_rank']:.1f}" for direction, title in DIRECTIONS.items())
    print(f"mean rank: {ranks}")
    write_json(target / METRICS, {"retrieval": scores, "protocol": protocol, "provenance": notes})
