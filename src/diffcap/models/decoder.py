"""A transformer decoder of words that attend to visual tokens, its blocks and its loss.

Letters: B pairs, T text positions, P earlier positions, N visual tokens, D width, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffcap.models.layers import Attention, BlockMemory, Dropout, KeyValue, Linear, Segments, sinusoidal_positions

NULL, UNK, START, END = range(4)  # ids of the special tokens, in the order of RobustChangeCaptioning; NULL is padding


class BlockOutput(NamedTuple):
    """Output of a decoder block: hidden states, (B, T, D) each, and keys and values."""

    after_self_attention: Tensor  # after the residual connection and the norm of the self-attention
    after_cross_attention: Tensor  # after the residual connection and the norm of the cross-attention
    hidden: Tensor  # the block's output
    new_key_values: KeyValue  # keys and values of the self-attention, for the positions of this call only


class PostNormBlock(nn.Module):
    """One decoder block: self-attention, cross-attention and FFN with ReLU, each with a residual connection and then a norm."""

    def __init__(self, width: int, heads: int, ffn: int, dropout: float) -> None:
        super().__init__()
        self.self_attention = Attention(width, heads, dropout)
        self.cross = Attention(width, heads, dropout)
        self.ffn = nn.Sequential(Linear(width, ffn), Dropout(dropout), nn.ReLU(inplace=True), Linear(ffn, width))
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, memory: BlockMemory, mask: Tensor | None, past_segments: Segments) -> BlockOutput:
        """Run words x (B, T, D). They attend to visual tokens in `memory`, and to words in `past_segments` and x where `mask` is True."""
        attended, new_key_values = self.self_attention(x, mask, past_segments)
        words = self.norm1(x + self.dropout(attended))
        visual = self.norm2(words + self.dropout(self.cross.attend_memory(words, memory)))
        hidden = self.norm3(visual + self.dropout(self.ffn(visual)))
        return BlockOutput(words, visual, hidden, new_key_values)


class DecoderOutput(NamedTuple):
    """Output of a decoder."""

    last_block: BlockOutput
    cache: list[KeyValue]  # each block's self-attention keys and values of all positions so far


class WordDecoder(nn.Module):
    """Predicts the next word from the words so far: word vectors with sinusoidal positions, blocks, a linear layer.

    Args:
        vocabulary_size: V. max_length: positions of a caption, START and END included.
        width: D. word_width: channels of the word vectors.
        input_projection: maps word vectors (B, T, word_width) to (B, T, D).
        blocks: modules with the forward of `PostNormBlock` and an `Attention` named `cross`. If a generator builds them, their
            random weights are drawn after those of the word vectors.
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

    def project_memory(self, visual: Tensor) -> list[KeyValue]:
        """Compute each block's cross-attention keys and values of the visual tokens (B, N, D), once for all words of a caption."""
        return [block.cross.project_key_value(visual) for block in self.blocks]  # type: ignore[union-attr, operator]

    def forward(
        self,
        tokens: Tensor,
        memory: list[KeyValue] | Tensor,
        past_key_values: list[KeyValue] | None = None,
        is_key: Tensor | None = None,
    ) -> DecoderOutput:
        """Run words through the blocks.

        Args:
            tokens: ids (B, T). memory: the result of `project_memory`, or in training the visual tokens (B, N, D) themselves.
            past_key_values: the `cache` of the previous call, with P positions; T is then 1. None: `tokens` begin the captions, P is 0.
            is_key: (B, P + T), True for words that may be attended to. None: all words except NULL; with `past_key_values`, all.
        """
        first_position = past_key_values[0][0].shape[2] if past_key_values else 0  # P
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

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits of the next word (..., V) from hidden states (..., D)."""
        return self.logit(self.output_dropout(hidden))

    def attention(self, tokens: Tensor, memory: list[KeyValue], is_key: Tensor | None = None) -> Tensor:
        """Return the last block's attention (B, T, N), the mean over heads; row t is for predicting the word after token t."""
        words = self(tokens, memory, None, is_key).last_block.after_self_attention
        cross = self.blocks[-1].cross
        return cross.mean_weights(cross.project_query(words), memory[-1][0])  # type: ignore[union-attr, operator]


def causal_mask(is_key: Tensor) -> Tensor:
    """Return a mask (B, 1, T, T): each position attends to itself and to earlier positions, but only to those with `is_key` (B, T)."""
    length = is_key.shape[1]
    return torch.ones(length, length, dtype=torch.bool, device=is_key.device).tril() & is_key[:, None, None]


def run_blocks(
    blocks: Iterable[nn.Module],
    x: Tensor,
    memories: Sequence[BlockMemory],
    mask: Tensor | None,
    past_key_values: Sequence[KeyValue] | None,
) -> DecoderOutput:
    """Run x (B, T, D) through decoder blocks; `memories` and `past_key_values` (of earlier positions) have an entry per block."""
    cache = []
    for index, block in enumerate(blocks):
        past_segments = past_key_values[index : index + 1] if past_key_values else ()  # at most one segment
        output = block(x, memories[index], mask, past_segments)
        key, value = output.new_key_values
        if past_key_values:
            past_key, past_value = past_key_values[index]
            key, value = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)
        cache.append((key, value))
        x = output.hidden
    return DecoderOutput(output, cache)


def next_word_losses(logits: Tensor, tokens: Tensor, words: Tensor) -> Tensor:
    """Return cross-entropies (n,), in nats, of the n words and ENDs in `tokens` (B, T). `logits[:, t]` (B, V) predicts token t + 1.

    `words` (n,): the indices of these words in the flattened `tokens[:, 1:]`.
    """
    rows = words + words // (tokens.shape[1] - 1)  # of the flattened logits, which have one position more
    return F.cross_entropy(take_flat(logits, rows), take_flat(tokens, rows + 1), reduction="none")


def flat_indices(mask: Tensor) -> Tensor:
    """Return the indices (n,) of the true entries of the flattened mask. On a GPU, the host waits for their number."""
    return mask.flatten().nonzero().flatten()


def take_flat(values: Tensor, indices: Tensor) -> Tensor:
    """Return the entries (n, ...) of `values` (B, T, ...) at `indices` (n,) of the flattened first two dimensions."""
    return values.flatten(0, 1).index_select(0, indices)


def pair_groups(before: Tensor, after: Tensor) -> list[slice]:
    """Return the batch rows of each group: the change pairs, then, if any, the distractor pairs, in which only the viewpoint changed.

    Each group has a pair for every before image, so `before` (b, ...) and `after` (B, ...) give B / b slices of b rows.
    """
    num_before = len(before)
    if not num_before:
        raise ValueError("the batch of this process has no pair; give each process at least one")
    return [slice(start, start + num_before) for start in range(0, len(after), num_before)]
