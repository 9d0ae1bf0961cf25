"""Layers that the methods share.

Letters: B pairs, T text positions, N visual tokens of one image, D width, H heads.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KeysValues = tuple[Tensor, Tensor]  # each (B, H, positions, D / H)


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
    """Multi-head self-attention whose queries may also look at keys and values of earlier positions.

    Args:
        width: D. heads: H, which divides D. dropout: on the attention probabilities.
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}")
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, past: KeysValues | None = None
    ) -> tuple[Tensor, KeysValues]:
        """Attend from x (B, T, D) to `past` and x.

        Args:
            x: (B, T, D).
            mask: boolean, True where a query may look; broadcast to (B, H, T, past + T). None: everywhere.
            past: keys and values of earlier positions, (B, H, P, D / H) each.

        Returns:
            (B, T, D), and the keys and values of x alone.
        """
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # (B, H, T, D / H) each
        own = (key, value)
        if past is not None:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        drop = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=drop)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width)), own


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
        self, x: Tensor, mask: Tensor | None = None, past: KeysValues | None = None
    ) -> tuple[Tensor, KeysValues]:
        """(B, T, D) to (B, T, D), and the keys and values of x; arguments as `Attention`."""
        mixed, own = self.attention(self.attention_norm(x), mask, past)
        x = x + self.dropout(mixed)
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
        self, x: Tensor, mask: Tensor | None = None, past: list[KeysValues] | None = None
    ) -> tuple[Tensor, list[KeysValues]]:
        """(B, T, D) to (B, T, D), and each layer's keys and values of x; `past` has one entry a layer."""
        x = self.norm(x)
        cache = []
        for index, layer in enumerate(self.layers):
            x, own = layer(x, mask, None if past is None else past[index])
            cache.append(own)
        return x, cache


def doubled_sinusoid(length: int, width: int) -> Tensor:
    """Fixed positions of IDC-PCL, (length, width): the angle of channel j at position p is `p / 10000 ** (2 j / width)`.

    Sine on even channels, cosine on odd ones. The usual table uses the exponent `2 floor(j / 2) / width`; the authors'
    code doubles it, so neighbouring channels differ and frequencies fall twice as fast.
    """
    channel = torch.arange(width, dtype=torch.float64)
    angle = torch.arange(length, dtype=torch.float64)[:, None] / 10000 ** (2 * channel / width)
    return torch.where(channel % 2 == 0, angle.sin(), angle.cos()).float()
