"""Layers that several methods share.

Letters: B rows of the batch, T positions of the input, S positions of the keys, P cached positions, Q positions whose output is
computed, D width, H heads, E = D / H channels of a head, C feature channels, N positions of a feature map.
"""

import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffcap.models.fast import (
    attention_over_segments,
    attention_with_dropout,
    attention_with_dropout_is_faster,
    dropout,
    maps_to_tokens,
)
from diffcap.utils.linear import is_float32_on_cpu, linear

KeyValue = tuple[Tensor, Tensor]  # keys and values, (B, H, positions, E) each
# Input of a cross-attention: keys and values, or the tokens (B, S, D) from which they are computed.
BlockMemory = KeyValue | Tensor
# Cached keys and values of one layer: a list of segments, for example that of the image tokens, then that of the words.
Segments = Sequence[KeyValue]
# Selects Q of T positions: a slice, indices (Q,) for all rows of the batch, or indices (B, Q).
Positions = slice | Tensor
ALL_POSITIONS = slice(None)


class Dropout(nn.Dropout):
    """`nn.Dropout` with the function `fast.dropout`, which is faster on the CPU."""

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements of x (...) in training."""
        return dropout(x, self.p) if self.training else x


class Linear(nn.Linear):
    """`nn.Linear` with the function `utils.linear.linear`, which is faster on some CPUs."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., in_features) to (..., out_features)."""
        return linear(x, self.weight, self.bias)


def use_fast_linear_(module: nn.Module) -> None:
    """Change the class of every `nn.Linear` in `module`, which another package built, to `Linear`."""
    for part in module.modules():
        if type(part) is nn.Linear:
            part.__class__ = Linear


class UnbiasedLayerNorm(nn.Module):
    """Layer normalisation of "The Annotated Transformer" (Rush, 2018), for IDC-PCL: `weight (x - mean) / (std + eps) + bias`.

    The standard deviation is unbiased: its denominator is D - 1. torch's fused kernel, which is used here, adds `eps ** 2` to the
    variance instead of `eps` to the standard deviation. The results agree up to a relative error of `eps / std`.
    """

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.width = width
        self.eps = eps
        self.unbiased_factor = math.sqrt((width - 1) / width)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (..., D) over its last dimension."""
        return F.layer_norm(x, (self.width,), self.weight * self.unbiased_factor, self.bias, self.eps**2)


def attention_to_tokens(attention: "Attention", query: Tensor, tokens: Tensor) -> Tensor:
    """Compute `attention.attend(query, attention.project_key_value(tokens))` without keys and values, for few queries and many tokens.

    With the key weight W_k and the value weight W_v of a head, `query (tokens W_k^T)^T` is `(query W_k) tokens^T`, and
    `probabilities (tokens W_v^T)` is `(probabilities tokens) W_v^T`. The bias of the keys adds the same number to all scores of a
    query, so the softmax does not depend on it. The projected query (B, H, T, E) and the tokens (B, S, D) give (B, T, D).
    """
    batch, heads, length, channels = query.shape
    head_shape = heads, batch * length, -1
    qkv_weight = attention.qkv.weight.view(3, heads, channels, -1)  # (3, H, E, D)
    qkv_bias = attention.qkv.bias
    scaled_query = (query * channels**-0.5).transpose(0, 1).reshape(head_shape)  # (H, B T, E)
    token_query = (scaled_query @ qkv_weight[1]).view(heads, batch, length, -1)
    token_query = token_query.transpose(0, 1).flatten(1, 2)  # (B, H T, D)
    probabilities = (token_query @ tokens.transpose(1, 2)).softmax(2)  # (B, H T, S)
    if attention.training:
        probabilities = dropout(probabilities, attention.dropout)
    mean_tokens = (probabilities @ tokens).view(batch, heads, length, -1)
    attended = mean_tokens.transpose(0, 1).reshape(head_shape) @ qkv_weight[2].transpose(1, 2)  # (H, B T, E)
    if qkv_bias is not None:  # the value bias is multiplied by the sum of the probabilities, which dropout changes
        probability_sum = probabilities.sum(2).view(batch, heads, length).transpose(0, 1).reshape(head_shape)
        attended = attended + probability_sum * qkv_bias.view(3, heads, 1, channels)[2]
    return attention.out(attention.merge_heads(attended.view(heads, batch, length, channels).transpose(0, 1)))


class Attention(nn.Module):
    """Multi-head attention: `forward` is self-attention, `attend_memory` is cross-attention.

    `dropout` is the rate for the attention weights; `out_proj` applies a linear layer to the merged heads.
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.0, out_proj: bool = True, bias: bool = True) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}")
        self.width = width
        self.heads = heads
        self.dropout = dropout
        self.qkv = Linear(width, 3 * width, bias=bias)
        self.out = Linear(width, width, bias=bias) if out_proj else nn.Identity()

    def split_heads(self, x: Tensor) -> Tensor:
        """Return a view (B, H, T, E) of x (B, T, D)."""
        return x.unflatten(2, (self.heads, self.width // self.heads)).transpose(1, 2)

    @staticmethod
    def merge_heads(heads: Tensor) -> Tensor:
        """Return `heads` (B, H, T, E) as (B, T, D); this is the inverse of `split_heads`."""
        return heads.transpose(1, 2).flatten(2)

    def _project(self, x: Tensor, start: int, stop: int) -> tuple[Tensor, ...]:
        """Compute the projections `start` to `stop - 1` of x (B, T, D) (0 query, 1 key, 2 value): (B, H, T, E) each."""
        weight_rows = slice(start * self.width, stop * self.width)
        bias = None if self.qkv.bias is None else self.qkv.bias[weight_rows]
        projected = linear(x, self.qkv.weight[weight_rows], bias)
        return tuple(self.split_heads(part) for part in projected.split(self.width, 2))

    def project_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute query, key and value of x (B, T, D): (B, H, T, E) each."""
        query, key, value = self._project(x, 0, 3)
        return query, key, value

    def project_query(self, x: Tensor) -> Tensor:
        """Compute the query of x (B, T, D): (B, H, T, E)."""
        return self._project(x, 0, 1)[0]

    def project_key_value(self, x: Tensor) -> KeyValue:
        """Compute key and value of x (B, T, D), for cross-attention: (B, H, T, E) each."""
        key, value = self._project(x, 1, 3)
        return key, value

    def attend(self, query: Tensor, key_value: KeyValue, mask: Tensor | None = None) -> Tensor:
        """Compute `out(softmax(query key^T / sqrt(E)) value)`, (B, T, D), with dropout of the probabilities in training.

        Args:
            query: (B, H, T, E). key_value: (B, H, S, E) each. If the query has more rows than the keys and values, or fewer, the
                smaller batch is repeated as a whole; its number of rows must divide the larger one.
            mask: boolean, True where a query may attend to a key; broadcast to (B, H, T, S). Every query needs at least one key.
        """
        key, value = key_value
        dropout_rate = self.dropout if self.training else 0.0
        is_decoding_step = query.shape[2] == 1 and not dropout_rate and len(query) == len(key)
        if is_decoding_step and query.device.type == "cpu":  # torch's fused kernel would be slower
            attended = attention_over_segments(query, [key_value], mask)
        elif 0 < dropout_rate < 1 and mask is None and attention_with_dropout_is_faster(query, key):
            attended = attention_with_dropout(query, key, value, dropout_rate)
        else:
            batch = max(len(query), len(key))
            query, key, value = (repeat_batch(part, batch) for part in (query, key, value))
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout_rate)
        return self.out(self.merge_heads(attended))

    def attend_memory(self, x: Tensor, memory: BlockMemory) -> Tensor:
        """Attend from x (B, T, D) to `memory`, keys and values or the tokens (B, S, D) that give them: (B, T, D)."""
        query = self.project_query(x)
        if not isinstance(memory, Tensor):
            return self.attend(query, memory)
        # The numbers of multiplications of `attend` and of `attention_to_tokens` for one pair, divided by 2 D
        length, num_tokens = query.shape[2], memory.shape[1]
        cost_with_keys = num_tokens * (self.width + length)
        cost_without_keys = length * (self.width + self.heads * num_tokens)
        is_supported = is_float32_on_cpu(query) and len(query) == len(memory) > 0
        if is_supported and cost_without_keys < cost_with_keys:
            return attention_to_tokens(self, query, memory)
        return self.attend(query, self.project_key_value(memory))

    def mean_weights(self, query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return attention weights (B, T, S), averaged over the heads, without dropout; every row sums to 1. Arguments: as in `attend`."""
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        return scores.softmax(-1).mean(1)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        past_segments: Segments = (),
        query_positions: Positions = ALL_POSITIONS,
    ) -> tuple[Tensor, KeyValue]:
        """Attend from x (B, T, D) to the P earlier positions and to x itself.

        Args:
            mask: boolean, True where a query may attend to a key; broadcast to (B, H, Q, P + T). None: to all keys.
            past_segments: cached keys and values of P earlier positions. The last segment is concatenated with the keys and values
                of x; the other segments are not copied. With several segments there is no dropout.
            query_positions: the Q positions of x whose output is computed.

        Returns:
            The output (B, Q, D), and the keys and values of all positions of x, without the cached ones.
        """
        if query_positions is ALL_POSITIONS:
            query, key, value = self.project_qkv(x)
        else:
            query = self.project_query(take_positions(x, query_positions))
            key, value = self.project_key_value(x)
        new_key_values = (key, value)
        if past_segments:
            past_key, past_value = past_segments[-1]
            key, value = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)
        if len(past_segments) > 1:
            attended = attention_over_segments(query, [*past_segments[:-1], (key, value)], mask)
            return self.out(self.merge_heads(attended)), new_key_values
        return self.attend(query, (key, value), mask), new_key_values


class PreNormBlock(nn.Module):
    """One transformer block of IDC-PCL: `x += Attention(LN x)`, then `x += FFN(LN x)` with ReLU and `UnbiasedLayerNorm`.

    Dropout is applied to the attention weights, inside the feed-forward network and before both additions.
    """

    def __init__(self, width: int, heads: int, ffn_width: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = UnbiasedLayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.ffn_norm = UnbiasedLayerNorm(width)
        self.ffn = nn.Sequential(
            Linear(width, ffn_width), Dropout(dropout), nn.ReLU(inplace=True), Linear(ffn_width, width)
        )
        self.dropout = Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        past_segments: Segments = (),
        query_positions: Positions = ALL_POSITIONS,
    ) -> tuple[Tensor, KeyValue]:
        """Run the block on x (B, T, D). The other arguments and the results are as in `Attention.forward`."""
        attended, new_key_values = self.attention(self.attention_norm(x), mask, past_segments, query_positions)
        return self.add_and_run_ffn(take_positions(x, query_positions), attended), new_key_values

    def add_and_run_ffn(self, x: Tensor, attended: Tensor) -> Tensor:
        """Apply the rest of the block to its input x and the attention's output, (B, Q, D) each: (B, Q, D)."""
        x = x + self.dropout(attended)
        return x + self.dropout(self.ffn(self.ffn_norm(x)))


class PreNormStack(nn.Module):
    """Normalisation of the input, then blocks (IDC-PCL, authors' code); without blocks it is the identity."""

    def __init__(self, num_layers: int, width: int, heads: int, ffn_width: int, dropout: float) -> None:
        super().__init__()
        self.norm = UnbiasedLayerNorm(width) if num_layers else nn.Identity()
        self.layers = nn.ModuleList(PreNormBlock(width, heads, ffn_width, dropout) for _ in range(num_layers))

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        past_key_values: Sequence[Segments] | None = None,
        query_positions: Positions = ALL_POSITIONS,
    ) -> tuple[Tensor, list[KeyValue]]:
        """Run the blocks on x (B, T, D). Return (B, Q, D), and each block's keys and values of all positions of x.

        Args:
            mask: boolean, (..., T, P + T) or (..., 1, P + T), with a row for every position of x or one for all.
            past_key_values: for each block, cached keys and values of P earlier positions, as in `Attention.forward`.
            query_positions: the Q positions of the result. Only the last block leaves out the other positions.
        """
        x = self.norm(x)
        new_key_values = []
        for index, layer in enumerate(self.layers):
            positions = query_positions if index == len(self.layers) - 1 else ALL_POSITIONS
            past_segments = past_key_values[index] if past_key_values else ()
            x, key_value = layer(x, take_mask_rows(mask, positions), past_segments, positions)
            new_key_values.append(key_value)
        return x if len(self.layers) else take_positions(x, query_positions), new_key_values

    def forward_repeated(
        self, prefix: Tensor, suffix: Tensor, mask: Tensor | None, query_positions: Positions = ALL_POSITIONS
    ) -> Tensor:
        """Return the result (B, Q, D) of `forward` for `torch.cat([prefix.repeat_interleave(R, 0), suffix], 1)`.

        Row i of `prefix` (b, M, D) precedes rows i R ... i R + R - 1 of `suffix` (B, T, D), R = B / b. The first block projects it once.
        """
        repeats = len(suffix) // max(1, len(prefix))  # R; a rank may have an empty batch
        if repeats <= 1 or len(self.layers) < 2:
            x = torch.cat([prefix.repeat_interleave(repeats, 0), suffix], 1)
            return self(x, mask, None, query_positions)[0]
        first_layer, *middle_layers, last_layer = cast(list[PreNormBlock], list(self.layers))
        prefix, suffix = self.norm(prefix), self.norm(suffix)
        prefix_qkv = first_layer.attention.project_qkv(first_layer.attention_norm(prefix))
        suffix_qkv = first_layer.attention.project_qkv(first_layer.attention_norm(suffix))
        query, key, value = (
            torch.cat([start.repeat_interleave(repeats, 0), end], 2) for start, end in zip(prefix_qkv, suffix_qkv)
        )
        x = torch.cat([prefix.repeat_interleave(repeats, 0), suffix], 1)
        x = first_layer.add_and_run_ffn(x, first_layer.attention.attend(query, (key, value), mask))
        for layer in middle_layers:
            x, _ = layer(x, mask)
        return last_layer(x, take_mask_rows(mask, query_positions), (), query_positions)[0]


def take_positions(x: Tensor, positions: Positions) -> Tensor:
    """Select positions of x (B, T, D): (B, Q, D)."""
    if isinstance(positions, slice):
        return x[:, positions]
    if positions.ndim == 1:
        return x.index_select(1, positions)
    flat_positions = torch.arange(len(x), device=x.device)[:, None] * x.shape[1] + positions  # row numbers in (B T, D)
    return x.flatten(0, 1).index_select(0, flat_positions.flatten()).unflatten(0, positions.shape)


def take_mask_rows(mask: Tensor | None, positions: Positions) -> Tensor | None:
    """Select the rows at `positions` of a mask (..., T, S), or (T, S) for positions (B, Q). A mask with one row is not changed."""
    if mask is None or positions is ALL_POSITIONS or mask.shape[-2] == 1:
        return mask
    mask_rows = mask[..., positions, :]
    return mask_rows[:, None] if isinstance(positions, Tensor) and positions.ndim == 2 else mask_rows  # (B, 1, Q, S)


def padded_nonzero(is_selected: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of the true entries in each row of a boolean (B, T), padded to (B, Q).

    Also return the indices (n,) of the n entries that are not padding in the flattened (B, Q). On a GPU, the host waits for Q and n.
    """
    max_count = int(is_selected.sum(1).max()) if len(is_selected) else 0
    indices = is_selected.int().argsort(dim=1, descending=True, stable=True)[:, :max_count]
    return indices, is_selected.gather(1, indices).flatten().nonzero().flatten()


@torch.no_grad()
def init_difference_attention_(qkv_weight: Tensor, out_weight: Tensor) -> None:
    """Initialise self-attention over both images so that `x + attention(x)` is approximately their difference before training.

    The query and key weights are equal, so a token attends mainly to itself and to the token with the same position and
    content in the other image. The output weight is approximately minus the transposed value weight, so the attention output is
    approximately minus the mean of these tokens. After Trockman and Kolter, "Mimetic initialization of self-attention layers",
    ICML 2023, who found this structure in trained transformers.

    Args:
        qkv_weight: (3 D, D), overwritten. out_weight: (D, D) of the layer after the merged heads, changed in place.
    """
    query, _, value = qkv_weight.chunk(3)
    nn.init.orthogonal_(query, 1.5)  # the attention logits grow with the square of this scale
    nn.init.orthogonal_(value)
    qkv_weight[len(query) : 2 * len(query)] = query
    out_weight.mul_(0.1).sub_(value.T)


def sinusoidal_positions(length: int, width: int, has_frequency_per_channel: bool = False) -> Tensor:
    """Return the fixed position embedding (length, width) of the transformer (Vaswani et al., 2017): sine on even channels, cosine on odd.

    Channels 2 k and 2 k + 1 at position p have the angle `p / 10000 ** (2 k / width)`. With `has_frequency_per_channel` (IDC-PCL,
    authors' code), channel j has the angle `p / 10000 ** (2 j / width)`.
    """
    channel = torch.arange(width, dtype=torch.float64)
    exponent = (2 * channel if has_frequency_per_channel else channel // 2 * 2) / width
    angle = torch.arange(length, dtype=torch.float64)[:, None] / 10000**exponent
    return torch.where(channel % 2 == 0, angle.sin(), angle.cos()).float()


def check_shape(name: str, x: Tensor, *expected: int) -> None:
    """Raise a ValueError if images or feature maps, x (B, ...), do not have the shape that a model was built for."""
    if tuple(x.shape[1:]) != expected:
        raise ValueError(f"{name} are {tuple(x.shape[1:])}, the model was built for {expected}")


def repeat_batch(x: Tensor, num_rows: int) -> Tensor:
    """Repeat a batch (b, ...) as a whole until it has `num_rows` rows, a multiple of b: row i is row i modulo b of x."""
    return x if len(x) == num_rows else torch.cat([x] * (num_rows // len(x)))


def init_xavier_(module: nn.Module) -> None:
    """Initialise every parameter with two or more dimensions Xavier-uniform, also embeddings and convolutions (several authors' code)."""
    for parameter in module.parameters():
        if parameter.ndim >= 2:
            nn.init.xavier_uniform_(parameter)


def init_attention_(module: nn.Module) -> None:
    """Initialise every `Attention` as torch's MultiheadAttention: the packed input matrix Xavier-uniform, biases 0."""
    for part in module.modules():
        if isinstance(part, Attention):
            nn.init.xavier_uniform_(part.qkv.weight)
            nn.init.zeros_(part.qkv.bias)
            nn.init.zeros_(part.out.bias)  # type: ignore[arg-type]


class GridEmbedding(nn.Module):
    """A linear layer at every position, plus a learned position embedding: half of it for the column, half for the row.

    `has_coordinates` appends two channels to the features at row i and column j: `2 j / columns - 1` and `2 i / rows - 1` (authors'
    code of SCORER and DIRL).
    """

    coordinate_channels: Tensor

    def __init__(self, channels: int, grid: tuple[int, int], width: int, has_coordinates: bool) -> None:
        super().__init__()
        rows, columns = self.grid = (grid[0], grid[1])
        self.channels = channels
        self.projection = nn.Linear(channels + 2 * has_coordinates, width)
        self.columns, self.rows = nn.Embedding(columns, width // 2), nn.Embedding(rows, width // 2)
        x, y = (2 * torch.arange(length) / length - 1 for length in (columns, rows))
        coordinate_channels = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)  # (rows, columns, 2)
        self.register_buffer("coordinate_channels", coordinate_channels.view(-1, 2), persistent=False)

    def forward(self, maps: Tensor) -> Tensor:
        """Embed feature maps (B, C, rows, columns): (B, rows * columns, D), in reading order."""
        check_shape("features", maps, self.channels, *self.grid)
        rows, columns = self.grid
        column_vectors = self.columns.weight.expand(rows, -1, -1)
        row_vectors = self.rows.weight[:, None].expand(-1, columns, -1)
        position_vectors = torch.cat([column_vectors, row_vectors], -1).flatten(0, 1)  # (N, D)
        weight = self.projection.weight
        if weight.shape[1] > self.channels:  # the coordinates are projected here, once for all images
            position_vectors = position_vectors + F.linear(self.coordinate_channels, weight[:, self.channels :])
        return maps_to_tokens(maps, weight[:, : self.channels], position_vectors + self.projection.bias)
