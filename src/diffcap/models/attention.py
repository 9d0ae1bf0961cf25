"""Attention with dropout on the CPU.

Torch's fused attention has no dropout on the CPU: it falls back to separate operations over all B x H x T x S
probabilities, and keeps several copies of them for the backward pass. Here one pair is computed at a time, in the
processor's cache, and nothing is kept but the state of the random numbers; the backward pass makes the probabilities and
the draws again, as the fused kernels do. In bfloat16 the scores and probabilities are float32.

Letters: B pairs, H heads, T queries, S keys, E channels of a head.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LEVELS = 1 << 16  # of the random numbers: two bytes a probability are enough
WORTHWHILE = 1 << 14  # probabilities of a pair, H x T x S, below which a loop over pairs costs more than it saves


def dropped_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    """`(softmax(query key^T / sqrt(E)) * kept / (1 - p)) value`, each probability dropped with p on its own.

    Args:
        query: (B, H, T, E) float32 or bfloat16 on the CPU. key, value: (B, H, S, E). Where the batch of one is a multiple of the
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
        raise ValueError(f"{len(query)} rows of queries, {len(key)} of keys: neither is a multiple of the other")
    return _Dropped.apply(query, key, value, drop)


def is_worthwhile(query: Tensor, key: Tensor) -> bool:
    """Whether `dropped_attention` may take the place of torch's own with dropout, and is faster."""
    if query.device.type != "cpu" or query.dtype not in (torch.float32, torch.bfloat16):
        return False
    if not len(query) or not len(key):  # a rank may have no pairs
        return False
    return query.shape[1] * query.shape[2] * key.shape[2] >= WORTHWHILE


def is_plain(x: Tensor) -> bool:
    """Whether the package's own passes for the CPU may compute with `x`: float32 there, and nothing else asked for."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, drop: int) -> Tensor:
        batch, (_, heads, length, width) = max(len(query), len(key)), query.shape
        out = query.new_empty(batch, length, heads, width).transpose(1, 2)
        ctx.drop, ctx.scale, ctx.drawn = drop, LEVELS / (LEVELS - drop), torch.get_rng_state()
        with torch.autocast("cpu", enabled=False):
            for row in range(batch):
                asked, seen = row % len(query), row % len(key)
                probabilities = _probabilities(query[asked], key[seen])
                left = probabilities.mul_(_kept(probabilities, drop)).to(value.dtype)
                out[row] = left @ (value[seen] * ctx.scale)
        ctx.save_for_backward(query, key, value)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value = ctx.saved_tensors
        again = torch.Generator()
        again.set_state(ctx.drawn)
        to_query, to_key, to_value = (_empty(part) for part in (query, key, value))
        for row in range(len(gradient)):
            asked, seen = row % len(query), row % len(key)
            probabilities = _probabilities(query[asked], key[seen])
            kept, above = _kept(probabilities, ctx.drop, again), gradient[row] * ctx.scale
            _put(to_value, seen, row, (probabilities * kept).to(above.dtype).transpose(1, 2) @ above)
            to_probabilities = (above @ value[seen].transpose(1, 2)).float().mul_(kept)
            to_scores = torch._softmax_backward_data(to_probabilities, probabilities, -1, torch.float32)
            to_scores = to_scores.mul_(query.shape[3] ** -0.5).to(query.dtype)
            _put(to_query, asked, row, to_scores @ key[seen])
            _put(to_key, seen, row, to_scores.transpose(1, 2) @ query[asked])
        return to_query, to_key, to_value, None


def _probabilities(query: Tensor, key: Tensor) -> Tensor:
    """(H, T, E) and (H, S, E) to (H, T, S), float32."""
    return torch.softmax((query.float() * query.shape[2] ** -0.5) @ key.float().transpose(1, 2), 2)


def _kept(probabilities: Tensor, drop: int, generator: torch.Generator | None = None) -> Tensor:
    """Which of (H, T, S) are kept: random 16-bit integers, four from each number drawn, that reach `drop`; boolean."""
    count = probabilities.numel()
    drawn = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    return (drawn.view(torch.int16)[:count] >= drop - LEVELS // 2).view(probabilities.shape)


def _empty(heads: Tensor) -> Tensor:
    """As `heads` (B, H, T, E), laid out as (B, T, H, E): joining the heads again copies nothing."""
    return heads.new_empty(heads.transpose(1, 2).shape).transpose(1, 2)


def _put(target: Tensor, place: int, row: int, part: Tensor) -> None:
    """Write what a place gets from its own row, add what it gets from the further rows that it serves."""
    if place == row:
        target[place] = part
    else:
        target[place] += part
