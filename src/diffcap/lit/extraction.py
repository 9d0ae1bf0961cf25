"""Images through a frozen backbone into the feature store, on any number of devices."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor

from diffcap.errors import DiffcapError
from diffcap.features.backbones import Library, build_backbone
from diffcap.features.images import ImageBatch, ImageData, image_stamps, unique_images
from diffcap.features.store import Rows, StoreWriter
from diffcap.records import read_dataset


class Extraction(pl.LightningModule):
    """A backbone, run by `trainer.predict`.

    Args:
        name: folder of the store, under `<data.folder>/features/`.
        library: where the network comes from: torchvision, open_clip, timm, the embedded blocks, clip4idc (a checkpoint
            of ours), or pixels: the images themselves.
        network: the network's name in that library, for example resnet101.
        stage: where in the network the map is taken: a node's name of torchvision (layer3, layer4), a block's number of
            open_clip or timm (null for the last).
        weights: "default" for the library's own download, "random", or the path of a .safetensors or .pth file.
        pool: rows and columns that the map is averaged to, null to keep it as it is.
        image_size: height and width that pixels are resized to.
    """

    def __init__(
        self,
        name: str,
        library: Library = "torchvision",
        network: str | None = None,
        stage: str | int | None = None,
        weights: str = "default",
        pool: tuple[int, int] | None = None,
        image_size: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.backbone = build_backbone(library, network, stage, weights, pool, image_size)

    def predict_step(self, batch: ImageBatch, batch_idx: int) -> Tensor | None:
        """(B, C, h, w) features of a batch, None for a batch without a readable image."""
        return self.backbone(batch.images) if len(batch.rows) else None


class StoreFiller(BasePredictionWriter):
    """Writes every rank's features into the one store; the first rank declares it complete after all have finished.

    Args:
        writer: this process's hold on the store. wanted: the rows to write; the rest of a batch is there already.
    """

    def __init__(self, writer: StoreWriter, wanted: Rows) -> None:
        super().__init__("batch")
        self.writer = writer
        self.wanted = wanted
        self.problems: list[str] = []

    def write_on_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        prediction: Any,
        batch_indices: Any,
        batch: ImageBatch,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write the wanted images of a batch, and keep the sentences about those that could not be read or written."""
        self.problems += batch.problems
        rows = batch.rows.numpy()
        wanted = np.isin(rows, self.wanted)
        if not wanted.any():
            return
        try:
            self.writer.write(rows[wanted], prediction.float().cpu().numpy()[wanted])
        except DiffcapError as error:
            self.problems.append(str(error))

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wait for all ranks, then finish.

        Raises:
            DiffcapError: on the first rank, when any rank met an image that it could not extract.
            SystemExit: on the others then, so that the sentence is printed once.
        """
        self.writer.flush()
        problems = _all_ranks(self.problems)  # this is the barrier, too
        if problems and trainer.global_rank:
            raise SystemExit(1)
        if problems:
            count = "1 image" if len(problems) == 1 else f"{len(problems):,} images"
            raise DiffcapError(
                f"{problems[0].removesuffix('.')} ({count} of {self.writer.folder} could not be computed, the rest is kept; "
                "`make data` lists all missing and broken images, and renders those of a rendered dataset again)."
            )
        if trainer.is_global_zero:
            self.writer.finish()


def _all_ranks(mine: list[str]) -> list[str]:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return mine
    gathered: list[list[str]] = [[] for _ in range(distributed.get_world_size())]
    distributed.all_gather_object(gathered, mine)
    return [problem for problems in gathered for problem in problems]


def extract(trainer: pl.Trainer, model: Extraction, data: ImageData) -> tuple[Path, int]:
    """Extract what is missing or damaged in the store of a dataset; nothing is computed when nothing is.

    Returns:
        The store's folder, complete, and how many images were extracted now.

    Raises:
        DiffcapError: no dataset there, a store of another kind under that name, or an image that cannot be read.
    """
    dataset = read_dataset(data.folder)
    if dataset.info.get("captions_only"):
        raise DiffcapError(
            f"{data.folder}: a manifest of captions only; run `make data` again with the images in place and without "
            "--captions_only."
        )
    paths, root = unique_images(dataset.pairs), dataset.root
    meta = {**model.backbone.describe(), "precision": str(trainer.precision)}
    folder = data.folder / "features" / model.name
    writer = StoreWriter(folder, paths, model.backbone.shape(), meta, image_stamps([root / path for path in paths]))
    missing = writer.missing()
    if not len(missing) and (folder / "complete").is_file():
        return folder, 0
    data.assign(missing, [root / path for path in writer.paths], model.backbone.preprocess)
    trainer.callbacks.append(StoreFiller(writer, missing))  # type: ignore[attr-defined]
    trainer.predict(model, datamodule=data, return_predictions=False)
    return folder, len(missing)
