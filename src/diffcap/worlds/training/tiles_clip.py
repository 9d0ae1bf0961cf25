"""Training of the small CLIP that the package ships for `tiles`: see `clip.ClipTraining`."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from diffcap.features.tiles_backbone import CLASSES
from diffcap.models.clip import networks_folder
from diffcap.worlds.tiles.captions import describe
from diffcap.worlds.tiles.tags import LEXICON
from diffcap.worlds.training.clip import Batch, ClipTraining
from diffcap.worlds.training.shipped import RenderedScenes
from diffcap.worlds.training.tiles_backbone import Targets, cover_loss, house_loss, rendered_tiles

NETWORK = "ViT-tiles-16"
SHIPPED = networks_folder() / f"{NETWORK}.safetensors"
SIDE = 128  # height and width of the images that the network reads, in pixels
PLACES = 4  # of the dense task along each side of a patch: 8 x 8 pixels of the rendered image each


def described_batch(first: int, count: int, seed: int, jitter: float) -> Batch:
    """Render one image of each pair `first` ... `first + count - 1`: before, after, before, ...

    Returns:
        (count, 3, 128, 128) uint8 images, one sentence for each, and `Targets` with covers (count, 17, 32, 32). Of a sentence, the
        first 32 tokens are used.
    """
    numbers = [2 * pair + pair % 2 for pair in range(first, first + count)]  # of images, see `rendered_tiles`
    images, scenes, targets = rendered_tiles(numbers, seed, jitter)
    small = [np.array(Image.fromarray(image).resize((SIDE, SIDE), Image.Resampling.BICUBIC)) for image in images]
    sentences = [describe(scene, number, seed) for scene, number in zip(scenes, numbers)]
    batch = torch.from_numpy(np.stack(small)).permute(0, 3, 1, 2)
    return batch, sentences, Targets(F.avg_pool2d(targets.covers, 2), targets.houses)


class DescribedTiles(RenderedScenes):
    """Images of `tiles` with sentences; options as `RenderedScenes`."""

    make = staticmethod(described_batch)


class TilesClipTraining(ClipTraining):
    """`ClipTraining` on `tiles`. Dense task: land cover and centres of houses for every 8 x 8 pixels of the rendered image.

    Args:
        lr: AdamW's highest learning rate, reached after a tenth of the steps.
        steps: number of training steps, for the schedule.
        dense_weight: weight of the dense task.
    """

    def __init__(self, lr: float = 1e-3, steps: int = 1400, dense_weight: float = 1.0) -> None:
        super().__init__(NETWORK, [*LEXICON, "and"], CLASSES + 1, PLACES, lr, steps, dense_weight)
        self.save_hyperparameters()

    def dense_loss(self, logits: Tensor, targets: Targets) -> Tensor:
        """See `ClipTraining`; logits (B, 18, 32, 32), the last one is that of a house's centre."""
        return cover_loss(logits[:, :CLASSES], targets.covers) + 5 * house_loss(logits[:, CLASSES], targets.houses)

    def dense_counts(self, logits: Tensor, targets: Targets) -> tuple[int, int]:
        """Places whose most probable land cover is right."""
        right = logits[:, :CLASSES].argmax(1) == targets.covers.argmax(1)
        return int(right.sum()), right.numel()
