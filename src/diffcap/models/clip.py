"""CLIP's two towers, as CLIP4IDC uses them: an image tower that encodes a pair of images, and a text tower.

The networks are open_clip's. The first blocks of the image tower encode each image separately ("intra"), the others encode
both images jointly ("inter").

Letters: B pairs, b before images, N patches of an image, T text positions, W width of a tower, E width of CLIP's common space, H heads.
"""

import math
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from diffcap.models.layers import check_shape, init_difference_attention_, repeat_batch, use_fast_linear_
from diffcap.utils.linear import linear

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)  # of R, G and B in CLIP's training images, on the scale 0 ... 1
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
NETWORKS_FOLDER = Path(__file__).with_name("networks")  # open_clip configurations and their weights
Network = str | dict[str, Any]  # a network's name or its configuration, see `build_clip`
PairInit = Literal["clip", "difference"]  # initial weights of the attention between two images, see `PairTower`
Clip = Any  # an open_clip.CLIP or open_clip.CustomTextCLIP; torch's Module does not type their parts
# Attributes of the towers that this file uses. timm's image towers, and those without a class token, lack some and are refused.
_IMAGE_ATTRIBUTES = ("_embeds", "class_embedding", "grid_size", "ln_post", "proj", "transformer")
_TEXT_ATTRIBUTES = ("token_embedding", "positional_embedding", "transformer", "ln_final", "text_projection")


def build_clip(network: Network, image_size: tuple[int, int] | None = None, vocabulary_size: int | None = None) -> Clip:
    """Build an open_clip model with random weights. If `image_size` or `vocabulary_size` is None, the network's own is used.

    `network` is a name of `open_clip.list_models()`, the name of a file in `models/networks/`, or a model's configuration.
    """
    import open_clip  # imports timm and torchvision, too slow for a stage's --help

    config = _read_configuration(network)
    vision = dict(config["vision_cfg"])
    text = dict(config["text_cfg"])
    if image_size is not None:
        vision["image_size"] = tuple(image_size)
    if vocabulary_size is not None:
        text["vocab_size"] = vocabulary_size
    model_class = open_clip.CustomTextCLIP if config.pop("custom_text", False) else open_clip.CLIP
    arguments = {key: config[key] for key in ("embed_dim", "quick_gelu", "init_logit_scale") if key in config}
    model: Clip = model_class(**arguments, vision_cfg=vision, text_cfg=text)
    missing = [name for name in _IMAGE_ATTRIBUTES if getattr(model.visual, name, None) is None]
    missing += [name for name in _TEXT_ATTRIBUTES if getattr(text_tower_of(model), name, None) is None]
    if missing:
        title = network if isinstance(network, str) else "the configured network"
        raise ValueError(f"{title} has no {missing[0]}; choose a ViT with a class token, such as ViT-B-32-quickgelu")
    for side, patch in zip(model.visual.image_size, model.visual.patch_size):
        if side % patch:
            raise ValueError(f"patches of {patch} pixels do not divide an image side of {side}; choose another size")
    use_fast_linear_(model)
    for part in model.modules():
        if isinstance(part, open_clip.transformer.QuickGELU):
            part.__class__ = QuickGELU
    for block in [*model.visual.transformer.resblocks, *text_tower_of(model).transformer.resblocks]:
        if type(block.attn) is nn.MultiheadAttention and block.attn.batch_first:
            block.attn.__class__ = BlockAttention
    return model


def _read_configuration(network: Network) -> dict[str, Any]:
    import open_clip

    if isinstance(network, str) and network not in open_clip.list_models():
        open_clip.add_model_config(NETWORKS_FOLDER)
    config = open_clip.get_model_config(network) if isinstance(network, str) else dict(network)
    if config is None:
        raise ValueError(f"open_clip has no model {network!r}; `open_clip.list_models()` lists them")
    return config


def pretrained_grid(network: Network) -> tuple[int, int]:
    """Return the rows and columns of patches at the image size that the network's weights were trained with."""
    from open_clip.utils import to_2tuple

    vision = _read_configuration(network)["vision_cfg"]
    height, width = to_2tuple(vision["image_size"])
    patch_height, patch_width = to_2tuple(vision["patch_size"])
    return height // patch_height, width // patch_width


@torch.no_grad()
def clamp_logit_scale_(logit_scale: Tensor) -> None:
    """Limit `exp(logit_scale)`, the factor of the cosines in CLIP, to 100, in place."""
    logit_scale.clamp_(max=math.log(100))


def text_tower_of(clip: Clip) -> Any:
    """Return the module with the text tower: the attribute `text` if the open_clip model has one, else the model itself."""
    return getattr(clip, "text", clip)


class QuickGELU(nn.Module):
    """CLIP's activation `x sigmoid(1.702 x)` as `silu(1.702 x) / 1.702`, for whose gradient torch keeps one tensor instead of two."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to each element of x (...)."""
        return F.silu(1.702 * x).div_(1.702)


class BlockAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` with the faster function `linear`. It does what open_clip's blocks need: self-attention without dropout."""

    def forward(  # type: ignore[override]
        self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool = False, attn_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Attend within `query` (B, T, W); `key` and `value` are the same tensor. `attn_mask` (T, T): as in torch."""
        projected = linear(query, self.in_proj_weight, self.in_proj_bias)
        qkv = projected.unflatten(2, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)  # (3, B, H, T, W / H)
        attended = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], attn_mask=attn_mask)
        return linear(attended.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias), None


class PairTower(nn.Module):
    """Encodes the pixels of two images as tokens of the pair (CLIP4IDC, section 3.1; the norm `ln_mid` is from the authors' code).

    Args:
        clip: the open_clip model whose image tower is used.
        intra_layers: number of blocks that encode each image separately. None: three quarters of all blocks (9 of ViT-B/32's 12).
        joint: if False, all blocks encode each image separately, and then an image type embedding is added (the paper's FT1 and FT2).
        pair_init: "clip": all blocks start from CLIP's weights (paper). "difference": the attention of the first inter block starts
            with weights that subtract the images (`init_difference_attention_`; ours, for little data or few steps).
        checkpointing: compute the blocks again in the backward pass, which takes less memory and more time.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        clip: Clip,
        intra_layers: int | None = None,
        joint: bool = True,
        pair_init: PairInit = "clip",
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.visual: Any = clip.visual
        self.grid: tuple[int, int] = tuple(self.visual.grid_size)  # rows and columns of patches
        self.image_size: tuple[int, int] = tuple(self.visual.image_size)  # height and width in pixels
        num_blocks = len(self.visual.transformer.resblocks)
        self.intra_layers = num_blocks * 3 // 4 if intra_layers is None else intra_layers
        if joint and not 0 < self.intra_layers < num_blocks:
            raise ValueError(
                f"intra_layers is {self.intra_layers}; the network has {num_blocks} blocks: give 1 to {num_blocks - 1}"
            )
        self.joint = joint
        self.pair_init = pair_init
        self.checkpointing = checkpointing
        num_tokens, width = self.visual.positional_embedding.shape
        scale = width**-0.5
        type_width = width if joint else self.visual.proj.shape[1]
        self.before_mark = nn.Parameter(scale * torch.randn(type_width))  # image type embeddings: before, after
        self.after_mark = nn.Parameter(scale * torch.randn(type_width))
        if joint:
            self.joint_positions = nn.Parameter(scale * torch.randn(2 * num_tokens, width))
            self.ln_mid = nn.LayerNorm(width)
            if pair_init == "difference":
                attention = self.visual.transformer.resblocks[self.intra_layers].attn
                init_difference_attention_(attention.in_proj_weight, attention.out_proj.weight)
        self.register_buffer("mean", torch.tensor(CLIP_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(CLIP_STD).view(3, 1, 1), persistent=False)

    def normalize(self, images: Tensor) -> Tensor:
        """Subtract the mean from pixels 0 ... 255 (B, 3, height, width) and divide by the standard deviation: (B, 3, height, width)."""
        check_shape("images", images, 3, *self.image_size)
        return (images.to(self.mean.dtype) / 255 - self.mean) / self.std

    def _run_blocks(self, blocks: nn.ModuleList, x: Tensor) -> Tensor:
        for block in blocks:
            recompute = self.checkpointing and self.training
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        return x

    def encode_single(self, normalized: Tensor) -> Tensor:
        """Encode normalised images (B, 3, height, width) by the intra blocks: (B, 1 + N, W), the class token first."""
        blocks = self.visual.transformer.resblocks
        intra_blocks = blocks[: self.intra_layers] if self.joint else blocks
        return self._run_blocks(intra_blocks, self.visual._embeds(normalized))

    def encode_pair(self, before: Tensor, after: Tensor) -> Tensor:
        """Encode both images' tokens, (b, 1 + N, W) and (B, 1 + N, W), by the inter blocks: (B, 2 + 2 N, E). B is a multiple of b."""
        before = repeat_batch(before, len(after))
        if not self.joint:
            return torch.cat([self.project(before) + self.before_mark, self.project(after) + self.after_mark], 1)
        x = torch.cat([before + self.before_mark, after + self.after_mark], 1) + self.joint_positions
        inter_blocks = self.visual.transformer.resblocks[self.intra_layers :]
        return self.project(self._run_blocks(inter_blocks, self.ln_mid(x)))

    def keeps_initial_value(self, name: str) -> bool:
        """Return True if `pair_init` has initialised the captioner's parameter `name`, which then does not get CLIP's weights."""
        prefix = f"images.visual.transformer.resblocks.{self.intra_layers}.attn."  # a captioner's attribute `images` is this tower
        return self.joint and self.pair_init == "difference" and name.startswith(prefix)

    def freeze_embeddings(self) -> None:
        """Freeze all layers before the first block (authors' code)."""
        visual = self.visual
        for part in (visual.conv1, visual.ln_pre, visual.class_embedding, visual.positional_embedding):
            part.requires_grad_(False)

    def project(self, x: Tensor) -> Tensor:
        """Project the last block's tokens (..., W) into CLIP's common space, (..., E); CLIP projects only the class token."""
        return linear(self.visual.ln_post(x), self.visual.proj.T)

    def forward(self, before: Tensor, after: Tensor) -> Tensor:
        """Encode normalised images, (b, 3, height, width) and (B, 3, height, width), as tokens (B, 2 + 2 N, E)."""
        return self.encode_pair(self.encode_single(before), self.encode_single(after))


class TokenEmbedding(nn.Module):
    """CLIP's token and position embeddings. Padding, whose id is beyond the vocabulary, gets the vector of END, the last id."""

    def __init__(self, clip: Clip) -> None:
        super().__init__()
        text = text_tower_of(clip)
        self.token_embedding: nn.Embedding = text.token_embedding
        self.positional_embedding: nn.Parameter = text.positional_embedding

    def freeze_embeddings(self) -> None:
        """Freeze token and position embeddings (authors' code)."""
        self.token_embedding.requires_grad_(False)
        self.positional_embedding.requires_grad_(False)

    def forward(self, tokens: Tensor, first_position: int = 0) -> Tensor:
        """Embed ids (B, T) at the positions from `first_position` on: (B, T, W)."""
        end = first_position + tokens.shape[1]
        num_positions = len(self.positional_embedding)
        if end > num_positions:
            raise ValueError(f"{end} text positions are needed, CLIP has {num_positions}: lower max_length")
        token_vectors = self.token_embedding(tokens.clamp(max=self.token_embedding.num_embeddings - 1))
        return token_vectors + self.positional_embedding[first_position:end]


class TextTower(TokenEmbedding):
    """CLIP's text tower. It encodes a caption as one vector, the output at the caption's END token."""

    attn_mask: Tensor

    def __init__(self, clip: Clip) -> None:
        super().__init__(clip)
        text = text_tower_of(clip)
        self.transformer = text.transformer
        self.ln_final = text.ln_final
        self.text_projection = text.text_projection
        self.register_buffer("attn_mask", text.attn_mask, persistent=False)

    def forward(self, tokens: Tensor, first_position: int = 0) -> Tensor:
        """Encode ids (B, T) as vectors (B, E). END has the largest id except for padding, as in CLIP."""
        length = tokens.shape[1]
        x = self.transformer(super().forward(tokens, first_position), attn_mask=self.attn_mask[:length, :length])
        end_positions = tokens.clamp(max=self.token_embedding.num_embeddings - 1).argmax(1)  # (B,), of each first END
        x = self.ln_final(x)[torch.arange(len(x), device=x.device), end_positions]
        projection = self.text_projection
        return projection(x) if isinstance(projection, nn.Module) else linear(x, projection.T)
