"""Losses of SCORER (Tu et al., ICCV 2023, section 3.2): token-wise matching of two sets of images, computed in blocks, and the
contrast of each pair with the other pairs.

Letters: A query images of N tokens, B key images of M tokens, D width; a and b: one of the A and of the B images, or a block of them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from diffcap.losses.gather import first_row
from diffcap.utils.linear import linear

MIN_BLOCK = 1 << 21  # dot products in memory at once: 8 MB, for a CPU's cache
MAX_BLOCK = 1 << 30  # 4 GB


def _block_size(device: torch.device) -> int:
    """Return the block size: on CUDA a power of two that fills at most an eighth of the free memory, elsewhere `MIN_BLOCK`."""
    if device.type != "cuda":
        return MIN_BLOCK
    unused_cache = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free_memory, _ = torch.cuda.mem_get_info(device)
    max_size = (free_memory + unused_cache) // 8 // 4  # 4 bytes for each dot product
    return min(MAX_BLOCK, max(MIN_BLOCK, 1 << max(0, max_size.bit_length() - 1)))


def token_matching(query: Tensor, key: Tensor, block_size: int | None = None) -> Tensor:
    """Compare every image of one set with every image of another by their best matching tokens (SCORER, eq. 2 and 3).

    With dot products `s(l, m)` of token l of image a and token m of image b, entry (a, b) is
    `(mean_l max_m s(l, m) + mean_m max_l s(l, m)) / 2`. Nothing is normalised or scaled.

    The A x N x B x M dot products are computed `block_size` at a time and not kept. The gradient needs only the indices of the
    maxima, so the backward pass does 1 / N of the work that all dot products would need. Of equal maxima, only one gets the gradient.

    All input types are computed in float32. Under bfloat16 autocast, tokens and dot products are rounded to bfloat16 before the
    maxima are taken; the means are float32, and the gradient uses the unrounded tokens.

    Args:
        query: (A, N, D). key: (B, M, D). The result is (A, B) float32.
        block_size: number of dot products in memory at once; None: it is chosen for the device.

    Example:
        >>> query = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])  # one image with two tokens
        >>> key = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[0.5, 0.0], [0.5, 0.0]]])  # two images
        >>> token_matching(query, key)
        tensor([[1.5000, 0.3750]])
    """
    return _TokenMatching.apply(query, key, block_size or _block_size(query.device))


class _TokenMatching(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, block_size: int) -> Tensor:
        device = query.device.type
        is_bfloat16 = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16
        dtype = torch.bfloat16 if is_bfloat16 else torch.float32  # float16 could overflow: dot products are not bounded
        num_queries, n, width = query.shape  # A, N, D
        num_keys, m, _ = key.shape  # B, M, D
        score = query.new_empty(num_queries, num_keys, dtype=torch.float32)
        index_type = torch.int16 if max(n, m) < 2**15 else torch.int32
        # For each token, the index of the token in the other image with which it has the largest dot product.
        best_key = torch.empty(num_queries, n, num_keys, dtype=index_type, device=query.device)
        best_query = torch.empty(num_queries, num_keys, m, dtype=index_type, device=query.device)
        keys_per_block = max(1, min(num_keys, block_size // (n * m)))
        queries_per_block = max(1, min(num_queries, block_size // (n * m * keys_per_block)))
        for first_key in range(0, num_keys, keys_per_block):
            keys = slice(first_key, first_key + keys_per_block)
            key_part = key[keys].to(dtype)
            key_tokens = key_part.reshape(-1, width)  # (b M, D)
            for first_query in range(0, num_queries, queries_per_block):
                queries = slice(first_query, first_query + queries_per_block)
                query_part = query[queries].to(dtype)
                with torch.autocast(device, enabled=False):
                    similarity = linear(query_part.reshape(-1, width), key_tokens)
                similarity = similarity.view(len(query_part), n, len(key_part), m)
                query_maxima, index = similarity.max(3)  # (a, N, b)
                best_key[queries, :, keys] = index.to(index_type)
                key_maxima, index = similarity.max(1)  # (a, b, M)
                best_query[queries, keys] = index.to(index_type)
                query_mean = query_maxima.mean(1, dtype=torch.float32)
                key_mean = key_maxima.mean(2, dtype=torch.float32)
                score[queries, keys] = (query_mean + key_mean) / 2
        ctx.save_for_backward(query, key, best_key, best_query)
        return score

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        query, key, best_key, best_query = ctx.saved_tensors
        num_queries, n, width = query.shape  # A, N, D
        num_keys, m, _ = key.shape  # B, M, D
        flat_query = query.reshape(-1, width).float()
        flat_key = key.reshape(-1, width).float()
        half_gradient = gradient.float() / 2  # (A, B)
        # The gradient of token l of image a is a weighted sum of tokens best_key[a, l, b] of all B images b.
        first_key_tokens = torch.arange(num_keys, device=key.device) * m  # of each image, in flat_key
        chosen_keys = (best_key.long() + first_key_tokens).view(num_queries * n, num_keys)
        key_weights = (half_gradient / n)[:, None].expand(-1, n, -1).reshape(chosen_keys.shape)
        # The gradient of token m of image b is a weighted sum of tokens best_query[a, b, m] of all A images a.
        first_query_tokens = torch.arange(num_queries, device=key.device) * n  # of each image, in flat_query
        chosen_queries = best_query.long() + first_query_tokens[:, None, None]
        chosen_queries = chosen_queries.permute(1, 2, 0).reshape(num_keys * m, num_queries)
        query_weights = (half_gradient / m).T[:, None].expand(-1, m, -1).reshape(chosen_queries.shape)
        grad_query = grad_key = None
        if ctx.needs_input_grad[0]:
            grad_query = _weighted_gather(chosen_keys, key_weights, flat_key)
            grad_query = grad_query + _weighted_scatter(chosen_queries, query_weights, flat_key, num_queries * n)
            grad_query = grad_query.view(query.shape).to(query.dtype)
        if ctx.needs_input_grad[1]:
            grad_key = _weighted_gather(chosen_queries, query_weights, flat_query)
            grad_key = grad_key + _weighted_scatter(chosen_keys, key_weights, flat_query, num_keys * m)
            grad_key = grad_key.view(key.shape).to(key.dtype)
        return grad_query, grad_key, None


def _weighted_gather(chosen: Tensor, weights: Tensor, tokens: Tensor) -> Tensor:
    """Return a matrix whose row i is the sum over j of `weights[i, j] * tokens[chosen[i, j]]`."""
    return F.embedding_bag(chosen, tokens, per_sample_weights=weights, mode="sum")


def _weighted_scatter(chosen: Tensor, weights: Tensor, tokens: Tensor, num_rows: int) -> Tensor:
    """Return (num_rows, D) whose row r is the sum of `weights[i, j] * tokens[i]` over all i and j with `chosen[i, j] == r`."""
    sorted_rows, order = chosen.flatten().sort()
    offsets = torch.searchsorted(sorted_rows, torch.arange(num_rows, device=chosen.device))
    sources = order // chosen.shape[1]
    return F.embedding_bag(sources, tokens, offsets, per_sample_weights=weights.flatten()[order], mode="sum")


def cross_view_nce(similarity: Tensor) -> Tensor:
    """Contrast the similarity of a pair's two images with that of images of different pairs, in one direction (SCORER, eq. 4).

    Args:
        similarity: (B, all B), for B pairs of this rank: scaled similarities of its images (rows) with all ranks' images (columns,
            in rank order). True pairs are on the diagonal that begins at the column of this rank's first image.

    Returns:
        (B,) losses in nats: -log of the row's softmax at the true pair. 0 if there is only one column.

    Example:
        >>> similarity = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
        >>> cross_view_nce(similarity)
        tensor([0.1269, 0.3133])
    """
    target = torch.arange(len(similarity), device=similarity.device) + first_row(similarity)
    return F.cross_entropy(similarity.float(), target, reduction="none")
