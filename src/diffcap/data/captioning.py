"""The LightningDataModules of captioning: feature maps of pairs with captions; that of pre-training stands in `pretraining`.

Every random choice of a training step (samples, hidden words and patches, swapped images) comes from the seed and the
step alone, over the global batch, of which each rank takes its share; see `sampler`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader

from diffcap.data.pair_table import PairBatches, PairTable, RetrievalBatches, identity_collate
from diffcap.data.sampler import Batch, StepBatches, Stream, step_generator
from diffcap.errors import DiffcapError
from diffcap.features.store import FeatureStore
from diffcap.losses.mlm import mask_words
from diffcap.records import ChangePair, Changes, read_dataset, take_changes
from diffcap.text.vocabularies import AnyLayout, vocabulary_for

Samples = Literal["captions", "pairs", "scenes"]
say = rank_zero_only(print)


class FeatureData(pl.LightningDataModule):
    """What pre-training and captioning have in common.

    Args:
        folder: the dataset's folder, with `manifest.jsonl`.
        features: name of the feature store in its `features/`.
        batch_size: of one step over all ranks together (the papers' figure), not of one rank.
        eval_batch_size: pairs a rank decodes at once.
        min_count: a word must occur this often in the training captions.
        max_length: positions of a caption, BOS and EOS included; longer ones are cut.
        mask_ratio: chance of a word, and of a patch in MVCL, to be hidden (paper: 0.15).
        swap: default and nonsemantic image change roles with probability 1/2 (SCORER's and DIRL's augmentation).
        trim: leave out the padding that no caption of the batch needs; changes nothing where padding is not attended.
        val_limit: validate on the first pairs only; null for all.
        num_workers: processes that read ahead; 0 reads in the training process.
        seed: of every draw.
        vocabulary_layout: "pcl", "rcc" as SCORER and DIRL have it (see `diffcap.text.vocabulary`), or "clip" (see
            `diffcap.text.bpe`).
        changes: protocol of a dataset whose pairs have several changes, "single" or "multi", see `records.take_changes`; null
            for the dataset's own, where it has one.
        multi: `max_length` and `min_count` that take the place of those above where the protocol is "multi", whose captions
            are longer; null for the same ones.
        vocabulary_with: folders of more datasets whose training captions count for the vocabulary; the stages of one
            model need the same ones (IDC-PCL: CUB and Birds-to-Words share one).
    """

    takes_single_images: ClassVar[bool] = False
    classes = 0  # of images, where there are any

    def __init__(
        self,
        folder: str,
        features: str,
        batch_size: int = 200,
        eval_batch_size: int = 256,
        min_count: int = 1,
        max_length: int = 40,
        mask_ratio: float = 0.15,
        swap: bool = False,
        trim: bool = False,
        val_limit: int | None = None,
        num_workers: int = 0,
        seed: int = 1234,
        vocabulary_layout: AnyLayout = "pcl",
        changes: Changes | None = None,
        multi: dict[str, int] | None = None,
        vocabulary_with: list[str] | None = None,
    ) -> None:
        super().__init__()
        found, self.store_name = read_dataset(folder), features
        self.changes: Changes | None = changes or found.info.get("changes")
        if unknown := sorted(set(multi or {}) - {"max_length", "min_count"}):
            raise DiffcapError(f"data.multi names {unknown[0]!r}; it takes max_length and min_count.")
        if multi and self.changes == "multi":
            max_length, min_count = multi.get("max_length", max_length), multi.get("min_count", min_count)
        self.batch_size, self.eval_batch_size, self.max_length = batch_size, eval_batch_size, max_length
        for name, least in (("batch_size", 1), ("eval_batch_size", 1), ("max_length", 4)):
            if getattr(self, name) < least:
                raise DiffcapError(f"data.{name} is {getattr(self, name)}; it must be at least {least}.")
        self.mask_ratio, self.swap, self.trim = mask_ratio, swap, trim
        self.val_limit, self.num_workers, self.seed = val_limit, num_workers, seed
        self.dataset = replace(found, pairs=take_changes(found.pairs, self.changes))
        self.store = FeatureStore.open(Path(folder) / "features" / features)
        train = self._pairs("train")
        if not self.takes_single_images and any(pair.after is None for pair in train):
            raise DiffcapError(
                f"{self.dataset.name}: made of single images, which only pre-training takes (make pretrain DATASET=<pairs> "
                "EXTRA=cub); give a dataset of pairs here."
            )
        others = [pair for other in vocabulary_with or [] for pair in read_dataset(other).pairs]
        captions = (caption for pair in (*train, *others) if pair.split == "train" for caption in pair.captions)
        self.vocabulary = vocabulary_for(captions, min_count, vocabulary_layout)
        self.words = self.vocabulary.words
        self.vocabulary_size = len(self.vocabulary)
        self.feature_channels, *self.grid = self.store.shape
        self.image_size = self.grid  # where the features are pixels
        for split in ("train", "val"):
            bare = [pair.id for pair in self.dataset.pairs if pair.split == split and not pair.captions]
            if bare:
                say(
                    f"{self.dataset.name}: {len(bare):,} {split} pairs (first {bare[0]}) have no caption and are left out"
                )
        self.val_references = {pair.id: pair.captions for pair in self._pairs("val")[:val_limit]}

    def _pairs(self, split: str) -> list[ChangePair]:
        """The pairs of a split that have captions."""
        pairs = [pair for pair in self.dataset.pairs if pair.split == split and pair.captions]
        if not pairs and any("class" in pair.extra for pair in self.dataset.pairs):
            raise DiffcapError(
                f"{self.dataset.name}: its images have classes and no captions; it helps in the pre-training of another "
                "dataset only (make pretrain DATASET=<pairs> EXTRA=nabirds)."
            )
        if not pairs:
            raise DiffcapError(
                f"{self.dataset.name}: its manifest has no {split} pairs with captions; add some to the {split} split."
            )
        return pairs

    def table(self, split: str) -> PairTable:
        """The pairs of a split that have captions."""
        return PairTable(self._pairs(split), self.store, self.vocabulary, self.max_length)

    def setup(self, stage: str) -> None:
        """Encode the captions."""
        if stage == "fit":
            self.train_table = self.table("train")
        if stage in ("fit", "validate"):
            self.val_table = self.table("val")

    def _text(self, tokens: np.ndarray, generator: torch.Generator) -> Batch:
        """The batch's entries for captions (B, T): `tokens`; with a mask token `mlm_tokens` and `mlm_labels` too."""
        text = torch.from_numpy(tokens.astype(np.int64))
        # Trimmed only after the draws, so that the same words are hidden with and without it.
        used = self.val_table.longest(tokens) if self.trim else tokens.shape[1]
        if self.vocabulary.mask is None:
            return {"tokens": text[:, :used]}
        hidden, labels = mask_words(
            text,
            eos_id=self.vocabulary.eos,
            mask_id=self.vocabulary.mask,
            vocabulary_size=self.vocabulary_size,
            ratio=self.mask_ratio,
            generator=generator,
        )
        return {"tokens": text[:, :used], "mlm_tokens": hidden[:, :used], "mlm_labels": labels[:, :used]}

    def _share(self, batch: Batch) -> Batch:
        """This rank's part of a global batch."""
        ranks, rank = (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)
        return {key: value if isinstance(value, str) else value[rank::ranks] for key, value in batch.items()}

    def _with_images(
        self, batch: Batch, pairs: np.ndarray, generator: torch.Generator, table: PairTable | None = None
    ) -> Batch:
        """This rank's part of a global batch, with the feature maps of its pairs (of the training table) only."""
        swap = (
            torch.rand(len(pairs), generator=generator) < 0.5
            if self.swap
            else torch.zeros(len(pairs), dtype=torch.bool)
        )
        share = self._share({**batch, "pairs": pairs, "swap": swap.numpy()})
        images = (table or self.train_table).images(share.pop("pairs"), share.pop("swap"))
        return {**share, **images}

    def _choices(self, samples: Samples) -> np.ndarray:
        """The training samples: the pair of each, (n,), or the two pairs of each scene, (n, 2)."""
        table = self.train_table
        if samples == "captions":
            return table.owner
        if samples == "pairs":
            return np.flatnonzero(table.counts)
        scenes = table.scenes()
        scenes = scenes[table.counts[scenes].all(1)]
        if not len(scenes):
            raise DiffcapError(
                f"{self.dataset.name}: no training scene has a change pair and a distractor pair; set data.samples to pairs."
            )
        alone = np.setdiff1d(np.flatnonzero(table.counts), scenes)
        if len(alone):
            say(
                f"{self.dataset.name}: {len(alone):,} training pairs (first {table.ids[alone[0]]}) have no change or no "
                "distractor pair beside them and are left out; data.samples=pairs trains on them, too"
            )
        return scenes

    def make_batch(self, step: int) -> Batch:
        """This rank's share of training batch `step`."""
        raise NotImplementedError

    @property
    def samples_a_step(self) -> int:
        """What the ranks share out: a process without any cannot take part in every loss."""
        return self.batch_size

    def train_dataloader(self) -> DataLoader:
        """Batches from the step at which the trainer stands."""
        assert self.trainer is not None
        samples, ranks = self.samples_a_step, self.trainer.world_size
        if samples < ranks:
            raise DiffcapError(
                f"data.batch_size is {self.batch_size}, which makes {samples} samples a step for {ranks} processes; "
                "raise it, or lower trainer.devices."
            )
        first = self.trainer.global_step * self.trainer.accumulate_grad_batches
        return DataLoader(StepBatches(self.make_batch, first), batch_size=None, **self._workers())

    def val_dataloader(self) -> DataLoader:
        """The validation pairs in order."""
        pairs = PairBatches(self.val_table, self._text, self.val_limit)
        return DataLoader(pairs, self.eval_batch_size, collate_fn=identity_collate, **self._workers())

    def _workers(self) -> dict[str, Any]:
        # Forked, where another way is the system's default: a trainer cannot be pickled.
        return {"num_workers": self.num_workers, "multiprocessing_context": "fork" if self.num_workers else None}


class CaptionData(FeatureData):
    """Captioning.

    Args:
        folder: the dataset's folder, with `manifest.jsonl`.
        features: name of the feature store in its `features/`.
        samples: "captions": every caption of every training pair is a sample (IDC-PCL). "pairs": every pair is, with one
            of its captions by chance (SCORER, DIRL). "scenes": every scene is, with its change pair and its distractor
            pair (SCORER and DIRL on CLEVR-Change); `batch_size` counts scenes then.
        settings: see `FeatureData`.
    """

    def __init__(
        self,
        folder: str,
        features: str,
        samples: Samples = "captions",
        **settings: Any,
    ) -> None:
        super().__init__(folder, features, **settings)
        self.samples = samples

    def setup(self, stage: str) -> None:
        """Encode the captions and lay out the samples."""
        super().setup(stage)
        if stage != "fit":
            return
        self.choices = self._choices(self.samples)
        self.stream = Stream(len(self.choices), self.seed)

    def make_batch(self, step: int) -> Batch:
        """See `FeatureData`: `before`, `after`, the text, `is_change`; see `PairTable.images` for two pairs a scene."""
        generator, table = step_generator(self.seed, step), self.train_table
        samples = self.stream.take(step * self.batch_size, self.batch_size)
        pairs = self.choices[samples]
        tokens = table.tokens[samples] if self.samples == "captions" else table.draw_captions(pairs, generator)
        if self.samples == "scenes":
            return self._scene_batch(pairs, tokens, generator)
        batch = {**self._text(tokens, generator), "is_change": torch.from_numpy(table.is_change[pairs]).long()}
        return self._with_images(batch, pairs, generator)

    def _scene_batch(self, pairs: np.ndarray, tokens: np.ndarray, generator: torch.Generator) -> Batch:
        """Pairs (b, 2) and captions (b, 2, T) to a batch of change pairs, then distractor pairs; shared out by scene."""
        text = self._text(tokens.reshape(-1, tokens.shape[-1]), generator)
        text["is_change"] = torch.from_numpy(self.train_table.is_change[pairs].reshape(-1)).long()
        by_scene = {key: value.unflatten(0, (-1, 2)) for key, value in text.items()}
        batch = self._with_images(by_scene, pairs, generator)
        return {key: value.transpose(0, 1).flatten(0, 1) if key in text else value for key, value in batch.items()}


class AdaptData(FeatureData):
    """CLIP4IDC's adaptation: every caption of every training pair that shows a change is a sample (authors' code).

    Arguments as `FeatureData`, of which `features` is a store of pixels; with `swap` the first image is the nonsemantic one half
    of the time.
    """

    def setup(self, stage: str) -> None:
        """Encode the captions and lay out the samples."""
        super().setup(stage)
        if stage == "fit":
            table = self.train_table
            self.samples = np.flatnonzero(table.is_change[table.owner])
            if not len(self.samples):
                raise DiffcapError(
                    f"{self.dataset.name}: no training pair shows a change; there is nothing to retrieve."
                )
            self.stream = Stream(len(self.samples), self.seed)

    def make_batch(self, step: int) -> Batch:
        """See `FeatureData`: `before`, `after`, `tokens`."""
        generator, table = step_generator(self.seed, step), self.train_table
        samples = self.samples[self.stream.take(step * self.batch_size, self.batch_size)]
        return self._with_images(self._text(table.tokens[samples], generator), table.owner[samples], generator)

    def val_dataloader(self) -> DataLoader:
        """The validation pairs that show a change, in order, each with all its captions."""
        pairs = RetrievalBatches(self.val_table, self.val_limit)
        return DataLoader(pairs, self.eval_batch_size, collate_fn=identity_collate, **self._workers())
