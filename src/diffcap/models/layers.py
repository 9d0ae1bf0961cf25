"""Layers that the methods share.

Letters: B pairs, T text positions, N visual tokens of one image, D width, H heads.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffcap.models.attention import dropped_attention, is_worthwhile

KeysValues = tuple[Tensor, Tensor]  # each (B, H, positions, D / H)
Past = Sequence[KeysValues]  # of earlier positions, in one part or several
ALL = slice(None)


class UnbiasedLayerNorm(nn.Module):
    """Layer normalisation in the "annotated transformer" form that IDC-PCL uses: `a (x - mean) / (std + eps) + b`.

    The standard deviation is the unbiased one (D - 1 below the line). Computed by the fused kernel with `eps ** 2` on
    the variance, which agrees with the formula to a relative `eps / std`.

    Args:
        width: D, the last dimension.
        eps: added to the standard deviation, not to the variance (authors' code).
    """

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.width, self.eps = width, eps
        self.unbias = math.sqrt((width - 1) / width)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (..., D) over its last dimension."""
        return F.layer_norm(x, (self.width,), self.weight * self.unbias, self.bias, self.eps**2)


class Attention(nn.Module):
    """Multi-head attention; called on one sequence it is self-attention, whose queries may also look at earlier positions.

    Args:
        width: D. heads: H, which divides D. dropout: on the attention probabilities.
        projected: a last linear layer over the joined heads. bias: of all its linear layers.
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.0, projected: bool = True, bias: bool = True) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}")
        self.width, self.heads, self.dropout = width, heads, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias) if projected else nn.Identity()

    def _heads(self, x: Tensor, first: int, parts: int) -> tuple[Tensor, ...]:
        """The query (0), key (1) or value (2) heads of x (B, T, D), `parts` of them from `first` on: (B, H, T, D / H) each."""
        rows = slice(first * self.width, (first + parts) * self.width)
        bias = self.qkv.bias if self.qkv.bias is None else self.qkv.bias[rows]
        joined = F.linear(x, self.qkv.weight[rows], bias).split(self.width, 2)
        return tuple(self.apart(part) for part in joined)

    def apart(self, joined: Tensor) -> Tensor:
        """Heads beside one another, (B, T, D), to one after another, (B, H, T, D / H); copies nothing."""
        return joined.unflatten(2, (self.heads, self.width // self.heads)).transpose(1, 2)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of x (B, T, D): (B, H, T, D / H) each."""
        query, key, value = self._heads(x, 0, 3)
        return query, key, value

    def queries(self, x: Tensor) -> Tensor:
        """The queries of x alone."""
        return self._heads(x, 0, 1)[0]

    def keys_values(self, x: Tensor) -> KeysValues:
        """The keys and values of x alone: what cross-attention needs of the other sequence, once."""
        key, value = self._heads(x, 1, 2)
        return key, value

    def attend_parts(self, query: Tensor, parts: Sequence[KeysValues], mask: Tensor | None = None) -> Tensor:
        """`attend` over keys and values that stand in several places, for the few queries of one decoding step.

        Joining them would copy them all at every step, which takes longer than the attention. No dropout.

        Args:
            query: (B, H, T, D / H). parts: (B, H, S_i, D / H) each, fastest where they are contiguous.
            mask: boolean, broadcast to (B, H, T, sum of S_i).
        """
        query = (query * query.shape[3] ** -0.5).contiguous()  # once, not for each part
        scores = torch.cat([query @ key.transpose(2, 3) for key, _ in parts], 3)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        shares = scores.softmax(3).split([key.shape[2] for key, _ in parts], 3)
        mixed = [share @ value for share, (_, value) in zip(shares, parts)]
        return self.out(sum(mixed[1:], mixed[0]).transpose(1, 2).flatten(2))

    def attend(self, query: Tensor, keys_values: KeysValues, mask: Tensor | None = None) -> Tensor:
        """Queries (B, H, T, D / H) over keys and values to (B, T, D).

        Where one side has fewer rows, b of B = n b, each of its rows serves n of the other's, every b-th one.
        """
        drop, (key, value) = self.dropout if self.training else 0.0, keys_values
        step = query.shape[2] == 1 and not drop and len(query) == len(key)
        if step and query.device.type == "cpu":  # there the fused kernel is slower for one query
            return self.attend_parts(query, [keys_values], mask)
        if 0 < drop < 1 and mask is None and is_worthwhile(query, key):
            mixed = dropped_attention(query, key, value, drop)
        else:
            batch = max(len(query), len(key))
            query, key, value = (tile(part, batch) for part in (query, key, value))
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=drop)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def weights(self, query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
        """Where queries (B, H, T, D / H) look among keys (B, H, S, D / H), mean over the heads: (B, T, S); mask as `attend`."""
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        return (scores if mask is None else scores.masked_fill(~mask, float("-inf"))).softmax(-1).mean(1)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, past: Past = (), rows: slice = ALL
    ) -> tuple[Tensor, KeysValues]:
        """Attend from x (B, T, D) to `past` and x.

        Args:
            x: (B, T, D).
            mask: boolean, True where a query may look; broadcast to (B, H, rows of T, past + T). None: everywhere.
            past: keys and values of earlier positions, (B, H, P, D / H) each, in one part or several, see `attend_parts`.
            rows: the positions of x whose output is wanted.

        Returns:
            (B, rows of T, D), and the keys and values of all of x.
        """
        if rows == ALL:
            query, key, value = self.project(x)
        else:
            query, (key, value) = self.queries(x[:, rows]), self.keys_values(x)
        own = (key, value)
        for before, beside in past[-1:]:
            key, value = torch.cat([before, key], 2), torch.cat([beside, value], 2)
        if len(past) > 1:
            return self.attend_parts(query, [*past[:-1], (key, value)], mask), own
        return self.attend(query, (key, value), mask), own


class PreNormBlock(nn.Module):
    """One transformer block of IDC-PCL: `x += Attention(LN x)`, then `x += FFN(LN x)`, ReLU inside."""

    def __init__(self, width: int, heads: int, ffn: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = UnbiasedLayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.ffn_norm = UnbiasedLayerNorm(width)
        self.ffn = nn.Sequential(nn.Linear(width, ffn), nn.ReLU(), nn.Dropout(dropout), nn.Linear(ffn, width))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, past: Past = (), rows: slice = ALL
    ) -> tuple[Tensor, KeysValues]:
        """(B, T, D) to (B, rows of T, D), and the keys and values of all of x; arguments as `Attention`."""
        mixed, own = self.attention(self.attention_norm(x), mask, past, rows)
        x = x[:, rows] + self.dropout(mixed)
        return x + self.dropout(self.ffn(self.ffn_norm(x))), own


class PreNormStack(nn.Module):
    """Blocks with one extra normalisation of the input and none of the output (authors' code).

    Args:
        layers: number of blocks; 0 gives the identity.
    """

    def __init__(self, layers: int, width: int, heads: int, ffn: int, dropout: float) -> None:
        super().__init__()
        self.norm = UnbiasedLayerNorm(width) if layers else nn.Identity()
        self.layers = nn.ModuleList(PreNormBlock(width, heads, ffn, dropout) for _ in range(layers))

    def forward(
        self, x: Tensor, mask: Tensor | None = None, past: Sequence[Past] | None = None, rows: slice = ALL
    ) -> tuple[Tensor, list[KeysValues]]:
        """(B, T, D) to (B, rows of T, D), and each layer's keys and values of all of x.

        Args:
            x: (B, T, D). mask: as `Attention`, (..., T, past + T). past: of each layer.
            rows: the positions whose output is wanted; the last layer computes no others.
        """
        x = self.norm(x)
        cache = []
        for index, layer in enumerate(self.layers):
            wanted = rows if index == len(self.layers) - 1 else ALL
            shown = mask if mask is None or wanted == ALL else mask[..., wanted, :]
            x, own = layer(x, shown, past[index] if past else (), wanted)
            cache.append(own)
        return x if len(self.layers) else x[:, rows], cache


@torch.no_grad()
def begin_with_the_difference(
    qkv_weight: Tensor, out_weight: Tensor, sharpness: float = 1.5, noise: float = 0.1
) -> None:
    """Draw an attention over both images' tokens so that, at first, a token becomes what it differs by from its likes.

    Queries equal keys, so a token looks at the same place and content in both images; values come back turned round, so
    what they share is taken away. After "Mimetic initialization of self-attention layers" (Trockman and Kolter, ICML 2023),
    where trained transformers are found to look so.

    Args:
        qkv_weight: (3 D, D), filled anew. out_weight: (D, D) of the layer over the joined heads.
        sharpness: scale of queries and keys. noise: share of what the output layer was that stays in it.
    """
    query, _, value = qkv_weight.chunk(3)
    nn.init.orthogonal_(query, sharpness)
    nn.init.orthogonal_(value)
    qkv_weight[len(query) : 2 * len(query)] = query
    out_weight.mul_(noise).sub_(value.T)


def doubled_sinusoid(length: int, width: int) -> Tensor:
    """Fixed positions of IDC-PCL, (length, width): the angle of channel j at position p is `p / 10000 ** (2 j / width)`.

    Sine on even channels, cosine on odd ones. The usual table uses the exponent `2 floor(j / 2) / width`; the authors'
    code doubles it, so neighbouring channels differ and frequencies fall twice as fast.
    """
    channel = torch.arange(width, dtype=torch.float64)
    angle = torch.arange(length, dtype=torch.float64)[:, None] / 10000 ** (2 * channel / width)
    return torch.where(channel % 2 == 0, angle.sin(), angle.cos()).float()


def sinusoid(length: int, width: int) -> Tensor:
    """Fixed positions of the transformer, (length, width): sine on even channels, cosine on odd ones.

    Channels 2 j and 2 j + 1 have the angle `p / 10000 ** (2 j / width)` at position p.
    """
    channel = torch.arange(width, dtype=torch.float64) // 2 * 2
    angle = torch.arange(length, dtype=torch.float64)[:, None] / 10000 ** (channel / width)
    return torch.where(torch.arange(width) % 2 == 0, angle.sin(), angle.cos()).float()


def tile(x: Tensor, rows: int) -> Tensor:
    """Copies of a batch (b, ...), one after the other, that make (rows, ...)."""
    return x if len(x) == rows else torch.cat([x] * (rows // len(x)))


def tiled_sum(x: Tensor, y: Tensor) -> Tensor:
    """`x + tile(y)` of (B, ...) and (b, ...), B a multiple of b, without the copies."""
    return x + y if len(x) == len(y) else (x.unflatten(0, (-1, len(y))) + y).flatten(0, 1)


def linear_of_both(layer: nn.Linear, first: Tensor, second: Tensor) -> Tensor:
    """`layer(torch.cat([first, second], -1))` without that copy, which would be kept for the gradient."""
    one, two = layer.weight.split([first.shape[-1], second.shape[-1]], 1)
    return F.linear(first, one, layer.bias).add_(F.linear(second, two))
