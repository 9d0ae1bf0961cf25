"""Feature extraction, which writes a frozen backbone's features of images to the feature store, on any number of devices."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor

from diffcap.datasets.registry import get_dataset
from diffcap.features.backbones import build_backbone
from diffcap.features.images import ImageBatch, ImageData, file_stamps, unique_images
from diffcap.features.store import RowNumbers
from diffcap.features.writer import StoreWriter, write_file_store
from diffcap.lit.launch import compare_processes
from diffcap.lit.training import refuse_slow_bf16
from diffcap.losses.gather import world_size
from diffcap.records import read_dataset
from diffcap.utils.errors import DiffcapError
from diffcap.utils.host_copy import HostCopy


class Extraction(pl.LightningModule):
    """A frozen backbone, which `trainer.predict` runs on batches of images.

    Args:
        name: name of the feature store, which is the folder `<data.folder>/features/<name>`.
        library: source of the network: torchvision, open_clip, timm or pixels (no network: the images themselves); or blocks, tiles or
            clip4idc, which are a dataset or method of diffcap with a network (clip4idc: CLIP after the method's pre-training).
        network: the network's name in that library, for example resnet101.
        stage: the layer whose output is used: the name of a node in torchvision (layer3, layer4), the number of a block in
            open_clip or timm (null for the last).
        weights: "default" for the weights that the library downloads, "random", or the path of a .safetensors or .pth file.
        pool: rows and columns to which the feature map is averaged; null for no pooling.
        image_size: height and width that images are resized to, for pixels, torchvision and timm; null for 224 x 224, or for the size
            of a timm network's weights.
        image_std: standard deviations of R, G, B for a torchvision network; null for ImageNet's.
        norm: apply the last norm of a timm network to the map.
        from_files: store nothing, but decode and resize an image file each time it is read; only for the library pixels.
    """

    def __init__(
        self,
        name: str,
        library: str = "torchvision",
        network: str | None = None,
        stage: str | int | None = None,
        weights: str = "default",
        pool: tuple[int, int] | None = None,
        image_size: tuple[int, int] | None = None,
        image_std: tuple[float, float, float] | None = None,
        norm: bool = False,
        from_files: bool = False,
    ) -> None:
        super().__init__()
        if from_files and library != "pixels":
            raise DiffcapError(f"--model.from_files is only for pixels; remove the option for {library}.")
        self.from_files = from_files
        self.name = name
        self.backbone = build_backbone(library, network, stage, weights, pool, image_size, image_std, norm)

    def predict_step(self, batch: ImageBatch, batch_idx: int) -> Tensor | None:
        """Return the features (B, C, h, w) of a batch; None if no image of the batch is readable."""
        return self.backbone(batch.images) if len(batch.rows) else None


class StoreFiller(BasePredictionWriter):
    """Write the `missing` rows of a feature store (one row per image), from all ranks. At the end, rank 0 marks the store as complete.

    The features of a batch are written after the next batch has been given to the device, so that the device computes meanwhile.
    """

    def __init__(self, writer: StoreWriter, missing: RowNumbers) -> None:
        super().__init__("batch")
        self.writer = writer
        self.missing = missing
        self.problems: list[str] = []
        self.num_left = 0  # number of missing images of other shards; the first rank sets it at the end
        self._unwritten: tuple[RowNumbers, HostCopy] | None = None  # rows of the last batch and their features

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, batch: ImageBatch, *_: Any
    ) -> None:
        """Write the missing rows of the previous batch; collect messages about images that cannot be read or written."""
        self.problems += batch.problems
        copy = (batch.rows.numpy(), HostCopy(prediction)) if len(batch.rows) else None
        self._write_last_batch()
        self._unwritten = copy

    def _write_last_batch(self) -> None:
        if self._unwritten is None:
            return
        rows, copy = self._unwritten
        self._unwritten = None
        is_missing = np.isin(rows, self.missing)
        try:
            features = copy.wait()[0].float().numpy()
            self.writer.write(rows[is_missing], features[is_missing])
        except DiffcapError as error:
            self.problems.append(str(error))

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wait for all ranks, then mark the store as complete. If an image failed, the first rank raises the error and the others exit."""
        self._write_last_batch()
        self.writer.flush()
        problems = self.problems
        if world_size() > 1:
            gathered: list[list[str]] = [[] for _ in range(world_size())]
            torch.distributed.all_gather_object(gathered, problems)  # also waits for all ranks
            problems = [problem for rank_problems in gathered for problem in rank_problems]
        if problems and trainer.global_rank:
            raise SystemExit(1)
        if problems:
            count = "1 image" if len(problems) == 1 else f"{len(problems):,} images"
            raise DiffcapError(
                f"{problems[0].removesuffix('.')} ({count} of {self.writer.folder} could not be extracted, the others are stored; "
                "`make data` lists all missing and broken images, and renders them again if diffcap renders this dataset)."
            )
        if trainer.is_global_zero:
            self.num_left = self.writer.finish()


def extract(trainer: pl.Trainer, model: Extraction, data: ImageData) -> tuple[Path, int, int]:
    """Extract the features that are missing or damaged in the feature store of a dataset; `data.shard` limits them.

    Returns the store's folder, the number of images that were extracted (with `from_files`, the number of files that were read), and the
    number of missing images that belong to other shards.
    """
    refuse_slow_bf16(trainer)
    dataset = read_dataset(data.folder)
    if dataset.info.get("captions_only"):
        raise DiffcapError(
            f"{data.folder}: the manifest has captions only; add the images and run `make data` again without --captions_only."
        )
    warning = get_dataset(dataset.name).features_note(model.name, model.backbone.describe().get("library"))
    if warning and trainer.is_global_zero:  # the backbone was made for another dataset
        print(f"warning: {warning}", flush=True)
    paths = unique_images(dataset.pairs)
    root = dataset.root
    meta = {**model.backbone.describe(), "precision": str(trainer.precision)}
    folder = data.folder / "features" / model.name
    shape = model.backbone.shape()
    files = [root / path for path in paths]
    ranges = {root / path: values for pair in dataset.pairs for path, values in pair.ranges.items()}
    # Each file's size, time and, above 8 bits, value range. If they change, the image is extracted again.
    stamps = file_stamps(files, ranges)
    if model.from_files and data.shard:
        raise DiffcapError(f"--data.shard={data.shard}: BACKBONE=files stores no features; leave out the shard.")
    if model.from_files:
        return folder, write_file_store(folder, paths, files, stamps, shape, meta), 0
    writer = StoreWriter(folder, paths, shape, meta, stamps, data.own_rows if data.shard else None)
    missing = data.own_rows(writer.missing_rows())
    compare_processes("extracts images" if len(missing) else "has no image to extract")
    filler = StoreFiller(writer, missing)
    if not len(missing):
        if not (folder / "complete").is_file():
            filler.on_predict_end(trainer, model)
        return folder, 0, filler.num_left
    data.assign(missing, [root / path for path in writer.image_paths], model.backbone.preprocess, ranges)
    trainer.callbacks.append(filler)  # type: ignore[attr-defined]
    # Search for the fastest kernels, because all batches except the last one have the same shape.
    torch.backends.cudnn.benchmark = True
    trainer.predict(model, datamodule=data, return_predictions=False)
    return folder, len(missing), filler.num_left
