"""Training of the small CLIP that ships for `blocks`: pictures and sentences about their objects, rendered on the fly."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from diffcap.datasets.blocks.captions import LEXICON, describe
from diffcap.evaluation.retrieval import PairRetrieval
from diffcap.lit.backbone import BLOCK, DENSE, attributes_of, dense_loss, targets_of
from diffcap.lit.shipped import HELD_OUT, RenderedScenes, rendered, warmed_cosine
from diffcap.losses.pair_text import pair_text_contrastive_loss
from diffcap.models.clip import PairTower, TextTower, build_clip, clamp_logit_scale_, networks_folder
from diffcap.text.bpe import build_clip_vocabulary

NETWORK = "ViT-blocks-16"
SHIPPED = networks_folder() / f"{NETWORK}.safetensors"
SEEN = 12  # pixels of an object that a sentence may name

Batch = tuple[Tensor, list[str], Tensor]


def described_batch(first: int, count: int, seed: int, jitter: float) -> Batch:
    """Render the before pictures of triples number `first` to `first + count`.

    Returns:
        (count, 3, 96, 128) uint8 pictures, a sentence of each, and `Targets.dense`.
    """
    numbers = range(first, first + count)
    images, slots, scenes = rendered(numbers, seed, jitter)
    pixels = torch.stack([(slots == slot).flatten(1).sum(1) for slot in range(scenes.size.shape[1])], 1)
    sentences = describe(scenes, pixels >= SEEN, numbers, seed)
    return images, sentences, targets_of(attributes_of(scenes), slots).dense


class DescribedScenes(RenderedScenes):
    """Scenes of `blocks` with sentences about them; options as `RenderedScenes`."""

    make = staticmethod(described_batch)


class ClipTraining(pl.LightningModule):
    """CLIP's contrast of pictures and sentences, with a dense auxiliary task for its patches.

    A batch of scenes is far too small for the contrast alone to teach where things are; the real CLIP has 400 million
    pictures for that.

    Args:
        lr: AdamW's highest learning rate, after a tenth of the steps.
        steps: steps of training, for the schedule.
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
        """Pictures (B, 3, 96, 128) uint8 to (B, 1 + N, E)."""
        return self.images.project(self.images.encode_single(self.images.normalize(images)))

    def text(self, sentences: list[str]) -> Tensor:
        """B sentences to (B, E)."""
        length = len(self.words.positional_embedding)
        rows = [torch.tensor(self.vocabulary.encode(sentence, length)) for sentence in sentences]
        return self.words(nn.utils.rnn.pad_sequence(rows, True, self.vocabulary.pad).to(self.device))

    def dense(self, tokens: Tensor) -> Tensor:
        """Logits of the dense task from all tokens, (B, sum of `DENSE`, 12, 16)."""
        patches = self.dense_head(tokens[:, 1:]).transpose(1, 2)
        return self.unfold(patches.unflatten(2, self.images.grid))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The contrast, and the dense task."""
        images, sentences, classes = batch
        tokens = self.tokens(images)
        contrast = pair_text_contrastive_loss(self.text(sentences), tokens[:, 0], self.clip.logit_scale.exp()).mean()
        dense = dense_loss(self.dense(tokens), classes)
        loss = contrast + self.dense_weight * dense
        self.log_dict({"loss": loss, "contrast": contrast, "dense": dense}, prog_bar=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        """Keep the scale of the cosines at 100 or less."""
        clamp_logit_scale_(self.clip.logit_scale)

    def configure_optimizers(self) -> Any:
        """AdamW, warmed up over a tenth of the steps, then down along a cosine."""
        return warmed_cosine(self.parameters(), self.lr, self.steps)


@torch.no_grad()
def measure(training: ClipTraining, images: int, seed: int, jitter: float) -> dict[str, float]:
    """Held-out scenes: R@1 of sentences and pictures among each other, and the share of object blocks whose four values are right."""
    metric, right, blocks = PairRetrieval(), 0, 0
    for start in range(0, images, 100):
        count = min(100, images - start)
        pictures, sentences, classes = described_batch(HELD_OUT + start, count, seed, jitter)
        tokens, numbers = training.tokens(pictures), torch.arange(start, start + count)
        metric.update(tokens[:, 0], numbers, training.text(sentences), numbers, numbers)
        guess = torch.stack([part.argmax(1) for part in training.dense(tokens).split(DENSE, 1)], 1)
        here = classes[:, 0] > 0
        right += int((guess == classes).all(1)[here].sum())
        blocks += int(here.sum())
    scores = {name: float(value) for name, value in metric.compute().items() if name.endswith("R@1")}
    return {name: round(value, 4) for name, value in {**scores, "blocks": right / max(1, blocks)}.items()}


def finish(
    training: ClipTraining, scenes: RenderedScenes, probe_images: int
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """See `shipped.train_and_ship`: open_clip's names, float16, the words' vectors with the tokens that they belong to."""
    state = {name: value.half() for name, value in training.clip.state_dict().items()}
    training.clip.load_state_dict({name: value.float() for name, value in state.items()})  # what is shipped is measured
    state["token_ids"] = torch.tensor(training.vocabulary.clip_ids)
    return state, measure(training, probe_images, scenes.seed, scenes.jitter)
