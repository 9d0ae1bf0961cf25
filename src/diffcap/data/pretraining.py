"""The LightningDataModule of IDC-PCL's pre-training: one task a step, on one dataset or on several."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from diffcap.data.captioning import FeatureData, Samples
from diffcap.data.labelled_pairs import LabelledPairs
from diffcap.data.pair_table import PairTable
from diffcap.data.sampler import Batch, Stream, TaskSchedule, step_generator
from diffcap.errors import DiffcapError
from diffcap.features.store import FeatureStore
from diffcap.losses.mvcl import mask_patches
from diffcap.negatives import read_negatives
from diffcap.records import ChangePair, read_dataset

CAPTIONED = ("mlm", "mvcl", "fda")
SINGLE = "single_"  # before the name of a task on the images of `singles`
FGVC = "fgvc"


@dataclass
class Captioned:
    """A captioned dataset as the tasks draw from it.

    Attributes:
        table: its training pairs, or single images. choices: see `FeatureData._choices`. samples: what they are.
        count: choices that make a batch. aligning: see `PretrainData._aligning`, None where fda has no share.
    """

    table: PairTable
    choices: np.ndarray
    samples: Samples
    count: int
    aligning: tuple[np.ndarray, np.ndarray] | None


class PretrainData(FeatureData):
    """IDC-PCL's tasks, one a step.

    Args:
        folder: the dataset's folder, with `manifest.jsonl`: pairs, or single images with captions (CUB).
        features: name of the feature store in its `features/`, and in those of `singles` and `labelled`.
        tasks: shares of "mlm", "mvcl" and "fda" (paper: 8:1:2 on CLEVR-Change, 9:1:2 on the birds); of "single_mlm",
            "single_mvcl" and "single_fda" on `singles`; and of "fgvc" on `labelled` (paper: 9:1:2:3 on the birds).
        without: tasks that are left out of `tasks`, whose other shares stay as they are (the papers' ablations).
        negatives: file of hard negatives, null for `negatives.jsonl` in the dataset's folder; read if fda has a share.
        samples: of mlm and mvcl: "captions" (released), "pairs" or "scenes" as `CaptionData` has them, but with `batch_size`
            pairs, so half as many scenes.
        singles: folder of a dataset of single images with captions, with negatives, for tasks beside those of `folder`; it has
            to stand in `vocabulary_with`, too.
        labelled: folder of a dataset of single images with classes (NABirds), of which "fgvc" draws pairs.
        settings: see `FeatureData`; of a batch, fda takes `batch_size // (1 + negatives)` pairs (authors' code), and
            `trim` is exact with the model's `pad_mask` only.
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
            unknown = sorted(set(names) - set(known))
            if unknown:
                raise DiffcapError(
                    f"data.{key} names {unknown[0]!r}; the tasks are {', '.join(known[:-1])} and {FGVC}."
                )
        kept = {task: share for task, share in shares.items() if task not in (without or [])}
        self.schedule = TaskSchedule(kept, self.seed)
        self.negatives_path = Path(negatives) if negatives else Path(folder) / "negatives.jsonl"
        self.singles, self.labelled = singles, labelled
        for place, name in ((singles, "singles"), (labelled, "labelled")):
            wanting = [task for task in self.schedule.tasks if self._place_of(task) == name]
            if wanting and place is None:
                raise DiffcapError(f"data.tasks names {wanting[0]!r}, which draws from data.{name}; give its folder.")
        if singles and Path(singles).resolve() not in [
            Path(p).resolve() for p in settings.get("vocabulary_with") or []
        ]:
            raise DiffcapError(
                f"data.singles is {singles}, whose words are not in the vocabulary; give its folder in data.vocabulary_with, too, "
                "here and in fine-tuning."
            )
        if FGVC in self.schedule.tasks:
            assert labelled is not None
            self.labelled_images = _labelled_images(labelled)
            self.classes = 1 + max(image.extra["class"] for image in self.labelled_images)

    @staticmethod
    def _place_of(task: str) -> str:
        return "labelled" if task == FGVC else "singles" if task.startswith(SINGLE) else "folder"

    def setup(self, stage: str) -> None:
        """Encode captions and negatives, and lay out each task's samples."""
        super().setup(stage)
        if stage != "fit":
            return
        places = {self._place_of(task) for task in self.schedule.tasks}
        self.sources: dict[str, Captioned] = {}
        if "folder" in places:
            aligning = self._aligning("fda", self.train_table, self.negatives_path)
            choices = self._choices(self.samples)
            self.sources["folder"] = Captioned(self.train_table, choices, self.samples, self.samples_a_step, aligning)
        if "singles" in places:
            assert self.singles is not None
            table = PairTable(
                _captioned_images(self.singles), self._store_of(self.singles), self.vocabulary, self.max_length
            )
            aligning = self._aligning(SINGLE + "fda", table, Path(self.singles) / "negatives.jsonl")
            self.sources["singles"] = Captioned(table, table.owner, "captions", self.batch_size, aligning)
        if "labelled" in places:
            assert self.labelled is not None
            self.labelled_store = self._store_of(self.labelled)
            self.labelled_rows = self.labelled_store.rows([image.before for image in self.labelled_images])
            labels = np.array([image.extra["class"] for image in self.labelled_images])
            self.labelled_pairs = LabelledPairs(labels, self.seed + 1)
        self.streams = {
            task: Stream(self._samples_of(task), self.seed + 1 + number)
            for number, task in enumerate(self.schedule.tasks)
            if task != FGVC
        }

    def _samples_of(self, task: str) -> int:
        source = self.sources[self._place_of(task)]
        if task.endswith("fda"):
            assert source.aligning is not None
            return len(source.aligning[0])
        return len(source.choices)

    def _store_of(self, folder: str) -> FeatureStore:
        """The features of another dataset, which must be of the same kind."""
        store = FeatureStore.open(Path(folder) / "features" / self.store_name)
        differing = [
            key for key in {**store.meta, **self.store.meta} if store.meta.get(key) != self.store.meta.get(key)
        ]
        if differing:
            raise DiffcapError(
                f"{store.folder}: its features are of another kind than those of {self.dataset.name} (another "
                f"{differing[0]}); extract both with the same BACKBONE and WEIGHTS."
            )
        return store

    @property
    def samples_a_step(self) -> int:
        """Of mlm and mvcl; fda has fewer, and works on a process without any."""
        return self.batch_size // (2 if self.samples == "scenes" else 1)

    def _aligning(self, task: str, table: PairTable, path: Path) -> tuple[np.ndarray, np.ndarray] | None:
        """The pair of each caption that has negatives, (n,), and the caption with them, (n, 1 + K, T)."""
        if task not in self.schedule.tasks:
            return None
        number = {pair_id: index for index, pair_id in enumerate(table.ids)}
        rows = [row for row in read_negatives(path) if row.id in number]
        told = {(table.ids[pair], caption) for pair, caption in zip(table.owner, table.captions)}
        foreign = [row for row in rows if (row.id, row.caption) not in told]
        if foreign:
            how = f" negatives_ARGS=--changes={self.changes}" if self.changes else ""
            raise DiffcapError(
                f"{path}: {len(foreign):,} of its {len(rows):,} captions (first of {foreign[0].id}) are not those that this stage "
                f"trains on; write it again with `make negatives{how}`."
            )
        widths = {len(row.negatives) for row in rows}
        if len(widths) != 1:
            fault = "captions have different numbers of negatives" if rows else "no line is of a training pair"
            raise DiffcapError(f"{path}: {fault}; write it again with `make negatives`.")
        texts = [text for row in rows for text in (row.caption, *(negative.text for negative in row.negatives))]
        owner = np.array([number[row.id] for row in rows])
        return owner, table.encode(texts).reshape(len(rows), 1 + widths.pop(), -1)

    def make_batch(self, step: int) -> Batch:
        """See `FeatureData`: `task`, the feature maps, and what the task needs."""
        task, turn = self.schedule.at(step)
        if task == FGVC:
            return self._labelled_batch(turn)
        generator, source = step_generator(self.seed, step), self.sources[self._place_of(task)]
        table, samples_of, kind = source.table, self.streams[task], task.removeprefix(SINGLE)
        if kind == "fda":
            assert source.aligning is not None
            owner, choices = source.aligning
            count = max(1, self.batch_size // choices.shape[1])
            samples = samples_of.take(turn * count, count)
            pairs, tokens = owner[samples], choices[samples]
            used = table.longest(tokens) if self.trim else tokens.shape[-1]
            text: Batch = {"fda_captions": torch.from_numpy(tokens[..., :used]).long()}
        else:
            samples = samples_of.take(turn * source.count, source.count)
            pairs = source.choices[samples].T.reshape(-1)  # of scenes: all change pairs, then all distractor pairs
            tokens = table.tokens[samples] if source.samples == "captions" else table.draw_captions(pairs, generator)
            text = self._text(tokens, generator)
            if kind == "mvcl":
                height, width = self.store.shape[1:]
                hide = mask_patches(len(pairs), height * width, self.mask_ratio, generator, table.images_each)
                text = {"tokens": text["tokens"], "visual_mask": hide}
        return self._with_images({"task": task, **text}, pairs, generator, table)

    def _labelled_batch(self, turn: int) -> Batch:
        """`batch_size` pairs of labelled images: `before`, `after`, `class_before`, `class_after`."""
        drawn = self.labelled_pairs.take(turn * self.batch_size, self.batch_size)
        classes = torch.from_numpy(self.labelled_pairs.classes)
        share = self._share(
            {"class_before": classes[drawn.first], "class_after": classes[drawn.second], **drawn._asdict()}
        )
        images = [self.labelled_store.read(self.labelled_rows[share.pop(name)]) for name in drawn._fields]
        before, after = (torch.from_numpy(maps).float() for maps in images)
        return {"task": FGVC, **share, "before": before, "after": after}


def _captioned_images(folder: str) -> list[ChangePair]:
    dataset = read_dataset(folder)
    images = [pair for pair in dataset.pairs if pair.split == "train" and pair.captions and pair.after is None]
    if not images:
        raise DiffcapError(f"{dataset.name}: has no single training image with captions, which data.singles is for.")
    return images


def _labelled_images(folder: str) -> list[ChangePair]:
    """All of them, whatever their split: nothing is ever tested on them (IDC-PCL, too, quotes the whole number)."""
    dataset = read_dataset(folder)
    images = [pair for pair in dataset.pairs if isinstance(pair.extra.get("class"), int)]
    if len({image.extra["class"] for image in images}) < 2:
        raise DiffcapError(f"{dataset.name}: has no images of two classes or more, which data.labelled is for.")
    return images
