"""Parts that RSICCformer and Chg2Cap share: layers, the captioners' base class, and rules to rename the authors' parameters.

Letters: B pairs, b before images (pair i has before image i modulo b, see `repeat_batch`), N positions of the grid, T text positions,
D width, C feature channels.
"""

import copy
import re
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffcap.checkpoints.importing import Rule, State, count_layers
from diffcap.methods.remote_sensing.resnet import GlobalBatchNorm2d, ResNetEncoder
from diffcap.models.captioner import AttentionMaps, Batch, Captioner
from diffcap.models.decoder import WordDecoder, take_flat
from diffcap.models.layers import Dropout, KeyValue, Linear, init_attention_, repeat_batch
from diffcap.utils.errors import DiffcapError


class ResidualBlock(nn.Module):
    """`relu(x + branch(x))`; the branch has convolutions of 1 x 1, 3 x 3 and 1 x 1, each with batch norm (authors' code)."""

    def __init__(self, channels: int, inner_channels: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(channels, inner_channels, 1),
            GlobalBatchNorm2d(inner_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner_channels, inner_channels, 3, padding=1),
            GlobalBatchNorm2d(inner_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner_channels, channels, 1),
            GlobalBatchNorm2d(channels),
        )

    def forward(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        """Apply the block to tokens (B, N, D), row by row on the `grid` (rows, columns): (B, N, D)."""
        maps = tokens.transpose(1, 2).unflatten(2, grid)
        return F.relu(maps + self.branch(maps)).flatten(2).transpose(1, 2)


class PostNormLayer(nn.Module):
    """An encoder layer: `attention`, then an FFN with ReLU, each with a residual connection and a norm after it. D is `channels`."""

    def __init__(self, attention: nn.Module, channels: int, ffn: int, dropout: float) -> None:
        super().__init__()
        self.attention = attention
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.ffn = nn.Sequential(Linear(channels, ffn), Dropout(dropout), nn.ReLU(inplace=True), Linear(ffn, channels))
        self.dropout = Dropout(dropout)

    def attend(self, x: Tensor) -> Tensor:
        """Return the attention's output (B, N, D) for tokens x (B, N, D)."""
        return self.attention(x)

    def forward(self, x: Tensor) -> Tensor:
        """Encode tokens x (B, N, D): (B, N, D)."""
        x = self.norm1(x + self.dropout(self.attend(x)))
        return self.norm2(x + self.dropout(self.ffn(x)))


class CausalWordDecoder(WordDecoder):
    """A `WordDecoder` whose word vectors have the width of the blocks; the vector of padding is trained like the others.

    Args:
        vocabulary_size: V. max_length: positions of a caption, start and end included. width: D.
        block: decoder block. Every layer is a copy of it, so all layers have the same initial weights (authors' code).
        layers: number of blocks. dropout: rate before the output layer. word_dropout: rate after the positions are added.
    """

    def __init__(
        self,
        vocabulary_size: int,
        max_length: int,
        width: int,
        block: nn.Module,
        layers: int,
        dropout: float,
        word_dropout: float,
    ) -> None:
        def copy_blocks() -> Iterator[nn.Module]:
            init_attention_(block)
            for _ in range(layers):
                yield copy.deepcopy(block)

        sizes = vocabulary_size, max_length, width, width
        super().__init__(*sizes, Dropout(word_dropout), copy_blocks(), padding_idx=None, output_dropout=dropout)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)  # authors' code
        nn.init.uniform_(self.logit.weight, -0.1, 0.1)
        nn.init.zeros_(self.logit.bias)


class PixelOrFeatureCaptioner(Captioner):
    """A captioner of feature maps, or of pixels with a ResNet of its own; the loss is the mean over all words (authors' code).

    A batch may have several "after" images for a "before" image, such as those of a change and a distractor pair.
    """

    uses_adamw = False  # Adam is used (authors' code)
    images: ResNetEncoder | None  # None if the captioner reads feature maps
    decoder: CausalWordDecoder

    def compute_maps(self, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the feature maps, (B, C, h, w) each, of b before and B after images, which are pixels or feature maps.

        The ResNet runs on before and after images separately, so their statistics for batch norm in training differ (authors' code).
        """
        if self.images is not None:
            before = self.images(before)
            after = self.images(after)
        return repeat_batch(before, len(after)), after

    @abstractmethod
    def encode_tokens(self, before: Tensor, after: Tensor) -> Tensor:
        """Encode b before and B after images, which are pixels or feature maps, as the tokens (B, N, D) for the decoder."""

    @abstractmethod
    def arrange_maps(self, attention: Tensor) -> Tensor:
        """Arrange the attention to the visual tokens, (B, T, N), as maps (B, T, h, w)."""

    def is_key(self, tokens: Tensor) -> Tensor:
        """Return a mask (B, T) of the words in captions (B, T) that are attended to: all words, even padding (authors' code)."""
        return torch.ones_like(tokens, dtype=torch.bool)

    def encode(self, before: Tensor, after: Tensor) -> list[KeyValue]:
        """Compute each decoder block's keys and values of the visual tokens, see `Captioner.encode`."""
        return self.decoder.project_memory(self.encode_tokens(before, after))

    def step(self, tokens: Tensor, memory: list[KeyValue], cache: Any) -> tuple[Tensor, Any]:
        """Score the next word, see `Captioner.step`."""
        last_block, cache = self.decoder(tokens[:, None], memory, cache)
        return self.decoder.compute_logits(last_block.hidden[:, 0]), cache

    def teacher_forced_logits(self, tokens: Tensor, memory: list[KeyValue]) -> Tensor:
        """Score the words of given captions in one pass, see `Captioner.teacher_forced_logits`."""
        input_tokens = tokens[:, :-1]
        output = self.decoder(input_tokens, memory, None, self.is_key(input_tokens))
        return self.decoder.compute_logits(output.last_block.hidden)

    def attention(self, before: Tensor, after: Tensor, tokens: Tensor) -> AttentionMaps:
        """Compute the maps of the last cross-attention, averaged over the heads, see `Captioner.attention`.

        A token of the memory belongs to one position in both images, so both maps are equal.
        """
        memory = self.encode(before, after)
        maps = self.arrange_maps(self.decoder.attention(tokens, memory, self.is_key(tokens)))
        return AttentionMaps(maps, maps, None)

    def validation_losses(self, batch: Batch) -> dict[str, Tensor]:
        """Return the cross-entropies (n,), in nats, of the n words and ends of the captions; unknown words are included."""
        tokens = batch["tokens"]
        input_tokens = tokens[:, :-1]
        visual = self.encode_tokens(batch["before"], batch["after"])
        output = self.decoder(input_tokens, self.decoder.project_memory(visual), None, self.is_key(input_tokens))
        words = torch.cat(self.find_words(batch))
        logits = self.decoder.compute_logits(take_flat(output.last_block.hidden, words))
        word_losses = F.cross_entropy(logits, take_flat(tokens[:, 1:], words), reduction="none")
        return {"caption_loss": word_losses, **self.change_losses(visual, batch)}

    def check(self, data: Any) -> None:
        """Raise a DiffcapError if the data do not suit the captioner. They must be pixels if it has a ResNet, else features."""
        super().check(data)
        backbone = self.hyperparameters["backbone"]
        has_pixels = data.store.meta.get("dtype") == "uint8"
        if has_pixels != (backbone is not None):
            found, needed = ("pixels", "features") if has_pixels else ("features", "pixels")
            raise DiffcapError(
                f"{data.store_name} contains {found}, but {type(self).__name__} with model.captioner.init_args.backbone "
                f"{backbone or 'null'} needs {needed}. Give other features with BACKBONE=, or change that setting in a settings file."
            )

    def load_initial(self, weights: str | None, vocabulary: Any) -> None:
        """Load the weights of the ResNet, see `Captioner.load_initial`."""
        if self.images is None and weights:
            raise DiffcapError(
                f"model.initial_weights is {weights}, but this {type(self).__name__} has no ResNet; remove the option, or set "
                "model.captioner.init_args.backbone."
            )
        if self.images is not None:
            if not weights:
                raise DiffcapError("model.initial_weights is not set; give default, random, or a file.")
            self.images.load(weights)

    def pretrained_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the ResNet, see `Captioner.pretrained_parameters`."""
        return [] if self.images is None else list(self.images.parameters())


# Rules to rename parameters: a regular expression of the authors' name, and diffcap's name; None leaves the parameter out.
def decoder_rules(prefix: str, cross_attention: str) -> tuple[Rule, ...]:
    """Return rules for the authors' word decoder. Its names begin with `prefix`, its cross-attention is named `cross_attention`."""
    layer = rf"{prefix}\.transformer\.layers\.(\d+)\."
    return (
        (rf"{prefix}\.vocab_embedding", "decoder.embedding"),
        (layer + r"self_attn\.in_proj_(weight|bias)", r"decoder.blocks.\1.self_attention.qkv.\2"),
        (layer + r"self_attn\.out_proj", r"decoder.blocks.\1.self_attention.out"),
        (layer + cross_attention + r"\.in_proj_(weight|bias)", r"decoder.blocks.\1.cross.qkv.\2"),
        (layer + cross_attention + r"\.out_proj", r"decoder.blocks.\1.cross.out"),
        (layer + "linear1", r"decoder.blocks.\1.ffn.0"),
        (layer + "linear2", r"decoder.blocks.\1.ffn.3"),
        (layer + "norm([123])", r"decoder.blocks.\1.norm\2"),
        (rf"{prefix}\.wdc", "decoder.logit"),
        # Modules that are stored but not used.
        (layer + "fc_alpha[123]", None),
        (rf"{prefix}\.position_encoding\.(?:embedding_1D|pe)", None),
    )


def residual_rule(official: str, ours: str) -> Rule:
    """Return the rule for residual blocks. `official` is a pattern of the authors' name, which may have groups; `ours` is our name."""
    last_group = 1 + re.compile(official).groups  # number of the group that matches a name in the branch
    return rf"{official}\.left\.([\w.]+)", rf"{ours}.branch.\{last_group}"


def backbone_rules(prefix: str) -> list[Rule]:
    """Return rules for the ResNet, whose layers the authors number; `prefix` is a pattern of the names' beginning."""
    names = {0: "conv1", 1: "bn1", 4: "layer1", 5: "layer2", 6: "layer3", 7: "layer4"}  # 2: ReLU, 3: pooling
    return [(rf"{prefix}\.{number}\.([\w.]+)", rf"images.network.{name}.\1") for number, name in names.items()]


def restore_convolutions(renamed: State) -> dict[str, Tensor]:
    """Restore the last two dimensions of the weights of 1 x 1 convolutions, which `importing.rename` removes for linear layers."""
    convolutions = re.compile(r"images\.network\.|.*\.branch\.")
    return {
        name: value[..., None, None] if value.ndim == 2 and convolutions.match(name) else value
        for name, value in renamed.items()
    }


IMAGE_SIZE = (256, 256)  # height and width
# A key has the numbers of blocks in the first three layers, and True if a block has three convolutions, False if it has two.
_RESNET_NAMES: dict[tuple[tuple[int, ...], bool], str] = {
    ((2, 2, 2), False): "resnet18",
    ((3, 4, 6), False): "resnet34",
    ((3, 4, 6), True): "resnet50",
    ((3, 4, 23), True): "resnet101",
    ((3, 8, 36), True): "resnet152",
}


def resnet_name(state: State, prefix: str) -> str | None:
    """Return torchvision's name of the ResNet whose parameters' names begin with `prefix`; None if the state has no ResNet."""
    if not any(re.match(prefix, name) for name in state):
        return None
    block_counts = tuple(count_layers(state, rf"{prefix}\.{number}\.(\d+)\.") for number in (4, 5, 6))
    has_three_convolutions = any(re.fullmatch(rf"{prefix}\.4\.0\.conv3\.weight", name) for name in state)
    if (block_counts, has_three_convolutions) not in _RESNET_NAMES:
        raise ValueError(f"its backbone has {block_counts} blocks in the first three layers, unlike every known ResNet")
    return _RESNET_NAMES[block_counts, has_three_convolutions]
