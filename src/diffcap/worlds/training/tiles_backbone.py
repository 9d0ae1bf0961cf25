"""Training of the shipped `tiles` backbone on images rendered during training, and its accuracy on held-out images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from diffcap.features.convolutions import fuse_batch_norms
from diffcap.features.tiles_backbone import CLASSES, COVERS, STRIDE, TilesNetwork, tiles_preprocessing
from diffcap.worlds.tiles.changes import sample_pair
from diffcap.worlds.tiles.render import (
    ASPHALT,
    BARE,
    CARS,
    CHIMNEY,
    DIRT_ROAD,
    FIELDS,
    FIXTURE,
    FOREST,
    GRASS,
    LINE,
    MUD,
    PARKING,
    ROOF,
    SHADOW,
    SHORE,
    TREES,
    VERGE,
    WATER,
    materials,
    render,
    to_image,
)
from diffcap.worlds.tiles.scenes import ROOFS as ROOF_COLORS
from diffcap.worlds.tiles.scenes import SIZE, Layer
from diffcap.worlds.tiles.write import appearance
from diffcap.worlds.training.shipped import HELD_OUT, RenderedScenes, warmed_cosine

IGNORED = CLASSES  # of small fixtures on roofs and cars, which belong to no class
HOUSE_WEIGHT = 4.0  # of a block of 8 x 8 pixels with the centre of a house; few blocks have one


def _class_of_material() -> np.ndarray:
    """(SHADOW,) class of each material number."""
    table = np.full(SHADOW, IGNORED, np.int64)
    covers = {GRASS: "grass", FOREST: "forest", WATER: "water", SHORE: "shore", BARE: "bare ground", MUD: "mud"}
    covers |= {ASPHALT: "paved road", LINE: "paved road", VERGE: "paved road", DIRT_ROAD: "dirt road"}
    covers |= {PARKING: "parking lot"}
    for material, name in covers.items():
        table[material] = COVERS.index(name)
    table[FIELDS:ROOF] = COVERS.index("field")
    levels = (TREES - ROOF) // len(ROOF_COLORS)
    table[ROOF:TREES] = len(COVERS) + np.arange(TREES - ROOF) // levels
    table[TREES:CARS] = COVERS.index("tree")
    table[[FIXTURE, CHIMNEY]] = IGNORED
    return table


@dataclass
class Targets:
    """Training targets of B images.

    Attributes:
        covers: (B, 17, 64, 64) float, fraction of each class of land cover in each 4 x 4 pixels; they add up to at most 1.
        houses: (B, 32, 32) float, 1 where the centre of a house lies in the 8 x 8 pixels, else 0.
    """

    covers: Tensor
    houses: Tensor


def rendered_tiles(numbers: Sequence[int], seed: int, jitter: float) -> tuple[list[np.ndarray], list[Layer], Targets]:
    """Render images by number; images 2 k and 2 k + 1 are the before and after image of pair k.

    Returns:
        B images (256, 256, 3) uint8, their scenes, and their targets.
    """
    table, images, scenes, classes = _class_of_material(), [], [], []
    houses = torch.zeros(len(numbers), SIZE // 8, SIZE // 8)
    for row, number in enumerate(numbers):
        pair = sample_pair(number // 2, seed)
        dates, texture = appearance(number // 2, seed, jitter)
        scene, date = (pair.before, pair.after)[number % 2], dates[number % 2]
        images.append(render(scene, date, texture))
        scenes.append(scene)
        classes.append(table[materials(scene, date)])
        for house in scene.houses:
            x, y = to_image(house.center, date)
            if 0 <= x < SIZE and 0 <= y < SIZE:
                houses[row, int(y) // 8, int(x) // 8] = 1
    return images, scenes, Targets(_fractions(np.stack(classes)), houses)


def _fractions(classes: np.ndarray) -> Tensor:
    """Classes (B, 256, 256) of the pixels to `Targets.covers`; `IGNORED` is left out."""
    side, count = SIZE // STRIDE, CLASSES + 1
    cells = np.arange(len(classes) * side * side).reshape(-1, side, 1, side, 1) * count
    index = cells + classes.reshape(-1, side, STRIDE, side, STRIDE)
    pixels = np.bincount(index.ravel(), minlength=len(classes) * side * side * count)
    covers = pixels.reshape(-1, side, side, count)[..., :CLASSES] / STRIDE**2
    return torch.from_numpy(covers.astype(np.float32)).permute(0, 3, 1, 2)


def tile_batch(first: int, count: int, seed: int, jitter: float) -> tuple[Tensor, Targets]:
    """Images `first` ... `first + count - 1`, (count, 3, 256, 256) preprocessed, and their targets; see `rendered_tiles`."""
    images, _, targets = rendered_tiles(range(first, first + count), seed, jitter)
    batch = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    return tiles_preprocessing().normalize(batch.float()), targets


class RenderedTiles(RenderedScenes):
    """Images of `tiles` with `Targets`; options as `RenderedScenes`."""

    make = staticmethod(tile_batch)


class TilesTraining(pl.LightningModule):
    """The shipped backbone of `tiles`: predicts the land cover of each 4 x 4 pixels, and the centres of houses.

    Args:
        lr: AdamW's highest learning rate, reached after a tenth of the steps.
        steps: number of training steps, for the schedule.
    """

    def __init__(self, lr: float = 4e-3, steps: int = 700) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.steps = lr, steps
        self.network = TilesNetwork(norm=True)

    def training_step(self, batch: tuple[Tensor, Targets], batch_idx: int) -> Tensor:
        """Cross-entropy of the land cover, rare classes weighted more, and of the centres of houses."""
        images, targets = batch
        covers, houses = self.network.raw(images)
        cover = cover_loss(covers, targets.covers)
        house = house_loss(houses, targets.houses)
        loss = cover + 5 * house
        self.log_dict({"loss": loss, "cover": cover, "house": house}, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW with warm-up and cosine schedule."""
        return warmed_cosine(self.parameters(), self.lr, self.steps)


def cover_loss(logits: Tensor, fractions: Tensor) -> Tensor:
    """Cross-entropy between predicted and true fractions; the weight of a class is the inverse root of its share of the batch.

    Args:
        logits, fractions: (B, 17, rows, columns).
    """
    share = fractions.mean((0, 2, 3))
    weights = (share.clamp(min=1e-4)).rsqrt()[:, None, None]
    losses = -(weights * fractions * logits.log_softmax(1)).sum(1)
    return losses.sum() / (weights * fractions).sum()


def house_loss(logits: Tensor, houses: Tensor) -> Tensor:
    """Weighted cross-entropy of the centres of houses, (B, 32, 32) both."""
    return F.binary_cross_entropy_with_logits(logits, houses, 1 + (HOUSE_WEIGHT - 1) * houses)


@torch.no_grad()
def held_out_scores(network: TilesNetwork, images: int, seed: int, jitter: float) -> dict[str, float]:
    """Set the network's output scaling, and measure its predictions on held-out images.

    Args:
        network: without batch norm; its buffers `mean` and `scale` are set from the first half of the images.
        images: number of images. seed, jitter: of the scenes.

    Returns:
        On the second half: the share of pixels whose most probable class is right, the mean of this share over the classes, and the
        correlation of the predicted with the true number of houses in a cell of 32 x 32 pixels.
    """
    network.mean.zero_()
    network.scale.fill_(1)
    features, right, total, counts = [], torch.zeros(CLASSES), torch.zeros(CLASSES), []
    for start in range(0, images, 50):
        batch, targets = tile_batch(HELD_OUT + start, min(50, images - start), seed, jitter)
        covers, houses = network.raw(batch)
        if start < images // 2:
            features.append(network.values(covers, houses))
            continue
        truth = targets.covers.argmax(1)
        right += torch.bincount(truth[truth == covers.argmax(1)], minlength=CLASSES)
        total += torch.bincount(truth.flatten(), minlength=CLASSES)
        counts.append(
            torch.stack([16 * F.avg_pool2d(each, 4) for each in (houses.sigmoid(), targets.houses)]).flatten(1)
        )
    values = torch.cat(features).transpose(0, 1).flatten(1).double()
    network.mean.copy_(values.mean(1))
    network.scale.copy_(values.std(1).clamp(min=1e-3))
    scores = {
        "pixels": (right.sum() / total.sum()).item(),
        "classes": (right / total.clamp(min=1))[total > 0].mean().item(),
        "houses": torch.corrcoef(torch.cat(counts, 1))[0, 1].item(),
    }
    return {name: round(value, 4) for name, value in scores.items()}


def finish(
    training: TilesTraining, scenes: RenderedScenes, probe_images: int
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """See `shipped.train_and_ship`: weights in float16, the scaling in float32; scores are `held_out_scores`'."""
    network = fuse_batch_norms(training.network)
    scores = held_out_scores(network, probe_images, scenes.seed, scenes.jitter)
    state = {name: value if name in ("mean", "scale") else value.half() for name, value in network.state_dict().items()}
    return state, scores
