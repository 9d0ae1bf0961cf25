"""Transformer decoders of words that attend to visual tokens, and the captioners that have one.

Letters: B pairs, T text positions, P earlier positions, N visual tokens, D width, H heads, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffcap.models.layers import Attention, BlockMemory, Dropout, KeyValue, Linear, Segments, sinusoidal_positions

NULL, UNK, START, END = range(4)  # token ids of the vocabulary layout "rcc"


class BlockOutput(NamedTuple):
    """Hidden states of a decoder block, (B, T, D) each."""

    after_self_attention: Tensor  # after the residual connection and the norm of the self-attention
    after_cross_attention: Tensor  # after those of the cross-attention
    hidden: Tensor  # the block's output
    new_key_values: KeyValue  # of its self-attention, for the positions of this call only


class PostNormBlock(nn.Module):
    """One post-norm decoder block with ReLU in its FFN."""

    def __init__(self, width: int, heads: int, ffn: int, dropout: float) -> None:
        super().__init__()
        self.self_attention = Attention(width, heads, dropout)
        self.cross = Attention(width, heads, dropout)
        self.ffn = nn.Sequential(Linear(width, ffn), nn.ReLU(), Dropout(dropout), Linear(ffn, width))
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, memory: BlockMemory, mask: Tensor | None, past_segments: Segments) -> BlockOutput:
        """See `BlockOutput`; arguments as `Attention`."""
        attended, new_key_values = self.self_attention(x, mask, past_segments)
        words = self.norm1(x + self.dropout(attended))
        visual = self.norm2(words + self.dropout(self.cross.attend_memory(words, memory)))
        hidden = self.norm3(visual + self.dropout(self.ffn(visual)))
        return BlockOutput(words, visual, hidden, new_key_values)


class Decoded(NamedTuple):
    """Output of the last block, and every block's self-attention keys and values of all positions so far."""

    last: BlockOutput
    cache: list[KeyValue]


class WordDecoder(nn.Module):
    """Predicts the next word from the words so far: word vectors with sinusoidal positions, blocks, a linear layer.

    Args:
        vocabulary_size: V. max_length: positions of a caption, START and END included.
        width: D. word_width: channels of the word vectors.
        input_projection: (B, T, word_width) to (B, T, D).
        blocks: modules `(x, memory, mask, past_segments) -> BlockOutput` with a cross-attention `cross`; `memory` is that of
            `Attention.attend_memory`. An iterator is consumed after the word vectors are initialised.
        padding_idx: argument of the `nn.Embedding` of the words. output_dropout: rate before the linear layer.
    """

    positions: Tensor

    def __init__(
        self,
        vocabulary_size: int,
        max_length: int,
        width: int,
        word_width: int,
        input_projection: nn.Module,
        blocks: Iterable[nn.Module],
        padding_idx: int | None = NULL,
        output_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, word_width, padding_idx=padding_idx)
        self.lift = input_projection  # "lift" is its name in checkpoints
        self.blocks = nn.ModuleList(blocks)
        self.output_dropout = Dropout(output_dropout)
        self.logit = Linear(width, vocabulary_size)
        self.register_buffer("positions", sinusoidal_positions(max_length, word_width), persistent=False)

    def memory(self, visual: Tensor) -> list[KeyValue]:
        """Each block's keys and values of the visual tokens (B, N, D), computed once for a pair."""
        return [block.cross.project_key_value(visual) for block in self.blocks]  # type: ignore[union-attr, operator]

    def forward(
        self,
        tokens: Tensor,
        memory: list[KeyValue] | Tensor,
        past_key_values: list[KeyValue] | None = None,
        is_key: Tensor | None = None,
    ) -> Decoded:
        """Run ids (B, T) through the blocks, at the positions after the P ones of `past_key_values`; with those, T is 1.

        Args:
            tokens: (B, T). memory: see `memory`, or the visual tokens (B, N, D) themselves, for a training step.
            past_key_values: of each block.
            is_key: boolean (B, P + T), True for words that may be attended to. None: all but NULL; all with `past_key_values`.
        """
        first_position = past_key_values[0][0].shape[2] if past_key_values else 0
        end = first_position + tokens.shape[1]
        if end > len(self.positions):
            raise ValueError(f"{end} text positions, the decoder has {len(self.positions)}: raise max_length")
        x = self.lift(self.embedding(tokens) + self.positions[first_position:end])
        if past_key_values:
            mask = None if is_key is None else is_key[:, None, None]
        else:
            mask = causal_mask(tokens != NULL if is_key is None else is_key)
        memories: Sequence[BlockMemory] = [memory] * len(self.blocks) if isinstance(memory, Tensor) else memory
        return run_blocks(self.blocks, x, memories, mask, past_key_values)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (..., D) to logits of the next word (..., V)."""
        return self.logit(self.output_dropout(hidden))

    def attention(self, tokens: Tensor, memory: list[KeyValue], is_key: Tensor | None = None) -> Tensor:
        """Return the last block's cross-attention when the word after each of `tokens` (B, T) is predicted, mean over heads: (B, T, N)."""
        hidden = self(tokens, memory, None, is_key).last.after_self_attention
        cross = self.blocks[-1].cross
        return cross.mean_weights(cross.project_query(hidden), memory[-1][0])  # type: ignore[union-attr, operator]


def causal_mask(is_word: Tensor) -> Tensor:
    """Mask (B, 1, T, T) with which each position attends to itself and to earlier ones, only where `is_word` (B, T) is true."""
    length = is_word.shape[1]
    return torch.ones(length, length, dtype=torch.bool, device=is_word.device).tril() & is_word[:, None, None]


def run_blocks(
    blocks: Iterable[nn.Module],
    x: Tensor,
    memory: Sequence[BlockMemory],
    mask: Tensor | None,
    past_key_values: Sequence[KeyValue] | None,
) -> Decoded:
    """Run x (B, T, D) through decoder blocks; `memory` and `past_key_values` (of earlier positions) have an entry per block."""
    cache = []
    for index, block in enumerate(blocks):
        past_segments = past_key_values[index : index + 1] if past_key_values else ()
        output = block(x, memory[index], mask, past_segments)
        key, value = output.new_key_values
        if past_key_values:
            past_key, past_value = past_key_values[index]
            key, value = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)
        cache.append((key, value))
        x = output.hidden
    return Decoded(output, cache)


def next_word_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross-entropies (n,), in nats, of the n words and ENDs of `tokens` (B, T), from the `logits` (B, T, V) before each."""
    target = tokens[:, 1:]
    is_word = target != NULL
    return F.cross_entropy(logits[:, :-1][is_word], target[is_word], reduction="none")


def pair_groups(before: Tensor, after: Tensor) -> list[slice]:
    """Return the rows of each group of pairs in a batch: change pairs, then distractor pairs if there are any.

    `before` (b, ...) and `after` (B, ...) give B / b slices of b rows each.
    """
    size = len(before)
    if not size:
        raise ValueError("the batch of this process has no pair; give each process at least one")
    if len(after) % size:
        raise ValueError(f"{len(after)} after images are not a multiple of {size} before images")
    return [slice(start, start + size) for start in range(0, len(after), size)]


def mean(values: list[Tensor]) -> Tensor:
    """Mean of scalars."""
    return torch.stack(values).mean()
