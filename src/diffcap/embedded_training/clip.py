"""Training of the small CLIP that the package ships for `blocks`, on rendered images and sentences about their objects."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from diffcap.datasets.blocks.captions import LEXICON, describe
from diffcap.embedded_training.blocks_backbone import BLOCK, DENSE, attributes_of, dense_loss, targets_of
from diffcap.embedded_training.shipped import HELD_OUT, RenderedScenes, rendered, warmed_cosine
from diffcap.evaluation.retrieval import PairRetrieval
from diffcap.losses.pair_text import pair_text_contrastive_loss
from diffcap.models.clip import PairTower, TextTower, build_clip, clamp_logit_scale_, networks_folder
from diffcap.text.bpe import build_clip_vocabulary

NETWORK = "ViT-blocks-16"
SHIPPED = networks_folder() / f"{NETWORK}.safetensors"
MIN_PIXELS = 12  # visible pixels of an object that a sentence may mention

Batch = tuple[Tensor, list[str], Tensor]


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


class ClipTraining(pl.LightningModule):
    """CLIP's contrastive loss of images and sentences, with a dense auxiliary task for the patches.

    The contrastive loss alone would need far more images to learn object positions; CLIP was trained on 400 million images.

    Args:
        lr: AdamW's highest learning rate, reached after a tenth of the steps.
        steps: number of training steps, for the schedule.
        dense_weight: weight of the prediction of color, shape, material and size for every 8 x 8 pixels from its patch.
    """

    def __init__(self, lr: float = 1e-3, steps: int = 3500, dense_weight: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.steps, self.dense_weight = lr, steps, dense_weight
        self.vocabulary = build_clip_vocabulary([" ".join(LEXICON)], "clip_used")
        self.clip = build_clip(NETWORK, vocabulary_size=len(self.vocabulary))
        self.images, self.words = PairTower(self.clip, joint=False), TextTower(self.clip)  # the same modules
        patch = self.clip.visual.patch_size[0] // BLOCK
        self.dense_head = nn.Linear(self.clip.visual.proj.shape[1], sum(DENSE) * patch**2)
        self.unfold = nn.PixelShuffle(patch)

    def tokens(self, images: Tensor) -> Tensor:
        """Images (B, 3, 96, 128) uint8 to tokens (B, 1 + N, E)."""
        return self.images.project(self.images.encode_single(self.images.normalize(images)))

    def text(self, sentences: list[str]) -> Tensor:
        """B sentences to (B, E)."""
        length = len(self.words.positional_embedding)
        rows = [torch.tensor(self.vocabulary.encode(sentence, length)) for sentence in sentences]
        return self.words(nn.utils.rnn.pad_sequence(rows, True, self.vocabulary.pad).to(self.device))

    def dense(self, tokens: Tensor) -> Tensor:
        """Tokens (B, 1 + N, E) to logits of the dense task, (B, sum of `DENSE`, 12, 16)."""
        patches = self.dense_head(tokens[:, 1:]).transpose(1, 2)
        return self.unfold(patches.unflatten(2, self.images.grid))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The sum of the contrastive loss and the weighted loss of the dense task."""
        images, sentences, classes = batch
        tokens = self.tokens(images)
        contrast = pair_text_contrastive_loss(self.text(sentences), tokens[:, 0], self.clip.logit_scale.exp()).mean()
        dense = dense_loss(self.dense(tokens), classes)
        loss = contrast + self.dense_weight * dense
        self.log_dict({"loss": loss, "contrast": contrast, "dense": dense}, prog_bar=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        """Limit the scale of the cosines to 100."""
        clamp_logit_scale_(self.clip.logit_scale)

    def configure_optimizers(self) -> Any:
        """AdamW with warm-up and cosine schedule."""
        return warmed_cosine(self.parameters(), self.lr, self.steps)


@torch.no_grad()
def measure(training: ClipTraining, images: int, seed: int, jitter: float) -> dict[str, float]:
    """R@1 between sentences and images of held-out scenes, and accuracy of the dense task on blocks that show an object.

    A block counts as correct if its color, shape, material and size are all correct.
    """
    metric, correct, blocks = PairRetrieval(), 0, 0
    for start in range(0, images, 100):
        count = min(100, images - start)
        images_batch, sentences, classes = described_batch(HELD_OUT + start, count, seed, jitter)
        tokens, numbers = training.tokens(images_batch), torch.arange(start, start + count)
        metric.update(tokens[:, 0], numbers, training.text(sentences), numbers, numbers)
        predicted = torch.stack([part.argmax(1) for part in training.dense(tokens).split(DENSE, 1)], 1)
        is_object = classes[:, 0] > 0
        correct += int((predicted == classes).all(1)[is_object].sum())
        blocks += int(is_object.sum())
    scores = {name: float(value) for name, value in metric.compute().items() if name.endswith("R@1")}
    return {name: round(value, 4) for name, value in {**scores, "blocks": correct / max(1, blocks)}.items()}


def finish(
    training: ClipTraining, scenes: RenderedScenes, probe_images: int
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """See `shipped.train_and_ship`: weights in float16 under open_clip's names, and the token ids of the word vectors."""
    state = {name: value.half() for name, value in training.clip.state_dict().items()}
    training.clip.load_state_dict(
        {name: value.float() for name, value in state.items()}
    )  # evaluate the rounded weights
    state["token_ids"] = torch.tensor(training.vocabulary.clip_ids)
    return state, measure(training, probe_images, scenes.seed, scenes.jitter)
