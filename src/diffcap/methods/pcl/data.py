"""The LightningDataModule of IDC-PCL's pre-training. Each step has one task, on one of up to three datasets."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from diffcap.data.datamodules import FeatureData, Samples
from diffcap.data.pair_table import PairTable
from diffcap.data.sampler import Batch, ShuffledEpochs, TaskSchedule, cached_epoch, step_generator
from diffcap.data.workers import read_maps
from diffcap.features.store import FeatureStore
from diffcap.methods.pcl.losses import mask_patches
from diffcap.negatives.file import iter_negatives
from diffcap.records import read_dataset
from diffcap.utils.errors import DiffcapError

CAPTIONED = ("mlm", "mvcl", "fda")
SINGLE = "single_"  # prefix of the tasks on the dataset `singles`
FGVC = "fgvc"
PAIRS_PER_IMAGE = 4  # per epoch; ours, IDC-PCL only says "half and half by random sampling"


class LabelledPairs:
    """An infinite sequence of pairs of labelled images, with random access. `labels` (images,) has at least two distinct values.

    In each epoch, every image is the first of four pairs: two with an image of its class if there is one, the others with images
    of other classes. Each epoch has new random partners and a new order.
    """

    def __init__(self, labels: np.ndarray, seed: int) -> None:
        self.labels = labels
        self.seed = seed
        self.order = ShuffledEpochs(PAIRS_PER_IMAGE * len(labels), seed)
        self._by_class = np.argsort(labels, kind="stable")  # image indices, those of one class next to each other
        _, class_index, class_sizes = np.unique(labels, return_inverse=True, return_counts=True)
        class_starts = np.cumsum(class_sizes) - class_sizes
        self._class_start, self._class_size = class_starts[class_index], class_sizes[class_index]  # (images,) each
        position = np.empty_like(self._by_class)  # of each image in `_by_class`
        position[self._by_class] = np.arange(len(labels))
        self._rank_in_class = position - self._class_start
        self._partners: dict[int, np.ndarray] = {}

    def take(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of the first and the second images of pairs `start` ... `start + count - 1`, (count,) each."""
        pair_ids = self.order.take(start, count)
        first = pair_ids // PAIRS_PER_IMAGE
        slot = pair_ids % PAIRS_PER_IMAGE
        epochs = (start + np.arange(count)) // self.order.size
        second = np.empty_like(first)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            partners = cached_epoch(self._partners, int(epoch), self._sample_partners)
            second[rows] = partners[first[rows], slot[rows]]
        return first, second

    def _sample_partners(self, epoch: int) -> np.ndarray:
        """Sample the second image of each pair in an epoch, (images, PAIRS_PER_IMAGE)."""
        rng = np.random.default_rng([self.seed, 11, epoch])
        start = self._class_start[:, None]
        size = self._class_size[:, None]
        uniform = rng.random((len(self.labels), PAIRS_PER_IMAGE))
        # Positions in `_by_class`, in the image's own class (any but the image itself) and outside of it.
        offset = 1 + (uniform * (size - 1)).astype(np.int64)
        same_class = start + (self._rank_in_class[:, None] + offset) % size
        other_class = (uniform * (len(self.labels) - size)).astype(np.int64)
        other_class += np.where(other_class >= start, size, 0)
        is_same_class = (np.arange(PAIRS_PER_IMAGE) < PAIRS_PER_IMAGE // 2) & (size > 1)
        return self._by_class[np.where(is_same_class, same_class, other_class)]


class Candidates(NamedTuple):
    """The captions with negatives, which are the samples of fda."""

    pairs: np.ndarray  # (n,) index of each caption's pair
    texts: np.ndarray  # (n, 1 + K) rows in `tokens` of the caption and of its negatives
    tokens: np.ndarray  # (d, T) padded ids of the distinct texts


class CaptionedSource(NamedTuple):
    """A captioned dataset from which the tasks take samples."""

    table: PairTable  # its training pairs, or single images
    sample_pairs: np.ndarray  # see `FeatureData._pairs_of_samples`
    samples: Samples  # of mlm and mvcl
    samples_per_step: int
    fda: Candidates | None  # None where fda has no share


class PretrainData(FeatureData):
    """The data of IDC-PCL's pre-training tasks, one task per step.

    Args:
        folder: the dataset's folder, with `manifest.jsonl`: pairs, or single images with captions (CUB).
        features: name of the feature store in its `features/`, and in those of `singles` and `labelled`.
        tasks: shares of "mlm", "mvcl" and "fda" (paper: 8:1:2 on CLEVR-Change, 9:1:2 on the birds); of "single_mlm",
            "single_mvcl" and "single_fda" on `singles`; and of "fgvc" on `labelled` (paper: 9:1:2:3 on the birds).
        without: tasks to remove from `tasks`; the shares of the others are not changed (the papers' ablations).
        negatives: file of hard negatives, null for `negatives.jsonl` in the dataset's folder; read if fda has a share.
        samples: of mlm and mvcl: "captions" (authors' code), "pairs" or "scenes", see `CaptionData`; here `batch_size` is always
            a number of pairs, so there are half as many scenes.
        singles: folder of a dataset of single images with captions and negatives, for the tasks "single_...", also in `vocabulary_with`.
        labelled: folder of a dataset of single images with classes (NABirds), for the task "fgvc".
        settings: see `FeatureData`. A batch of fda has `batch_size // (1 + negatives)` pairs (authors' code). `trim` changes the
            results unless the model has `pad_mask`.
    """

    takes_single_images: ClassVar[bool] = True

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
        known = (*CAPTIONED, *(SINGLE + task for task in CAPTIONED), FGVC)
        for key, names in (("tasks", shares), ("without", without or [])):
            if unknown := sorted(set(names) - set(known)):
                raise DiffcapError(
                    f"data.{key} has the unknown task {unknown[0]!r}; the tasks are {', '.join(known[:-1])} and {FGVC}."
                )
        kept_shares = {task: share for task, share in shares.items() if task not in (without or [])}
        self.schedule = TaskSchedule(kept_shares, self.seed)
        self.negatives_path = Path(negatives) if negatives else Path(folder) / "negatives.jsonl"
        self.singles = singles
        self.labelled = labelled
        for source_folder, source in ((singles, "singles"), (labelled, "labelled")):
            tasks_of_source = [task for task in self.schedule.tasks if self._source_of(task) == source]
            if tasks_of_source and source_folder is None:
                raise DiffcapError(
                    f"data.tasks has {tasks_of_source[0]!r}, but data.{source} is not set; give its folder."
                )
        vocabulary_folders = [Path(path).resolve() for path in settings.get("vocabulary_with") or []]
        if singles and Path(singles).resolve() not in vocabulary_folders:
            raise DiffcapError(
                f"data.singles is {singles}, but data.vocabulary_with does not have this folder; add it, here and in fine-tuning."
            )
        if FGVC in self.schedule.tasks:  # the images of all splits, because nothing is evaluated on them, as in IDC-PCL
            assert labelled is not None
            dataset = read_dataset(labelled)
            self.labelled_images = [pair for pair in dataset.pairs if isinstance(pair.extra.get("class"), int)]
            classes = {image.extra["class"] for image in self.labelled_images}
            if len(classes) < 2:
                raise DiffcapError(
                    f"{dataset.name}: has images of fewer than two classes; data.labelled needs at least two."
                )
            self.classes = 1 + max(classes)

    @staticmethod
    def _source_of(task: str) -> str:
        if task == FGVC:
            return "labelled"
        return "singles" if task.startswith(SINGLE) else "folder"

    def setup(self, stage: str) -> None:
        """Encode captions and negatives, and list the samples of each task."""
        super().setup(stage)
        if stage != "fit":
            return
        sources = {self._source_of(task) for task in self.schedule.tasks}
        self.sources: dict[str, CaptionedSource] = {}
        if "folder" in sources:
            candidates = self._fda_candidates("fda", self.train_table, self.negatives_path)
            pairs = self._pairs_of_samples(self.samples)
            size = self.samples_per_step
            self.sources["folder"] = CaptionedSource(self.train_table, pairs, self.samples, size, candidates)
        if "singles" in sources:
            assert self.singles is not None
            dataset = read_dataset(self.singles)
            store = self._open_store(self.singles)
            images = [pair for pair in dataset.pairs if pair.split == "train" and pair.captions and pair.after is None]
            if not images:
                raise DiffcapError(
                    f"{dataset.name}: has no single training image with captions; data.singles needs some."
                )
            table = PairTable(images, store, self.vocabulary, self.max_length)
            candidates = self._fda_candidates(SINGLE + "fda", table, Path(self.singles) / "negatives.jsonl")
            pairs = table.caption_pair
            self.sources["singles"] = CaptionedSource(table, pairs, "captions", self.batch_size, candidates)
        if "labelled" in sources:
            assert self.labelled is not None
            self.labelled_store = self._open_store(self.labelled)
            self.labelled_rows = self.labelled_store.rows([image.before for image in self.labelled_images])
            labels = np.array([image.extra["class"] for image in self.labelled_images])
            self.labelled_pairs = LabelledPairs(labels, self.seed + 1)
        self.epochs_of_task = {}
        for index, task in enumerate(self.schedule.tasks):
            if task != FGVC:
                source = self.sources[self._source_of(task)]
                samples = source.fda.pairs if source.fda and task.endswith("fda") else source.sample_pairs
                self.epochs_of_task[task] = ShuffledEpochs(len(samples), self.seed + 1 + index)

    def _open_store(self, folder: str) -> FeatureStore:
        """Open the features of another dataset, which must be those of the same backbone."""
        store = FeatureStore.open(Path(folder) / "features" / self.store_name)
        expected = self.store.meta
        keys = {**store.meta, **expected}
        if different := [key for key in keys if store.meta.get(key) != expected.get(key)]:
            raise DiffcapError(
                f"{store.folder}: its features and those of {self.dataset.name} have different values of {different[0]}; extract "
                "both with the same BACKBONE and WEIGHTS."
            )
        return store

    @property
    def samples_per_step(self) -> int:
        """Number of samples of mlm and mvcl; fda has fewer, and a rank may get none of those."""
        return self.batch_size // (2 if self.samples == "scenes" else 1)

    def _fda_candidates(self, task: str, table: PairTable, path: Path) -> Candidates | None:
        """Read the captions of the training pairs and their negatives from a file; None if the task has no share."""
        if task not in self.schedule.tasks:
            return None
        index_of = {pair_id: index for index, pair_id in enumerate(table.ids)}
        captions_of: list[list[str]] = [[] for _ in table.ids]
        for pair, caption in zip(table.caption_pair, table.captions):
            captions_of[pair].append(caption)
        pairs: list[int] = []
        unknown: list[str] = []

        def texts() -> Iterator[str]:  # one line of the file at a time: a list of all texts takes gigabytes
            for row in iter_negatives(path):
                if row.id not in index_of:
                    continue
                pairs.append(index_of[row.id])
                if row.caption not in captions_of[pairs[-1]]:
                    unknown.append(row.id)
                yield row.caption
                yield from (negative.text for negative in row.negatives)

        tokens, rows = table.encode_distinct(texts())
        if unknown:
            option = f" negatives_ARGS=--changes={self.changes}" if self.changes else ""
            raise DiffcapError(
                f"{path}: {len(unknown):,} of its {len(pairs):,} captions (first: pair {unknown[0]}) are not training captions of "
                f"this stage; write the file again with `make negatives{option}`."
            )
        if not pairs:
            raise DiffcapError(f"{path}: it has no training pair; write the file again with `make negatives`.")
        return Candidates(np.array(pairs), rows.reshape(len(pairs), -1), tokens)

    def make_batch(self, step: int) -> Batch:
        """See `FeatureData`: `task`, the feature maps, and what the task needs."""
        task, task_step = self.schedule.at(step)
        if task == FGVC:
            return self._labelled_batch(task_step)
        generator = step_generator(self.seed, step)
        source = self.sources[self._source_of(task)]
        table = source.table
        epochs = self.epochs_of_task[task]
        plain_task = task.removeprefix(SINGLE)
        if plain_task == "fda":
            assert source.fda is not None
            count = max(1, self.batch_size // source.fda.texts.shape[1])
            samples = epochs.take(task_step * count, count)
            pairs = source.fda.pairs[samples]
            tokens = source.fda.tokens[source.fda.texts[samples]]  # (count, 1 + K, T)
            length = table.longest_length(tokens) if self.trim else tokens.shape[-1]
            entries: Batch = {"fda_captions": torch.from_numpy(tokens[..., :length]).long()}
        else:
            samples = epochs.take(task_step * source.samples_per_step, source.samples_per_step)
            pairs = source.sample_pairs[samples].T.reshape(-1)  # of scenes: all change pairs, then all distractor pairs
            tokens = table.tokens[samples] if source.samples == "captions" else table.draw_captions(pairs, generator)
            entries = self._text_entries(tokens, generator)
            if plain_task == "mvcl":
                height, width = self.store.shape[1:]
                mask = mask_patches(len(pairs), height * width, self.mask_ratio, generator, table.images_per_pair)
                entries = {"tokens": entries["tokens"], "visual_mask": mask}
        return self._add_images({"task": task, **entries}, pairs, generator, table)

    def _labelled_batch(self, task_step: int) -> Batch:
        """Return `batch_size` pairs of labelled images: `before`, `after`, `class_before`, `class_after`."""
        first, second = self.labelled_pairs.take(task_step * self.batch_size, self.batch_size)
        labels = torch.from_numpy(self.labelled_pairs.labels)
        part = self._rank_part(
            {"class_before": labels[first], "class_after": labels[second], "first": first, "second": second}
        )
        before = read_maps(self.labelled_store, self.labelled_rows[part.pop("first")])
        after = read_maps(self.labelled_store, self.labelled_rows[part.pop("second")])
        return {"task": FGVC, **part, "before": before, "after": after}
