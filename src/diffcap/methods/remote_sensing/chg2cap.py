"""Chg2Cap (Chang and Ghamisi, "Changes to Captions: An Attentive Network for Remote Sensing Change Captioning", IEEE TIP 2023).

Letters: B pairs, N positions of the grid, T text positions, C feature channels, A width of the encoder's attention, D width of
the decoder, V vocabulary.
"""

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffcap.checkpoints import importing
from diffcap.features.preprocessing import ResizeNormalize
from diffcap.methods.remote_sensing import parts
from diffcap.methods.remote_sensing.resnet import BatchNormMode, Normalization, ResNetEncoder
from diffcap.models.captioner import constructor_arguments
from diffcap.models.change_head import ChangeHead
from diffcap.models.decoder import END, NULL, START, BlockOutput, PostNormBlock
from diffcap.models.layers import BlockMemory, KeyValue, Linear, Segments, check_shape, init_xavier_

Cache = tuple[list[KeyValue], Tensor]  # keys and values of the P words so far; mask (B, P), True for words except NULL


class KeyAttention(nn.Module):
    """Self-attention whose values are its keys (authors' code, which stores an unused projection for values)."""

    def __init__(self, channels: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"attention_width {width} is not a multiple of heads {heads}")
        self.heads = heads
        self.dropout = dropout
        self.query = Linear(channels, width, bias=False)
        self.key = Linear(channels, width, bias=False)
        self.out = Linear(width, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Attend from each of the tokens (B, N, C) to all of them: (B, N, C)."""
        query = self.query(x).unflatten(2, (self.heads, -1)).transpose(1, 2)  # (B, heads, N, A / heads)
        key = self.key(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, key, dropout_p=dropout)
        return self.out(attended.transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    """A layer that encodes each image on its own, then a layer for the concatenated channels of both images."""

    def __init__(self, channels: int, width: int, heads: int, ffn: int, dropout: float) -> None:
        super().__init__()
        self.single = parts.PostNormLayer(KeyAttention(channels, width, heads, dropout), channels, ffn, dropout)
        self.pair = parts.PostNormLayer(KeyAttention(2 * channels, width, heads, dropout), 2 * channels, ffn, dropout)

    def forward(
        self, before: Tensor, after: Tensor, first_before: Tensor, first_after: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Encode both images (B, N, C): (B, N, C) each. `first_before` and `first_after`, the first layer's inputs, are added to them."""
        before = self.single(before) + before
        after = self.single(after) + after
        new_before, new_after = self.pair(torch.cat([before, after], 2)).chunk(2, 2)
        return new_before + first_before, new_after + first_after


class OuterResidualBlock(PostNormBlock):
    """A post-norm decoder block, with its input added to its output (authors' code)."""

    def forward(self, x: Tensor, memory: BlockMemory, mask: Tensor | None, past_segments: Segments) -> BlockOutput:
        """Run words x (B, T, D). They attend to visual tokens in `memory`, and to words in `past_segments` and x where `mask` is True."""
        output = super().forward(x, memory, mask, past_segments)
        return output._replace(hidden=output.hidden + x)


class Chg2Cap(parts.PixelOrFeatureCaptioner):
    """Chg2Cap: hierarchical self-attention over both images, a residual block with their cosine similarity, a decoder.

    The defaults are those of the authors' code. `before` and `after` are feature maps, or pixels if `backbone` is set.

    Args:
        vocabulary_size: V. Ids: 0 padding, 1 unknown word, 2 start, 3 end, then the words.
        feature_channels, grid: channels, rows and columns of the input: C = 2048 and 8 x 8 for the features of ResNet-101's
            layer4; 3 and the images' height and width with `backbone`.
        max_length: positions of a caption, start and end included (41; 27 on Dubai-CC).
        table: lengths of the position tables for the grid's rows and columns (16 and 16; a grid of 8 x 8 uses the first 8 of each).
        attention_width: A (2048). ffn: inner width of the encoder's blocks (512). width: D (2048).
        heads: per attention layer (8). encoder_layers: 3. decoder_layers: 1.
        dropout: 0.1. word_dropout: rate after the positions are added to the word vectors (0.1).
        backbone: name of a torchvision ResNet, for pixels (resnet101); None: precomputed features.
        trained_layers: layers of the backbone that are trained (layer2, layer3 and layer4).
        batch_norm: mode of the backbone's frozen layers, see `ResNetEncoder`. "eval" is ours; the authors' code has "train".
        normalization: dataset whose pixel mean and deviation are used: "levir_cc" or "dubai_cc" (authors' code), or "imagenet".
        resize: height and width to which images are resized for the backbone (256 x 256 on Dubai-CC); None: no resizing.
        change_weight: factor of the losses of a `models.change_head.ChangeHead` that reads the fused tokens (ours); None: no head.
        change_types: names of the types of changes in the training data, which the head distinguishes.
    """

    bos_id = START
    eos_id = END
    vocabulary_layout = "chg2cap"

    def __init__(
        self,
        vocabulary_size: int,
        feature_channels: int = 2048,
        grid: tuple[int, int] = (8, 8),
        max_length: int = 41,
        table: tuple[int, int] = (16, 16),
        attention_width: int = 2048,
        ffn: int = 512,
        width: int = 2048,
        heads: int = 8,
        encoder_layers: int = 3,
        decoder_layers: int = 1,
        dropout: float = 0.1,
        word_dropout: float = 0.1,
        backbone: str | None = None,
        trained_layers: tuple[str, ...] = ("layer2", "layer3", "layer4"),
        batch_norm: BatchNormMode = "eval",
        normalization: Normalization = "levir_cc",
        resize: tuple[int, int] | None = None,
        change_weight: float | None = None,
        change_types: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__()
        self.hyperparameters = constructor_arguments(locals())
        self.images = None
        if backbone is not None:
            pixel_options = normalization, trained_layers, batch_norm
            self.images = ResNetEncoder(backbone, "layer4", grid, *pixel_options, resize=resize)
            feature_channels = self.images.channels
            grid = self.images.grid
        if table[0] < grid[0] or table[1] < grid[1]:
            remedy = "the features hold pixels, so set backbone" if feature_channels == 3 else "enlarge it"
            raise ValueError(f"table is {tuple(table)}, smaller than the grid {tuple(grid)} of the features; {remedy}")
        self.channels = feature_channels
        self.grid = (grid[0], grid[1])
        row_channels = feature_channels // 2  # the other channels of a position's vector are for its column
        self.rows = nn.Embedding(table[0], row_channels)
        self.columns = nn.Embedding(table[1], feature_channels - row_channels)
        self.encoder = nn.ModuleList(
            EncoderLayer(feature_channels, attention_width, heads, ffn, dropout) for _ in range(encoder_layers)
        )
        for part in (self.rows, self.columns, self.encoder):
            init_xavier_(part)
        self.fusion = Linear(2 * feature_channels, width)
        self.residual = parts.ResidualBlock(width, width // 2)
        block = OuterResidualBlock(width, heads, 4 * width, dropout)  # 4: authors' code
        self.decoder = parts.CausalWordDecoder(
            vocabulary_size, max_length, width, block, decoder_layers, dropout, word_dropout
        )
        if change_weight:
            self.change_head = ChangeHead(width, change_types, change_weight)

    def encode_images(self, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """Encode b before and B after images, pixels or feature maps, as tokens (B, w h, C) each, column by column.

        This order matters, because the authors' code exchanges rows and columns before its 3 x 3 convolutions.
        """
        maps = self.compute_maps(before, after)
        for image in maps:
            check_shape("features", image, self.channels, *self.grid)
        rows, columns = self.grid
        column_vectors = self.columns.weight[:columns].expand(rows, -1, -1)
        row_vectors = self.rows.weight[:rows, None].expand(-1, columns, -1)
        position = torch.cat([column_vectors, row_vectors], -1).flatten(0, 1)  # (N, C)
        first_before, first_after = (image.flatten(2).transpose(1, 2) + position for image in maps)
        before, after = first_before, first_after
        for layer in self.encoder:
            before, after = layer(before, after, first_before, first_after)
        before = before.unflatten(1, self.grid).transpose(1, 2)  # (B, w, h, C)
        after = after.unflatten(1, self.grid).transpose(1, 2)
        return before.flatten(1, 2), after.flatten(1, 2)

    def encode_tokens(self, before: Tensor, after: Tensor) -> Tensor:
        """Encode b before and B after images, pixels or feature maps, as fused tokens (B, w h, D), column by column.

        The cosine similarity of both images at a position is added to all channels there.
        """
        before, after = self.encode_images(before, after)
        similarity = F.cosine_similarity(before, after, dim=2)[..., None]  # (B, N, 1)
        fused = self.fusion(torch.cat([before, after], 2) + similarity)
        return self.residual(fused, self.grid[::-1])

    def step(self, tokens: Tensor, memory: list[KeyValue], cache: Cache | None) -> tuple[Tensor, Cache]:
        """Score the next word, see `Captioner.step`. No word attends to NULL."""
        past_key_values = None
        is_key = tokens[:, None] != NULL
        if cache is not None:
            past_key_values, past_is_key = cache
            is_key = torch.cat([past_is_key, is_key], 1)
        last, key_values = self.decoder(tokens[:, None], memory, past_key_values, is_key)
        return self.decoder.compute_logits(last.hidden[:, 0]), (key_values, is_key)

    def is_key(self, tokens: Tensor) -> Tensor:
        """Return a mask (B, T) of the words that are attended to: all except NULL and END (authors' code)."""
        return (tokens != NULL) & (tokens != END)

    def arrange_maps(self, attention: Tensor) -> Tensor:
        """Arrange the attention (B, T, w h) to the fused tokens as maps (B, T, h, w)."""
        return attention.unflatten(2, self.grid[::-1]).transpose(2, 3)


def _block_rules(number: int, name: str) -> tuple[importing.Rule, ...]:
    """Return rules to rename block `number` of every encoder layer in the authors' code to the attribute `name` of `EncoderLayer`."""
    official = rf"encoder_trans_dict\.selftrans\.(\d+)\.{number}\."
    ours = rf"encoder.\1.{name}."
    return (
        (official + r"att\.to_q", ours + "attention.query"),
        (official + r"att\.to_k", ours + "attention.key"),
        (official + r"att\.to_v", None),  # stored, not used: the values are the keys
        (official + r"att\.to_out\.0", ours + "attention.out"),
        (official + r"feedforward\.net\.([03])", ours + r"ffn.\2"),
        (official + "norm([12])", ours + r"norm\2"),
    )


_RULES = (
    (r"encoder_trans_dict\.h_embedding", "columns"),  # the authors' names are exchanged
    (r"encoder_trans_dict\.w_embedding", "rows"),
    *_block_rules(0, "single"),
    *_block_rules(1, "pair"),
    (r"decoder_dict\.Conv1", "fusion"),
    parts.residual_rule(r"decoder_dict\.LN", "residual"),
    *parts.decoder_rules("decoder_dict", "multihead_attn"),
    *parts.backbone_rules(r"encoder_dict\.cnn"),
)


def official_sizes(
    state: importing.State, options: importing.ImportOptions, grid: tuple[int, int] = (8, 8)
) -> importing.Sizes:
    """Return Chg2Cap's hyperparameters, from the authors' state dict and the user's options.

    If the state dict has a ResNet, `options.dataset` determines the normalisation of the pixels. `grid`: rows and columns of the features.
    """
    attention_width, channels = state["encoder_trans_dict.selftrans.0.0.att.to_k.weight"].shape
    positions = [value for name, value in state.items() if re.fullmatch(r"decoder_dict\.(.*\.)?pe", name)]
    max_length = options.max_length or (len(positions[0]) if positions else 41)
    model: dict[str, Any] = {
        "vocabulary_size": len(state["decoder_dict.vocab_embedding.weight"]),
        "feature_channels": channels,
        "grid": list(grid),
        "max_length": max_length,
        "table": [len(state[f"encoder_trans_dict.{side}_embedding.weight"]) for side in "wh"],  # exchanged names
        "attention_width": attention_width,
        "ffn": len(state["encoder_trans_dict.selftrans.0.0.feedforward.net.0.weight"]),
        "width": len(state["decoder_dict.Conv1.weight"]),
        "heads": options.heads,
        "encoder_layers": importing.count_layers(state, r"encoder_trans_dict\.selftrans\.(\d+)\."),
        "decoder_layers": importing.count_layers(state, r"decoder_dict\.transformer\.layers\.(\d+)\."),
    }
    network = parts.resnet_name(state, r"encoder_dict\.cnn")
    if network is None:
        shape = (channels, grid[0], grid[1])
        features = importing.resnet_features("layer4", shape, ResizeNormalize(parts.IMAGE_SIZE))
        return importing.Sizes(model, max_length, features)
    is_dubai = options.dataset == "dubai_cc"
    image_size = (50, 50) if is_dubai else parts.IMAGE_SIZE
    model |= {"backbone": network, "feature_channels": 3, "grid": list(image_size)}
    if is_dubai:
        model |= {"normalization": "dubai_cc", "resize": list(parts.IMAGE_SIZE)}
    return importing.Sizes(model, max_length, importing.pixel_features(image_size))


IMPORTER = importing.Importer(
    official_sizes,
    lambda state, stage: parts.restore_convolutions(importing.rename(state, _RULES, "Chg2Cap")),  # for every stage
    vocabulary_layout="chg2cap",
    vocabulary_file="vocab.json",
    groups=("encoder_dict", "encoder_trans_dict", "decoder_dict"),  # the state dicts in a checkpoint
)
