"""Training of the two networks for the rendered dataset `tiles`: a backbone that predicts land cover, and a small CLIP."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from diffcap.features.tiles_backbone import CLASSES, COVERS, PREPROCESSING, SHIPPED_FILE, STRIDE, TilesNetwork
from diffcap.features.weights import fuse_batch_norms
from diffcap.models.clip import NETWORKS_FOLDER
from diffcap.worlds.tiles import render as paint
from diffcap.worlds.tiles.captions import LEXICON, describe
from diffcap.worlds.tiles.changes import sample_pair
from diffcap.worlds.tiles.scenes import ROOF_COLORS, SIZE, Layer
from diffcap.worlds.tiles.write import sample_appearance
from diffcap.worlds.training import shipped
from diffcap.worlds.training.shipped import ClipBatch, ClipTraining, ShippedTraining

IGNORED_CLASS = CLASSES  # index after the 17 classes; cars and small things on roofs, which have no class, get it


def _class_of_material() -> np.ndarray:
    """Return the class (land cover or color of a roof) of each id of a material that `render` paints, (number of ids,)."""
    classes = np.full(paint.SHADOW_OFFSET, IGNORED_CLASS, np.int64)
    covers = {paint.GRASS: "grass", paint.FOREST: "forest", paint.WATER: "water", paint.SHORE: "shore"}
    covers |= {paint.BARE: "bare ground", paint.MUD: "mud", paint.DIRT_ROAD: "dirt road", paint.PARKING: "parking lot"}
    covers |= dict.fromkeys((paint.ASPHALT, paint.MARKING, paint.VERGE), "paved road")
    for material, cover in covers.items():
        classes[material] = COVERS.index(cover)
    classes[paint.FIRST_FIELD : paint.FIRST_ROOF] = COVERS.index("field")
    num_levels = (paint.FIRST_TREE - paint.FIRST_ROOF) // len(ROOF_COLORS)  # brightness levels of each roof color
    roofs = np.arange(paint.FIRST_TREE - paint.FIRST_ROOF)
    classes[paint.FIRST_ROOF : paint.FIRST_TREE] = len(COVERS) + roofs // num_levels
    classes[paint.FIRST_TREE : paint.FIRST_CAR] = COVERS.index("tree")
    return classes


@dataclass
class Targets:
    """Training targets of B images."""

    covers: Tensor  # (B, 17, 64, 64) fraction of each class in each area of 4 x 4 pixels; the sum is at most 1
    houses: Tensor  # (B, 32, 32) 1 if the centre of a house lies in an area of 8 x 8 pixels, else 0


def render_tiles(numbers: Sequence[int], seed: int, jitter: float) -> tuple[list[np.ndarray], list[Layer], Targets]:
    """Return B images (256, 256, 3) uint8, their scenes, and targets. Number 2 k is the before image of pair k, 2 k + 1 the after image."""
    classes, images, scenes, class_maps = _class_of_material(), [], [], []
    houses = torch.zeros(len(numbers), SIZE // 8, SIZE // 8)
    for index, number in enumerate(numbers):
        pair = sample_pair(number // 2, seed)
        dates, texture_start = sample_appearance(number // 2, seed, jitter)
        scene, date = (pair.before, pair.after)[number % 2], dates[number % 2]
        images.append(paint.render(scene, date, texture_start))
        scenes.append(scene)
        class_maps.append(classes[paint.draw_materials(scene, date)])
        for house in scene.houses:
            x, y = paint.to_image(house.center, date)
            if 0 <= x < SIZE and 0 <= y < SIZE:
                houses[index, int(y) // 8, int(x) // 8] = 1
    side, num_classes = SIZE // STRIDE, CLASSES + 1
    first_index = np.arange(len(numbers) * side * side).reshape(-1, side, 1, side, 1) * num_classes
    histogram_index = first_index + np.stack(class_maps).reshape(-1, side, STRIDE, side, STRIDE)
    pixel_counts = np.bincount(histogram_index.ravel(), minlength=len(numbers) * side * side * num_classes)
    fractions = pixel_counts.reshape(-1, side, side, num_classes)[..., :CLASSES] / STRIDE**2  # without `IGNORED_CLASS`
    fraction_tensor = torch.from_numpy(fractions.astype(np.float32)).permute(0, 3, 1, 2)
    return images, scenes, Targets(fraction_tensor, houses)


class TilesBackbone(ShippedTraining):
    """Training of the backbone, which predicts the land cover of each 4 x 4 pixels, and the centres of houses.

    Args:
        lr: AdamW's highest learning rate, reached after a tenth of the steps.
        steps: number of training steps; the learning rate depends on it.
    """

    weights_file = SHIPPED_FILE

    def __init__(self, lr: float = 4e-3, steps: int = 700) -> None:
        super().__init__(lr, steps)
        self.network = TilesNetwork(norm=True)

    @staticmethod
    def render_batch(first_scene: int, num_scenes: int, seed: int, jitter: float) -> tuple[Tensor, Targets]:
        """Return (num_scenes, 3, 256, 256) preprocessed images, and their targets."""
        images, _, targets = render_tiles(range(first_scene, first_scene + num_scenes), seed, jitter)
        batch = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
        return PREPROCESSING.normalize(batch.float()), targets

    def training_step(self, batch: tuple[Tensor, Targets], batch_idx: int) -> Tensor:
        """Return the sum of the loss of the land cover and the weighted loss of the centres of houses."""
        images, targets = batch
        cover_logits, house_logits = self.network.predict(images)
        cover = cover_loss(cover_logits, targets.covers)
        house = house_loss(house_logits, targets.houses)
        loss = cover + 5 * house
        self.log_dict({"loss": loss, "cover": cover, "house": house}, prog_bar=True)
        return loss

    def finish(self, num_scenes: int, seed: int, jitter: float) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the weights and the scores. The first half of the held-out images gives the scaling of features, the second the scores.

        Scores: "pixels" is the fraction of pixels whose most probable class is right, "classes" the mean of this fraction over the classes,
        and "houses" the correlation of the predicted and the true number of houses in 32 x 32 pixels.
        """
        network = fuse_batch_norms(self.network)
        num_right, num_pixels = torch.zeros(CLASSES), torch.zeros(CLASSES)
        unscaled_features, counts_by_batch, num_seen = [], [], 0
        for images, targets in self.held_out_batches(num_scenes, seed, jitter):
            cover_logits, house_logits = network.predict(images)
            num_seen += len(images)
            if num_seen - len(images) < num_scenes // 2:
                unscaled_features.append(network.compute_channels(cover_logits, house_logits))
                continue
            true_cover = targets.covers.argmax(1)
            num_right += torch.bincount(true_cover[true_cover == cover_logits.argmax(1)], minlength=CLASSES)
            num_pixels += torch.bincount(true_cover.flatten(), minlength=CLASSES)
            house_counts = [16 * F.avg_pool2d(each, 4) for each in (house_logits.sigmoid(), targets.houses)]
            counts_by_batch.append(torch.stack(house_counts).flatten(1))
        shipped.set_scaling_(network, unscaled_features)
        scores = {
            "pixels": (num_right.sum() / num_pixels.sum()).item(),
            "classes": (num_right / num_pixels.clamp(1))[num_pixels > 0].mean().item(),
            "houses": torch.corrcoef(torch.cat(counts_by_batch, 1))[0, 1].item(),
        }
        return shipped.backbone_state(network), {name: round(value, 4) for name, value in scores.items()}


def cover_loss(logits: Tensor, fractions: Tensor) -> Tensor:
    """Return the cross-entropy of (B, 17, h, w) logits and fractions. The weight of a class is 1 / sqrt(share), so rare ones count more."""
    class_shares = fractions.mean((0, 2, 3))
    weights = (class_shares.clamp(1e-4)).rsqrt()[:, None, None]
    losses = -(weights * fractions * logits.log_softmax(1)).sum(1)
    return losses.sum() / (weights * fractions).sum()


def house_loss(logits: Tensor, houses: Tensor) -> Tensor:
    """Return the binary cross-entropy of (B, 32, 32) logits and targets. The weight of 8 x 8 pixels with a house's centre is 4, else 1."""
    return F.binary_cross_entropy_with_logits(logits, houses, 1 + 3.0 * houses)


class TilesClip(ClipTraining):
    """`ClipTraining` on `tiles`. The dense task predicts land cover and centres of houses in each 8 x 8 pixels.

    Args:
        steps: number of training steps; the learning rate depends on it.
    """

    clip_name = "ViT-tiles-16"
    sentence_words = (*LEXICON, "and")
    num_dense_logits, cells_per_side = CLASSES + 1, 4  # a cell has 8 x 8 pixels of the rendered image
    weights_file = NETWORKS_FOLDER / f"{clip_name}.safetensors"

    def __init__(self, steps: int = 1400, **options: float) -> None:
        super().__init__(steps=steps, **options)

    @staticmethod
    def render_batch(first_scene: int, num_scenes: int, seed: int, jitter: float) -> ClipBatch:
        """Return (num_scenes, 3, 128, 128) uint8 images, a sentence for each, and `Targets` with covers (num_scenes, 17, 32, 32).

        There is one image of each pair: the before image if the number of the pair is even, else the after image.
        """
        image_numbers = [2 * pair + pair % 2 for pair in range(first_scene, first_scene + num_scenes)]
        images, scenes, targets = render_tiles(image_numbers, seed, jitter)
        resampling = Image.Resampling.BICUBIC
        small_images = [np.array(Image.fromarray(image).resize((128, 128), resampling)) for image in images]
        sentences = [describe(scene, number, seed) for scene, number in zip(scenes, image_numbers)]
        image_batch = torch.from_numpy(np.stack(small_images)).permute(0, 3, 1, 2)
        return image_batch, sentences, Targets(F.avg_pool2d(targets.covers, 2), targets.houses)

    def dense_loss(self, logits: Tensor, targets: Targets) -> Tensor:
        """Return the loss of the dense task from logits (B, 18, 32, 32): the classes, then the centre of a house."""
        return cover_loss(logits[:, :CLASSES], targets.covers) + 5 * house_loss(logits[:, CLASSES], targets.houses)

    def count_dense_hits(self, logits: Tensor, targets: Targets) -> tuple[int, int]:
        """Count the cells whose most probable land cover is right, and all cells."""
        is_right = logits[:, :CLASSES].argmax(1) == targets.covers.argmax(1)
        return int(is_right.sum()), is_right.numel()
