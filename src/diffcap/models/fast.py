"""Functions that take less time or memory than the plain expressions of torch. Each docstring names the expression that a function equals.

Most of them are for the CPU, where torch has no fused kernel. Tests compare values and gradients with those of the plain expressions.

Letters: B pairs, b rows before a batch is repeated, H heads, T queries, S keys, E channels of a head, D width, C x h x w feature maps.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from diffcap.utils.linear import is_float32_on_cpu, linear

RANDOM_LEVELS = 1 << 16  # dropout compares 16-bit random integers with a threshold
MIN_DROPOUT_ELEMENTS = 1 << 16  # with fewer elements, torch's own dropout is as fast
MIN_PROBABILITIES = 1 << 14  # with a smaller H x T x S, torch's own attention is faster than a loop over pairs


def add_repeated(x: Tensor, y: Tensor) -> Tensor:
    """Compute `x + y.repeat(B // b, 1, ...)` for x (B, ...) and y (b, ...), without copies of y. B is a multiple of b."""
    if len(x) == len(y):
        return x + y
    return (x.unflatten(0, (-1, len(y))) + y).flatten(0, 1)


def linear_of_concatenation(layer: nn.Linear, first: Tensor, second: Tensor) -> Tensor:
    """Compute `layer(torch.cat([first, second], -1))` without the concatenated tensor, which autograd would keep."""
    first_weight, second_weight = layer.weight.split([first.shape[-1], second.shape[-1]], 1)
    return linear(first, first_weight, layer.bias).add_(linear(second, second_weight))


def maps_to_tokens(maps: Tensor, weight: Tensor, offset: Tensor) -> Tensor:
    """Compute `offset + F.linear(maps.flatten(2).transpose(1, 2), weight)`: a linear layer at every position of feature maps.

    Maps (B, C, h, w), weight (D, C) and offset (h w, D) give (B, h w, D), in reading order. The offset is bias plus position embedding.
    """
    if is_float32_on_cpu(maps) and is_float32_on_cpu(weight):
        return _MapsToTokens.apply(maps.flatten(2), weight, offset)
    # A 1 x 1 convolution: the maps are not copied to channels-last order, and no such copy is kept for the gradient.
    tokens = F.conv2d(maps, weight[..., None, None])  # (B, D, h, w)
    return offset + tokens.flatten(2).transpose(1, 2)  # with the offset first, the sum is contiguous


class _MapsToTokens(torch.autograd.Function):
    """`maps_to_tokens` image by image. The only tensor as large as all maps that it allocates is the gradient of the maps."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, weight: Tensor, offset: Tensor) -> Tensor:
        tokens = maps.new_empty(len(maps), *offset.shape)
        for image, out in zip(maps, tokens):
            torch.add(linear(image.T, weight), offset, out=out)
        ctx.save_for_backward(maps, weight)
        return tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_tokens: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        maps, weight = ctx.saved_tensors
        grad_maps = torch.empty_like(maps) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros(weight.shape) if ctx.needs_input_grad[1] else None
        for index, (image, grad) in enumerate(zip(maps, grad_tokens)):
            if grad_weight is not None:
                grad_weight.add_(linear(grad.T, image))
            if grad_maps is not None:
                grad_maps[index] = linear(weight.T, grad)
        return grad_maps, grad_weight, grad_tokens.sum(0)


def dropout(x: Tensor, probability: float) -> Tensor:
    """Compute `F.dropout(x, probability)`, on the CPU with 16-bit random integers.

    On the CPU, torch samples one number at a time, in one thread, and keeps a factor of x's type for every element. This function takes
    four numbers from a random integer of 64 bits and keeps a byte per element. `probability` is rounded to a multiple of 1 / 65536.
    """
    if x.device.type != "cpu" or not 0 < probability < 1 or x.numel() < MIN_DROPOUT_ELEMENTS:
        return F.dropout(x, probability)
    return _Dropout.apply(x, round(probability * RANDOM_LEVELS))


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, threshold: int) -> Tensor:
        keep_mask = _keep_mask(x, threshold)
        ctx.save_for_backward(keep_mask)
        ctx.scale = RANDOM_LEVELS / (RANDOM_LEVELS - threshold)
        return keep_mask.to(x.dtype).mul_(ctx.scale).mul_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (keep_mask,) = ctx.saved_tensors
        return keep_mask.to(grad.dtype).mul_(ctx.scale).mul_(grad), None


def attention_over_segments(
    query: Tensor, segments: Sequence[tuple[Tensor, Tensor]], mask: Tensor | None = None
) -> Tensor:
    """Compute `softmax(query key^T / sqrt(E)) value`, where keys and values are the concatenation of several segments.

    It is for decoding steps. They have so few queries that concatenating all keys and values would take longer than the attention.

    Args:
        query: (B, H, T, E), the shape of the result. segments: keys and values, (B, H, S_i, E) for segment i; fastest if contiguous.
        mask: boolean, True where a query may attend to a key; broadcast to (B, H, T, sum of S_i).
    """
    query = (query * query.shape[3] ** -0.5).contiguous()  # contiguous once, not for every segment
    scores = torch.cat([query @ key.transpose(2, 3) for key, _ in segments], 3)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    probabilities = scores.softmax(3).split([key.shape[2] for key, _ in segments], 3)
    outputs = [segment_probabilities @ value for segment_probabilities, (_, value) in zip(probabilities, segments)]
    return sum(outputs[1:], outputs[0])


def attention_with_dropout(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    """Compute `F.dropout(softmax(query key^T / sqrt(E)), dropout) value` on the CPU.

    On the CPU, torch's `scaled_dot_product_attention` with dropout falls back to separate operations over all B x H x T x S
    probabilities and keeps several copies of them for the backward pass. Here one pair is computed at a time, in the
    processor's cache. Only the dropout mask is kept, one byte for each probability; the backward pass computes the
    probabilities again, as the fused kernels of GPUs do. With bfloat16 inputs, scores and probabilities are float32.

    `query` (B, H, T, E), `key` and `value` (B, H, S, E) are float32 or bfloat16; the result is a view of a contiguous (B, T, H, E).
    Either `query`, or `key` and `value`, may have b rows instead, where B is a multiple of b; that batch is repeated as a whole.
    `dropout` in [0, 1) is rounded to a multiple of 1 / 65536.
    """
    return _AttentionWithDropout.apply(query, key, value, round(dropout * RANDOM_LEVELS))


def attention_with_dropout_is_faster(query: Tensor, key: Tensor) -> bool:
    """Return True if `attention_with_dropout` supports these queries and keys and is faster than torch's own attention."""
    is_supported = query.device.type == "cpu" and query.dtype in (torch.float32, torch.bfloat16)
    has_pairs = len(query) > 0 and len(key) > 0  # a rank may have no pair
    return is_supported and has_pairs and query.shape[1] * query.shape[2] * key.shape[2] >= MIN_PROBABILITIES


class _AttentionWithDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, threshold: int) -> Tensor:
        num_rows = max(len(query), len(key))
        _, heads, length, channels = query.shape
        out = query.new_empty(num_rows, length, heads, channels).transpose(1, 2)
        ctx.scale = RANDOM_LEVELS / (RANDOM_LEVELS - threshold)
        keep_mask = torch.empty(num_rows, heads, length, key.shape[2], dtype=torch.uint8)
        with torch.autocast("cpu", enabled=False):
            for row in range(num_rows):
                query_row = row % len(query)
                key_row = row % len(key)
                probabilities = _probabilities(query[query_row], key[key_row])
                keep_mask[row] = _keep_mask(probabilities, threshold)
                dropped = probabilities.mul_(keep_mask[row]).to(value.dtype)
                out[row] = dropped @ (value[key_row] * ctx.scale)
        ctx.save_for_backward(query, key, value, keep_mask)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, keep_mask = ctx.saved_tensors
        # (B, H, T, E) as views of contiguous (B, T, H, E), so that merging the heads copies nothing
        grad_query, grad_key, grad_value = (
            part.new_zeros(part.transpose(1, 2).shape).transpose(1, 2) for part in (query, key, value)
        )
        for row in range(len(grad_out)):
            query_row = row % len(query)
            key_row = row % len(key)
            probabilities = _probabilities(query[query_row], key[key_row])
            scaled_grad = grad_out[row] * ctx.scale
            dropped = (probabilities * keep_mask[row]).to(scaled_grad.dtype)
            grad_value[key_row] += dropped.transpose(1, 2) @ scaled_grad
            grad_probabilities = (scaled_grad @ value[key_row].transpose(1, 2)).float().mul_(keep_mask[row])
            grad_scores = torch._softmax_backward_data(grad_probabilities, probabilities, -1, torch.float32)
            grad_scores = grad_scores.mul_(query.shape[3] ** -0.5).to(query.dtype)
            grad_query[query_row] += grad_scores @ key[key_row]
            grad_key[key_row] += grad_scores.transpose(1, 2) @ query[query_row]
        return grad_query, grad_key, grad_value, None


def _probabilities(query: Tensor, key: Tensor) -> Tensor:
    """Compute attention probabilities (H, T, S) of one pair, float32, from its queries (H, T, E) and keys (H, S, E)."""
    scaled_query = query.float() * query.shape[2] ** -0.5
    return torch.softmax(scaled_query @ key.float().transpose(1, 2), 2)


def _keep_mask(x: Tensor, threshold: int) -> Tensor:
    """Sample a mask like x: 1 for elements that dropout keeps, else 0. `threshold` is the probability of 0 times 65536."""
    count = x.numel()
    random_bits = torch.empty(math.ceil(count / 4), dtype=torch.int64).random_(-(2**63), None)
    keep = random_bits.view(torch.int16)[:count] >= threshold - RANDOM_LEVELS // 2
    return keep.view(torch.uint8).view(x.shape)  # torch multiplies by integers several times faster than by booleans
