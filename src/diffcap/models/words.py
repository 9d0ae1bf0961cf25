"""The word decoder that SCORER and DIRL share: what surrounds the blocks, which are each method's own.

Both come from one code base: words of 300 channels with sinusoidal positions, lifted to the model's width; two blocks of
self-attention, cross-attention to the fused visual tokens and an FFN; a linear layer to the vocabulary.

Letters: B pairs, T text positions, N visual tokens, D width, H heads, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffcap.models.captioner import WordMaps
from diffcap.models.layers import KeysValues, sinusoid

NULL, UNK, START, END = range(4)


class BlockOutput(NamedTuple):
    """What a decoder block gives: (B, T, D) after self-attention, after cross-attention and at its end."""

    said: Tensor
    seen: Tensor
    hidden: Tensor
    own: KeysValues  # of its self-attention, this call's positions only


class Decoded(NamedTuple):
    """The last block's output and every block's self-attention keys and values so far."""

    last: BlockOutput
    cache: list[KeysValues]


class WordDecoder(nn.Module):
    """Words so far to hidden states and scores of the next word.

    Args:
        vocabulary_size: V. max_length: positions of a caption, START and END included.
        width: D. word_width: channels of the word vectors (authors' code: 300).
        lift: (B, T, word_width) to (B, T, D). blocks: modules `(x, memory, mask, past) -> BlockOutput` with a `cross`.
    """

    positions: Tensor

    def __init__(
        self,
        vocabulary_size: int,
        max_length: int,
        width: int,
        word_width: int,
        lift: nn.Module,
        blocks: Sequence[nn.Module],
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, word_width, padding_idx=NULL)
        self.lift, self.blocks = lift, nn.ModuleList(blocks)
        self.logit = nn.Linear(width, vocabulary_size)
        self.register_buffer("positions", sinusoid(max_length, word_width), persistent=False)

    def memory(self, visual: Tensor) -> list[KeysValues]:
        """Each block's keys and values of the visual tokens (B, N, D), computed once a pair."""
        return [block.cross.keys_values(visual) for block in self.blocks]  # type: ignore[union-attr, operator]

    def forward(self, tokens: Tensor, memory: list[KeysValues], past: list[KeysValues] | None = None) -> Decoded:
        """Run ids (B, T) at the positions after `past` through the blocks; without `past`, padding is not seen."""
        first = past[0][0].shape[2] if past else 0
        length = tokens.shape[1]
        if first + length > len(self.positions):
            raise ValueError(
                f"{first + length} text positions, the decoder has {len(self.positions)}: raise max_length"
            )
        x = self.lift(self.embedding(tokens) + self.positions[first : first + length])
        mask = None if past else causal_mask(tokens != NULL)
        return run_blocks(self.blocks, x, memory, mask, past)

    def step(
        self, tokens: Tensor, memory: list[KeysValues], cache: list[KeysValues] | None
    ) -> tuple[Tensor, list[KeysValues]]:
        """One position, see `Captioner.step`; an unknown word is never said (authors' code)."""
        last, cache = self(tokens[:, None], memory, cache)
        return self._said(last.hidden[:, 0]), cache

    def next_logits(self, tokens: Tensor, memory: list[KeysValues]) -> Tensor:
        """All positions in one pass, see `Captioner.next_logits`."""
        return self._said(self(tokens[:, :-1], memory).last.hidden)

    def _said(self, hidden: Tensor) -> Tensor:
        logits = self.logit(hidden)
        return logits.index_fill(-1, torch.tensor([UNK], device=logits.device), float("-inf"))

    def attention(self, tokens: Tensor, memory: list[KeysValues]) -> Tensor:
        """Where the last block looks for the word after each of `tokens` (B, T), mean over heads: (B, T, N)."""
        said = self(tokens, memory).last.said
        cross = self.blocks[-1].cross
        return cross.weights(cross.queries(said), memory[-1][0])  # type: ignore[union-attr, operator]


def causal_mask(real: Tensor) -> Tensor:
    """Which positions each may look at, (B, 1, T, T): itself and those before it that are `real` (B, T)."""
    length = real.shape[1]
    return torch.ones(length, length, dtype=torch.bool, device=real.device).tril() & real[:, None, None]


def run_blocks(
    blocks: Iterable[nn.Module],
    x: Tensor,
    memory: Sequence[KeysValues],
    mask: Tensor | None,
    past: Sequence[KeysValues] | None,
) -> Decoded:
    """Run x (B, T, D) through decoder blocks, each with its own memory; `past` holds each one's earlier positions."""
    cache = []
    for index, block in enumerate(blocks):
        output = block(x, memory[index], mask, past[index : index + 1] if past else ())
        key, value = output.own
        cache.append(
            (torch.cat([past[index][0], key], 2), torch.cat([past[index][1], value], 2)) if past else (key, value)
        )
        x = output.hidden
    return Decoded(output, cache)


def next_word_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross-entropy of every word and END given the words before: logits (B, T, V), tokens (B, T) to (n,), in nats."""
    target = tokens[:, 1:]
    real = target != NULL
    return F.cross_entropy(logits[:, :-1][real], target[real], reduction="none")


def streams_of(before: Tensor, after: Tensor) -> list[slice]:
    """Which pairs of a batch are one stream: all, or, with twice as many after images, change pairs, then distractors."""
    size = len(before)
    if not size:
        raise ValueError("a process without a pair cannot know the streams of the others; give each at least one")
    if len(after) % size:
        raise ValueError(f"{len(after)} after images are no multiple of {size} before images")
    return [slice(start, start + size) for start in range(0, len(after), size)]


def mean(values: list[Tensor]) -> Tensor:
    """Mean of scalars."""
    return torch.stack(values).mean()


def roll_out(looked: Tensor, to_before: Tensor | None, to_after: Tensor | None, grid: tuple[int, int]) -> WordMaps:
    """Share the attention on fused tokens out to the two images.

    A fused token stands for its own place in both images, half by itself and half by what the last encoder layer's attention
    brought to it from the other image (attention rollout, Abnar and Zuidema, ACL 2020).

    Args:
        looked: (B, T, N) on fused tokens. to_before: (B, N, N), rows are after's tokens. to_after: rows are before's tokens.
        grid: rows and columns of the N places.
    """
    maps = [looked if moved is None else (looked + looked @ moved) / 2 for moved in (to_before, to_after)]
    return WordMaps(maps[0].unflatten(2, grid), maps[1].unflatten(2, grid), to_after)
