"""Training of the small CLIPs that ship for `blocks` and `tiles`, on rendered images and sentences about them."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from diffcap.losses.pair_text import pair_text_contrastive_loss
from diffcap.methods.clip4idc.retrieval import PairRetrieval
from diffcap.models.clip import PairTower, TextTower, build_clip, clamp_logit_scale_
from diffcap.text.vocabularies import build_clip_vocabulary
from diffcap.worlds.training.shipped import ShippedTraining

Batch = tuple[Tensor, list[str], Any]  # images (B, 3, h, w) uint8, a sentence for each, targets of the dense task


class ClipTraining(ShippedTraining):
    """CLIP's contrastive loss of images and sentences, with a dense auxiliary task for the patches.

    The contrastive loss alone would need far more images to learn object positions; CLIP was trained on 400 million images.

    Args:
        lr: AdamW's highest learning rate, reached after a tenth of the steps.
        steps: number of training steps, for the schedule.
        dense_weight: weight of the dense task.
    """

    network: ClassVar[str]  # name of the open_clip configuration
    words_used: ClassVar[Iterable[str]]  # in the sentences
    dense_classes: ClassVar[int]  # C, logits of the dense task at each place
    dense_places: ClassVar[int]  # places along each side of a patch

    def __init__(self, lr: float = 1e-3, steps: int = 3500, dense_weight: float = 1.0) -> None:
        super().__init__(lr, steps)
        self.dense_weight = dense_weight
        self.vocabulary = build_clip_vocabulary([" ".join(self.words_used)], "clip_used")
        self.clip = build_clip(self.network, vocabulary_size=len(self.vocabulary))
        self.images, self.words = PairTower(self.clip, joint=False), TextTower(self.clip)  # the same modules
        self.dense_head = nn.Linear(self.clip.visual.proj.shape[1], self.dense_classes * self.dense_places**2)
        self.unfold = nn.PixelShuffle(self.dense_places)

    @abstractmethod
    def dense_loss(self, logits: Tensor, targets: Any) -> Tensor:
        """Loss of the dense task, logits (B, C, rows, columns)."""

    @abstractmethod
    def dense_counts(self, logits: Tensor, targets: Any) -> tuple[int, int]:
        """How many predictions of the dense task are right, and how many are counted."""

    def tokens(self, images: Tensor) -> Tensor:
        """Images (B, 3, h, w) uint8 to tokens (B, 1 + N, E)."""
        return self.images.project(self.images.encode_single(self.images.normalize(images)))

    def text(self, sentences: list[str]) -> Tensor:
        """B sentences to (B, E)."""
        length = len(self.words.positional_embedding)
        rows = [torch.tensor(self.vocabulary.encode(sentence, length)) for sentence in sentences]
        return self.words(nn.utils.rnn.pad_sequence(rows, True, self.vocabulary.pad).to(self.device))

    def dense(self, tokens: Tensor) -> Tensor:
        """Tokens (B, 1 + N, E) to logits of the dense task, (B, C, rows, columns)."""
        patches = self.dense_head(tokens[:, 1:]).transpose(1, 2)
        return self.unfold(patches.unflatten(2, self.images.grid))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The sum of the contrastive loss and the weighted loss of the dense task."""
        images, sentences, targets = batch
        tokens = self.tokens(images)
        contrast = pair_text_contrastive_loss(self.text(sentences), tokens[:, 0], self.clip.logit_scale.exp()).mean()
        dense = self.dense_loss(self.dense(tokens), targets)
        loss = contrast + self.dense_weight * dense
        self.log_dict({"loss": loss, "contrast": contrast, "dense": dense}, prog_bar=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        """Limit the scale of the cosines to 100."""
        clamp_logit_scale_(self.clip.logit_scale)

    def measure(self, images: int, seed: int, jitter: float) -> dict[str, float]:
        """R@1 between sentences and images of held-out scenes, and the accuracy of the dense task."""
        metric = PairRetrieval()
        right = total = start = 0
        for batch, sentences, targets in self.held_out(images, seed, jitter):
            tokens, numbers = self.tokens(batch), torch.arange(start, start + len(batch))
            metric.update(tokens[:, 0], numbers, self.text(sentences), numbers, numbers)
            batch_right, batch_total = self.dense_counts(self.dense(tokens), targets)
            right += batch_right
            total += batch_total
            start += len(batch)
        scores = {name: float(value) for name, value in metric.compute().items() if name.endswith("R@1")}
        return {name: round(value, 4) for name, value in {**scores, "dense": right / max(1, total)}.items()}

    def finish(self, images: int, seed: int, jitter: float) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Weights in float16 under open_clip's names, and the token ids of the word vectors; see `measure`."""
        state = {name: value.half() for name, value in self.clip.state_dict().items()}
        self.clip.load_state_dict({name: value.float() for name, value in state.items()})  # measure the rounded weights
        state["token_ids"] = torch.tensor(self.vocabulary.clip_ids)
        return state, self.measure(images, seed, jitter)
