"""The LightningDataModule of IDC-PCL's pre-training. Each step has one task, on one of up to three datasets.

The tasks: "mlm" predicts masked words, "mvcl" masked patches; "fda" tells a caption from hard negatives; "fgvc" classifies images.
"""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from diffcap.data.datamodules import FeatureData, Samples
from diffcap.data.pair_table import PairTable
from diffcap.data.sampler import Batch, ShuffledEpochs, TaskSchedule, step_generator
from diffcap.data.workers import read_maps
from diffcap.features.store import FeatureStore
from diffcap.methods.pcl.losses import mask_patches
from diffcap.negatives.file import iter_negatives
from diffcap.records import read_dataset
from diffcap.utils.errors import DiffcapError

CAPTION_TASKS = ("mlm", "mvcl", "fda")
SINGLE_PREFIX = "single_"  # prefix of the tasks on single images, the option `singles`
FGVC_TASK = "fgvc"
PAIRS_PER_IMAGE = 4  # pairs with the same first image, per epoch; ours: IDC-PCL says "half and half by random sampling"


class LabelledPairs:
    """An infinite sequence of pairs of labelled images, with random access. `labels` (images,) has at least two distinct values.

    In each epoch, every image is the first of four pairs: two with an image of its class if there is one, the others with images
    of other classes. Each epoch has new random partners and a new order.
    """

    def __init__(self, labels: np.ndarray, seed: int) -> None:
        self.labels = labels
        self.seed = seed
        self.epochs = ShuffledEpochs(PAIRS_PER_IMAGE * len(labels), seed)
        self._sorted_images = np.argsort(labels, kind="stable")  # image indices, those of one class next to each other
        _, class_indices, class_sizes = np.unique(labels, return_inverse=True, return_counts=True)
        class_starts = np.cumsum(class_sizes) - class_sizes  # positions in `_sorted_images`
        self._class_start = class_starts[class_indices]  # (images,)
        self._class_size = class_sizes[class_indices]  # (images,)
        positions = np.empty_like(self._sorted_images)  # each image's index in `_sorted_images`
        positions[self._sorted_images] = np.arange(len(labels))
        self._index_in_class = positions - self._class_start
        self._partners = lru_cache(2)(self._sample_partners)  # of two epochs, because a batch may extend over both

    def take(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of the first and the second images of pairs `start` ... `start + count - 1`, (count,) each."""
        pair_ids = self.epochs.take(start, count)  # 0 ... 3 are the pairs of image 0, 4 ... 7 those of image 1
        first_images = pair_ids // PAIRS_PER_IMAGE
        partner_indices = pair_ids % PAIRS_PER_IMAGE
        epoch_of_pair = (start + np.arange(count)) // self.epochs.size
        second_images = np.empty_like(first_images)
        for epoch in np.unique(epoch_of_pair).tolist():
            is_in_epoch = epoch_of_pair == epoch
            chosen = first_images[is_in_epoch], partner_indices[is_in_epoch]
            second_images[is_in_epoch] = self._partners(epoch)[chosen]
        return first_images, second_images

    def _sample_partners(self, epoch: int) -> np.ndarray:
        """Sample the second image of each pair in an epoch, (images, PAIRS_PER_IMAGE)."""
        rng = np.random.default_rng([self.seed, 11, epoch])  # 11: number of this random stream
        class_start = self._class_start[:, None]
        class_size = self._class_size[:, None]
        uniform = rng.random((len(self.labels), PAIRS_PER_IMAGE))
        # Positions of partners in `_sorted_images`: in the image's own class, without the image itself, and in other classes.
        offset = 1 + (uniform * (class_size - 1)).astype(np.int64)
        same_class = class_start + (self._index_in_class[:, None] + offset) % class_size
        other_class = (uniform * (len(self.labels) - class_size)).astype(np.int64)
        other_class += np.where(other_class >= class_start, class_size, 0)
        is_same_class = (np.arange(PAIRS_PER_IMAGE) < PAIRS_PER_IMAGE // 2) & (class_size > 1)
        return self._sorted_images[np.where(is_same_class, same_class, other_class)]


class FdaSamples(NamedTuple):
    """The samples of the task "fda": n captions with K negatives each."""

    pair_indices: np.ndarray  # (n,) each caption's pair
    text_rows: np.ndarray  # (n, 1 + K) rows in `tokens` of the caption and of its negatives
    tokens: np.ndarray  # (d, T) padded ids of the d distinct texts


class CaptionSource(NamedTuple):
    """A captioned dataset from which the tasks take samples."""

    table: PairTable  # the dataset's training pairs, or its single images
    # What the samples of "mlm" and "mvcl" are: captions, pairs, or scenes (a change and a distractor pair with the same before image)
    samples: Samples
    sample_pairs: np.ndarray  # (n,) index of each sample's pair; for scenes (n, 2): change pair, distractor pair
    samples_per_step: int
    fda: FdaSamples | None  # None if the training does not have the task "fda"


class PretrainData(FeatureData):
    """The data of IDC-PCL's pre-training tasks, one task per step.

    Args:
        folder: the dataset's folder, with `manifest.jsonl`: pairs, or single images with captions (CUB).
        features: name of the feature store in its `features/`, and in those of `singles` and `labelled`.
        tasks: shares of "mlm", "mvcl" and "fda" (paper: 8:1:2 on CLEVR-Change, 9:1:2 on the birds); of "single_mlm",
            "single_mvcl" and "single_fda" on `singles`; and of "fgvc" on `labelled` (paper: 9:1:2:3 on the birds).
        without: tasks to remove from `tasks`, without a change of the other shares (the papers' ablations).
        negatives: file of hard negatives, null for `negatives.jsonl` in the dataset's folder; read if fda has a share.
        samples: what a sample of mlm and mvcl is: "captions" (authors' code), "pairs" or "scenes" (a change and a distractor pair).
            `batch_size` always counts pairs, so a batch has half as many scenes.
        singles: folder of single images with captions and negatives, for the tasks "single_..."; `vocabulary_with` must have it, too.
        labelled: folder of a dataset of single images with classes (NABirds), for the task "fgvc".
        settings: see `FeatureData`. A batch of fda has `batch_size // (1 + K)` captions with K negatives (authors' code). `trim`,
            which removes padding, changes the results unless the model has `pad_mask`.
    """

    takes_single_images = True  # `folder` may have single images

    def __init__(
        self,
        folder: str,
        features: str,
        tasks: dict[str, int] | None = None,
        without: list[str] | None = None,
        negatives: str | None = None,
        samples: Samples = "captions",
        singles: str | None = None,
        labelled: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(folder, features, **settings)
        self.samples = samples
        shares = {"mlm": 8, "mvcl": 1, "fda": 2} if tasks is None else tasks
        known_tasks = (*CAPTION_TASKS, *(SINGLE_PREFIX + task for task in CAPTION_TASKS))
        for option, option_tasks in (("tasks", shares), ("without", without or [])):
            if unknown := sorted(set(option_tasks) - {*known_tasks, FGVC_TASK}):
                raise DiffcapError(
                    f"data.{option} has the unknown task {unknown[0]!r}; the tasks are {', '.join(known_tasks)} and {FGVC_TASK}."
                )
        kept_shares = {task: share for task, share in shares.items() if task not in (without or [])}
        self.schedule = TaskSchedule(kept_shares, self.seed)
        self.negatives_file = Path(negatives) if negatives else Path(folder) / "negatives.jsonl"
        self.folders = {"singles": singles or "", "labelled": labelled or ""}  # by the option's name
        for option, option_folder in self.folders.items():
            tasks_of_option = [task for task in self.schedule.tasks if self._folder_option(task) == option]
            if tasks_of_option and not option_folder:
                raise DiffcapError(
                    f"data.tasks has {tasks_of_option[0]!r}, but data.{option} is not set; give its folder."
                )
        vocabulary_folders = [Path(path).resolve() for path in settings.get("vocabulary_with") or []]
        if singles and Path(singles).resolve() not in vocabulary_folders:
            raise DiffcapError(
                f"data.singles is {singles}, but data.vocabulary_with does not have this folder; add it, here and in fine-tuning."
            )
        if FGVC_TASK in self.schedule.tasks:
            # Images of all splits are used, as in IDC-PCL, because nothing is evaluated on them.
            dataset = read_dataset(self.folders["labelled"])
            self.labelled_images = [pair for pair in dataset.pairs if isinstance(pair.extra.get("class"), int)]
            class_ids = {image.extra["class"] for image in self.labelled_images}
            if len(class_ids) < 2:
                raise DiffcapError(f"{dataset.name}: has images of fewer than two classes; data.labelled needs two.")
            self.classes = 1 + max(class_ids)  # argument `classes` of the model

    @staticmethod
    def _folder_option(task: str) -> str:
        """Return the name of the option with the dataset that a task reads."""
        if task == FGVC_TASK:
            return "labelled"
        return "singles" if task.startswith(SINGLE_PREFIX) else "folder"

    def setup(self, stage: str) -> None:
        """Encode captions and negatives, and list the samples of each task."""
        super().setup(stage)
        if stage != "fit":
            return
        options = {self._folder_option(task) for task in self.schedule.tasks}
        self.sources: dict[str, CaptionSource] = {}  # the keys are options with a dataset's folder
        if "folder" in options:
            fda = self._read_fda_samples("fda", self.train_table, self.negatives_file)
            sample_pairs = self._pairs_of_samples(self.samples)
            table = self.train_table
            self.sources["folder"] = CaptionSource(table, self.samples, sample_pairs, self.samples_per_step, fda)
        if "singles" in options:
            singles_folder = self.folders["singles"]
            dataset = read_dataset(singles_folder)
            store = self._open_store(singles_folder)
            images = [pair for pair in dataset.pairs if pair.split == "train" and pair.captions and pair.after is None]
            if not images:
                raise DiffcapError(f"{dataset.name}: has no single training image with captions, for data.singles.")
            table = PairTable(images, store, self.vocabulary, self.max_length)
            fda = self._read_fda_samples(SINGLE_PREFIX + "fda", table, Path(singles_folder) / "negatives.jsonl")
            self.sources["singles"] = CaptionSource(table, "captions", table.caption_pair, self.batch_size, fda)
        if "labelled" in options:
            self.labelled_store = self._open_store(self.folders["labelled"])
            self.labelled_rows = self.labelled_store.rows([image.before for image in self.labelled_images])
            labels = np.array([image.extra["class"] for image in self.labelled_images])
            self.labelled_pairs = LabelledPairs(labels, self.seed + 1)
        self.epochs_of_task = {}
        for index, task in enumerate(self.schedule.tasks):
            if task != FGVC_TASK:
                source = self.sources[self._folder_option(task)]
                pairs = source.fda.pair_indices if source.fda and task.endswith("fda") else source.sample_pairs
                self.epochs_of_task[task] = ShuffledEpochs(len(pairs), self.seed + 1 + index)

    def _open_store(self, folder: str) -> FeatureStore:
        """Open the feature store of another dataset. Its metadata must be those of `self.store`: backbone, weights, image size."""
        store = FeatureStore.open(Path(folder) / "features" / self.store_name)
        own_meta = self.store.meta
        if different_keys := [key for key in {**store.meta, **own_meta} if store.meta.get(key) != own_meta.get(key)]:
            raise DiffcapError(
                f"{store.folder}: its features and those of {self.dataset.name} have different values of {different_keys[0]}; extract "
                "both with the same BACKBONE and WEIGHTS."
            )
        return store

    @property
    def samples_per_step(self) -> int:
        """Return the number of samples in a step of mlm or mvcl. A step of fda has fewer, so some ranks may get none."""
        return self.batch_size // (2 if self.samples == "scenes" else 1)

    def _read_fda_samples(self, task: str, table: PairTable, negatives_file: Path) -> FdaSamples | None:
        """Read the captions of the training pairs and their negatives; return None if the task is not trained."""
        if task not in self.schedule.tasks:
            return None
        pair_index_of = {pair_id: index for index, pair_id in enumerate(table.ids)}
        captions_of_pair: list[list[str]] = [[] for _ in table.ids]
        for index, caption in zip(table.caption_pair, table.captions):
            captions_of_pair[index].append(caption)
        pair_indices: list[int] = []
        unknown_ids: list[str] = []  # ids of pairs that do not have the file's caption

        def read_texts() -> Iterator[str]:  # one line of the file at a time: a list of all texts takes gigabytes
            for line in iter_negatives(negatives_file):
                if line.id not in pair_index_of:
                    continue
                pair_indices.append(pair_index_of[line.id])
                if line.caption not in captions_of_pair[pair_indices[-1]]:
                    unknown_ids.append(line.id)
                yield line.caption
                yield from (negative.text for negative in line.negatives)

        tokens, text_rows = table.encode_distinct(read_texts())
        if unknown_ids:
            # `self.changes`: how pairs with several changes are read, "single" or "multi".
            option = f" negatives_ARGS=--changes={self.changes}" if self.changes else ""
            raise DiffcapError(
                f"{negatives_file}: {len(unknown_ids):,} of its {len(pair_indices):,} captions (first: pair {unknown_ids[0]}) are "
                f"not captions of the training pairs; write the file again with `make negatives{option}`."
            )
        if not pair_indices:
            raise DiffcapError(f"{negatives_file}: has no training pair; write the file again with `make negatives`.")
        return FdaSamples(np.array(pair_indices), text_rows.reshape(len(pair_indices), -1), tokens)

    def make_batch(self, step: int) -> Batch:
        """Return this rank's part of a batch: "task", "before", "after" (for pairs), and the entries that `PCLPretraining` needs for it."""
        task, task_step = self.schedule.at(step)  # `task_step`: number of earlier steps with this task
        if task == FGVC_TASK:
            first_images, second_images = self.labelled_pairs.take(task_step * self.batch_size, self.batch_size)
            labels = torch.from_numpy(self.labelled_pairs.labels)
            classes = {"class_before": labels[first_images], "class_after": labels[second_images]}
            rank_part = self._rank_part({**classes, "first_images": first_images, "second_images": second_images})
            before = read_maps(self.labelled_store, self.labelled_rows[rank_part.pop("first_images")])
            after = read_maps(self.labelled_store, self.labelled_rows[rank_part.pop("second_images")])
            return {"task": FGVC_TASK, **rank_part, "before": before, "after": after}
        generator = step_generator(self.seed, step)
        source = self.sources[self._folder_option(task)]
        table = source.table
        epochs = self.epochs_of_task[task]
        task_kind = task.removeprefix(SINGLE_PREFIX)
        if task_kind == "fda":
            assert source.fda is not None
            num_samples = max(1, self.batch_size // source.fda.text_rows.shape[1])
            sample_indices = epochs.take(task_step * num_samples, num_samples)
            pair_indices = source.fda.pair_indices[sample_indices]
            tokens = source.fda.tokens[source.fda.text_rows[sample_indices]]  # (num_samples, 1 + K, T)
            length = table.longest_length(tokens) if self.trim else tokens.shape[-1]
            entries: Batch = {"fda_captions": torch.from_numpy(tokens[..., :length]).long()}
        else:
            sample_indices = epochs.take(task_step * source.samples_per_step, source.samples_per_step)
            pair_indices = source.sample_pairs[sample_indices].T.reshape(-1)  # scenes: change, then distractor pairs
            is_caption = source.samples == "captions"
            tokens = table.tokens[sample_indices] if is_caption else table.draw_captions(pair_indices, generator)
            entries = self._text_entries(tokens, generator)  # "tokens", "mlm_tokens", "mlm_labels"
            if task_kind == "mvcl":
                num_patches = self.store.shape[1] * self.store.shape[2]  # of an image
                num_pairs = len(pair_indices)
                is_masked = mask_patches(num_pairs, num_patches, self.mask_ratio, generator, table.images_per_pair)
                entries = {"tokens": entries["tokens"], "visual_mask": is_masked}
        return self._add_images({"task": task, **entries}, pair_indices, generator, table)
