"""RSICCformer (Liu, Zhao, Chen, Zou and Shi, "Remote Sensing Image Change Captioning With Dual-Branch Transformers: A New
Method and a Large Scale Dataset", IEEE TGRS 2022).

Letters: B pairs, N positions of the grid, T text positions, d width of the encoder, C feature channels, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn

from diffcap.checkpoints import importing
from diffcap.features.preprocessing import ResizeNormalize
from diffcap.methods.remote_sensing import parts
from diffcap.methods.remote_sensing.resnet import BatchNormMode, ResNetEncoder
from diffcap.models.captioner import constructor_arguments
from diffcap.models.change_head import ChangeHead
from diffcap.models.decoder import PostNormBlock
from diffcap.models.layers import Attention, GridEmbedding, init_attention_, init_xavier_

FFN_RATIO = 4  # inner width of every FFN, relative to its input (authors' code)


class DifferenceLayer(parts.PostNormLayer):
    """One encoder layer: both images attend to the difference between them, with the same weights (authors' code).

    The tokens (B, 2 N, d) are those of the before image, then of the after image. The difference is the key and the value,
    although the name of the authors' class calls it the query.
    """

    attention: Attention

    def attend(self, x: Tensor) -> Tensor:
        """Attend from tokens x (B, 2 N, d) of both images to their difference: (B, 2 N, d)."""
        before, after = x.chunk(2, 1)
        query = self.attention.project_query(x)
        return self.attention.attend(query, self.attention.project_key_value(after - before))


class Merge(nn.Module):
    """One step of merging the outputs (2 d channels) of all encoder layers: `LayerNorm(ResidualBlock(merged + layer output))`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.residual, self.norm = parts.ResidualBlock(2 * width, width), nn.LayerNorm(2 * width)

    def forward(self, merged: Tensor, grid: tuple[int, int]) -> Tensor:
        """Apply the step to `merged` (B, N, 2 d), the sum of the merged tokens and the layer output: (B, N, 2 d)."""
        return self.norm(self.residual(merged, grid))


class RSICCformer(parts.PixelOrFeatureCaptioner):
    """RSICCformer: images that attend to their difference, residual blocks that merge the layers, a transformer decoder.

    The defaults are those of the authors' code. `before` and `after` are feature maps, or pixels if `backbone` is set.

    Args:
        vocabulary_size: V. Ids: 0 padding, then the words; the last three are the unknown word, start and end.
        feature_channels, grid: channels, rows and columns of the input: 1024 and 14 x 14 for the features of ResNet-101's
            layer3, pooled; 3 and the images' height and width with `backbone`.
        max_length: positions of a caption, start and end included (52).
        width: d (512); the decoder's width is 2 d. heads: per attention layer (8). encoder_layers: 3. decoder_layers: 1.
        dropout: 0.5. word_dropout: rate after the positions are added to the word vectors (0.1).
        backbone: name of a torchvision ResNet, for pixels (resnet101); None: precomputed features.
        trained_layers: layers of the backbone that are trained (none; layer2 and layer3 with the authors' flag for fine-tuning).
        batch_norm: mode of the backbone's frozen layers, see `ResNetEncoder`. "eval" is ours; the authors' code has "train", so
            the running statistics in its checkpoints are not those of ImageNet.
        pool: rows and columns of the backbone's pooled map (14, 14).
        change_weight: factor of the losses of a `models.change_head.ChangeHead` that reads the merged tokens (ours); None: no head.
        change_types: names of the types of changes in the training data, which the head distinguishes.
    """

    vocabulary_layout = "rsicc"

    def __init__(
        self,
        vocabulary_size: int,
        feature_channels: int = 1024,
        grid: tuple[int, int] = (14, 14),
        max_length: int = 52,
        width: int = 512,
        heads: int = 8,
        encoder_layers: int = 3,
        decoder_layers: int = 1,
        dropout: float = 0.5,
        word_dropout: float = 0.1,
        backbone: str | None = None,
        trained_layers: tuple[str, ...] = (),
        batch_norm: BatchNormMode = "eval",
        pool: tuple[int, int] = (14, 14),
        change_weight: float | None = None,
        change_types: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__()
        self.hyperparameters = constructor_arguments(locals())
        self.bos_id, self.eos_id = vocabulary_size - 2, vocabulary_size - 1
        self.images = None
        if backbone is not None:
            self.images = ResNetEncoder(backbone, "layer3", grid, "imagenet", trained_layers, batch_norm, pool)
            feature_channels = self.images.channels
            grid = self.images.grid
        self.embedding = GridEmbedding(feature_channels, grid, width, has_coordinates=False)
        self.encoder = nn.ModuleList(
            DifferenceLayer(Attention(width, heads, dropout), width, FFN_RATIO * width, dropout)
            for _ in range(encoder_layers)
        )
        self.merge = nn.ModuleList(Merge(width) for _ in range(encoder_layers))
        for part in (self.embedding, self.encoder, self.merge):
            init_attention_(part)
            init_xavier_(part)
        block = PostNormBlock(2 * width, heads, FFN_RATIO * 2 * width, dropout)
        self.decoder = parts.CausalWordDecoder(
            vocabulary_size, max_length, 2 * width, block, decoder_layers, dropout, word_dropout
        )
        if change_weight:
            self.change_head = ChangeHead(2 * width, change_types, change_weight)

    def encode_tokens(self, before: Tensor, after: Tensor) -> Tensor:
        """Encode b before and B after images, pixels or feature maps, as the merged tokens (B, N, 2 d)."""
        maps = self.compute_maps(before, after)
        x = torch.cat([self.embedding(image) for image in maps], 1)
        outputs = []
        for layer in self.encoder:
            x = layer(x)
            outputs.append(torch.cat(x.chunk(2, 1), 2))  # channels of both images: (B, N, 2 d)
        merged = torch.zeros_like(outputs[0])
        for step, output in zip(self.merge, outputs):
            merged = step(merged + output, self.embedding.grid)
        return merged

    def arrange_maps(self, attention: Tensor) -> Tensor:
        """Arrange the attention (B, T, N) to the merged tokens as maps (B, T, rows, columns)."""
        return attention.unflatten(2, self.embedding.grid)


_LAYER = r"encoder_feat\.transformer\.(\d+)\."
_RULES = (
    (r"encoder_feat\.w_embedding", "embedding.columns"),
    (r"encoder_feat\.h_embedding", "embedding.rows"),
    (r"encoder_feat\.projection", "embedding.projection"),
    (_LAYER + r"attention\.in_proj_(weight|bias)", r"encoder.\1.attention.qkv.\2"),
    (_LAYER + r"attention\.out_proj", r"encoder.\1.attention.out"),
    (_LAYER + "norm([12])", r"encoder.\1.norm\2"),
    (_LAYER + "linear1", r"encoder.\1.ffn.0"),
    (_LAYER + "linear2", r"encoder.\1.ffn.3"),
    parts.residual_rule(r"encoder_feat\.resblock\.(\d+)", r"merge.\1.residual"),
    (r"encoder_feat\.LN\.(\d+)", r"merge.\1.norm"),
    *parts.decoder_rules("decoder", "multihead_attn2"),
    *parts.backbone_rules(r"encoder_image\.net"),
    # Parameters that are stored, but not used.
    (r"encoder_feat\.(?:embedding_1D|projection[234])", None),
    (r"decoder\.transformer\.layers\.\d+\.(?:self_attn2|multihead_attn3?)\.(?:in_proj_(?:weight|bias)|out_proj)", None),
)


# Classes of the pickled modules and optimizers in the authors' checkpoint; they are from torch, torchvision and the authors.
_CLASSES = (
    *("Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d", "AdaptiveAvgPool2d", "Softmax", "Bottleneck", "BasicBlock"),
    *("Linear", "NonDynamicallyQuantizableLinear", "_LinearWithBias", "MultiheadAttention", "LayerNorm", "Dropout"),
    *("Embedding", "Sequential", "ModuleList", "TransformerDecoder", "Adam", "defaultdict", "dict"),
    *("CNN_Encoder", "MCCFormers_diff_as_Q", "CrossTransformer", "resblock"),
    *("DecoderTransformer", "Mesh_TransformerDecoderLayer", "PositionalEncoding"),
)


def official_sizes(state: importing.State, options: importing.ImportOptions) -> importing.Sizes:
    """Return the hyperparameters of RSICCformer. If the authors' state dict has a ResNet, the model reads pixels."""
    projection_weight = state["encoder_feat.projection.weight"]
    grid = [len(state[f"encoder_feat.{side}_embedding.weight"]) for side in "hw"]
    max_length = options.max_length or len(state["decoder.position_encoding.embedding_1D.weight"])
    model: dict[str, Any] = {
        "vocabulary_size": len(state["decoder.vocab_embedding.weight"]),
        "feature_channels": projection_weight.shape[1],
        "grid": grid,
        "max_length": max_length,
        "width": len(projection_weight),
        "heads": options.heads,
        "encoder_layers": importing.count_layers(state, r"encoder_feat\.transformer\.(\d+)\."),
        "decoder_layers": importing.count_layers(state, r"decoder\.transformer\.layers\.(\d+)\."),
    }
    network = parts.resnet_name(state, r"encoder_image\.net")
    if network is None:
        shape = (projection_weight.shape[1], grid[0], grid[1])
        features = importing.resnet_features("layer3", shape, ResizeNormalize(parts.IMAGE_SIZE), shape[1:])
        return importing.Sizes(model, max_length, features)
    model |= {"backbone": network, "pool": grid, "feature_channels": 3, "grid": list(parts.IMAGE_SIZE)}
    return importing.Sizes(model, max_length, importing.pixel_features(parts.IMAGE_SIZE))


IMPORTER = importing.Importer(
    official_sizes,
    lambda state, stage: parts.restore_convolutions(importing.rename(state, _RULES, "RSICCformer")),  # for every stage
    vocabulary_layout="rsicc",
    vocabulary_file="WORDMAP_*.json",
    groups=("encoder_image", "encoder_feat", "decoder"),  # the modules in a checkpoint
    pickled_classes=_CLASSES,
)
