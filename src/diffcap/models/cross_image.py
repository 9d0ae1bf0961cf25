"""The common base of SCORER and DIRL: an encoder in which each image attends to the other, and a decoder of words.

Letters: B pairs, b before images (each has one pair, or a change pair and a distractor pair, in which only the viewpoint changed, so B
is b or 2 b), N visual tokens of one image, T text positions, D width, H heads, C feature channels, V vocabulary.
"""

from abc import abstractmethod
from typing import Any, NamedTuple

from torch import Tensor, nn

from diffcap.models.captioner import AttentionMaps, Batch, Captioner
from diffcap.models.decoder import END, NULL, START, UNK, WordDecoder, next_word_losses
from diffcap.models.fast import add_repeated
from diffcap.models.layers import Attention, Dropout, GridEmbedding, KeyValue


class CrossImageOutput(NamedTuple):
    """Output of an encoder layer for B pairs."""

    before: Tensor  # (B, N, D) tokens of the before images, after they attended to the after images
    after: Tensor  # (B, N, D) tokens of the after images, after they attended to the before images
    before_query_key: tuple[Tensor, Tensor]  # queries and keys of the before images, (b, H, N, D / H) each
    after_query_key: tuple[Tensor, Tensor]  # queries and keys of the after images, (B, H, N, D / H) each


class CrossImageLayer(nn.Module):
    """One encoder layer, `LayerNorm(x + Attention(x, other image))` for both images with the same weights.

    `dropout` is the rate for the attention weights, `output_dropout` for the attention's output. `out_proj`: its last layer is linear.
    """

    def __init__(
        self, width: int, heads: int, dropout: float, output_dropout: float, out_proj: bool, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout, out_proj)
        self.norm, self.dropout = nn.LayerNorm(width, eps), Dropout(output_dropout)

    def forward(self, before: Tensor, after: Tensor) -> CrossImageOutput:
        """Encode before images (b, N, D) and after images (B, N, D); if B is 2 b, both halves of `after` use the same `before`."""
        attention = self.attention
        before_query, before_key, before_value = attention.project_qkv(before)
        after_query, after_key, after_value = attention.project_qkv(after)
        attended_after = self.dropout(attention.attend(before_query, (after_key, after_value)))  # (B, N, D)
        new_before = self.norm(add_repeated(attended_after, before))
        attended_before = self.dropout(attention.attend(after_query, (before_key, before_value)))  # (B, N, D)
        new_after = self.norm(after + attended_before)
        return CrossImageOutput(new_before, new_after, (before_query, before_key), (after_query, after_key))


class CrossImageCaptioner(Captioner):
    """A captioner with an `embedding`, an `encoder`, the function `fuse` of a subclass and a `decoder`, which run in this order."""

    bos_id = START
    eos_id = END
    extra_eos_id = NULL
    vocabulary_layout = "rcc"  # that of RobustChangeCaptioning
    embedding: GridEmbedding
    encoder: nn.ModuleList  # of `CrossImageLayer`s; may be empty
    decoder: WordDecoder

    @abstractmethod
    def fuse(self, before: Tensor, after: Tensor, encoded: CrossImageOutput | None) -> Tensor:
        """Compute the decoder's input (B, N, D) from embedded images (b, N, D) and (B, N, D) and the output of `run_encoder` for them."""

    def run_encoder(self, before: Tensor, after: Tensor) -> CrossImageOutput | None:
        """Return the last encoder layer's output for embedded images (b, N, D) and (B, N, D); None without a layer."""
        encoded = None
        for layer in self.encoder:
            encoded = None  # frees the memory of the previous layer's queries and keys
            encoded = layer(before, after)
            before, after = encoded.before, encoded.after
        return encoded

    def encode_tokens(self, before: Tensor, after: Tensor) -> Tensor:
        """Encode feature maps (B, C, h, w) as the fused tokens (B, N, D)."""
        before, after = self.embedding(before), self.embedding(after)  # (B, N, D) each
        return self.fuse(before, after, self.run_encoder(before, after))

    def encode(self, before: Tensor, after: Tensor) -> list[KeyValue]:
        """Compute each decoder block's keys and values of the fused tokens, (B, H, N, D / H) each, see `Captioner.encode`."""
        return self.decoder.project_memory(self.encode_tokens(before, after))

    def step(self, tokens: Tensor, memory: list[KeyValue], cache: Any) -> tuple[Tensor, Any]:
        """Score the next word, see `Captioner.step`."""
        last_block, cache = self.decoder(tokens[:, None], memory, cache)
        return self._logits_without_unk(last_block.hidden[:, 0]), cache

    def teacher_forced_logits(self, tokens: Tensor, memory: list[KeyValue]) -> Tensor:
        """Score the words of given captions in one pass, see `Captioner.teacher_forced_logits`."""
        return self._logits_without_unk(self.decoder(tokens[:, :-1], memory).last_block.hidden)

    def _logits_without_unk(self, hidden: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states (..., D), -inf for UNK, which is never generated (authors' code)."""
        logits = self.decoder.compute_logits(hidden)
        logits.select(-1, UNK).fill_(float("-inf"))  # in place, because `index_fill` needs a tensor from the host
        return logits

    def word_mask(self, tokens: Tensor) -> Tensor:
        """Return a mask (B, T - 1) of the words and ENDs, see `Captioner.word_mask`."""
        return tokens[:, 1:] != NULL

    def validation_losses(self, batch: Batch) -> dict[str, Tensor]:
        """Compute the losses of the words of validation pairs; the other losses depend on the batch size and are left out."""
        tokens = batch["tokens"]
        fused = self.encode_tokens(batch["before"], batch["after"])
        hidden = self.decoder(tokens, self.decoder.project_memory(fused)).last_block.hidden
        (words,) = self.find_words(batch)
        caption_losses = next_word_losses(self.decoder.compute_logits(hidden), tokens, words)
        return {"caption_loss": caption_losses, **self.change_losses(fused, batch)}

    def attention(self, before: Tensor, after: Tensor, tokens: Tensor) -> AttentionMaps:
        """Compute the attention of captions (B, T) to both images; `roll_out` derives it from the attention to fused tokens."""
        before, after = self.embedding(before), self.embedding(after)
        encoded = self.run_encoder(before, after)
        memory = self.decoder.project_memory(self.fuse(before, after, encoded))
        attention = self.decoder.attention(tokens, memory)  # (B, T, N)
        if encoded is None:
            maps = attention.unflatten(2, self.embedding.grid)
            return AttentionMaps(maps, maps, None)
        last_attention: Attention = self.encoder[-1].attention  # type: ignore[assignment]
        (before_query, before_key), (after_query, after_key) = encoded.before_query_key, encoded.after_query_key
        after_to_before = last_attention.mean_weights(after_query, before_key)
        before_to_after = last_attention.mean_weights(before_query, after_key)
        return roll_out(attention, after_to_before, before_to_after, self.embedding.grid)


def roll_out(
    attention: Tensor, after_to_before: Tensor, before_to_after: Tensor, grid: tuple[int, int]
) -> AttentionMaps:
    """Distribute the attention to fused tokens over the two images (attention rollout, Abnar and Zuidema, ACL 2020).

    A fused token represents one position in both images. In the map of each image, half of the token's attention goes to this position,
    and half to the positions to which this position of the other image attends in the last encoder layer.

    Args:
        attention: (B, T, N) to fused tokens. grid: rows and columns of the N positions.
        after_to_before: (B, N, N), attention of the after image's tokens (rows) to the before image's (columns).
        before_to_after: attention in the other direction.
    """
    before = (attention + attention @ after_to_before) / 2
    after = (attention + attention @ before_to_after) / 2
    return AttentionMaps(before.unflatten(2, grid), after.unflatten(2, grid), before_to_after)
