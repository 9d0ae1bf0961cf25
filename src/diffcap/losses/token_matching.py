"""Token-wise matching of two sets of images (SCORER, section 3.2), in blocks."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 1 << 21  # similarities held at once: 8 MB


def token_matching(query: Tensor, key: Tensor, block: int = BLOCK) -> Tensor:
    """Compare every image of one set with every image of another by their best matching tokens (SCORER, eq. 2 and 3).

    Entry (a, b) is half the mean over a's tokens of the best dot product with a token of b, plus half the mean over b's
    tokens of the best one with a token of a. Nothing is normalised or scaled.

    The A x N x B x M similarities are made and forgotten `block` at a time. Which token won is all that the gradient
    needs, so the backward pass multiplies winners only: a 1 / N th of the dense form's work. Of equals one wins.

    Computed in float32 whatever the type of the inputs. Under bfloat16 autocast the tokens are rounded to bfloat16, and so are
    their similarities, among which the winners are sought; the means are float32, and the gradient is that of the winners'
    unrounded tokens.

    Args:
        query: (A, N, D). key: (B, M, D).
        block: similarities held at once.

    Returns:
        (A, B) float32.

    Raises:
        ValueError: the sizes do not fit.
    """
    if query.ndim != 3 or key.ndim != 3 or query.shape[2] != key.shape[2]:
        raise ValueError(f"need (A, N, D) and (B, M, D), got {tuple(query.shape)} and {tuple(key.shape)}")
    return _TokenMatching.apply(query, key, block)


class _TokenMatching(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, block: int) -> Tensor:
        device = query.device.type
        mixed = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16
        with torch.autocast(device, enabled=False):  # float16 would overflow: nothing bounds a similarity
            return _TokenMatching._match(ctx, query, key, block, torch.bfloat16 if mixed else torch.float32)

    @staticmethod
    def _match(ctx: Any, query: Tensor, key: Tensor, block: int, kind: torch.dtype) -> Tensor:
        (queries, n, width), (keys, m, _) = query.shape, key.shape
        score = query.new_empty(queries, keys, dtype=torch.float32)
        small = torch.int16 if max(n, m) < 2**15 else torch.int32
        best_key = torch.empty(queries, n, keys, dtype=small, device=query.device)
        best_query = torch.empty(queries, keys, m, dtype=small, device=query.device)
        columns = max(1, min(keys, block // (n * m)))
        rows = max(1, min(queries, block // (n * m * columns)))
        for left in range(0, keys, columns):
            part = key[left : left + columns].to(kind)
            table = part.reshape(-1, width).T  # (D, b M)
            for top in range(0, queries, rows):
                asked = query[top : top + rows].to(kind)
                similarity = (asked.reshape(-1, width) @ table).view(len(asked), n, len(part), m)
                by_query, winner = similarity.max(3)  # (a, N, b)
                place = slice(top, top + rows), slice(None), slice(left, left + columns)
                best_key[place] = winner.to(small)
                by_key, winner = similarity.max(1)  # (a, b, M)
                best_query[top : top + rows, left : left + columns] = winner.to(small)
                means = by_query.mean(1, dtype=torch.float32), by_key.mean(2, dtype=torch.float32)
                score[top : top + rows, left : left + columns] = (means[0] + means[1]) / 2
        ctx.save_for_backward(query, key, best_key, best_query)
        return score

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        query, key, best_key, best_query = ctx.saved_tensors
        (queries, n, width), (keys, m, _) = query.shape, key.shape
        flat_query, flat_key = query.reshape(-1, width).float(), key.reshape(-1, width).float()
        half = gradient.float() / 2
        # Token l of image a took token best_key[a, l, b] of every image b; a bag of B tokens each.
        first = torch.arange(keys, device=key.device) * m
        chosen_keys = (best_key.long() + first).view(queries * n, keys)
        key_weights = (half / n)[:, None].expand(-1, n, -1).reshape(queries * n, keys)
        # Token m of image b took token best_query[a, b, m] of every image a; a bag of A tokens each.
        first = torch.arange(queries, device=key.device)[:, None, None] * n
        chosen_queries = (best_query.long() + first).permute(1, 2, 0).reshape(keys * m, queries)
        query_weights = (half / m).T[:, None].expand(-1, m, -1).reshape(keys * m, queries)
        to_query = to_key = None
        if ctx.needs_input_grad[0]:
            to_query = _take(chosen_keys, key_weights, flat_key) + _give(
                chosen_queries, query_weights, flat_key, queries * n
            )
            to_query = to_query.view(query.shape).to(query.dtype)
        if ctx.needs_input_grad[1]:
            to_key = _take(chosen_queries, query_weights, flat_query) + _give(
                chosen_keys, key_weights, flat_query, keys * m
            )
            to_key = to_key.view(key.shape).to(key.dtype)
        return to_query, to_key, None


def _take(chosen: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
    """Row i of the result: the sum over j of `weights[i, j] * rows[chosen[i, j]]`."""
    return F.embedding_bag(chosen, rows, per_sample_weights=weights, mode="sum")


def _give(chosen: Tensor, weights: Tensor, rows: Tensor, count: int) -> Tensor:
    """Row c of the result, (count, D): the sum of `weights[i, j] * rows[i]` over all i and j with `chosen[i, j] == c`."""
    taken, order = chosen.flatten().sort()
    offsets = torch.searchsorted(taken, torch.arange(count, device=chosen.device))
    givers = order // chosen.shape[1]
    return F.embedding_bag(givers, rows, offsets, per_sample_weights=weights.flatten()[order], mode="sum")
