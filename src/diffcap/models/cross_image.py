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

    `dropout` is the rate for the attention weights, `output_dropout` that for the attention's output; `out_proj`: see `Attention`.
    """

    def __init__(
        self, width: int, heads: int, dropout: float, output_dropout: float, out_proj: bool, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout, out_proj)
        self.norm, self.dropout = nn.LayerNorm(width, eps), Dropout(output_dropout)

    def forward(self, before: Tensor, after: Tensor) -> Views:
        """Encode before images (b, N, D) and after images (B, N, D); if B is 2 b, both halves of `after` use the same `before`."""
        attention = self.attention
        query1, key1, value1 = attention.project_qkv(before)
        query2, key2, value2 = attention.project_qkv(after)
        from_after = self.dropout(attention.attend(query1, (key2, value2)))
        new_before = self.norm(add_repeated(from_after, before))
        from_before = self.dropout(attention.attend(query2, (key1, value1)))
        return Views(new_before, self.norm(after + from_before), (query1, key1), (query2, key2))


class CrossImageCaptioner(Captioner):
    """The common base of SCORER and DIRL, whose authors' programs share code."""

    bos_id = START
    eos_id = END
    extra_eos_id = NULL
    vocabulary_layout = "rcc"
    embedding: GridEmbedding
    encoder: nn.ModuleList  # of `CrossImageLayer`s; may be empty
    decoder: WordDecoder

    @abstractmethod
    def fuse(self, before: Tensor, after: Tensor, views: Views | None) -> Tensor:
        """Return the difference representation (B, N, D), from embedded images (b, N, D) and (B, N, D) and their `compare`."""

    def compare(self, before: Tensor, after: Tensor) -> Views | None:
        """Return the last encoder layer's output for embedded images (b, N, D) and (B, N, D); None without a layer."""
        views = None
        for layer in self.encoder:
            views = None  # free the previous layer's queries and keys
            views = layer(before, after)
            before = views.before
            after = views.after
        return views

    def encode(self, before: Tensor, after: Tensor) -> list[KeyValue]:
        """See `Captioner.encode`: each decoder block's keys and values of the difference representation."""
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
        """Return the logits (..., V) of hidden states (..., D), -inf for UNK, which is never generated (authors' code)."""
        logits = self.decoder.logits(hidden)
        return logits.index_fill(-1, torch.tensor([UNK], device=logits.device), float("-inf"))

    def validation_losses(self, batch: Batch) -> dict[str, Tensor]:
        """See `Captioner.validation_losses`: the word losses only, because the other losses depend on the batch size."""
        tokens = batch["tokens"]
        hidden = self.decoder(tokens, self.encode(batch["before"], batch["after"])).last.hidden
        return {"caption_loss": next_word_losses(self.decoder.logits(hidden), tokens)}

    def attention(self, before: Tensor, after: Tensor, tokens: Tensor) -> AttentionMaps:
        """See `Captioner.attention`; `roll_out` distributes attention to fused tokens over the two images."""
        before, after = self.embedding(before), self.embedding(after)
        views = self.compare(before, after)
        memory = self.decoder.memory(self.fuse(before, after, views))
        attention = self.decoder.attention(tokens, memory)
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
    """Distribute the attention to fused tokens over the two images (attention rollout, Abnar and Zuidema, ACL 2020).

    A fused token represents one position in both images. In each image, half of its attention goes to that position, and half
    to the positions from which the last encoder layer's attention took the other image's content.

    Args:
        attention: (B, T, N) to fused tokens. grid: rows and columns of the N positions.
        to_before: (B, N, N), attention of the after image's tokens (rows) to the before image's. to_after: vice versa.
            None: all attention stays at its own position.
    """
    before = attention if to_before is None else (attention + attention @ to_before) / 2
    after = attention if to_after is None else (attention + attention @ to_after) / 2
    return AttentionMaps(before.unflatten(2, grid), after.unflatten(2, grid), to_after)
