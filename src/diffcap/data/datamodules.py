"""The LightningDataModules of captioning. Their batches have feature maps of image pairs, and captions.

Every random choice of a training step (samples, masked words, swapped images) depends only on the seed and the step, and is
made for the global batch, which is the batch of all ranks together. Each rank then takes its part of the global batch.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader

from diffcap.data.masking import mask_words
from diffcap.data.pair_table import PairDataset, PairTable, RetrievalDataset, identity_collate, maps_as_float
from diffcap.data.sampler import Batch, ShuffledEpochs, StepDataset, step_generator
from diffcap.data.workers import worker_options
from diffcap.datasets.registry import get_dataset
from diffcap.features.store import FeatureStore
from diffcap.records import ChangePair, Changes, read_dataset, take_changes
from diffcap.text.vocabularies import AnyLayout, build_any_vocabulary
from diffcap.text.vocabulary import DEFAULT_LAYOUT
from diffcap.utils.errors import DiffcapError

Samples = Literal["captions", "pairs", "scenes"]  # what a training sample is, see `CaptionData`
rank_zero_print = rank_zero_only(print)


class FeatureData(pl.LightningDataModule):
    """Base class of the data modules of pre-training and captioning.

    Args:
        folder: the dataset's folder, with `manifest.jsonl`.
        features: name of the feature store, a folder in `features/` of the dataset's folder.
        batch_size: number of samples of a training step, over all ranks together (as in the papers).
        eval_batch_size: number of pairs that each rank decodes at once.
        min_count: minimum number of occurrences of a word in the captions of `vocabulary_splits`.
        max_length: maximum number of ids of a caption, with BOS and EOS; longer captions are cut.
        mask_ratio: probability that a word, or an image patch in a pre-training, is masked (paper: 0.15).
        swap: for each sample, with probability 1/2, exchange the before image and the after image of the distractor pair, which show the
            same scene. The change pair of this scene gets the same new before image (SCORER, DIRL).
        trim: remove padding that no caption of the batch needs; the results are the same for models that mask padding.
        val_limit: number of pairs for validation, which are the first pairs of the split; null for all pairs.
        num_workers: worker processes of the data loaders, per rank; null: up to 6 with a GPU, else 0. The batches do not depend on it.
        seed: seed of all random choices.
        vocabulary_layout: name of the special tokens and the order of the ids, such as "pcl" or "rcc" (`diffcap.text.vocabulary`);
            "clip" for CLIP's tokens, "hub" for the tokens of `base`.
        changes: for datasets with one sentence per change. "single": each sentence is a caption. "multi": all sentences of a pair are
            one caption. null for the dataset's own value.
        multi: values of `max_length` and `min_count` that are used if `changes` is "multi", whose captions are longer.
        vocabulary_with: folders of further datasets whose training captions are counted for the vocabulary (IDC-PCL: CUB and
            Birds-to-Words share a vocabulary). All stages of a model need the same list.
        vocabulary_splits: splits whose captions are counted: "train", or "all" (RSICCformer, Chg2Cap). Equal in all stages of a model.
        base: the captioner's vision-language model; the training stage sets it.
        base_revision: commit of `base`; the training stage sets it.
    """

    takes_single_images = False  # True in a pre-training that can use single images
    classes = 0  # number of image classes, for a pre-training that classifies images

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
        num_workers: int | None = None,
        seed: int = 1234,
        vocabulary_layout: AnyLayout = DEFAULT_LAYOUT,
        changes: Changes | None = None,
        multi: dict[str, int] | None = None,
        vocabulary_with: list[str] | None = None,
        base: str | None = None,
        base_revision: str | None = None,
        vocabulary_splits: Literal["train", "all"] = "train",
    ) -> None:
        super().__init__()
        dataset = read_dataset(folder)
        self.store_name = features  # recorded in checkpoints
        self.changes: Changes | None = changes or dataset.info.get("changes")
        if unknown := sorted(set(multi or {}) - {"max_length", "min_count"}):
            raise DiffcapError(f"data.multi has the unknown key {unknown[0]!r}; its keys are max_length and min_count.")
        if multi and self.changes == "multi":
            max_length, min_count = multi.get("max_length", max_length), multi.get("min_count", min_count)
        self.batch_size, self.eval_batch_size, self.max_length = batch_size, eval_batch_size, max_length
        for name, minimum in (("batch_size", 1), ("eval_batch_size", 1), ("max_length", 4)):
            if getattr(self, name) < minimum:
                raise DiffcapError(f"data.{name} is {getattr(self, name)}; it must be at least {minimum}.")
        self.mask_ratio, self.swap, self.trim = mask_ratio, swap, trim
        self.val_limit, self.num_workers, self.seed = val_limit, num_workers, seed
        self.dataset = replace(dataset, pairs=take_changes(dataset.pairs, self.changes))
        self.store = FeatureStore.open(Path(folder) / "features" / features)
        has_single_images = any(pair.after is None for pair in self._captioned_pairs("train"))
        if has_single_images and not self.takes_single_images:
            raise DiffcapError(
                f"{self.dataset.name}: has single images, which only pre-training can use (make pretrain DATASET=<pairs> "
                f"EXTRA={self.dataset.name}); give a dataset of pairs."
            )
        other_pairs = [pair for other_folder in vocabulary_with or [] for pair in read_dataset(other_folder).pairs]
        counted_pairs = [
            pair  # in the order of the manifest, because the layout "rsicc" numbers the words in this order
            for pair in (*self.dataset.pairs, *other_pairs)
            if pair.split == "train" or vocabulary_splits == "all"
        ]
        captions = (caption for pair in counted_pairs for caption in pair.captions)
        self.vocabulary = build_any_vocabulary(captions, min_count, vocabulary_layout, base, base_revision)
        self.words = self.vocabulary.words
        self.vocabulary_size = len(self.vocabulary)
        self.feature_channels, *self.grid = self.store.shape
        self.image_size = self.grid  # height and width, if the features are pixels
        changed_pairs = (pair for pair in self._captioned_pairs("train") if not pair.is_distractor)
        # The types of changes that a `ChangeHead` distinguishes
        self.change_types = tuple(sorted({pair.change_type for pair in changed_pairs if pair.change_type}))
        for split in ("train", "val"):
            uncaptioned = [pair.id for pair in self.dataset.pairs if pair.split == split and not pair.captions]
            if uncaptioned:
                rank_zero_print(
                    f"{self.dataset.name}: {len(uncaptioned):,} {split} pairs (first {uncaptioned[0]}) have no caption and are "
                    "left out"
                )
        # A function that computes on the CPU what a model adds to a batch. `TrainingModule` sets it to `Captioner.host_entries`.
        self.host_entries: Callable[[Batch], Batch] = lambda batch: {}
        self.val_references = {pair.id: pair.captions for pair in self._captioned_pairs("val")[:val_limit]}

    def _captioned_pairs(self, split: str) -> list[ChangePair]:
        """Return the pairs of a split that have captions. Raise an error if there are none."""
        pairs = [pair for pair in self.dataset.pairs if pair.split == split and pair.captions]
        if not pairs and any("class" in pair.extra for pair in self.dataset.pairs):
            raise DiffcapError(
                f"{self.dataset.name}: its images have classes and no captions, so it can only be added to the pre-training on "
                f"another dataset (make pretrain DATASET=<pairs> EXTRA={self.dataset.name})."
            )
        if not pairs:
            raise DiffcapError(f"{self.dataset.name}: its manifest has no {split} pairs with captions; add some.")
        return pairs

    def table(self, split: str) -> PairTable:
        """Return the pairs of a split that have captions, with their features."""
        pairs = self._captioned_pairs(split)
        return PairTable(pairs, self.store, self.vocabulary, self.max_length, self.change_types)

    def setup(self, stage: str) -> None:
        """Encode the captions, and print warnings about the training data."""
        if stage == "fit":
            self.train_table = self.table("train")
            if note := get_dataset(self.dataset.name).features_note(self.store_name, self.store.meta.get("library")):
                rank_zero_print(f"warning: {note}")
            num_cut, needed_length = self.train_table.cut_captions()
            if num_cut:
                rank_zero_print(
                    f"warning: {num_cut:,} of {len(self.train_table.captions):,} training captions of {self.dataset.name} are longer than "
                    f"data.max_length={self.max_length} allows, and their ends are not learned; --data.max_length={needed_length} keeps "
                    "all of them"
                )
        if stage in ("fit", "validate"):
            self.val_table = self.table("val")

    def _text_entries(self, tokens: np.ndarray, generator: torch.Generator) -> Batch:
        """Return the entry "tokens" for captions (B, T), and with [MASK] in the vocabulary also "mlm_tokens" and "mlm_labels".

        "mlm_tokens" (B, T) has masked words, and "mlm_labels" (B, T) has the original ids of these words.
        """
        text = torch.from_numpy(tokens.astype(np.int64))
        length = self.val_table.longest_length(tokens) if self.trim else tokens.shape[1]
        if self.vocabulary.mask is None:
            return {"tokens": text[:, :length]}
        masked, labels = mask_words(  # before trimming, so that `trim` does not change which words are masked
            text,
            eos_id=self.vocabulary.eos,
            mask_id=self.vocabulary.mask,
            vocabulary_size=self.vocabulary_size,
            ratio=self.mask_ratio,
            generator=generator,
        )
        return {"tokens": text[:, :length], "mlm_tokens": masked[:, :length], "mlm_labels": labels[:, :length]}

    def _rank_part(self, batch: Batch) -> Batch:
        """Return this rank's part of a global batch. A string, such as the "task" of a pre-training, is the same on all ranks."""
        world_size, rank = (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)
        return {key: value if isinstance(value, str) else value[rank::world_size] for key, value in batch.items()}

    def _add_images(
        self, batch: Batch, pair_indices: np.ndarray, generator: torch.Generator, table: PairTable | None = None
    ) -> Batch:
        """Return this rank's part of a global batch, with the images of its pairs. `pair_indices`: (B,), or (b, 2) for samples "scenes"."""
        is_swapped = torch.zeros(len(pair_indices), dtype=torch.bool)
        if self.swap:
            is_swapped = torch.rand(len(pair_indices), generator=generator) < 0.5
        part = self._rank_part({**batch, "pairs": pair_indices, "swap": is_swapped.numpy()})
        images = (table or self.train_table).images(part.pop("pairs"), part.pop("swap"))
        return {**part, **images}

    def _pairs_of_samples(self, samples: Samples) -> np.ndarray:
        """Return the index of the pair of each training sample, (n,). For samples "scenes", return both pairs' indices, (n, 2)."""
        table = self.train_table
        if samples == "captions":
            return table.caption_pair
        if samples == "pairs":
            return np.flatnonzero(table.caption_counts)
        scenes = table.scenes()
        scenes = scenes[table.caption_counts[scenes].all(1)]
        if not len(scenes):
            raise DiffcapError(
                f"{self.dataset.name}: no training scene has a change pair and a distractor pair; set data.samples=pairs."
            )
        unmatched = np.setdiff1d(np.flatnonzero(table.caption_counts), scenes)
        if len(unmatched):
            rank_zero_print(
                f"{self.dataset.name}: {len(unmatched):,} training pairs (first {table.ids[unmatched[0]]}) belong to scenes "
                "without a change pair or without a distractor pair and are left out; set data.samples=pairs to train on them"
            )
        return scenes

    def make_batch(self, step: int) -> Batch:
        """Return this rank's part of training batch `step`."""
        raise NotImplementedError

    @property
    def samples_per_step(self) -> int:
        """Number of samples that are distributed over the ranks; some losses need at least one on each rank."""
        return self.batch_size

    @property
    def batches_per_epoch(self) -> int:
        """Number of training batches of an epoch; known before `setup`."""
        raise DiffcapError(
            "the stage has no epochs, as each task has its own samples; give lengths in steps (5000, not 5ep)."
        )

    def train_dataloader(self) -> DataLoader:
        """The training batches, from the trainer's current step on."""
        assert self.trainer is not None
        num_samples = self.samples_per_step
        ranks = self.trainer.world_size
        if num_samples < ranks:
            raise DiffcapError(
                f"data.batch_size is {self.batch_size}, which gives {num_samples} samples per step for {ranks} processes; "
                "raise it, or lower trainer.devices."
            )
        first_step = self.trainer.global_step * self.trainer.accumulate_grad_batches  # number of earlier batches
        batches = StepDataset(self.make_batch, first_step)
        return DataLoader(batches, batch_size=None, collate_fn=self._add_host_entries, **self._worker_options())

    def val_dataloader(self) -> DataLoader:
        """The validation pairs in order."""
        pairs = PairDataset(self.val_table, self._text_entries, self.val_limit)
        return DataLoader(pairs, self.eval_batch_size, collate_fn=self._add_host_entries, **self._worker_options())

    def _add_host_entries(self, batch: Any) -> Batch:
        return {**batch, **self.host_entries(batch)}

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Convert the feature maps to float32 on the device. Pixels stay integers."""
        return maps_as_float(batch)

    def _worker_options(self) -> dict[str, Any]:
        return worker_options(self.num_workers, self.trainer)


class CaptionData(FeatureData):
    """The data of fine-tuning: pairs and captions.

    Args:
        samples: "captions": each caption of each training pair is a sample (IDC-PCL). "pairs": each pair is a sample, with a
            random one of its captions (SCORER, DIRL). "scenes": each change pair is a sample, together with the distractor pair that has
            the same before image (SCORER and DIRL on CLEVR-Change); then `batch_size` is the number of these scenes.
        settings: see `FeatureData`.
    """

    def __init__(self, folder: str, features: str, samples: Samples = "captions", **settings: Any) -> None:
        super().__init__(folder, features, **settings)
        self.samples = samples

    @property
    def batches_per_epoch(self) -> int:
        """Number of training batches of an epoch. The last, incomplete batch counts (SCORER and DIRL, authors' code)."""
        pairs = self._captioned_pairs("train")
        if self.samples == "captions":
            num_samples = sum(len(pair.captions) for pair in pairs)
        elif self.samples == "pairs":
            num_samples = len(pairs)
        else:
            distractor_befores = {pair.before for pair in pairs if pair.is_distractor}
            num_samples = sum(not pair.is_distractor and pair.before in distractor_befores for pair in pairs)
        return math.ceil(num_samples / self.batch_size)

    def setup(self, stage: str) -> None:
        """Encode the captions and list the training samples."""
        super().setup(stage)
        if stage == "fit":
            self.sample_pairs = self._pairs_of_samples(self.samples)
            self.epochs = ShuffledEpochs(len(self.sample_pairs), self.seed)

    def make_batch(self, step: int) -> Batch:
        """Return this rank's part of training batch `step`. With samples "scenes", change pairs come before distractor pairs."""
        generator = step_generator(self.seed, step)
        table = self.train_table
        sample_indices = self.epochs.take(step * self.batch_size, self.batch_size)
        pair_indices = self.sample_pairs[sample_indices]
        if self.samples == "captions":
            tokens = table.tokens[sample_indices]
        else:
            tokens = table.draw_captions(pair_indices, generator)
        entries = self._text_entries(tokens.reshape(-1, tokens.shape[-1]), generator)
        entries["is_change"] = torch.from_numpy(table.is_change[pair_indices].reshape(-1)).long()
        entries["change_type"] = torch.from_numpy(table.change_type[pair_indices].reshape(-1))
        if self.samples != "scenes":
            return self._add_images(entries, pair_indices, generator)
        # Each rank gets whole scenes, as entries of shape (b, 2, ...), and then puts the change pairs before the distractor pairs.
        scene_entries = {key: value.unflatten(0, (-1, 2)) for key, value in entries.items()}
        batch = self._add_images(scene_entries, pair_indices, generator)
        return {key: value.transpose(0, 1).flatten(0, 1) if key in entries else value for key, value in batch.items()}


class AdaptData(FeatureData):
    """The data of CLIP4IDC's adaptation, which trains retrieval on pixels. Each caption of a change pair is a sample (authors' code)."""

    @property
    def batches_per_epoch(self) -> int:
        """Number of training batches of an epoch, at least 1. The last, incomplete batch does not count (authors' code)."""
        num_captions = sum(len(pair.captions) for pair in self._captioned_pairs("train") if not pair.is_distractor)
        return max(1, num_captions // self.batch_size)

    def setup(self, stage: str) -> None:
        """Encode the captions and list the training samples."""
        super().setup(stage)
        if stage == "fit":
            table = self.train_table
            self.sample_captions = np.flatnonzero(table.is_change[table.caption_pair])
            if not len(self.sample_captions):
                raise DiffcapError(f"{self.dataset.name}: has no change pair in the train split; add some.")
            self.epochs = ShuffledEpochs(len(self.sample_captions), self.seed)

    def make_batch(self, step: int) -> Batch:
        """Return this rank's part of training batch `step`: `before`, `after`, `tokens`."""
        generator = step_generator(self.seed, step)
        table = self.train_table
        caption_indices = self.sample_captions[self.epochs.take(step * self.batch_size, self.batch_size)]
        entries = self._text_entries(table.tokens[caption_indices], generator)
        return self._add_images(entries, table.caption_pair[caption_indices], generator)

    def val_dataloader(self) -> DataLoader:
        """The change pairs of the validation split in order, each with all its captions."""
        change_pairs = RetrievalDataset(self.val_table, self.val_limit)
        return DataLoader(change_pairs, self.eval_batch_size, collate_fn=identity_collate, **self._worker_options())


class ReinforceData(CaptionData):
    """The data of self-critical training: pairs, and random numbers with which a model samples captions.

    Args:
        draws: number of captions to sample for each pair (5 in "A Better Variant of Self-Critical Sequence Training").
        settings: see `CaptionData`.
    """

    def __init__(self, folder: str, features: str, draws: int = 5, **settings: Any) -> None:
        super().__init__(folder, features, **settings)
        if draws < 1:
            raise DiffcapError(f"data.draws is {draws}; it must be at least 1.")
        self.draws = draws

    def make_batch(self, step: int) -> Batch:
        """Return this rank's part of batch `step`. "draws" (B, K, T - 1): random numbers (0 to 1) for the words of K captions per pair."""
        generator = step_generator(self.seed, step)
        sample_indices = self.epochs.take(step * self.batch_size, self.batch_size)
        pair_indices = self.sample_pairs[sample_indices]  # (B,), or (b, 2) for samples "scenes"; the rewards need them
        numbers = torch.rand(*pair_indices.shape, self.draws, self.max_length - 1, generator=generator)
        batch = self._add_images({"pair": torch.from_numpy(pair_indices), "draws": numbers}, pair_indices, generator)
        if pair_indices.ndim == 2:  # in the order of the images: all change pairs, then all distractor pairs
            batch |= {key: batch[key].transpose(0, 1).flatten(0, 1) for key in ("pair", "draws")}
        return batch
