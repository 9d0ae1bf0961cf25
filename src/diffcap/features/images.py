"""DataModule of a dataset's distinct images, decoded and preprocessed for a backbone."""

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
from diffcap.features.store import Rows
from diffcap.records import ChangePair
from diffcap.utils.cores import available_cores
from diffcap.utils.errors import DiffcapError
from diffcap.utils.image_io import Values


def unique_images(pairs: Iterable[ChangePair]) -> list[str]:
    """Return the distinct image paths of the pairs, in the order of the manifest."""
    return list(dict.fromkeys(path for pair in pairs for path in pair.images))


@dataclass
class ImageBatch:
    """A batch of images."""

    rows: Tensor  # (B,) int64, row of each image in the store
    images: Tensor  # (B, 3, H, W), preprocessed
    problems: list[str]  # error messages of the wanted images that could not be read and are not in the batch


@dataclass
class _Batches(Dataset[ImageBatch]):
    """Batches of images, with an error message for each unreadable image.

    With an exception, the other images would not be read, the other ranks would wait, and the worker's traceback would be printed.
    """

    batches: list[Rows]
    wanted: set[int]
    files: Sequence[Path]
    preprocess: Callable[[Image.Image], Tensor]
    ranges: Mapping[Path, Values]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> ImageBatch:
        rows = []
        images = []
        problems = []
        for row in self.batches[index].tolist():
            try:
                file = self.files[row]
                images.append(self.preprocess(load_image(file, values=self.ranges.get(file))))
                rows.append(row)
            except DiffcapError as error:
                if row in self.wanted:
                    problems.append(str(error))
        stacked = torch.stack(images) if images else torch.empty(0)
        return ImageBatch(torch.tensor(rows, dtype=torch.int64), stacked, problems)


class ImageData(pl.LightningDataModule):
    """The images of a dataset without features, distributed over all ranks.

    Args:
        folder: the dataset's folder, with `manifest.jsonl` and `dataset.json`.
        batch_size: images per batch and device.
        num_workers: processes per device that decode images; 0: the main process decodes; null: one per CPU core, at most 4,
            and 0 on a single core. The features do not depend on it.
    """

    def __init__(self, folder: str, batch_size: int = 64, num_workers: int | None = None) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.batch_size = batch_size
        cores = available_cores()
        self.num_workers = (min(4, cores) if cores > 1 else 0) if num_workers is None else num_workers

    def assign(
        self,
        rows: Rows,
        files: Sequence[Path],
        preprocess: Callable[[Image.Image], Tensor],
        ranges: Mapping[Path, Values] | None = None,
    ) -> None:
        """Set the images to load: the wanted rows of the store, the image file of every row, and ranges as in `ChangePair.ranges`."""
        self._rows = rows
        self._files = list(files)
        self._preprocess = preprocess
        self._ranges = ranges or {}

    def batches(self) -> list[Rows]:
        """Return the rows of each batch: k * batch_size to (k + 1) * batch_size, if at least one of them is wanted.

        So an image is always in a batch with the same other images, for any number of ranks and after an interruption. This
        matters because the last bits of a convolution can depend on the size of the batch.
        """
        all_rows = np.arange(len(self._files), dtype=np.int64)
        return [all_rows[k * self.batch_size :][: self.batch_size] for k in np.unique(self._rows // self.batch_size)]

    def predict_dataloader(self) -> DataLoader[ImageBatch]:
        """Return this rank's batches. Each batch belongs to one rank; a rank without batches gets an empty one."""
        rank, world_size = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        # On a rank without batches, Lightning skips the last hooks, in which the other ranks would wait for it.
        rank_batches = self.batches()[rank::world_size] or [np.empty(0, dtype=np.int64)]
        data = _Batches(rank_batches, set(self._rows.tolist()), self._files, self._preprocess, self._ranges)
        return DataLoader(data, batch_size=None, num_workers=self.num_workers)

    def transfer_batch_to_device(self, batch: ImageBatch, device: torch.device, dataloader_idx: int) -> ImageBatch:
        """Move the images to the device; the rows stay on the CPU, where the store is written."""
        return ImageBatch(batch.rows, batch.images.to(device, non_blocking=True), batch.problems)


def image_stamps(files: Sequence[Path], ranges: Mapping[Path, Values] | None = None) -> list[str]:
    """Return size and modification time of each file, and its range of values if `ranges` has it; "" for a missing file."""
    stamps = []
    for file in files:
        status = file.stat() if file.is_file() else None
        values = (ranges or {}).get(file, ())
        stamps.append(" ".join(map(str, (status.st_size, status.st_mtime_ns, *values))) if status else "")
    return stamps
