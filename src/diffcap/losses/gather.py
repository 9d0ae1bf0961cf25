"""Sums, means and gathers over the global batch, that is, over all ranks.

A rank is a process of distributed training; it has n values or rows of the global batch. The results are scaled so that DDP's average
of the gradients is the gradient of the loss over the global batch: 2 ranks with B / 2 pairs each give the gradient of 1 rank with B pairs.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Return the number of ranks; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return this process's rank; 0 without torch.distributed."""
    return dist.get_rank() if world_size() > 1 else 0


def detached_sum_over_ranks(value: Tensor) -> Tensor:
    """Return the sum of a tensor over the ranks, without gradients."""
    value = value.detach().clone()
    if world_size() > 1:
        dist.all_reduce(value)
    return value


def global_mean(values: Tensor) -> Tensor:
    """Return a number whose mean over the ranks is the mean of all ranks' `values` (n,). n may differ between ranks, or be 0."""
    count = detached_sum_over_ranks(values.new_full((), values.numel(), dtype=torch.float32))
    return values.sum() * world_size() / count.clamp(min=1)


def first_row(rows: Tensor) -> int:
    """Return the index of the first row of this rank's `rows` (n, ...) among the rows of all ranks; n may differ between ranks."""
    return sum(_row_counts(rows)[: rank()])


def _row_counts(rows: Tensor) -> list[int]:
    """Return the length of `rows` on each rank."""
    if world_size() == 1:
        return [len(rows)]
    counts = list(torch.zeros(world_size(), dtype=torch.long, device=rows.device))
    dist.all_gather(counts, torch.tensor(len(rows), device=rows.device))
    return [int(count) for count in counts]


class _Sum(torch.autograd.Function):
    """Sum over the ranks. A rank's value is in the sum of every rank, so its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return detached_sum_over_ranks(value.contiguous())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return detached_sum_over_ranks(gradient.contiguous())


def sum_over_ranks(value: Tensor) -> Tensor:
    """Return the sum of a tensor over the ranks, with gradients.

    If the ranks compute a loss from these sums, it is the same on every rank, and DDP's average of the ranks' gradients is its gradient.
    """
    return value if world_size() == 1 else _Sum.apply(value)


def gather_rows(rows: Tensor) -> tuple[Tensor, int]:
    """Gather the rows of all ranks in rank order. In the backward pass, each rank gets the gradients of its own rows.

    Returns:
        The rows of all ranks, (sum of n, ...), and the index of this rank's first row. n may differ between ranks.
    """
    if world_size() == 1:
        return rows, 0
    counts = _row_counts(rows)
    first_index = sum(counts[: rank()])
    zeros_before = rows.new_zeros(first_index, *rows.shape[1:])
    zeros_after = rows.new_zeros(sum(counts) - first_index - len(rows), *rows.shape[1:])
    return sum_over_ranks(torch.cat([zeros_before, rows, zeros_after])), first_index
