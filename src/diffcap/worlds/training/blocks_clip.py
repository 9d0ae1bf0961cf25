"""Training of the small CLIP that the package ships for `blocks`: see `clip.ClipTraining`."""

import torch
from torch import Tensor

from diffcap.models.clip import networks_folder
from diffcap.worlds.blocks.captions import LEXICON, describe
from diffcap.worlds.training.blocks_backbone import DENSE, attributes_of, dense_loss, targets_of
from diffcap.worlds.training.clip import Batch, ClipTraining
from diffcap.worlds.training.shipped import RenderedScenes, rendered

NETWORK = "ViT-blocks-16"
SHIPPED = networks_folder() / f"{NETWORK}.safetensors"
PLACES = 2  # of the dense task along each side of a patch: 8 x 8 pixels each
MIN_PIXELS = 12  # visible pixels of an object that a sentence may mention


def described_batch(first: int, count: int, seed: int, jitter: float) -> Batch:
    """Render the before images of the triples `first` ... `first + count - 1`.

    Returns:
        (count, 3, 96, 128) uint8 images, one sentence for each, and `Targets.dense`.
    """
    numbers = range(first, first + count)
    images, slots, scenes = rendered(numbers, seed, jitter)
    pixels = torch.stack([(slots == slot).flatten(1).sum(1) for slot in range(scenes.size.shape[1])], 1)
    sentences = describe(scenes, pixels >= MIN_PIXELS, numbers, seed)
    return images, sentences, targets_of(attributes_of(scenes), slots).dense


class DescribedScenes(RenderedScenes):
    """Scenes of `blocks` with sentences; options as `RenderedScenes`."""

    make = staticmethod(described_batch)


class BlocksClipTraining(ClipTraining):
    """`ClipTraining` on `blocks`. Dense task: color, shape, material and size for every 8 x 8 pixels.

    Args:
        lr: AdamW's highest learning rate, reached after a tenth of the steps.
        steps: number of training steps, for the schedule.
        dense_weight: weight of the dense task.
    """

    def __init__(self, lr: float = 1e-3, steps: int = 3500, dense_weight: float = 1.0) -> None:
        super().__init__(NETWORK, LEXICON, sum(DENSE), PLACES, lr, steps, dense_weight)
        self.save_hyperparameters()

    def dense_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """See `ClipTraining`; logits (B, sum of `DENSE`, 12, 16)."""
        return dense_loss(logits, targets)

    def dense_counts(self, logits: Tensor, targets: Tensor) -> tuple[int, int]:
        """Blocks of 8 x 8 pixels that show an object: a block is right if all four predictions are."""
        predicted = torch.stack([part.argmax(1) for part in logits.split(DENSE, 1)], 1)
        is_object = targets[:, 0] > 0
        return int((predicted == targets).all(1)[is_object].sum()), int(is_object.sum())
