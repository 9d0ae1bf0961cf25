"""The one place that knows of ranks: sums, means and gathers over the whole global batch.

Everything is the identity on one process. The scaled losses are made so that the average of gradients that DDP takes
is the gradient of the global loss: 2 ranks x B / 2 give what 1 rank x B gives.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Number of ranks; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's rank; 0 without torch.distributed."""
    return dist.get_rank() if world_size() > 1 else 0


def total(value: Tensor) -> Tensor:
    """Sum of a detached scalar over the ranks."""
    value = value.detach().clone()
    if world_size() > 1:
        dist.all_reduce(value)
    return value


def global_mean(values: Tensor) -> Tensor:
    """This rank's share of the mean over every rank's values, (n,) to a scalar; n may differ, or be 0, between ranks.

    Multiplied by the number of ranks, so that DDP's averaging gives the gradient of the global mean.
    """
    count = total(torch.tensor(float(values.numel()), device=values.device))
    return values.sum() * world_size() / count.clamp(min=1)


def global_sum(values: Tensor) -> Tensor:
    """This rank's share of the sum over every rank's values, scaled as in `global_mean`."""
    return values.sum() * world_size()


def first_row(rows: Tensor) -> int:
    """Where this rank's rows, (n, ...), begin among all ranks'; n may differ between ranks."""
    return sum(_counts(rows)[: rank()])


def _counts(rows: Tensor) -> list[int]:
    """How many rows each rank has."""
    if world_size() == 1:
        return [len(rows)]
    counts = [torch.zeros((), dtype=torch.long, device=rows.device) for _ in range(world_size())]
    dist.all_gather(counts, torch.tensor(len(rows), device=rows.device))
    return [int(count) for count in counts]


def sum_over_ranks(value: Tensor) -> Tensor:
    """Sum of a tensor over the ranks, with gradients.

    A loss of such sums is the same on every rank; DDP's average of the gradients is then the gradient of it.
    """
    return value if world_size() == 1 else _Sum.apply(value)


def gather_rows(rows: Tensor) -> tuple[Tensor, int]:
    """Every rank's rows, (n, D) to (total, D) in rank order, with gradients to the rank they came from.

    Returns:
        The rows, and the index at which this rank's own begin. n may differ between ranks.
    """
    if world_size() == 1:
        return rows, 0
    sizes = _counts(rows)
    padded = torch.cat([rows, rows.new_zeros(max(sizes) - len(rows), *rows.shape[1:])])
    gathered = _Gather.apply(padded)
    return torch.cat([part[:size] for part, size in zip(gathered, sizes)]), sum(sizes[: rank()])


class _Gather(torch.autograd.Function):
    """(n, ...) of every rank to (ranks, n, ...); the gradient of a rank's rows is what all ranks found for them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        parts = [torch.empty_like(rows) for _ in range(world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient[rank()]


class _Sum(torch.autograd.Function):
    """All-reduce; the gradient of a rank's part is the sum of what all ranks found for the total."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient
