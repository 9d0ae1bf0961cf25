"""Lightning's data module for feature extraction: it decodes and preprocesses each distinct image of a dataset."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from diffcap.features.preprocessing import load_image
from diffcap.features.store import RowNumbers
from diffcap.records import ChangePair
from diffcap.utils.console import parse_shard
from diffcap.utils.cores import available_cores
from diffcap.utils.errors import DiffcapError
from diffcap.utils.image_io import ValueRange


def unique_images(pairs: Iterable[ChangePair]) -> list[str]:
    """Return the distinct image paths of the pairs, in the order of the pairs."""
    return list(dict.fromkeys(path for pair in pairs for path in pair.images))


@dataclass
class ImageBatch:
    """A batch of images."""

    rows: Tensor  # (B,) int64, number of each image's row in the feature store
    images: Tensor  # (B, 3, H, W), preprocessed
    problems: list[str]  # error messages about unreadable images that need features; these images are not in `images`


@dataclass
class _ImageBatches(Dataset[ImageBatch]):
    """Batches of images. An unreadable image gives a message, because an exception would stop the decoding while other ranks wait."""

    row_batches: list[RowNumbers]  # one array for each batch: the rows of its images in the feature store
    wanted_rows: set[int]  # rows of the store that have no features yet
    image_files: Sequence[Path]  # one file for each row
    preprocess: Callable[[Image.Image], Tensor]
    value_ranges: Mapping[Path, ValueRange]  # for images with more than 8 bits: image file -> value range of its pair

    def __len__(self) -> int:
        return len(self.row_batches)

    def __getitem__(self, index: int) -> ImageBatch:
        rows = []
        images = []
        problems = []
        for row in self.row_batches[index].tolist():
            try:
                file = self.image_files[row]
                images.append(self.preprocess(load_image(file, value_range=self.value_ranges.get(file))))
                rows.append(row)
            except DiffcapError as error:
                if row in self.wanted_rows:
                    problems.append(str(error))
        stacked = torch.stack(images) if images else torch.empty(0)
        return ImageBatch(torch.tensor(rows, dtype=torch.int64), stacked, problems)


class ImageData(pl.LightningDataModule):
    """The images of a dataset whose features are missing, distributed over all ranks.

    Args:
        folder: the dataset's folder, with `manifest.jsonl` and `dataset.json`.
        batch_size: images per batch and device.
        num_workers: number of processes per device that decode images. With 0, the main process decodes them; null means one
            per CPU core, at most 4, and 0 on a single core. The features do not depend on this number.
        shard: "3/16" extracts the fourth of 16 parts of the batches; the first is "0/16". Jobs with the other parts fill the same store,
            also at the same time. All jobs need the same `batch_size`. null: all batches.
    """

    def __init__(
        self, folder: str, batch_size: int = 64, num_workers: int | None = None, shard: str | None = None
    ) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.batch_size = batch_size
        self.shard = shard
        self._shard_number, self._num_shards = parse_shard("--data.shard", "0/1" if shard is None else shard)
        cores = available_cores()
        self.num_workers = (min(4, cores) if cores > 1 else 0) if num_workers is None else num_workers

    def assign(
        self,
        wanted_rows: RowNumbers,
        image_files: Sequence[Path],
        preprocess: Callable[[Image.Image], Tensor],
        value_ranges: Mapping[Path, ValueRange] | None = None,
    ) -> None:
        """Set the rows of the store without features, the image file of every row, and the value ranges of images above 8 bits."""
        self._wanted_rows = wanted_rows
        self._image_files = list(image_files)
        self._preprocess = preprocess
        self._value_ranges = value_ranges or {}

    def own_rows(self, rows: RowNumbers) -> RowNumbers:
        """Return the rows among `rows` (n,) that are in this shard. Batch k of the store is in shard k modulo the number of shards."""
        return rows[rows // self.batch_size % self._num_shards == self._shard_number]

    def row_batches(self) -> list[RowNumbers]:
        """Return the rows of each batch. The whole store is cut into batches; batches without a wanted row are left out.

        So an image always has the same other images in its batch, on which the last bits of its features can depend.
        """
        all_rows = np.arange(len(self._image_files), dtype=np.int64)
        batch_numbers = np.unique(self._wanted_rows // self.batch_size)
        return [all_rows[number * self.batch_size :][: self.batch_size] for number in batch_numbers]

    def predict_dataloader(self) -> DataLoader[ImageBatch]:
        """Return this rank's batches. Each batch belongs to one rank; a rank (process) without batches gets an empty batch."""
        rank, world_size = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        # Lightning skips the last hooks on a rank without batches, but the other ranks wait for that rank in these hooks.
        rank_batches = self.row_batches()[rank::world_size] or [np.empty(0, dtype=np.int64)]
        wanted_rows = set(self._wanted_rows.tolist())
        dataset = _ImageBatches(rank_batches, wanted_rows, self._image_files, self._preprocess, self._value_ranges)
        return DataLoader(dataset, batch_size=None, num_workers=self.num_workers)

    def transfer_batch_to_device(self, batch: ImageBatch, device: torch.device, dataloader_idx: int) -> ImageBatch:
        """Move the images to the device; the rows stay on the CPU, where the store is written."""
        return ImageBatch(batch.rows, batch.images.to(device, non_blocking=True), batch.problems)


def file_stamps(files: Sequence[Path], value_ranges: Mapping[Path, ValueRange] | None = None) -> list[str]:
    """Return each file's stamp: bytes, time in ns ("2048 1700000000000000000"), and any value range in `value_ranges`; "" for no file."""
    stamps = []
    for file in files:
        status = file.stat() if file.is_file() else None
        value_range = (value_ranges or {}).get(file, ())
        stamps.append(" ".join(map(str, (status.st_size, status.st_mtime_ns, *value_range))) if status else "")
    return stamps
