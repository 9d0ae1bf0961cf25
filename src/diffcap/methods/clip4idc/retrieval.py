"""Evaluate how well a checkpoint of CLIP4IDC's adaptation retrieves pairs by captions and captions by pairs."""

from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from torch.utils.data import DataLoader

import diffcap
from diffcap.checkpoints.loading import build_pretraining
from diffcap.checkpoints.reading import checkpoint_record, read_checkpoint, remedy
from diffcap.data.pair_table import PairTable, RetrievalDataset, identity_collate
from diffcap.data.workers import explain_lost_workers, worker_options
from diffcap.evaluation.protocols import dataset_protocol
from diffcap.evaluation.retrieval import RECALL_KS, PairRetrieval, PairToText
from diffcap.evaluation.tables import metrics_table, print_table
from diffcap.features.store import FeatureStore
from diffcap.lit.decoding import evaluation_trainer
from diffcap.lit.launch import compare_processes
from diffcap.models.captioner import Batch
from diffcap.records import read_dataset, take_changes, write_json
from diffcap.run_folder import METRICS, check_finished
from diffcap.text.vocabularies import restore_vocabulary
from diffcap.utils.errors import DiffcapError, wrap_errors
from diffcap.utils.provenance import provenance


def add_to_metric(metric: PairRetrieval, model: Any, batch: Batch) -> None:
    """Add the embeddings of a batch's pairs and captions, with their numbers in the split, to `metric`. `model`: `CLIP4IDCAdaptation`."""
    pairs = model.encode_pairs(batch["before"], batch["after"])
    texts = model.words(batch["texts"])
    metric.update(pairs, batch["number"], texts, batch["text_number"], batch["text_pair_number"])


class Retrieval(pl.LightningModule):
    """The module for `trainer.test` over pairs with all their captions. After the test, `scores` has the recalls and the mean ranks."""

    def __init__(self, model: Any, pair_to_text: PairToText) -> None:
        super().__init__()
        self.model = model
        self.metric = PairRetrieval(pair_to_text)
        self.scores: dict[str, float] = {}

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Add the embeddings of a batch's pairs and of all their captions to the metric."""
        add_to_metric(self.metric, self.model, batch)

    def on_test_epoch_end(self) -> None:
        """Compute the scores over the pairs of all ranks."""
        self.scores = {name: float(value) for name, value in self.metric.compute().items()}


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
    pair_to_text: PairToText,
) -> None:
    """Compute recall and mean rank in both directions, print them, and write them to metrics.json.

    `checkpoint`: best.ckpt of an adaptation. `limit`: number of change pairs. `changes`: how pairs with several changes are read: with
    "single", each sentence is a caption; with "multi", all sentences are one. `pair_to_text`: what is ranked for a pair: all "captions",
    or all "pairs", each by the most similar of its captions. The other arguments are options of `diffcap eval`.
    """
    check_finished([checkpoint])
    checkpoint_content = read_checkpoint(checkpoint)
    metadata = checkpoint_content["diffcap"]
    with wrap_errors(checkpoint, f"diffcap {diffcap.__version__} cannot build its model", remedy(Path(checkpoint))):
        vocabulary = restore_vocabulary(metadata["words"], metadata["vocabulary_layout"])
        module = Retrieval(build_pretraining(checkpoint_content).eval(), pair_to_text)
    dataset_folder = Path(folder or f"data/{metadata['dataset']}")
    out_folder = Path(out)
    dataset = read_dataset(dataset_folder)
    changes = changes or metadata.get("changes") or dataset.info.get("changes")
    pairs_of_split = take_changes([pair for pair in dataset.pairs if pair.split == split], changes)
    pairs = [pair for pair in pairs_of_split if pair.captions and not pair.is_distractor][:limit]
    if not pairs:
        raise DiffcapError(f"{dataset.name} has no {split} change pair with a caption; choose another --split.")
    store_name = features or metadata["features"]["name"]
    store = FeatureStore.open(dataset_folder / "features" / store_name, metadata["features"])
    table = PairTable(pairs, store, vocabulary, metadata["max_length"])
    trainer = evaluation_trainer(devices, accelerator)
    compare_processes("ranks captions and pairs")  # ends all processes if they are not going to do the same
    workers = worker_options(None, trainer)
    loader = DataLoader(RetrievalDataset(table), batch_size, collate_fn=identity_collate, **workers)
    with explain_lost_workers():
        trainer.test(module, loader, verbose=False)
    if not trainer.is_global_zero:  # only rank 0 writes
        return
    scores = module.scores
    num_captions = sum(len(pair.captions) for pair in pairs)
    provenance_entry = provenance(
        method=metadata["method"],
        seed=metadata["seed"],
        step=checkpoint_content["global_step"],
        features=store_name,
        manifest_sha256=dataset.info.get("manifest_sha256"),
        checkpoints=[checkpoint_record(checkpoint, out_folder)],
    )
    protocol = {
        "dataset": dataset.name,
        "split": split,
        "limit": limit,
        **dataset_protocol(dataset.info, changes),
        "pairs": len(pairs),
        "captions": num_captions,
        "pair_to_text": pair_to_text,
    }
    out_folder.mkdir(parents=True, exist_ok=True)
    table_rows = {}
    mean_ranks = []
    for direction, title in {"t2p": "caption to pair", "p2t": "pair to caption"}.items():
        table_rows[title] = {f"R@{k}": scores[f"{direction}_R@{k}"] for k in RECALL_KS}
        mean_ranks.append(f"{title} {scores[f'{direction}_mean_rank']:.1f}")
    table_title = f"retrieval on {dataset.name} {split}, {len(pairs):,} change pairs, {num_captions:,} captions"
    print_table(metrics_table(table_rows, title=table_title))
    print(f"mean rank: {', '.join(mean_ranks)}")
    write_json(out_folder / METRICS, {"retrieval": scores, "protocol": protocol, "provenance": provenance_entry})
