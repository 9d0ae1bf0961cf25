"""Retrieval between pairs and captions with CLIP4IDC's adapted CLIP, on one device or several."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from diffcap.checkpoints.loading import Retriever
from diffcap.data.pair_table import PairTable, RetrievalDataset, identity_collate
from diffcap.data.workers import explain_lost_workers, worker_options
from diffcap.evaluation.retrieval import PairRetrieval, PairToText
from diffcap.features.store import FeatureStore
from diffcap.lit.decoding import evaluation_trainer
from diffcap.methods.clip4idc.model import CLIP4IDCAdaptation
from diffcap.records import ChangePair


class Retrieval(pl.LightningModule):
    """`trainer.test` over pairs with all their captions; afterwards `scores` holds the recalls and mean ranks."""

    def __init__(self, model: CLIP4IDCAdaptation, pair_to_text: PairToText) -> None:
        super().__init__()
        self.model, self.metric = model, PairRetrieval(pair_to_text)
        self.scores: dict[str, float] = {}

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Add the vectors of the pairs and of all their captions to the metric."""
        pairs, texts = self.model.pair(batch["before"], batch["after"]), self.model.words(batch["texts"])
        self.metric.update(pairs, batch["number"], texts, batch["text_number"], batch["text_owner"])

    def on_test_epoch_end(self) -> None:
        """Compute the scores over the pairs of all ranks."""
        self.scores = {name: float(value) for name, value in self.metric.compute().items()}


def retrieve(
    retriever: Retriever,
    pairs: Sequence[ChangePair],
    store: Path,
    batch_size: int,
    devices: int,
    accelerator: str,
    pair_to_text: PairToText,
) -> dict[str, float] | None:
    """Retrieve between change pairs and their captions; `store` is the folder of their pixels, `batch_size` counts pairs per rank.

    Returns the scores of `PairRetrieval`; None on every rank but the first.
    """
    features = FeatureStore.open(store, retriever.features)
    table = PairTable(pairs, features, retriever.vocabulary, retriever.max_length)
    trainer = evaluation_trainer(devices, accelerator)
    assert isinstance(retriever.model, CLIP4IDCAdaptation)
    module = Retrieval(retriever.model, pair_to_text)
    loader = DataLoader(
        RetrievalDataset(table), batch_size, collate_fn=identity_collate, **worker_options(None, trainer)
    )
    with explain_lost_workers():
        trainer.test(module, loader, verbose=False)
    return module.scores if trainer.is_global_zero else None
