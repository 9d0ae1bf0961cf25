"""The parts that RSICCformer and Chg2Cap share: both come from one code base.

Letters: B pairs, N tokens of the grid, T text positions, D width, V vocabulary.
"""

import copy
from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffcap.losses.gather import global_mean
from diffcap.methods.remote_sensing.weights import load_resnet
from diffcap.models.captioner import Batch, Captioner
from diffcap.models.decoder import Decoded, causal_mask, run_blocks
from diffcap.models.layers import (
    Dropout,
    KeyValue,
    Linear,
    init_attention_,
    repeat_batch,
    sinusoidal_position_embedding,
)
from diffcap.models.resnet import GlobalBatchNorm2d, ResNetEncoder
from diffcap.utils.errors import DiffcapError


class ResidualBlock(nn.Module):
    """`relu(x + branch(x))`; the branch has convolutions of 1 x 1, 3 x 3 and 1 x 1, each with batch norm (authors' code)."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(channels, inner, 1),
            GlobalBatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, padding=1),
            GlobalBatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, channels, 1),
            GlobalBatchNorm2d(channels),
        )

    def forward(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        """Tokens (B, N, D) of a grid with N positions, row by row, to (B, N, D)."""
        maps = tokens.transpose(1, 2).unflatten(2, grid)
        return F.relu(maps + self.branch(maps)).flatten(2).transpose(1, 2)


class CausalWordDecoder(nn.Module):
    """Words so far to hidden states and logits of the next word.

    Word vectors with sinusoidal positions, post-norm blocks, and a linear layer to the vocabulary. Differences from
    `decoder.WordDecoder` (SCORER, DIRL): word vectors have the blocks' width, padding is not masked by default, and the unknown
    word can be generated.

    Args:
        vocabulary_size: V. max_length: positions of a caption, start and end included. width: D.
        block: module `(x, memory, mask, past_segments) -> BlockOutput` with a cross-attention `cross`. Every layer is a copy of
            it, so all layers have the same initial weights (authors' code).
        layers: number of blocks. dropout: before the output layer. word_dropout: after the positions are added.
    """

    positions: Tensor

    def __init__(
        self,
        vocabulary_size: int,
        max_length: int,
        width: int,
        block: nn.Module,
        layers: int,
        dropout: float,
        word_dropout: float,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, width)
        self.word_dropout, self.dropout = Dropout(word_dropout), Dropout(dropout)
        init_attention_(block)
        self.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(layers))
        self.logit = Linear(width, vocabulary_size)
        self.register_buffer("positions", sinusoidal_position_embedding(max_length, width), persistent=False)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)  # authors' code
        nn.init.uniform_(self.logit.weight, -0.1, 0.1)
        nn.init.zeros_(self.logit.bias)

    def memory(self, visual: Tensor) -> list[KeyValue]:
        """Each block's keys and values of the visual tokens (B, N, D), computed once for a pair."""
        return [block.cross.project_key_value(visual) for block in self.blocks]  # type: ignore[union-attr, operator]

    def forward(
        self,
        tokens: Tensor,
        memory: list[KeyValue],
        past_key_values: list[KeyValue] | None = None,
        is_key: Tensor | None = None,
    ) -> Decoded:
        """Run ids (B, T) through the blocks, at the positions after the P ones of `past_key_values`; with those, T is 1.

        `is_key`, boolean (B, P + T): False where no position may attend to a word; None: all words may be attended to.
        """
        first = past_key_values[0][0].shape[2] if past_key_values else 0
        end = first + tokens.shape[1]
        if end > len(self.positions):
            raise ValueError(f"{end} text positions, the decoder has {len(self.positions)}: raise max_length")
        x = self.word_dropout(self.embedding(tokens) + self.positions[first:end])
        if past_key_values:
            mask = None if is_key is None else is_key[:, None, None]
        else:
            mask = causal_mask(torch.ones_like(tokens, dtype=torch.bool) if is_key is None else is_key)
        return run_blocks(self.blocks, x, memory, mask, past_key_values)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (..., D) to logits of the next word (..., V)."""
        return self.logit(self.dropout(hidden))

    def attention(self, tokens: Tensor, memory: list[KeyValue], is_key: Tensor | None = None) -> Tensor:
        """Cross-attention of the last block for the word after each of `tokens` (B, T), mean over heads: (B, T, N)."""
        hidden = self(tokens, memory, None, is_key).last.after_self_attention
        cross = self.blocks[-1].cross
        return cross.mean_weights(cross.project_query(hidden), memory[-1][0])  # type: ignore[union-attr, operator]


def feature_maps(images: ResNetEncoder | None, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Feature maps of both images, which are `before` and `after` themselves without a ResNet.

    `before` (b, ...) and `after` (B, ...), B a multiple of b, to (B, C, h, w) each; `before` is repeated as a whole. The images
    pass the ResNet one after the other, so batch norm in training mode has separate statistics for each (authors' code).
    """
    if images is not None:
        before, after = images(before), images(after)
    return repeat_batch(before, len(after)), after


class PixelOrFeatureCaptioner(Captioner):
    """A captioner on feature maps, or on pixels with a ResNet of its own, whose loss is the mean over words (authors' code)."""

    images: ResNetEncoder | None  # None if the captioner reads feature maps
    decoder: CausalWordDecoder

    @abstractmethod
    def visual_tokens(self, before: Tensor, after: Tensor) -> Tensor:
        """Two images, (b, C, h, w) and (B, C, h, w), B a multiple of b, to the tokens (B, N, D) that the decoder reads."""

    def hidden_states(self, tokens: Tensor, memory: list[KeyValue]) -> Tensor:
        """Ids (B, T) to hidden states (B, T, D) of the decoder."""
        return self.decoder(tokens, memory).last.hidden

    def encode(self, before: Tensor, after: Tensor) -> list[KeyValue]:
        """See `Captioner.encode`: each decoder block's keys and values of the visual tokens."""
        return self.decoder.memory(self.visual_tokens(before, after))

    def teacher_forced_logits(self, tokens: Tensor, memory: list[KeyValue]) -> Tensor:
        """See `Captioner.teacher_forced_logits`."""
        return self.decoder.logits(self.hidden_states(tokens[:, :-1], memory))

    def word_losses(self, batch: Batch) -> Tensor:
        """Cross-entropy of every word and the end given the words before, (n,) in nats; unknown words are included."""
        tokens = batch["tokens"]
        hidden = self.hidden_states(tokens[:, :-1], self.encode(batch["before"], batch["after"]))
        is_word = self.caption_mask(tokens)
        return F.cross_entropy(self.decoder.logits(hidden[is_word]), tokens[:, 1:][is_word], reduction="none")

    def validation_losses(self, batch: Batch) -> dict[str, Tensor]:
        """See `Captioner.validation_losses`: the word losses."""
        return {"caption_loss": self.word_losses(batch)}

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """See `Captioner.loss`: the mean over the words and ends of the global batch (authors' code)."""
        loss = global_mean(self.word_losses(batch))
        return {"loss": loss, "caption_loss": loss.detach()}

    def check(self, data: Any) -> None:
        """See `Captioner.check`; with a ResNet the data must be pixels, without one features."""
        super().check(data)
        name = self.hyperparameters["backbone"]
        has_pixels = data.store.meta.get("dtype") == "uint8"
        if has_pixels != (name is not None):
            found, needed = ("pixels", "features") if has_pixels else ("features", "pixels")
            raise DiffcapError(
                f"{data.store_name} holds {found}, and {type(self).__name__} with model.captioner.init_args.backbone "
                f"{name or 'null'} reads {needed}; give other features with BACKBONE=, or change that setting in a settings file."
            )

    @property
    def initial_weights(self) -> str | None:
        """See `Captioner.initial_weights`."""
        return None if self.images is None else "resnet_weights"

    def load_initial(self, weights: str, vocabulary: Any) -> None:
        """See `Captioner.load_initial`."""
        assert self.images is not None
        load_resnet(self.images, weights)

    def backbone_parameters(self) -> list[nn.Parameter]:
        """See `Captioner.backbone_parameters`."""
        return [] if self.images is None else [p for p in self.images.parameters() if p.requires_grad]

    def pretrained_parameters(self) -> list[nn.Parameter]:
        """See `Captioner.pretrained_parameters`: the backbone's."""
        return [] if self.images is None else list(self.images.parameters())
