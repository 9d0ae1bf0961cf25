"""SCORER with CBR (Tu, Li, Su, Zha, Yan and Huang, "Self-supervised Cross-view Representation Reconstruction for Change
Captioning", ICCV 2023).

Order of the file: the cross-view encoder, the decoder's block, cross-modal backward reasoning (`CBR`), the captioner
with its losses. Where paper and released code differ the code is the default, and the paper's way is an option.

Letters: B pairs, N visual tokens of one image, T text positions, D width, C feature channels, V vocabulary.
"""

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from diffcap.losses.cross_view import cross_view_nce
from diffcap.losses.gather import gather_rows, global_mean, world_size
from diffcap.losses.token_matching import token_matching
from diffcap.models.captioner import Batch, Captioner, WordMaps
from diffcap.models.grid import GridEmbedding
from diffcap.models.layers import Attention, KeysValues, Past, linear_of_both, tile, tiled_sum
from diffcap.models.words import (
    END,
    NULL,
    START,
    BlockOutput,
    WordDecoder,
    mean,
    next_word_losses,
    roll_out,
    streams_of,
)

EPS = 1e-6
Matching = Literal["collapsed", "per_head"]


class Views(NamedTuple):
    """Both images after an encoder layer, and the queries and keys of what went in: (B, N, D) each."""

    before: Tensor
    after: Tensor
    before_projected: tuple[Tensor, Tensor]
    after_projected: tuple[Tensor, Tensor]


class CrossView(nn.Module):
    """One encoder layer: each image rebuilt from the other, `LayerNorm(own + Attention(own, other))`, weights shared."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout, projected=False)
        self.norm = nn.LayerNorm(width, EPS)

    def forward(self, before: Tensor, after: Tensor) -> Views:
        """(b, N, D) and (B, N, D); where B is 2 b, `before` serves both halves of `after`."""
        first, second = self.attention.project(before), self.attention.project(after)
        rebuilt_before = self.norm(tiled_sum(self.attention.attend(first[0], (second[1], second[2])), before))
        rebuilt_after = self.norm(after + self.attention.attend(second[0], (first[1], first[2])))
        query, key = (tile(_join(part), len(after)) for part in first[:2])
        return Views(rebuilt_before, rebuilt_after, (query, key), (_join(second[0]), _join(second[1])))


class SCORERBlock(nn.Module):
    """One decoder block; its FFN is as wide as the model, and its last residual is the FFN's inner value.

    Args:
        ffn_residual: "gelu": `LN(W2 g + g)` with g = GELU(W1 x) (authors' code); "input": `LN(W2 g + x)`.
    """

    def __init__(self, width: int, heads: int, dropout: float, ffn_residual: Literal["gelu", "input"]) -> None:
        super().__init__()
        self.self_attention = Attention(width, heads, dropout, projected=False)
        self.cross = Attention(width, heads, dropout, projected=False)
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width, EPS) for _ in range(3))
        self.dropout, self.ffn_residual = nn.Dropout(dropout), ffn_residual

    def forward(self, x: Tensor, memory: KeysValues, mask: Tensor | None, past: Past) -> BlockOutput:
        """See `BlockOutput`; arguments as `Attention`."""
        mixed, own = self.self_attention(x, mask, past)
        said = self.norm1(x + mixed)
        seen = self.norm2(said + self.cross.attend(self.cross.queries(said), memory))
        inner = F.gelu(self.inner(seen))
        residual = inner if self.ffn_residual == "gelu" else seen
        return BlockOutput(said, seen, self.norm3(self.dropout(self.outer(inner)) + residual), own)


class CBR(nn.Module):
    """Cross-modal backward reasoning: sentence and before image together should give the after image (section 3.4)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.join = nn.Linear(2 * width, width)  # image channels, then the sentence's
        self.attention = Attention(width, heads, bias=False)
        nn.init.xavier_uniform_(self.attention.qkv.weight)  # as torch's own; it stays as it was drawn
        self.out = nn.Linear(width, width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.logit_scale = nn.Parameter(torch.ones(()))

    def forward(self, before: Tensor, sentences: Tensor) -> list[Tensor]:
        """Images (b, N, D) and sentences (B, D), B a multiple of b, to queries of the imagined after images: b at a time.

        Linear layers that follow one another are one matrix. A sentence is the same at every place: among the keys it
        would change no probability, to the values' mean it is added; so each image has one set of keys and values.
        """
        width, qkv = before.shape[2], self.attention.qkv.weight
        to_query, _, to_value = qkv.split(width)
        image, words = self.join.weight.split(width, 1)
        last = self.query.weight @ self.out.weight @ self.attention.out.weight  # type: ignore[operator]
        last_bias = F.linear(self.out.bias, self.query.weight, self.query.bias)
        query, key, value = F.linear(before, qkv @ image).split(width, 2)  # (b, N, D) each
        apart, imagined = self.attention.apart, []
        for said in F.linear(sentences, words, self.join.bias)[:, None].split(len(before)):  # (b, 1, D)
            asked = query + F.linear(said, to_query)
            mixed = _join(F.scaled_dot_product_attention(apart(asked), apart(key), apart(value)))
            imagined.append(F.linear(mixed, last).add_(F.linear(F.linear(said, to_value), last, last_bias)))
        return imagined


class SCORER(Captioner):
    """Cross-view contrast, reconstruction, decoder, and CBR.

    A batch with twice as many "after" as "before" holds two streams over the same first images: change pairs, then
    distractor pairs; every loss is the mean of both streams'.

    Args:
        vocabulary_size, feature_channels: V, C. grid: rows and columns of the feature map.
        max_length: L, positions of a caption (CLEVR-Change: 24). The sentence's mean in CBR divides by it.
        width: D (512). heads: 8. encoder_layers: paper: 2, 1, 3 and 2 on CLEVR-Change, CLEVR-DC, Spot, IER.
        decoder_layers: 2. word_width: 300. dropout: 0.1 (authors' code).
        coordinates: append x and y channels to the features (authors' code: on CLEVR-Change).
        difference: "reconstruction", or the paper's baseline "subtraction": before - after through a ReLU layer.
        cross_view_weight: lambda_v (0.1 on CLEVR-Change). cbr_weight: lambda_m (0.001 there, authors' code).
        mtm: token-wise matching "collapsed" over the heads to one dot product (authors' code), or the mean of the heads'
            ("per_head", as the paper has it; how it joins the heads is not said).
        cbr_trainable: train CBR's own layers; the authors leave them as they were drawn.
        decoder_ffn_residual: see `SCORERBlock`.
        decoder_std: of the decoder's first weights (authors' code: 0.02, for a width of 512).
        position_std: of the learned positions' first values (authors' code: 1, which narrow features drown in; DIRL's
            begin at Xavier's).
    """

    begin, end, closing_pad = START, END, NULL
    vocabulary_layout = "rcc"

    def __init__(
        self,
        vocabulary_size: int,
        feature_channels: int,
        grid: tuple[int, int] = (14, 14),
        max_length: int = 24,
        width: int = 512,
        heads: int = 8,
        encoder_layers: int = 2,
        decoder_layers: int = 2,
        word_width: int = 300,
        dropout: float = 0.1,
        coordinates: bool = True,
        difference: Literal["reconstruction", "subtraction"] = "reconstruction",
        cross_view_weight: float = 0.1,
        cbr_weight: float = 0.001,
        mtm: Matching = "collapsed",
        cbr_trainable: bool = False,
        decoder_ffn_residual: Literal["gelu", "input"] = "gelu",
        decoder_std: float = 0.02,
        position_std: float = 1.0,
    ) -> None:
        super().__init__()
        self.hyperparameters = {key: value for key, value in locals().items() if key not in ("self", "__class__")}
        self.hyperparameters["grid"] = list(grid)
        self.embedding = GridEmbedding(feature_channels, (grid[0], grid[1]), width, coordinates)
        for positions in (self.embedding.columns, self.embedding.rows):
            nn.init.normal_(positions.weight, std=position_std)
        self.encoder = nn.ModuleList(
            CrossView(width, heads, dropout) for _ in range(encoder_layers if difference == "reconstruction" else 0)
        )
        if difference == "reconstruction":
            self.fusion = nn.Sequential(nn.Linear(2 * width, width), nn.Dropout(dropout), nn.ReLU(inplace=True))
        else:
            if cross_view_weight:
                raise ValueError("difference: subtraction has no cross-view contrast; set cross_view_weight to 0")
            self.fusion = nn.Sequential(nn.Linear(width, width), nn.ReLU())
        self.decoder = WordDecoder(
            vocabulary_size,
            max_length,
            width,
            word_width,
            nn.Sequential(nn.Linear(word_width, width), nn.Dropout(dropout), nn.LayerNorm(width, EPS)),
            [SCORERBlock(width, heads, dropout, decoder_ffn_residual) for _ in range(decoder_layers)],
        )
        for module in self.decoder.modules():
            if isinstance(module, nn.Linear | nn.Embedding):  # the padding's row too, which is never trained
                nn.init.normal_(module.weight, std=decoder_std)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        self.logit_scale = nn.Parameter(torch.ones(())) if cross_view_weight else None
        self.cbr = CBR(width, heads) if cbr_weight else None
        if self.cbr is not None and not cbr_trainable:
            self.cbr.requires_grad_(False)
        self.cross_view_weight, self.cbr_weight, self.mtm = cross_view_weight, cbr_weight, mtm
        self.max_length = max_length

    def compare(self, before: Tensor, after: Tensor) -> Views | None:
        """The last encoder layer's views of two embedded images (b, N, D) and (B, N, D); None for the subtraction."""
        views = None
        for layer in self.encoder:
            views = None  # what the layer before compared is not needed any more
            views = layer(before, after)
            before, after = views.before, views.after
        return views

    def fuse(self, before: Tensor, after: Tensor, views: Views | None) -> Tensor:
        """The difference representation of embedded images and their views, (B, N, D)."""
        if views is None:
            return self.fusion(tiled_sum(-after, before))
        return self.fusion[1:](linear_of_both(self.fusion[0], views.before, views.after))  # type: ignore[arg-type]

    def encode(self, before: Tensor, after: Tensor) -> list[KeysValues]:
        """Two feature maps (B, C, h, w) to each decoder block's keys and values of the difference."""
        before, after = self.embedding(before), self.embedding(after)
        return self.decoder.memory(self.fuse(before, after, self.compare(before, after)))

    def step(
        self, tokens: Tensor, memory: list[KeysValues], cache: list[KeysValues] | None
    ) -> tuple[Tensor, list[KeysValues]]:
        """See `Captioner.step`."""
        return self.decoder.step(tokens, memory, cache)

    def next_logits(self, tokens: Tensor, memory: list[KeysValues]) -> Tensor:
        """See `Captioner.next_logits`."""
        return self.decoder.next_logits(tokens, memory)

    def attention(self, before: Tensor, after: Tensor, tokens: Tensor) -> WordMaps:
        """See `Captioner.attention`, and `words.roll_out` for how a fused token is shared out to the two images."""
        first, second = self.embedding(before), self.embedding(after)
        views = self.compare(first, second)
        looked = self.decoder.attention(tokens, self.decoder.memory(self.fuse(first, second, views)))
        if views is None:
            return roll_out(looked, None, None, self.embedding.grid)
        layer: Attention = self.encoder[-1].attention  # type: ignore[assignment]
        (one, key_one), (two, key_two) = (
            map(layer.apart, part) for part in (views.before_projected, views.after_projected)
        )
        to_after, to_before = layer.weights(one, key_two), layer.weights(two, key_one)
        return roll_out(looked, to_before, to_after, self.embedding.grid)

    def similarities(self, views: Views) -> tuple[Tensor, Tensor]:
        """Scaled matching of what enters the last encoder layer, this rank's rows against all ranks' columns.

        Returns:
            Before's queries with after's keys, and after's with before's: (B, all B) each.
        """
        assert self.logit_scale is not None
        scale = self.logit_scale.exp()
        one = scale * self._match(views.before_projected[0], views.after_projected[1])
        return one, scale * self._match(views.after_projected[0], views.before_projected[1])

    def _match(self, query: Tensor, key: Tensor) -> Tensor:
        """(B, N, D) each; one dot product over all heads' channels, or the mean of the heads' own."""
        key = gather_rows(key)[0]
        if self.mtm == "collapsed":
            return token_matching(query, key)
        heads = (part.chunk(self.encoder[-1].attention.heads, 2) for part in (query, key))  # type: ignore[union-attr, arg-type]
        return torch.stack([token_matching(*pair) for pair in zip(*heads)]).mean(0)

    def cbr_similarities(self, before: Tensor, after: Tensor, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Imagined against real after images of one stream, see `imagined_and_real` and `_cbr_match`."""
        return self._cbr_match(*self.imagined_and_real(before, after, hidden, tokens)[0])

    def imagined_and_real(
        self, before: Tensor, after: Tensor, hidden: Tensor, tokens: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """What CBR matches, of each stream: (b, N, D) each.

        Args:
            before, after: (b, N, D) and (B, N, D), embedded only. hidden: (B, T, D) of the caption's last block.
            tokens: (B, T).
        """
        assert self.cbr is not None
        said = (tokens != NULL).to(hidden.dtype)[..., None]
        sentence = (hidden * said).sum(1) / self.max_length  # not by the number of words (authors' code)
        return list(zip(self.cbr(before, sentence), self.cbr.key(after).split(len(before))))

    def _cbr_match(self, imagined: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's rows against all: the matrix, and its transpose."""
        assert self.cbr is not None
        scale = self.cbr.logit_scale.exp()
        score = scale * token_matching(imagined, gather_rows(real)[0])
        if world_size() == 1:
            return score, score.T
        return score, scale * token_matching(real, gather_rows(imagined)[0])

    def validate(self, batch: Batch) -> dict[str, Tensor]:
        """See `Captioner.validate`: the words' losses only; the other losses depend on the size of the batch."""
        hidden = self.decoder(batch["tokens"], self.encode(batch["before"], batch["after"])).last.hidden
        return {"caption_loss": next_word_losses(self.decoder.logit(hidden), batch["tokens"])}

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """`caption + lambda_v cross_view + lambda_m cbr` over the global batch (section 3.5), each the mean of the streams'.

        Needs `before` (b, C, h, w), `after` (B, C, h, w) with B = b, or B = 2 b for two streams, and `tokens` (B, T).
        """
        before, after, tokens = self.embedding(batch["before"]), self.embedding(batch["after"]), batch["tokens"]
        streams = streams_of(before, after)
        views = self.compare(before, after)
        decoded = self.decoder(tokens, self.decoder.memory(self.fuse(before, after, views)))
        logits = self.decoder.logit(decoded.last.hidden)
        parts = {"caption_loss": mean([global_mean(next_word_losses(logits[rows], tokens[rows])) for rows in streams])}
        loss = parts["caption_loss"]
        if self.logit_scale is not None and views is not None:
            if self.training:
                with torch.no_grad():
                    self.logit_scale.clamp_(max=math.log(100))
            losses = [cross_view_losses(self.similarities(stream)) for stream in _views_of_streams(views, len(before))]
            parts["cross_view_loss"] = mean(losses)
            loss = loss + self.cross_view_weight * parts["cross_view_loss"]
        if self.cbr is not None:
            pairs = self.imagined_and_real(before, after, decoded.last.hidden, tokens)
            losses = [cross_view_losses(self._cbr_match(*stream)) for stream in pairs]
            parts["cbr_loss"] = mean(losses)
            loss = loss + self.cbr_weight * parts["cbr_loss"]
        return {"loss": loss, **{name: value.detach() for name, value in parts.items()}}


def _views_of_streams(views: Views, size: int) -> list[Views]:
    """The views of every `size` pairs; by `split`, whose gradient is made at once, and not as a sum of padded slices."""
    leaves, shape = tree_flatten(views)
    return [tree_unflatten(list(parts), shape) for parts in zip(*(leaf.split(size) for leaf in leaves))]


def cross_view_losses(similarities: tuple[Tensor, Tensor]) -> Tensor:
    """Half of each direction's contrast (SCORER, eq. 4)."""
    return (global_mean(cross_view_nce(similarities[0])) + global_mean(cross_view_nce(similarities[1]))) / 2


def _join(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(2)  # (B, N, D), a view of the projection
