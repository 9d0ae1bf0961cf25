"""Layers that several methods share.

Letters: B pairs, T text positions, N visual tokens of one image, D width, H heads.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffcap.models.fast import attention_over_segments, attention_with_dropout, prefers_attention_with_dropout

KeyValue = tuple[Tensor, Tensor]  # keys and values, (B, H, positions, D / H) each
PastKeyValues = Sequence[KeyValue]  # of the earlier positions of one layer, in one segment or several
ALL = slice(None)


class UnbiasedLayerNorm(nn.Module):
    """Layer normalisation in the form of the "annotated transformer", which IDC-PCL uses: `a (x - mean) / (std + eps) + b`.

    The standard deviation is the unbiased one, with D - 1 in the denominator. It is computed by the fused kernel with
    `eps ** 2` added to the variance, which agrees with the formula up to a relative error of `eps / std`.

    Args:
        width: D, the last dimension.
        eps: added to the standard deviation, not to the variance (authors' code).
    """

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.width, self.eps = width, eps
        self.unbiased_factor = math.sqrt((width - 1) / width)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (..., D) over its last dimension."""
        return F.layer_norm(x, (self.width,), self.weight * self.unbiased_factor, self.bias, self.eps**2)


class Attention(nn.Module):
    """Multi-head attention. Calling the module is self-attention, optionally with cached keys and values of earlier positions.

    Args:
        width: D. heads: H, which divides D. dropout: of the attention probabilities.
        projected: whether a linear layer follows the merged heads. bias: of all its linear layers.
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.0, projected: bool = True, bias: bool = True) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}")
        self.width, self.heads, self.dropout = width, heads, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias) if projected else nn.Identity()

    def split_heads(self, x: Tensor) -> Tensor:
        """(B, T, D) to a view (B, H, T, D / H)."""
        return x.unflatten(2, (self.heads, self.width // self.heads)).transpose(1, 2)

    @staticmethod
    def merge_heads(heads: Tensor) -> Tensor:
        """(B, H, T, D / H) to (B, T, D); the inverse of `split_heads`."""
        return heads.transpose(1, 2).flatten(2)

    def _project(self, x: Tensor, first: int, count: int) -> tuple[Tensor, ...]:
        """`count` of query (0), key (1) and value (2) of x (B, T, D), starting at `first`: (B, H, T, D / H) each."""
        rows = slice(first * self.width, (first + count) * self.width)
        bias = self.qkv.bias if self.qkv.bias is None else self.qkv.bias[rows]
        projected = F.linear(x, self.qkv.weight[rows], bias).split(self.width, 2)
        return tuple(self.split_heads(part) for part in projected)

    def project_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of x (B, T, D): (B, H, T, D / H) each."""
        query, key, value = self._project(x, 0, 3)
        return query, key, value

    def project_query(self, x: Tensor) -> Tensor:
        """Query of x (B, T, D): (B, H, T, D / H)."""
        return self._project(x, 0, 1)[0]

    def project_key_value(self, x: Tensor) -> KeyValue:
        """Key and value of x (B, T, D), for cross-attention: (B, H, T, D / H) each."""
        key, value = self._project(x, 1, 2)
        return key, value

    def attend(self, query: Tensor, key_value: KeyValue, mask: Tensor | None = None) -> Tensor:
        """`out(softmax(query key^T / sqrt(D / H)) value)`, with dropout of the probabilities in training.

        Where one batch is smaller, b of B = n b, it is repeated n times: row i is used with row i modulo b.

        Args:
            query: (B, H, T, D / H). key_value: (B, H, S, D / H) each.
            mask: boolean, True where a query may look; broadcast to (B, H, T, S).

        Returns:
            (B, T, D).
        """
        key, value = key_value
        dropout = self.dropout if self.training else 0.0
        is_decoding_step = query.shape[2] == 1 and not dropout and len(query) == len(key)
        if is_decoding_step and query.device.type == "cpu":  # torch's fused kernel is slower for one query there
            mixed = attention_over_segments(query, [key_value], mask)
        elif 0 < dropout < 1 and mask is None and prefers_attention_with_dropout(query, key):
            mixed = attention_with_dropout(query, key, value, dropout)
        else:
            batch = max(len(query), len(key))
            query, key, value = (repeat_batch(part, batch) for part in (query, key, value))
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        return self.out(self.merge_heads(mixed))

    def probabilities(self, query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attention probabilities, averaged over the heads, without dropout.

        Args:
            query: (B, H, T, D / H). key: (B, H, S, D / H). mask: as `attend`.

        Returns:
            (B, T, S); every row sums to 1.
        """
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        return (scores if mask is None else scores.masked_fill(~mask, float("-inf"))).softmax(-1).mean(1)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, past_key_values: PastKeyValues = (), query_positions: slice = ALL
    ) -> tuple[Tensor, KeyValue]:
        """Self-attention of x (B, T, D) over the earlier positions and x.

        Args:
            x: (B, T, D).
            mask: boolean, True where a query may look; broadcast to (B, H, queries, P + T). None: everywhere.
            past_key_values: of P earlier positions, (B, H, P_i, D / H) each, in one segment or several, which are not
                concatenated (see `attention_over_segments`); several segments support no dropout.
            query_positions: the positions of x whose output is needed.

        Returns:
            (B, queries, D), and the keys and values of all positions of x.
        """
        if query_positions == ALL:
            query, key, value = self.project_qkv(x)
        else:
            query, (key, value) = self.project_query(x[:, query_positions]), self.project_key_value(x)
        new_key_values = (key, value)
        for past_key, past_value in past_key_values[-1:]:
            key, value = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)
        if len(past_key_values) > 1:
            mixed = attention_over_segments(query, [*past_key_values[:-1], (key, value)], mask)
            return self.out(self.merge_heads(mixed)), new_key_values
        return self.attend(query, (key, value), mask), new_key_values


class PreNormBlock(nn.Module):
    """One transformer block of IDC-PCL: `x += Attention(LN x)`, then `x += FFN(LN x)` with ReLU."""

    def __init__(self, width: int, heads: int, ffn: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = UnbiasedLayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.ffn_norm = UnbiasedLayerNorm(width)
        self.ffn = nn.Sequential(nn.Linear(width, ffn), nn.ReLU(), nn.Dropout(dropout), nn.Linear(ffn, width))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, past_key_values: PastKeyValues = (), query_positions: slice = ALL
    ) -> tuple[Tensor, KeyValue]:
        """(B, T, D) to (B, queries, D), and the keys and values of all of x; arguments as `Attention`."""
        mixed, new_key_values = self.attention(self.attention_norm(x), mask, past_key_values, query_positions)
        x = x[:, query_positions] + self.dropout(mixed)
        return x + self.dropout(self.ffn(self.ffn_norm(x))), new_key_values


class PreNormStack(nn.Module):
    """Blocks with one extra normalisation of the input and no normalisation of the output (authors' code).

    Args:
        layers: number of blocks; 0 gives the identity.
    """

    def __init__(self, layers: int, width: int, heads: int, ffn: int, dropout: float) -> None:
        super().__init__()
        self.norm = UnbiasedLayerNorm(width) if layers else nn.Identity()
        self.layers = nn.ModuleList(PreNormBlock(width, heads, ffn, dropout) for _ in range(layers))

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        past_key_values: Sequence[PastKeyValues] | None = None,
        query_positions: slice = ALL,
    ) -> tuple[Tensor, list[KeyValue]]:
        """(B, T, D) to (B, queries, D), and each layer's keys and values of all of x.

        Args:
            x: (B, T, D). mask: as `Attention`, (..., T, P + T). past_key_values: of each layer.
            query_positions: the positions whose output is needed; the last layer computes no others.
        """
        x = self.norm(x)
        new_key_values = []
        for index, layer in enumerate(self.layers):
            positions = query_positions if index == len(self.layers) - 1 else ALL
            layer_mask = mask if mask is None or positions == ALL else mask[..., positions, :]
            x, key_value = layer(x, layer_mask, past_key_values[index] if past_key_values else (), positions)
            new_key_values.append(key_value)
        return x if len(self.layers) else x[:, query_positions], new_key_values


@torch.no_grad()
def init_difference_attention_(
    qkv_weight: Tensor, out_weight: Tensor, sharpness: float = 1.5, noise: float = 0.1
) -> None:
    """Initialise self-attention over both images so that its first outputs are differences between the images.

    Queries equal keys, so a token attends to the same position and content in both images. The output layer negates the
    values, so the residual connection subtracts what both images share. After "Mimetic initialization of self-attention
    layers" (Trockman and Kolter, ICML 2023), who found this structure in trained transformers.

    Args:
        qkv_weight: (3 D, D), overwritten. out_weight: (D, D) of the layer after the merged heads.
        sharpness: scale of queries and keys. noise: factor of the output layer's former weights, which are kept in the sum.
    """
    query, _, value = qkv_weight.chunk(3)
    nn.init.orthogonal_(query, sharpness)
    nn.init.orthogonal_(value)
    qkv_weight[len(query) : 2 * len(query)] = query
    out_weight.mul_(noise).sub_(value.T)


def doubled_sinusoid(length: int, width: int) -> Tensor:
    """Fixed position embedding of IDC-PCL, (length, width): channel j at position p has the angle `p / 10000 ** (2 j / width)`.

    Sine on even channels, cosine on odd channels. The usual table has the exponent `2 floor(j / 2) / width`. The authors'
    code doubles it, so neighbouring channels differ and frequencies fall twice as fast.
    """
    channel = torch.arange(width, dtype=torch.float64)
    angle = torch.arange(length, dtype=torch.float64)[:, None] / 10000 ** (2 * channel / width)
    return torch.where(channel % 2 == 0, angle.sin(), angle.cos()).float()


def sinusoid(length: int, width: int) -> Tensor:
    """Fixed position embedding of the transformer, (length, width): sine on even channels, cosine on odd channels.

    Channels 2 j and 2 j + 1 at position p have the angle `p / 10000 ** (2 j / width)`.
    """
    channel = torch.arange(width, dtype=torch.float64) // 2 * 2
    angle = torch.arange(length, dtype=torch.float64)[:, None] / 10000 ** (channel / width)
    return torch.where(torch.arange(width) % 2 == 0, angle.sin(), angle.cos()).float()


def repeat_batch(x: Tensor, batch: int) -> Tensor:
    """Repeat a batch (b, ...) as a whole until it has `batch` rows, a multiple of b."""
    return x if len(x) == batch else torch.cat([x] * (batch // len(x)))
