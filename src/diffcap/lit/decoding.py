"""Decoding a split with a trained captioner, on one device or many."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import RichProgressBar
from torch.utils.data import DataLoader, Dataset

from diffcap.checkpoints.combining import together
from diffcap.checkpoints.loading import Checkpoint
from diffcap.data.pair_table import PairBatches, PairTable, identity_collate
from diffcap.features.store import FeatureStore
from diffcap.lit.cli import plain_settings
from diffcap.losses.gather import world_size
from diffcap.models.generation import beam_search, greedy
from diffcap.records import ChangePair


class MemberBatches(Dataset):
    """The pairs of several tables, the same ones, whose maps come as lists: one entry a member of an ensemble."""

    def __init__(self, tables: Sequence[PairTable]) -> None:
        self.parts = [PairBatches(table) for table in tables]

    def __len__(self) -> int:
        return len(self.parts[0])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> dict[str, Any]:
        batches = [part.__getitems__(indices) for part in self.parts]
        return {"id": batches[0]["id"], **{side: [batch[side] for batch in batches] for side in ("before", "after")}}


class Decoding(pl.LightningModule):
    """`trainer.predict` over pairs; afterwards `captions` holds every pair's caption, on every rank.

    Args:
        checkpoint: the captioner with its vocabulary.
        beams: 1 decodes greedily, as all the papers do. length_penalty: see `beam_search`.
    """

    def __init__(self, checkpoint: Checkpoint, beams: int = 1, length_penalty: float = 0.0) -> None:
        super().__init__()
        self.captioner, self.vocabulary = checkpoint.captioner, checkpoint.vocabulary
        self.max_length, self.beams, self.length_penalty = checkpoint.max_length, beams, length_penalty
        self.captions: dict[str, str] = {}

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Decode a batch of {"id", "before", "after"}."""
        maps = batch["before"], batch["after"]
        if self.beams == 1:
            tokens = greedy(self.captioner, *maps, self.max_length)
        else:
            tokens = beam_search(self.captioner, *maps, self.max_length, self.beams, self.length_penalty)
        self.captions.update(zip(batch["id"], (self.vocabulary.decode(row) for row in tokens)))

    def on_predict_epoch_end(self) -> None:
        """Gather all ranks' captions; a pair that padding repeated counts once."""
        if world_size() > 1:
            parts: list[Any] = [None] * world_size()
            dist.all_gather_object(parts, self.captions)
            self.captions = {key: caption for part in parts for key, caption in part.items()}


def decode(
    checkpoint: Checkpoint,
    pairs: Sequence[ChangePair],
    store: Path,
    batch_size: int = 128,
    beams: int = 1,
    length_penalty: float = 0.0,
    devices: int = 1,
    accelerator: str = "auto",
    others: Sequence[tuple[Checkpoint, Path]] = (),
) -> dict[str, str] | None:
    """Caption pairs whose features are in a store.

    Args:
        others: more members of an ensemble, of the same vocabulary, each with its own store; captions are then as long as the
            shortest of the members' `max_length` allows.

    Returns:
        id to caption in the order of `pairs`; None on every rank but the first.

    Raises:
        DiffcapError: the store is missing, or of another shape or backbone than the captioner was trained on.
    """
    members = [(checkpoint, store), *others]
    tables = [
        PairTable(pairs, FeatureStore.open(place, member.features), member.vocabulary, member.max_length)
        for member, place in members
    ]
    batches: Dataset = MemberBatches(tables) if others else PairBatches(tables[0])
    loader = DataLoader(batches, batch_size, collate_fn=identity_collate)
    if others:
        checkpoint = together([member for member, _ in members])
    with plain_settings(TypeError):
        trainer = pl.Trainer(
            devices=devices, accelerator=accelerator, strategy="ddp" if devices > 1 else "auto", logger=False,
            enable_checkpointing=False, enable_progress_bar=sys.stderr.isatty(), enable_model_summary=False,
            callbacks=[RichProgressBar()] if sys.stderr.isatty() else [],
        )  # fmt: skip
    module = Decoding(checkpoint, beams, length_penalty)
    trainer.predict(module, loader, return_predictions=False)
    return {pair.id: module.captions[pair.id] for pair in pairs} if trainer.is_global_zero else None
