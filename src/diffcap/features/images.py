"""The images of a dataset, each once, decoded and preprocessed for a backbone."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from diffcap.errors import DiffcapError
from diffcap.features.store import Rows
from diffcap.image_io import read_image
from diffcap.records import ChangePair


def unique_images(pairs: Iterable[ChangePair]) -> list[str]:
    """Before and after image paths as the manifest writes them, each once, in order of appearance."""
    return list(dict.fromkeys(path for pair in pairs for path in pair.images))


def load_image(path: str | Path) -> Image.Image:
    """Decode an image to RGB, see `read_image`.

    Raises:
        DiffcapError: it is missing, truncated, or not a readable image.
    """
    return read_image(path).image


@dataclass
class ImageBatch:
    """Some images of a store.

    Attributes:
        rows: (B,) int64, their rows in the store.
        images: (B, 3, H, W) preprocessed.
        problems: a sentence for each wanted image that could not be read; those are not among the rows.
    """

    rows: Tensor
    images: Tensor
    problems: list[str]


class _Batches(Dataset[ImageBatch]):
    """Batches of images; an unreadable one becomes a sentence in the batch.

    Not an exception: a worker's exception arrives as a page of traceback, and one broken file should neither stop the
    others nor leave the other ranks waiting.
    """

    def __init__(
        self, batches: list[Rows], wanted: Rows, files: Sequence[Path], preprocess: Callable[[Image.Image], Tensor]
    ) -> None:
        self.batches = batches
        self.wanted = set(wanted.tolist())
        self.files = files
        self.preprocess = preprocess

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> ImageBatch:
        rows, images, problems = [], [], []
        for row in self.batches[number].tolist():
            try:
                images.append(self.preprocess(load_image(self.files[row])))
                rows.append(row)
            except DiffcapError as error:
                if row in self.wanted:
                    problems.append(str(error))
        stacked = torch.stack(images) if images else torch.empty(0)
        return ImageBatch(torch.tensor(rows, dtype=torch.int64), stacked, problems)


class ImageData(pl.LightningDataModule):
    """The images of a dataset that still have to go through a backbone, shared out to all ranks.

    Args:
        folder: the dataset's folder, with `manifest.jsonl` and `dataset.json`.
        batch_size: images a batch, on each device.
        num_workers: processes that decode images, for each device; 0 decodes in the main process.
    """

    def __init__(self, folder: str, batch_size: int = 64, num_workers: int = 1) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.batch_size = batch_size
        self.num_workers = num_workers
        self._rows: Rows = np.empty(0, dtype=np.int64)
        self._files: list[Path] = []
        self._preprocess: Callable[[Image.Image], Tensor] | None = None

    def assign(self, rows: Rows, files: Sequence[Path], preprocess: Callable[[Image.Image], Tensor]) -> None:
        """Say what to load: rows of the store, the file of every row of the store, and the backbone's preprocessing."""
        self._rows = rows
        self._files = list(files)
        self._preprocess = preprocess

    def batches(self) -> list[Rows]:
        """Rows of each batch: all rows from k * batch_size to (k + 1) * batch_size, where one of them is wanted.

        An image shares its batch with the same others whatever was done before a kill, however many ranks there are, and
        when its row alone is repaired: the last bits of a convolution may depend on the size of the batch.
        """
        every = np.arange(len(self._files), dtype=np.int64)
        return [every[k * self.batch_size :][: self.batch_size] for k in np.unique(self._rows // self.batch_size)]

    def predict_dataloader(self) -> DataLoader[ImageBatch]:
        """This rank's batches, every one on exactly one rank; a rank with nothing to do gets one empty batch."""
        if self._preprocess is None:
            raise RuntimeError("call assign() first")
        rank, world = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        # One empty batch, because Lightning skips the closing hooks of a rank without any, and the others wait there.
        mine = self.batches()[rank::world] or [np.empty(0, dtype=np.int64)]
        data = _Batches(mine, self._rows, self._files, self._preprocess)
        return DataLoader(data, batch_size=None, num_workers=self.num_workers)

    def transfer_batch_to_device(self, batch: ImageBatch, device: torch.device, dataloader_idx: int) -> ImageBatch:
        """Move the images; the rows stay where the store is written from."""
        return ImageBatch(batch.rows, batch.images.to(device, non_blocking=True), batch.problems)


def image_stamps(files: Sequence[Path]) -> list[str]:
    """Size and time of each file, "" where there is none: a cheap sign that an image has been replaced."""

    def stamp(file: Path) -> str:
        found = file.stat()
        return f"{found.st_size} {found.st_mtime_ns}"

    return [stamp(file) if file.is_file() else "" for file in files]
