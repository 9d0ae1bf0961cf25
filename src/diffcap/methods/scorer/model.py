"""SCORER with CBR (Tu, Li, Su, Zha, Yan and Huang, "Self-supervised Cross-view Representation Reconstruction for Change
Captioning", ICCV 2023).

Order of the file: the decoder block, cross-modal backward reasoning (`CBR`), the captioner with its losses, the import of official
checkpoints. Where the paper and the released code differ, the code is the default and the paper's version is an option.

Letters: B pairs, N visual tokens of one image, T text positions, D width, C feature channels, V vocabulary.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffcap.checkpoints.importing import GROUPS, SHARED, Importer, Rule, Sizes, State, count_layers, rcc_sizes, rename
from diffcap.losses.gather import gather_rows, global_mean, world_size
from diffcap.methods.scorer.losses import cross_view_nce, token_matching
from diffcap.models.captioner import Batch, constructor_arguments
from diffcap.models.cross_image import CrossImageCaptioner, CrossImageLayer, Views
from diffcap.models.decoder import NULL, BlockOutput, WordDecoder, mean, next_word_losses, pair_groups
from diffcap.models.fast import add_repeated, linear_of_concatenation
from diffcap.models.layers import Attention, BlockMemory, Dropout, GridEmbedding, Linear, Segments, repeat_batch
from diffcap.utils.linear import linear

EPS = 1e-6  # of the layer norms (authors' code)


class SCORERBlock(nn.Module):
    """One decoder block. Its FFN is as wide as the model.

    `ffn_residual`: the last residual connection, with g = GELU(W1 x): "gelu", `LN(W2 g + g)` (authors' code), or "input", `LN(W2 g + x)`.
    """

    def __init__(self, width: int, heads: int, dropout: float, ffn_residual: Literal["gelu", "input"]) -> None:
        super().__init__()
        self.self_attention = Attention(width, heads, dropout, out_proj=False)
        self.cross = Attention(width, heads, dropout, out_proj=False)
        self.inner, self.outer = Linear(width, width), Linear(width, width)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width, EPS) for _ in range(3))
        self.dropout, self.ffn_residual = Dropout(dropout), ffn_residual

    def forward(self, x: Tensor, memory: BlockMemory, mask: Tensor | None, past_segments: Segments) -> BlockOutput:
        """See `BlockOutput`; arguments as `Attention`."""
        attended, new_key_values = self.self_attention(x, mask, past_segments)
        words = self.norm1(x + attended)
        visual = self.norm2(words + self.cross.attend_memory(words, memory))
        inner = F.gelu(self.inner(visual))
        residual = inner if self.ffn_residual == "gelu" else visual
        hidden = self.norm3(self.dropout(self.outer(inner)) + residual)
        return BlockOutput(words, visual, hidden, new_key_values)


class CBR(nn.Module):
    """Cross-modal backward reasoning: predict the after image from the sentence and the before image (section 3.4)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.join = Linear(2 * width, width)  # image channels, then the sentence's
        self.attention = Attention(width, heads, bias=False)
        nn.init.xavier_uniform_(self.attention.qkv.weight)  # as torch's MultiheadAttention; usually not trained
        self.out = Linear(width, width)
        self.query, self.key = Linear(width, width), Linear(width, width)
        self.logit_scale = nn.Parameter(torch.ones(()))

    def forward(self, before: Tensor, sentences: Tensor) -> list[Tensor]:
        """Predict after images, `query(out(attention(x)))` with `x = join([before; sentence])`, to be matched with `key`.

        Consecutive linear layers are multiplied into one matrix. The same sentence vector is joined at every position of an image.
        In the keys it therefore changes no attention probability, and in the values it adds the same vector to every output, so
        each image needs keys and values only once, for any number of sentences.

        Args:
            before: (b, N, D). sentences: (B, D), B a multiple of b; row i is joined to image i modulo b.

        Returns:
            B / b tensors (b, N, D).
        """
        attention = self.attention
        qkv = self.attention.qkv.weight
        query_weight, _, value_weight = qkv.split(before.shape[2])
        join_image, join_sentence = self.join.weight.split(before.shape[2], 1)
        output_weight = self.query.weight @ self.out.weight @ attention.out.weight  # type: ignore[operator]
        output_bias = linear(self.out.bias, self.query.weight, self.query.bias)
        image_query, key, value = linear(before, qkv @ join_image).split(before.shape[2], 2)  # (b, N, D) each
        key = attention.split_heads(key)
        value = attention.split_heads(value)
        outputs = []
        joined_sentences = linear(sentences, join_sentence, self.join.bias)[:, None]
        for sentence in joined_sentences.split(len(before)):  # (b, 1, D)
            query = attention.split_heads(image_query + linear(sentence, query_weight))
            attended = attention.merge_heads(F.scaled_dot_product_attention(query, key, value))
            sentence_value = linear(linear(sentence, value_weight), output_weight, output_bias)
            outputs.append(linear(attended, output_weight).add_(sentence_value))
        return outputs


class SCORER(CrossImageCaptioner):
    """SCORER: encoder with cross-view contrast, reconstruction of both images, decoder, and CBR.

    Every loss is the mean over the groups of pairs in a batch, see `decoder.pair_groups`.

    Args:
        vocabulary_size, feature_channels: V, C. grid: rows and columns of the feature map.
        max_length: L, positions of a caption (CLEVR-Change: 24); CBR divides the sum over a sentence by L.
        width: D (512). heads: 8. encoder_layers: paper: 2 on CLEVR-Change, 1 on CLEVR-DC, 3 on Spot-the-Diff, 2 on Image Editing Request.
        decoder_layers: 2. word_width: channels of the word vectors (300). dropout: 0.1 (authors' code).
        coordinates: append x and y channels to the features (authors' code: on CLEVR-Change).
        difference: "reconstruction", or the paper's baseline "subtraction": before - after through a ReLU layer.
        cross_view_weight: lambda_v (0.1 on CLEVR-Change). cbr_weight: lambda_m (0.001 on CLEVR-Change, authors' code).
        mtm: multi-head token-wise matching: "collapsed", one dot product over all heads' channels (authors' code), or
            "per_head", the mean over the heads (paper, which does not say how the heads are combined).
        cbr_trainable: train CBR's own layers; the authors keep their random initial weights.
        decoder_ffn_residual: see `SCORERBlock`.
        decoder_std: standard deviation of the decoder's initial weights (authors' code: 0.02, for a width of 512).
        position_std: standard deviation of the initial position embedding (authors' code: 1, which dominates features of few
            channels; DIRL uses Xavier initialisation).
    """

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
        mtm: Literal["collapsed", "per_head"] = "collapsed",
        cbr_trainable: bool = False,
        decoder_ffn_residual: Literal["gelu", "input"] = "gelu",
        decoder_std: float = 0.02,
        position_std: float = 1.0,
    ) -> None:
        super().__init__()
        self.hyperparameters = constructor_arguments(locals())
        self.embedding = GridEmbedding(feature_channels, grid, width, coordinates)
        for positions in (self.embedding.columns, self.embedding.rows):
            nn.init.normal_(positions.weight, std=position_std)
        self.encoder = nn.ModuleList(
            CrossImageLayer(width, heads, dropout, output_dropout=0.0, out_proj=False, eps=EPS)
            for _ in range(encoder_layers if difference == "reconstruction" else 0)
        )
        if difference == "reconstruction":
            self.fusion = nn.Sequential(Linear(2 * width, width), Dropout(dropout), nn.ReLU(inplace=True))
        else:
            if cross_view_weight:
                raise ValueError("difference: subtraction has no cross-view contrast; set cross_view_weight to 0")
            self.fusion = nn.Sequential(Linear(width, width), nn.ReLU())
        self.decoder = WordDecoder(
            vocabulary_size,
            max_length,
            width,
            word_width,
            nn.Sequential(Linear(word_width, width), Dropout(dropout), nn.LayerNorm(width, EPS)),
            [SCORERBlock(width, heads, dropout, decoder_ffn_residual) for _ in range(decoder_layers)],
        )
        for module in self.decoder.modules():
            if isinstance(module, nn.Linear | nn.Embedding):  # including the row of padding, which is never trained
                nn.init.normal_(module.weight, std=decoder_std)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        self.logit_scale = nn.Parameter(torch.ones(())) if cross_view_weight else None
        self.cbr = CBR(width, heads) if cbr_weight else None
        if self.cbr is not None and not cbr_trainable:
            self.cbr.requires_grad_(False)
        self.cross_view_weight = cross_view_weight
        self.cbr_weight = cbr_weight
        self.mtm = mtm
        self.max_length = max_length

    def fuse(self, before: Tensor, after: Tensor, views: Views | None) -> Tensor:
        """See `CrossImageCaptioner.fuse`; the views are both images, each reconstructed from the other."""
        if views is None:
            return self.fusion(add_repeated(-after, before))
        fused = linear_of_concatenation(self.fusion[0], views.before, views.after)  # type: ignore[arg-type]
        return self.fusion[1:](fused)

    def query_keys(self, views: Views) -> list[Tensor]:
        """Queries and keys of the before images, then of the after images, heads merged: (B, N, D) each."""
        merged = [Attention.merge_heads(heads) for heads in (*views.before_query_key, *views.after_query_key)]
        return [repeat_batch(tokens, len(views.after)) for tokens in merged]

    def similarities(self, query1: Tensor, key1: Tensor, query2: Tensor, key2: Tensor) -> tuple[Tensor, Tensor]:
        """Scaled similarities of before with after images and of after with before images, from `query_keys` (eq. 2 and 3).

        They are (B, all B): rows are the images of this rank, columns those of all ranks.
        """
        assert self.logit_scale is not None
        scale = self.logit_scale.exp()
        return scale * self._match(query1, key2), scale * self._match(query2, key1)

    def _match(self, query: Tensor, key: Tensor) -> Tensor:
        """Similarities (B, all B) of (B, N, D) each: one dot product over all heads' channels, or the mean over the heads."""
        key, _ = gather_rows(key)
        if self.mtm == "collapsed":
            return token_matching(query, key)
        num_heads: Any = self.encoder[-1].attention.heads  # type: ignore[union-attr]
        heads = zip(query.chunk(num_heads, 2), key.chunk(num_heads, 2))
        return torch.stack([token_matching(head_query, head_key) for head_query, head_key in heads]).mean(0)

    def predicted_and_real(
        self, before: Tensor, after: Tensor, hidden: Tensor, tokens: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Return for each group of pairs the after images that CBR predicts, and the real ones: (b, N, D) each.

        `before` (b, N, D) and `after` (B, N, D) are embedded images; `hidden` (B, T, D) is that of the last decoder block.
        """
        assert self.cbr is not None
        is_word = (tokens != NULL).to(hidden.dtype)[..., None]
        sentence = (hidden * is_word).sum(1) / self.max_length  # not divided by the number of words (authors' code)
        predicted = self.cbr(before, sentence)
        return list(zip(predicted, self.cbr.key(after).split(len(before))))

    def cbr_similarities(self, predicted: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """Scaled similarities of predicted with all real images, and of real with all predicted images: (b, all b) each."""
        assert self.cbr is not None
        scale = self.cbr.logit_scale.exp()
        score = scale * token_matching(predicted, gather_rows(real)[0])
        if world_size() == 1:
            return score, score.T
        return score, scale * token_matching(real, gather_rows(predicted)[0])

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """`caption + lambda_v cross_view + lambda_m cbr` over the global batch (section 3.5), each a mean over the groups."""
        before = self.embedding(batch["before"])
        after = self.embedding(batch["after"])
        tokens = batch["tokens"]
        groups = pair_groups(before, after)
        views = self.compare(before, after)
        decoded = self.decoder(tokens, self.fuse(before, after, views))
        logits = self.decoder.logit(decoded.last.hidden)
        word_losses = [next_word_losses(logits[rows], tokens[rows]) for rows in groups]
        loss = mean([global_mean(losses) for losses in word_losses])
        parts = {"caption_loss": loss}
        if self.logit_scale is not None and views is not None:
            if self.training:
                with torch.no_grad():
                    self.logit_scale.clamp_(max=math.log(100))
            # With `split`, because the gradient of slices is a sum of zero-padded tensors.
            per_group = zip(*(part.split(len(before)) for part in self.query_keys(views)))
            parts["cross_view_loss"] = mean([cross_view_loss(self.similarities(*group)) for group in per_group])
            loss = loss + self.cross_view_weight * parts["cross_view_loss"]
        if self.cbr is not None:
            images = self.predicted_and_real(before, after, decoded.last.hidden, tokens)
            parts["cbr_loss"] = mean([cross_view_loss(self.cbr_similarities(*group)) for group in images])
            loss = loss + self.cbr_weight * parts["cbr_loss"]
        return {"loss": loss, **{name: value.detach() for name, value in parts.items()}}


def cross_view_loss(similarities: tuple[Tensor, Tensor]) -> Tensor:
    """Mean of the contrastive losses of both directions (SCORER, eq. 4)."""
    first, second = similarities
    return (global_mean(cross_view_nce(first)) + global_mean(cross_view_nce(second))) / 2


# The released checkpoints have no CBR; the prefix `cbr.` is our assumption. The logit scales of all but the last layer are unused.
_LAYER = r"speaker_state\.core\.layer\.(\d+)\."
_RULES: tuple[Rule, ...] = (
    *SHARED,
    (r"change_detector_state\.scorer\.(\d+)\.attention\.(query|key|value)", r"encoder.\1.attention.qkv:\2"),
    (r"change_detector_state\.scorer\.(\d+)\.attention\.layer_norm", r"encoder.\1.norm"),
    (r"change_detector_state\.embed_fc\.0", "fusion.0"),
    (_LAYER + r"self_attention\.(query|key|value)", r"decoder.blocks.\1.self_attention.qkv:\2"),
    (_LAYER + r"dec_enc_attention\.(query|key|value)", r"decoder.blocks.\1.cross.qkv:\2"),
    (_LAYER + r"hidden_intermediate\.dense", r"decoder.blocks.\1.inner"),
    (_LAYER + r"output\.dense", r"decoder.blocks.\1.outer"),
    (_LAYER + r"output\.LayerNorm", r"decoder.blocks.\1.norm3"),
    (r"cbr\.conv1", "cbr.join"),
    (r"cbr\.conv2\.0", "cbr.out"),
    (r"cbr\.mh_att\.in_proj_weight", "cbr.attention.qkv.weight"),
    (r"cbr\.mh_att\.out_proj", "cbr.attention.out"),
    (r"cbr\.contra\.(query|key)", r"cbr.\1"),
    (r"cbr\.contra\.logit_scale", "cbr.logit_scale"),
)


def from_official(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename an official state dict to that of `SCORER`, with `cbr_weight=0` if it has no CBR."""
    last_layer = count_layers(state, r"change_detector_state\.scorer\.(\d+)\.") - 1
    scale = r"change_detector_state\.scorer\.{}\.attention\.logit_scale"
    scale_rules = [(scale.format(last_layer), "logit_scale"), (scale.format(r"\d+"), None)]
    return rename(state, [*scale_rules, *_RULES], "SCORER")


def official_sizes(state: State, options: Mapping[str, Any], tables: State) -> Sizes:
    """Hyperparameters of SCORER; official checkpoints have no CBR."""
    sizes = rcc_sizes(state, options, tables)
    sizes.model["encoder_layers"] = count_layers(state, r"change_detector_state\.scorer\.(\d+)\.")
    sizes.model["cbr_weight"] = 0.001 if any(name.startswith("cbr.") for name in state) else 0.0
    return sizes


IMPORTER = Importer(
    official_sizes,
    lambda state, stage: from_official(state),
    vocabulary_layout="rcc",
    vocabulary_file="vocab.json",
    groups=GROUPS,
    pickled_classes=("AttrDict",),
)
