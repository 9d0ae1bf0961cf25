"""SCORER with CBR (Tu, Li, Su, Zha, Yan and Huang, "Self-supervised Cross-view Representation Reconstruction for Change
Captioning", ICCV 2023).

Where the paper and the authors' code differ, the code's version is the default and the paper's is an option.

Letters: B pairs, b pairs of a group (the change pairs of a batch, or the distractor pairs of the same before images, in which only the
viewpoint changed), N visual tokens of one image, T text positions, D width, H heads, C feature channels, V vocabulary.
"""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffcap.checkpoints.importing import ImportOptions, Sizes, State, count_layers, rename
from diffcap.losses.gather import gather_rows, global_mean, world_size
from diffcap.methods import rcc
from diffcap.methods.scorer.losses import cross_view_nce, token_matching
from diffcap.models.captioner import Batch, constructor_arguments
from diffcap.models.change_head import ChangeHead
from diffcap.models.cross_image import CrossImageCaptioner, CrossImageLayer, CrossImageOutput
from diffcap.models.decoder import NULL, BlockOutput, WordDecoder, next_word_losses
from diffcap.models.fast import add_repeated, linear_of_concatenation
from diffcap.models.layers import Attention, BlockMemory, Dropout, GridEmbedding, Linear, Segments, repeat_batch
from diffcap.utils.linear import linear

EPS = 1e-6  # of the layer norms (authors' code)


class SCORERBlock(nn.Module):
    """One decoder block (section 3.3): self-attention, cross-attention, and an FFN as wide as the model.

    For its input x, the FFN computes g = GELU(W1 x), then `LN(W2 g + g)` if `ffn_residual` is "gelu" (authors' code), else `LN(W2 g + x)`.
    """

    def __init__(self, width: int, heads: int, dropout: float, ffn_residual: Literal["gelu", "input"]) -> None:
        super().__init__()
        self.self_attention = Attention(width, heads, dropout, out_proj=False)
        self.cross = Attention(width, heads, dropout, out_proj=False)
        self.inner, self.outer = Linear(width, width), Linear(width, width)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width, EPS) for _ in range(3))
        self.dropout, self.ffn_residual = Dropout(dropout), ffn_residual

    def forward(self, x: Tensor, memory: BlockMemory, mask: Tensor | None, past_segments: Segments) -> BlockOutput:
        """Run words x (B, T, D). They attend to visual tokens in `memory`, and to words in `past_segments` and x where `mask` is True."""
        attended, new_key_values = self.self_attention(x, mask, past_segments)
        words = self.norm1(x + attended)
        visual = self.norm2(words + self.cross.attend_memory(words, memory))
        inner = F.gelu(self.inner(visual))
        residual = inner if self.ffn_residual == "gelu" else visual
        hidden = self.norm3(self.dropout(self.outer(inner)) + residual)
        return BlockOutput(words, visual, hidden, new_key_values)


class CBR(nn.Module):
    """Cross-modal backward reasoning: predict the after image from the before image and the sentence (section 3.4)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.join = Linear(2 * width, width)  # its input: channels of an image token, then those of the sentence
        self.attention = Attention(width, heads, bias=False)
        nn.init.xavier_uniform_(self.attention.qkv.weight)  # as torch's MultiheadAttention
        self.out = Linear(width, width)
        self.query, self.key = Linear(width, width), Linear(width, width)
        self.logit_scale = nn.Parameter(torch.ones(()))

    def forward(self, before: Tensor, sentences: Tensor) -> list[Tensor]:
        """Predict after images: `query(out(attention(x)))`, where `x` is `join([token; sentence])` at every position of an image.

        To save time, consecutive linear layers are multiplied into one matrix. The sentence vector is the same at every position:
        in the keys it changes no attention probability, and in the values it adds the same vector to every output. So keys and
        values are computed from the images alone, once for all groups, and the sentence's part of the output is added at the end.

        Args:
            before: (b, N, D) embedded images. sentences: (B, D); row i is joined to image i modulo b.

        Returns:
            A tensor (b, N, D) for each group, to be compared with `self.key(after)` of the real after images.
        """
        attention = self.attention
        width = before.shape[2]
        qkv_weight = attention.qkv.weight
        query_weight, _, value_weight = qkv_weight.split(width)
        join_image_weight, join_sentence_weight = self.join.weight.split(width, 1)
        output_weight = self.query.weight @ self.out.weight @ attention.out.weight  # type: ignore[operator]
        output_bias = linear(self.out.bias, self.query.weight, self.query.bias)
        image_query, key, value = linear(before, qkv_weight @ join_image_weight).split(width, 2)  # (b, N, D) each
        key = attention.split_heads(key)
        value = attention.split_heads(value)
        predicted = []
        joined_sentences = linear(sentences, join_sentence_weight, self.join.bias)[:, None]  # (B, 1, D)
        for sentence in joined_sentences.split(len(before)):
            query = attention.split_heads(image_query + linear(sentence, query_weight))
            attended = attention.merge_heads(F.scaled_dot_product_attention(query, key, value))  # (b, N, D)
            sentence_output = linear(linear(sentence, value_weight), output_weight, output_bias)  # (b, 1, D)
            predicted.append(linear(attended, output_weight).add_(sentence_output))
        return predicted


class SCORER(CrossImageCaptioner):
    """SCORER: an encoder that reconstructs each image from the other, a decoder, and the losses of cross-view contrast and CBR.

    Args:
        vocabulary_size, feature_channels: V, C. grid: rows and columns of the feature map.
        max_length: positions of a caption (CLEVR-Change: 24). CBR's sentence vector is the sum over the words divided by this number.
        width: D (512). heads: 8. encoder_layers: paper: 2 on CLEVR-Change, 1 on CLEVR-DC, 3 on Spot-the-Diff, 2 on Image Editing Request.
        decoder_layers: 2. word_width: channels of the word vectors (300). dropout: rate (authors' code: 0.1).
        coordinates: append x and y channels to the features (authors' code: on CLEVR-Change).
        difference: "reconstruction", or the paper's baseline "subtraction", which replaces the encoder by before - after.
        cross_view_weight: lambda_v (0.1 on CLEVR-Change). cbr_weight: lambda_m (0.001 on CLEVR-Change, authors' code).
        mtm: multi-head token-wise matching: "collapsed", one dot product over all heads' channels (authors' code), or
            "per_head", the mean over the heads (paper, which does not say how the heads are combined).
        cbr_trainable: train the layers of CBR. In the authors' code, these layers keep their random initial weights.
        decoder_ffn_residual: see `SCORERBlock`.
        decoder_std: standard deviation of the decoder's initial weights (authors' code: 0.02, for a width of 512).
        position_std: standard deviation of the initial position embedding (authors' code: 1, with which positions dominate
            features of few channels; the method DIRL has Xavier initialisation instead).
        change_weight: factor of the losses of a `models.change_head.ChangeHead` that reads the fused tokens (ours); None: no head.
        change_types: names of the types of changes in the training data, which the head distinguishes.
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
        change_weight: float | None = None,
        change_types: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__()
        self.hyperparameters = constructor_arguments(locals())
        self.embedding = GridEmbedding(feature_channels, grid, width, coordinates)
        for position_embedding in (self.embedding.columns, self.embedding.rows):
            nn.init.normal_(position_embedding.weight, std=position_std)
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
            if isinstance(module, nn.Linear | nn.Embedding):  # also the vector of padding, which is never trained
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
        if change_weight:
            self.change_head = ChangeHead(width, change_types, change_weight)

    def fuse(self, before: Tensor, after: Tensor, encoded: CrossImageOutput | None) -> Tensor:
        """Fuse both images, each reconstructed from the other (`encoded`), to (B, N, D): `ReLU(W [before; after])` (section 3.2)."""
        if encoded is None:  # the baseline "subtraction"
            return self.fusion(add_repeated(-after, before))
        fused = linear_of_concatenation(self.fusion[0], encoded.before, encoded.after)  # type: ignore[arg-type]
        return self.fusion[1:](fused)

    def merge_query_keys(self, encoded: CrossImageOutput) -> list[Tensor]:
        """Merge the heads of the last encoder layer's queries and keys: those of before images, then of after images; (B, N, D) each."""
        merged = [Attention.merge_heads(heads) for heads in (*encoded.before_query_key, *encoded.after_query_key)]
        return [repeat_batch(tokens, len(encoded.after)) for tokens in merged]

    def cross_view_similarities(
        self, before_query: Tensor, before_key: Tensor, after_query: Tensor, after_key: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return scaled similarities of before with after images, and of after with before images (eq. 2 and 3): (b, all b) each.

        The arguments are one group's rows of `merge_query_keys`. A result has rows for this rank's images, columns for all ranks' images.
        """
        assert self.logit_scale is not None
        scale = self.logit_scale.exp()
        return scale * self._match(before_query, after_key), scale * self._match(after_query, before_key)

    def _match(self, query: Tensor, key: Tensor) -> Tensor:
        """Match queries and keys, (b, N, D) each, by multi-head token-wise matching (MTM): unscaled similarities (b, all b)."""
        key, _ = gather_rows(key)
        if self.mtm == "collapsed":
            return token_matching(query, key)
        num_heads: Any = self.encoder[-1].attention.heads  # type: ignore[union-attr]
        head_pairs = zip(query.chunk(num_heads, 2), key.chunk(num_heads, 2))
        return torch.stack([token_matching(head_query, head_key) for head_query, head_key in head_pairs]).mean(0)

    def predict_after_images(
        self, before: Tensor, after: Tensor, hidden: Tensor, tokens: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Return for each group the after images that CBR predicts, and the real ones: (b, N, D) each.

        `before` (b, N, D) and `after` (B, N, D) are embedded images; `hidden` (B, T, D) is the output of the last decoder block.
        """
        assert self.cbr is not None
        is_word = (tokens != NULL).to(hidden.dtype)[..., None]  # (B, T, 1)
        sentences = (hidden * is_word).sum(1) / self.max_length  # (B, D); authors' code: not the number of words
        return list(zip(self.cbr(before, sentences), self.cbr.key(after).split(len(before))))

    def cbr_similarities(self, predicted: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """Return scaled similarities of predicted with all real images, and of real with all predicted images: (b, all b) each."""
        assert self.cbr is not None
        scale = self.cbr.logit_scale.exp()
        similarity = scale * token_matching(predicted, gather_rows(real)[0])
        if world_size() == 1:
            return similarity, similarity.T
        return similarity, scale * token_matching(real, gather_rows(predicted)[0])

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Compute `caption + lambda_v cross_view + lambda_m cbr` over the global batch (section 3.5), each a mean over the groups."""
        before = self.embedding(batch["before"])  # (b, N, D)
        after = self.embedding(batch["after"])  # (B, N, D)
        tokens = batch["tokens"]
        encoded = self.run_encoder(before, after)
        fused = self.fuse(before, after, encoded)
        hidden = self.decoder(tokens, fused).last_block.hidden  # (B, T, D)
        logits = self.decoder.compute_logits(hidden)
        word_losses = [next_word_losses(logits, tokens, words) for words in self.find_words(batch)]
        loss = torch.stack([global_mean(losses) for losses in word_losses]).mean()
        parts = {"caption_loss": loss}
        if self.logit_scale is not None and encoded is not None:
            if self.training:
                with torch.no_grad():
                    self.logit_scale.clamp_(max=math.log(100))
            # `split` is faster than slices, whose gradient is a sum of zero-padded tensors.
            group_query_keys = zip(*(part.split(len(before)) for part in self.merge_query_keys(encoded)))
            cross_view_losses = [two_way_nce(*self.cross_view_similarities(*tensors)) for tensors in group_query_keys]
            parts["cross_view_loss"] = torch.stack(cross_view_losses).mean()
            loss = loss + self.cross_view_weight * parts["cross_view_loss"]
        if self.cbr is not None:
            group_images = self.predict_after_images(before, after, hidden, tokens)
            cbr_losses = [two_way_nce(*self.cbr_similarities(predicted, real)) for predicted, real in group_images]
            parts["cbr_loss"] = torch.stack(cbr_losses).mean()
            loss = loss + self.cbr_weight * parts["cbr_loss"]
        losses = {"loss": loss, **{name: value.detach() for name, value in parts.items()}}
        return self.add_change_losses(losses, self.change_losses(fused, batch))


def two_way_nce(forward: Tensor, backward: Tensor) -> Tensor:
    """Return the mean of both directions' contrastive losses (eq. 4) over the global batch, from similarities (b, all b) each."""
    return (global_mean(cross_view_nce(forward)) + global_mean(cross_view_nce(backward))) / 2


# Regular expressions of parameter names in the authors' checkpoints, and our names. A query, key or value (`qkv:\2`) becomes rows of `qkv`.
# The authors' checkpoints have no CBR; the prefix `cbr.` is our assumption.
_DECODER_LAYER = r"speaker_state\.core\.layer\.(\d+)\."
_RULES = (
    *rcc.RULES,  # of the modules that SCORER's and DIRL's code have in common
    (r"change_detector_state\.scorer\.(\d+)\.attention\.(query|key|value)", r"encoder.\1.attention.qkv:\2"),
    (r"change_detector_state\.scorer\.(\d+)\.attention\.layer_norm", r"encoder.\1.norm"),
    (r"change_detector_state\.embed_fc\.0", "fusion.0"),
    (_DECODER_LAYER + r"self_attention\.(query|key|value)", r"decoder.blocks.\1.self_attention.qkv:\2"),
    (_DECODER_LAYER + r"dec_enc_attention\.(query|key|value)", r"decoder.blocks.\1.cross.qkv:\2"),
    (_DECODER_LAYER + r"hidden_intermediate\.dense", r"decoder.blocks.\1.inner"),
    (_DECODER_LAYER + r"output\.dense", r"decoder.blocks.\1.outer"),
    (_DECODER_LAYER + r"output\.LayerNorm", r"decoder.blocks.\1.norm3"),
    (r"cbr\.conv1", "cbr.join"),
    (r"cbr\.conv2\.0", "cbr.out"),
    (r"cbr\.mh_att\.in_proj_weight", "cbr.attention.qkv.weight"),
    (r"cbr\.mh_att\.out_proj", "cbr.attention.out"),
    (r"cbr\.contra\.(query|key)", r"cbr.\1"),
    (r"cbr\.contra\.logit_scale", "cbr.logit_scale"),
)


def from_official(state: State) -> dict[str, Tensor]:
    """Rename the authors' parameters to those of `SCORER`. If those of CBR are missing, build the model with `cbr_weight=0`."""
    last_layer = count_layers(state, r"change_detector_state\.scorer\.(\d+)\.") - 1
    scale = r"change_detector_state\.scorer\.{}\.attention\.logit_scale"
    scale_rules = [(scale.format(last_layer), "logit_scale"), (scale.format(r"\d+"), None)]  # None: unused, left out
    return rename(state, [*scale_rules, *_RULES], "SCORER")


def official_sizes(state: State, options: ImportOptions, coordinates: bool | None = None) -> Sizes:
    """Return SCORER's hyperparameters, from the authors' state dict and the user's options; `coordinates`: see `rcc.common_sizes`."""
    sizes = rcc.common_sizes(state, options, coordinates)
    sizes.model["encoder_layers"] = count_layers(state, r"change_detector_state\.scorer\.(\d+)\.")
    sizes.model["cbr_weight"] = 0.0  # the authors' checkpoints have no CBR
    return sizes


IMPORTER = rcc.importer(official_sizes, lambda state, stage: from_official(state))  # for every stage
