"""Captioners whose encoder lets the tokens of each image attend to those of the other, and whose words a `WordDecoder` predicts.

Letters: B pairs, b before images, N visual tokens of one image, T text positions, D width, H heads, C feature channels, V vocabulary.
"""

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from diffcap.models.captioner import AttentionMaps, Batch, Captioner
from diffcap.models.decoder import END, NULL, START, UNK, WordDecoder, next_word_losses
from diffcap.models.fast import add_repeated
from diffcap.models.layers import Attention, Dropout, GridEmbedding, KeyValue


class Views(NamedTuple):
    """Output of an encoder layer."""

    before: Tensor  # (B, N, D) tokens of each image, after they attended to the other image
    after: Tensor
    before_query_key: tuple[Tensor, Tensor]  # queries and keys of the layer's input, (b, H, N, D / H) each
    after_query_key: tuple[Tensor, Tensor]  # (B, H, N, D / H) each


class CrossImageLayer(nn.Module):
    """One encoder layer, `LayerNorm(x + Attention(x, other image))` for both images with the same weights.

    `dropout` is of the attention weights, `output_dropout` of the attention's output; `out_proj`: see `Attention`.
    """

    def __init__(
        self, width: int, heads: int, dropout: float, output_dropout: float, out_proj: bool, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout, out_proj)
        self.norm, self.dropout = nn.LayerNorm(width, eps), Dropout(output_dropout)

    def forward(self, before: Tensor, after: Tensor) -> Views:
        """(b, N, D) and (B, N, D); where B is 2 b, `before` is used for both halves of `after`."""
        attention = self.attention
        (query1, key1, value1), (query2, key2, value2) = attention.project_qkv(before), attention.project_qkv(after)
        mixed = self.dropout(attention.attend(query1, (key2, value2)))
        new_before = self.norm(add_repeated(mixed, before))
        mixed = self.dropout(attention.attend(query2, (key1, value1)))
        return Views(new_before, self.norm(after + mixed), (query1, key1), (query2, key2))


class CrossImageCaptioner(Captioner):
    """What SCORER and DIRL have in common, which come from one code base."""

    bos_id = START
    eos_id = END
    extra_eos_id = NULL
    vocabulary_layout = "rcc"
    embedding: GridEmbedding
    encoder: nn.ModuleList  # of `CrossImageLayer`s; may be empty
    decoder: WordDecoder

    @abstractmethod
    def fuse(self, before: Tensor, after: Tensor, views: Views | None) -> Tensor:
        """The difference representation (B, N, D) of embedded images, (b, N, D) and (B, N, D), and the last layer's output."""

    def compare(self, before: Tensor, after: Tensor) -> Views | None:
        """Output of the last encoder layer for embedded images (b, N, D) and (B, N, D); None without a layer."""
        views = None
        for layer in self.encoder:
            views = None  # free the previous layer's queries and keys
            views = layer(before, after)
            before = views.before
            after = views.after
        return views

    def encode(self, before: Tensor, after: Tensor) -> list[KeyValue]:
        """Two feature maps (B, C, h, w) to each decoder block's keys and values of the difference representation."""
        before, after = self.embedding(before), self.embedding(after)
        return self.decoder.memory(self.fuse(before, after, self.compare(before, after)))

    def step(
        self, tokens: Tensor, memory: list[KeyValue], cache: list[KeyValue] | None
    ) -> tuple[Tensor, list[KeyValue]]:
        """See `Captioner.step`."""
        last, cache = self.decoder(tokens[:, None], memory, cache)
        return self._logits_without_unk(last.hidden[:, 0]), cache

    def teacher_forced_logits(self, tokens: Tensor, memory: list[KeyValue]) -> Tensor:
        """See `Captioner.teacher_forced_logits`."""
        return self._logits_without_unk(self.decoder(tokens[:, :-1], memory).last.hidden)

    def _logits_without_unk(self, hidden: Tensor) -> Tensor:
        """Logits of generation, (..., D) to (..., V): an unknown word is never generated (authors' code)."""
        logits = self.decoder.logits(hidden)
        return logits.index_fill(-1, torch.tensor([UNK], device=logits.device), float("-inf"))

    def validation_losses(self, batch: Batch) -> dict[str, Tensor]:
        """See `Captioner.validation_losses`: the word losses only, because the other losses depend on the batch size."""
        hidden = self.decoder(batch["tokens"], self.encode(batch["before"], batch["after"])).last.hidden
        return {"caption_loss": next_word_losses(self.decoder.logits(hidden), batch["tokens"])}

    def attention(self, before: Tensor, after: Tensor, tokens: Tensor) -> AttentionMaps:
        """See `Captioner.attention`; `roll_out` distributes attention to fused tokens over the two images."""
        before, after = self.embedding(before), self.embedding(after)
        views = self.compare(before, after)
        attention = self.decoder.attention(tokens, self.decoder.memory(self.fuse(before, after, views)))
        if views is None:
            return roll_out(attention, None, None, self.embedding.grid)
        layer: Attention = self.encoder[-1].attention  # type: ignore[assignment]
        (query1, key1), (query2, key2) = views.before_query_key, views.after_query_key
        to_after = layer.mean_weights(query1, key2)
        to_before = layer.mean_weights(query2, key1)
        return roll_out(attention, to_before, to_after, self.embedding.grid)


def roll_out(
    attention: Tensor, to_before: Tensor | None, to_after: Tensor | None, grid: tuple[int, int]
) -> AttentionMaps:
    """Attention to fused tokens, distributed over the two images (attention rollout, Abnar and Zuidema, ACL 2020).

    A fused token represents one position in both images. In each image, half of its attention goes to that position, and half
    to the positions from which the last encoder layer's attention took the other image's content.

    Args:
        attention: (B, T, N) to fused tokens. grid: rows and columns of the N positions.
        to_before: (B, N, N), attention of the after image's tokens (rows) to the before image's. to_after: vice versa.
            None: all attention stays at its own position.
    """
    before, after = (
        attention if other is None else (attention + attention @ other) / 2 for other in (to_before, to_after)
    )
    return AttentionMaps(before.unflatten(2, grid), after.unflatten(2, grid), to_after)
