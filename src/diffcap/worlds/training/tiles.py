"""Training of the backbone and the CLIP that ship for `tiles`, and their accuracy on held-out images."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from diffcap.features.tiles_backbone import CLASSES, COVERS, PREPROCESSING, SHIPPED_FILE, STRIDE, TilesNetwork
from diffcap.features.weights import fuse_batch_norms
from diffcap.models.clip import networks_folder
from diffcap.worlds.tiles import render as paint
from diffcap.worlds.tiles.captions import LEXICON, describe
from diffcap.worlds.tiles.changes import sample_pair
from diffcap.worlds.tiles.scenes import ROOFS as ROOF_COLORS
from diffcap.worlds.tiles.scenes import SIZE, Layer
from diffcap.worlds.tiles.write import appearance
from diffcap.worlds.training.shipped import Batch, ClipTraining, ShippedTraining, backbone_state, standardise_

IGNORED = CLASSES  # index for small fixtures on roofs and cars, which belong to no class
HOUSE_WEIGHT = 4.0  # loss weight of a block of 8 x 8 pixels with the centre of a house; few blocks have one


def _class_of_material() -> np.ndarray:
    """Return the class of each material number, (SHADOW,)."""
    table = np.full(paint.SHADOW, IGNORED, np.int64)
    covers = {paint.GRASS: "grass", paint.FOREST: "forest", paint.WATER: "water", paint.SHORE: "shore"}
    covers |= {paint.BARE: "bare ground", paint.MUD: "mud", paint.DIRT_ROAD: "dirt road", paint.PARKING: "parking lot"}
    covers |= dict.fromkeys((paint.ASPHALT, paint.LINE, paint.VERGE), "paved road")
    for material, name in covers.items():
        table[material] = COVERS.index(name)
    table[paint.FIELDS : paint.ROOF] = COVERS.index("field")
    levels = (paint.TREES - paint.ROOF) // len(ROOF_COLORS)
    table[paint.ROOF : paint.TREES] = len(COVERS) + np.arange(paint.TREES - paint.ROOF) // levels
    table[paint.TREES : paint.CARS] = COVERS.index("tree")
    table[[paint.FIXTURE, paint.CHIMNEY]] = IGNORED
    return table


@dataclass
class Targets:
    """Training targets of B images."""

    covers: Tensor  # (B, 17, 64, 64) fraction of each class in each 4 x 4 pixels; they add up to at most 1
    houses: Tensor  # (B, 32, 32) 1 where the centre of a house lies in the 8 x 8 pixels, else 0


def rendered_tiles(numbers: Sequence[int], seed: int, jitter: float) -> tuple[list[np.ndarray], list[Layer], Targets]:
    """B images (256, 256, 3) uint8, their scenes and targets; images 2 k and 2 k + 1 are those of pair k."""
    table, images, scenes, classes = _class_of_material(), [], [], []
    houses = torch.zeros(len(numbers), SIZE // 8, SIZE // 8)
    for row, number in enumerate(numbers):
        pair = sample_pair(number // 2, seed)
        dates, texture = appearance(number // 2, seed, jitter)
        scene, date = (pair.before, pair.after)[number % 2], dates[number % 2]
        images.append(paint.render(scene, date, texture))
        scenes.append(scene)
        classes.append(table[paint.materials(scene, date)])
        for house in scene.houses:
            x, y = paint.to_image(house.center, date)
            if 0 <= x < SIZE and 0 <= y < SIZE:
                houses[row, int(y) // 8, int(x) // 8] = 1
    side, count = SIZE // STRIDE, CLASSES + 1
    cells = np.arange(len(numbers) * side * side).reshape(-1, side, 1, side, 1) * count
    index = cells + np.stack(classes).reshape(-1, side, STRIDE, side, STRIDE)
    pixels = np.bincount(index.ravel(), minlength=len(numbers) * side * side * count)
    covers = pixels.reshape(-1, side, side, count)[..., :CLASSES] / STRIDE**2  # without `IGNORED`
    fractions = torch.from_numpy(covers.astype(np.float32)).permute(0, 3, 1, 2)
    return images, scenes, Targets(fractions, houses)


class TilesBackbone(ShippedTraining):
    """The backbone predicts the land cover of each 4 x 4 pixels, and the centres of houses.

    Args:
        lr: AdamW's highest learning rate, reached after a tenth of the steps.
        steps: number of training steps, for the schedule.
    """

    path = SHIPPED_FILE

    def __init__(self, lr: float = 4e-3, steps: int = 700) -> None:
        super().__init__(lr, steps)
        self.network = TilesNetwork(norm=True)

    @staticmethod
    def make(first: int, count: int, seed: int, jitter: float) -> tuple[Tensor, Targets]:
        """(count, 3, 256, 256) preprocessed images, and their targets; see `rendered_tiles`."""
        images, _, targets = rendered_tiles(range(first, first + count), seed, jitter)
        batch = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
        return PREPROCESSING.normalize(batch.float()), targets

    def training_step(self, batch: tuple[Tensor, Targets], batch_idx: int) -> Tensor:
        """Cross-entropy of the land cover, rare classes weighted more, and of the centres of houses."""
        images, targets = batch
        covers, houses = self.network.predict(images)
        cover = cover_loss(covers, targets.covers)
        house = house_loss(houses, targets.houses)
        loss = cover + 5 * house
        self.log_dict({"loss": loss, "cover": cover, "house": house}, prog_bar=True)
        return loss

    def finish(self, images: int, seed: int, jitter: float) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Scale the output by the first half of the held-out images; scores on the second half.

        "pixels" whose most probable class is right, their mean over the "classes", and the correlation of the number of "houses" in cells.
        """
        network = fuse_batch_norms(self.network)
        right, total = torch.zeros(CLASSES), torch.zeros(CLASSES)
        values, counts, seen = [], [], 0
        for batch, targets in self.held_out(images, seed, jitter):
            covers, houses = network.predict(batch)
            seen += len(batch)
            if seen - len(batch) < images // 2:
                values.append(network.compute_channels(covers, houses))
                continue
            truth = targets.covers.argmax(1)
            right += torch.bincount(truth[truth == covers.argmax(1)], minlength=CLASSES)
            total += torch.bincount(truth.flatten(), minlength=CLASSES)
            cells = [16 * F.avg_pool2d(each, 4) for each in (houses.sigmoid(), targets.houses)]
            counts.append(torch.stack(cells).flatten(1))
        standardise_(network, values)
        scores = {
            "pixels": (right.sum() / total.sum()).item(),
            "classes": (right / total.clamp(min=1))[total > 0].mean().item(),
            "houses": torch.corrcoef(torch.cat(counts, 1))[0, 1].item(),
        }
        return backbone_state(network), {name: round(value, 4) for name, value in scores.items()}


def cover_loss(logits: Tensor, fractions: Tensor) -> Tensor:
    """Cross-entropy of fractions, (B, 17, h, w) both; the weight of a class is the inverse root of its share of the batch."""
    share = fractions.mean((0, 2, 3))
    weights = (share.clamp(min=1e-4)).rsqrt()[:, None, None]
    losses = -(weights * fractions * logits.log_softmax(1)).sum(1)
    return losses.sum() / (weights * fractions).sum()


def house_loss(logits: Tensor, houses: Tensor) -> Tensor:
    """Weighted cross-entropy of the centres of houses, (B, 32, 32) both."""
    return F.binary_cross_entropy_with_logits(logits, houses, 1 + (HOUSE_WEIGHT - 1) * houses)


class TilesClip(ClipTraining):
    """`ClipTraining` on `tiles`. Dense task: land cover and centres of houses for every 8 x 8 pixels of the rendered image.

    Args:
        steps: number of training steps, for the schedule.
    """

    network = "ViT-tiles-16"
    words_used = (*LEXICON, "and")
    dense_classes, dense_places = CLASSES + 1, 4  # 8 x 8 pixels of the rendered image each
    path = networks_folder() / f"{network}.safetensors"

    def __init__(self, steps: int = 1400, **options: float) -> None:
        super().__init__(steps=steps, **options)

    @staticmethod
    def make(first: int, count: int, seed: int, jitter: float) -> Batch:
        """(count, 3, 128, 128) uint8 images, one sentence for each, and `Targets` with covers (count, 17, 32, 32).

        One image of each pair: before, after, before, ... Of a sentence, the first 32 tokens are used.
        """
        numbers = [2 * pair + pair % 2 for pair in range(first, first + count)]  # of images, see `rendered_tiles`
        images, scenes, targets = rendered_tiles(numbers, seed, jitter)
        small = [np.array(Image.fromarray(image).resize((128, 128), Image.Resampling.BICUBIC)) for image in images]
        sentences = [describe(scene, number, seed) for scene, number in zip(scenes, numbers)]
        batch = torch.from_numpy(np.stack(small)).permute(0, 3, 1, 2)
        return batch, sentences, Targets(F.avg_pool2d(targets.covers, 2), targets.houses)

    def dense_loss(self, logits: Tensor, targets: Targets) -> Tensor:
        """Logits (B, 18, 32, 32), the last one is that of a house's centre."""
        return cover_loss(logits[:, :CLASSES], targets.covers) + 5 * house_loss(logits[:, CLASSES], targets.houses)

    def dense_counts(self, logits: Tensor, targets: Targets) -> tuple[int, int]:
        """Places whose most probable land cover is right."""
        right = logits[:, :CLASSES].argmax(1) == targets.covers.argmax(1)
        return int(right.sum()), right.numel()
