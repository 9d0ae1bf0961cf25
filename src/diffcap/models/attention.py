"""Attention with dropout on the CPU.

Torch's fused attention has no dropout on the CPU: it falls back to separate operations over all B x H x T x S
probabilities, and keeps several copies of them for the backward pass. Here a few pairs are computed at a time, in the
processor's cache, and nothing is kept but which probabilities were dropped, a byte each; the backward pass makes the
probabilities again, as the fused kernels do.

Letters: B pairs, H heads, T queries, S keys, E channels of a head.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 1 << 16  # probabilities made at once: 256 KB, or more where a pair alone has more
LEVELS = 1 << 16  # of the random numbers: two bytes a probability are enough


def dropped_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    """`softmax(query key^T / sqrt(E)) * kept / (1 - p) value`, each probability dropped with p on its own.

    Args:
        query: (B, H, T, E) float32 on the CPU. key, value: (B, H, S, E). Where the batch of one is a multiple of the
            other's, the smaller one serves every part of the larger: row i goes with row i modulo its length.
        dropout: p, in [0, 1); rounded to a multiple of 1 / 65536.

    Returns:
        (B, H, T, E), laid out as (B, T, H, E).

    Raises:
        ValueError: `dropout` is not in [0, 1), or neither batch is a multiple of the other.
    """
    drop = round(dropout * LEVELS)
    if not 0 <= drop < LEVELS:
        raise ValueError(f"dropout must be in [0, 1), got {dropout}")
    if max(len(query), len(key)) % min(len(query), len(key)):
        raise ValueError(f"{len(query)} queries' and {len(key)} keys' batches: neither is a multiple of the other")
    return _Dropped.apply(query, key, value, drop)


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, drop: int) -> Tensor:
        batch, (_, heads, length, width) = max(len(query), len(key)), query.shape
        kept = torch.empty(batch, heads, length, key.shape[2], dtype=torch.bool)
        out = query.new_empty(batch, length, heads, width)
        for rows, asked, seen in _chunks(query, key):
            probabilities = _probabilities(query[asked], key[seen])
            torch.ge(_random(probabilities.shape), drop - LEVELS // 2, out=kept[rows])
            mixed = probabilities.mul_(kept[rows]) @ value[seen]
            torch.mul(mixed.transpose(1, 2), LEVELS / (LEVELS - drop), out=out[rows])
        ctx.save_for_backward(query, key, value, kept)
        ctx.scale = LEVELS / (LEVELS - drop)
        return out.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, kept = ctx.saved_tensors
        to_query, to_key, to_value = (_empty(part) for part in (query, key, value))
        for rows, asked, seen in _chunks(query, key):
            probabilities = _probabilities(query[asked], key[seen])
            above = gradient[rows] * ctx.scale
            _put(to_value, seen, rows, (probabilities * kept[rows]).transpose(-1, -2) @ above)
            to_probabilities = (above @ value[seen].transpose(-1, -2)).mul_(kept[rows])
            to_scores = torch._softmax_backward_data(to_probabilities, probabilities, -1, torch.float32)
            to_scores *= query.shape[-1] ** -0.5
            _put(to_query, asked, rows, to_scores @ key[seen])
            _put(to_key, seen, rows, to_scores.transpose(-1, -2) @ query[asked])
        return to_query, to_key, to_value, None


def _chunks(query: Tensor, key: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Rows of the result with those of the queries and of the keys, so that about `CHUNK` probabilities are made at once."""
    shared, batch = sorted((len(query), len(key)))
    size = max(1, CHUNK // (query[0, ..., 0].numel() * key.shape[2]))
    for first in range(0, batch, shared):
        for start in range(0, shared, size):
            part, rows = (slice(at + start, at + min(start + size, shared)) for at in (0, first))
            yield rows, *(rows if len(side) == batch else part for side in (query, key))


def _probabilities(query: Tensor, key: Tensor) -> Tensor:
    return torch.softmax(query * query.shape[-1] ** -0.5 @ key.transpose(-1, -2), -1)


def _random(shape: torch.Size) -> Tensor:
    """Random 16-bit integers of every value; four of them from each number drawn."""
    count = shape.numel()
    return torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)[:count].view(shape)


def _empty(heads: Tensor) -> Tensor:
    """As `heads` (B, H, T, E), laid out as (B, T, H, E): joining the heads again copies nothing."""
    return heads.new_empty(heads.transpose(1, 2).shape).transpose(1, 2)


def _put(target: Tensor, place: slice, rows: slice, part: Tensor) -> None:
    """Write the first part that a place gets, add what the further rows that it serves bring."""
    if place == rows:
        target[place] = part
    else:
        target[place] += part
