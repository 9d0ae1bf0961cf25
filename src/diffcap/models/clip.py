"""CLIP's two towers, as CLIP4IDC uses them: an image tower that sees a pair, and a text tower.

The networks are open_clip's. Of the image tower's blocks the first few work on each image alone ("intra"), the others on
both together ("inter").

Letters: B pairs, N patches of an image, T text positions, W width of a tower, E width of CLIP's common space.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from diffcap.models.layers import begin_with_the_difference, tile

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # CLIP's, of R, G and B
Network = str | dict[str, Any]
PairInit = Literal["clip", "difference"]
Clip = Any  # open_clip.CLIP or open_clip.CustomTextCLIP, whose parts torch's modules do not type
# What a tower must have to be taken apart; those of timm and the ones without a class token lack some of it.
_IMAGE_PARTS = ("_embeds", "class_embedding", "grid_size", "ln_post", "proj", "transformer")
_TEXT_PARTS = ("token_embedding", "positional_embedding", "transformer", "ln_final", "text_projection")


def build_clip(network: Network, image_size: tuple[int, int] | None = None, vocabulary_size: int | None = None) -> Clip:
    """An open_clip model with random weights.

    Args:
        network: a name of `open_clip.list_models()` or of a file in `networks/`, or such a model's configuration.
        image_size: height and width in pixels, None for the network's own; the patch must divide both.
        vocabulary_size: words, None for the network's own number.

    Raises:
        ValueError: unknown, no ViT with a class token, or the patch does not divide the image.
    """
    import open_clip  # brings timm and torchvision: not for a stage's --help

    config = _configuration(network)
    vision, words = dict(config["vision_cfg"]), dict(config["text_cfg"])
    if image_size is not None:
        vision["image_size"] = tuple(image_size)
    if vocabulary_size is not None:
        words["vocab_size"] = vocabulary_size
    custom = config.pop("custom_text", False)
    kept = {key: value for key, value in config.items() if key in ("embed_dim", "quick_gelu", "init_logit_scale")}
    kind = open_clip.CustomTextCLIP if custom else open_clip.CLIP
    model: Clip = kind(**kept, vision_cfg=vision, text_cfg=words)
    lacking = [part for part in _IMAGE_PARTS if getattr(model.visual, part, None) is None]
    lacking += [part for part in _TEXT_PARTS if getattr(text_of(model), part, None) is None]
    if lacking:
        raise ValueError(
            f"{_name(network)} has no {lacking[0]} to take apart; choose a ViT with a class token, such as ViT-B-32-quickgelu"
        )
    patches = model.visual.patch_size
    for side, patch in zip(model.visual.image_size, patches):
        if side % patch:
            raise ValueError(f"patches of {patch} pixels do not divide an image side of {side}; choose another size")
    return model


def _configuration(network: Network) -> dict[str, Any]:
    import open_clip

    if isinstance(network, str) and network not in open_clip.list_models():
        open_clip.add_model_config(networks())  # ours
    config = open_clip.get_model_config(network) if isinstance(network, str) else dict(network)
    if config is None:
        raise ValueError(f"open_clip has no model {network!r}; `open_clip.list_models()` lists them")
    return config


def own_grid(network: Network) -> tuple[int, int]:
    """Rows and columns of patches at a network's own image size, which its weights were trained with."""
    vision = _configuration(network)["vision_cfg"]
    sizes = (vision[name] for name in ("image_size", "patch_size"))
    (height, width), (tall, wide) = ((size, size) if isinstance(size, int) else size for size in sizes)
    return height // tall, width // wide


def networks() -> Path:
    """The folder of the package's own configurations of open_clip models, each with its weights beside it."""
    return Path(__file__).with_name("networks")


def _name(network: Network) -> str:
    return network if isinstance(network, str) else "the configuration"


@torch.no_grad()
def clamp_scale(logit_scale: Tensor) -> None:
    """Keep the scale of the cosines at 100 or less, in place (CLIP)."""
    logit_scale.clamp_(max=math.log(100))


def text_of(clip: Clip) -> Any:
    """The module that holds an open_clip model's text tower: some models have it apart."""
    return getattr(clip, "text", clip)


class PairTower(nn.Module):
    """Pixels of two images to tokens of the pair (CLIP4IDC, section 3.1; `ln_mid` from the authors' code).

    Args:
        clip: the open_clip model whose image tower this becomes. intra_layers: blocks that see one image only; None: three
            quarters of them (9 of ViT-B/32's 12). together: False leaves the images apart all the way (FT1, FT2): then all
            blocks are intra, and the marks of the two images are added at the end.
        pair_init: "clip": all blocks begin as CLIP's (paper); "difference": the attention of the first inter block is drawn anew,
            see `layers.begin_with_the_difference` (ours, where data or steps are few).
        mean, std: of R, G, B on the scale 0 ... 1. checkpointing: compute each block again in the backward pass.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        clip: Clip,
        intra_layers: int | None = None,
        together: bool = True,
        pair_init: PairInit = "clip",
        mean: Sequence[float] = MEAN,
        std: Sequence[float] = STD,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.visual: Any = clip.visual
        blocks = len(self.visual.transformer.resblocks)
        self.intra_layers = blocks * 3 // 4 if intra_layers is None else intra_layers
        if together and not 0 < self.intra_layers < blocks:
            raise ValueError(
                f"intra_layers {self.intra_layers} of {blocks} blocks leaves none for both images together"
            )
        self.together, self.pair_init, self.checkpointing = together, pair_init, checkpointing
        width, tokens = self.visual.positional_embedding.shape[1], self.visual.positional_embedding.shape[0]
        scale = width**-0.5
        marked = width if together else self.visual.proj.shape[1]
        self.before_mark = nn.Parameter(scale * torch.randn(marked))
        self.after_mark = nn.Parameter(scale * torch.randn(marked))
        if together:
            self.joint_positions = nn.Parameter(scale * torch.randn(2 * tokens, width))
            self.ln_mid = nn.LayerNorm(width)
            if pair_init == "difference":
                attention = self.visual.transformer.resblocks[self.intra_layers].attn
                begin_with_the_difference(attention.in_proj_weight, attention.out_proj.weight)
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1), persistent=False)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        rows, columns = self.visual.grid_size
        return rows, columns

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        height, width = self.visual.image_size
        return height, width

    def normalize(self, images: Tensor) -> Tensor:
        """Pixels 0 ... 255 (B, 3, height, width) to zero mean and unit variance.

        Raises:
            ValueError: the images have another size.
        """
        if tuple(images.shape[1:]) != (3, *self.image_size):
            raise ValueError(f"images are {tuple(images.shape[1:])}, the model was built for {(3, *self.image_size)}")
        return (images.to(self.mean.dtype) / 255 - self.mean) / self.std

    def _run(self, x: Tensor, blocks: nn.ModuleList) -> Tensor:
        for block in blocks:
            again = self.checkpointing and self.training
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        return x

    def alone(self, normalized: Tensor) -> Tensor:
        """Normalised images (B, 3, height, width) through the intra blocks: (B, 1 + N, W), the class token first."""
        blocks = self.visual.transformer.resblocks
        return self._run(self.visual._embeds(normalized), blocks[: self.intra_layers] if self.together else blocks)

    def both(self, before: Tensor, after: Tensor) -> Tensor:
        """Tokens of both images, (b, 1 + N, W) and (B, 1 + N, W), B a multiple of b, to the pair's (B, 2 + 2 N, E)."""
        before = tile(before, len(after))
        if not self.together:
            return torch.cat([self.out(before) + self.before_mark, self.out(after) + self.after_mark], 1)
        x = torch.cat([before + self.before_mark, after + self.after_mark], 1) + self.joint_positions
        return self.out(self._run(self.ln_mid(x), self.visual.transformer.resblocks[self.intra_layers :]))

    def is_drawn(self, name: str) -> bool:
        """Whether a parameter, by its name in the captioner, is not CLIP's, as the pair begins with another."""
        block = f"images.visual.transformer.resblocks.{self.intra_layers}.attn."
        return self.together and self.pair_init == "difference" and name.startswith(block)

    def freeze_embeddings(self) -> None:
        """Leave what stands before the blocks as it is (authors' code)."""
        self.visual.conv1.requires_grad_(False)
        self.visual.ln_pre.requires_grad_(False)
        self.visual.class_embedding.requires_grad_(False)
        self.visual.positional_embedding.requires_grad_(False)

    def out(self, x: Tensor) -> Tensor:
        """The last blocks' tokens (..., W) to CLIP's common space, (..., E); CLIP itself does so with the class token only."""
        return self.visual.ln_post(x) @ self.visual.proj

    def forward(self, before: Tensor, after: Tensor) -> Tensor:
        """Normalised images (b, 3, height, width) and (B, ...), B a multiple of b, to tokens (B, 2 + 2 N, E)."""
        return self.both(self.alone(before), self.alone(after))

    def class_tokens(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Of both images, (B, E) each: wherever the grid puts them."""
        return tokens[:, 0], tokens[:, tokens.shape[1] // 2]


class WordTable(nn.Module):
    """CLIP's word vectors and text positions; an id beyond the vocabulary (padding) gets END's vector, the last one.

    Args:
        clip: the open_clip model whose tables these become.
    """

    def __init__(self, clip: Clip) -> None:
        super().__init__()
        text = text_of(clip)
        self.token_embedding: nn.Embedding = text.token_embedding
        self.positional_embedding: nn.Parameter = text.positional_embedding

    def requires_grad_embeddings(self, learn: bool) -> None:
        """Whether word vectors and positions learn."""
        self.token_embedding.requires_grad_(learn)
        self.positional_embedding.requires_grad_(learn)

    def forward(self, tokens: Tensor, first: int = 0) -> Tensor:
        """Ids (B, T) at positions `first`, ... to (B, T, W).

        Raises:
            ValueError: there are fewer positions.
        """
        end = first + tokens.shape[1]
        if end > len(self.positional_embedding):
            raise ValueError(
                f"{end} text positions, CLIP has {len(self.positional_embedding)}: lower max_length to that, or less"
            )
        vectors = self.token_embedding(tokens.clamp(max=self.token_embedding.num_embeddings - 1))
        return vectors + self.positional_embedding[first:end]


class TextTower(WordTable):
    """CLIP's text tower: a caption to one vector, read at its END.

    Args:
        clip: the open_clip model whose text tower this becomes.
    """

    attn_mask: Tensor

    def __init__(self, clip: Clip) -> None:
        super().__init__(clip)
        text = text_of(clip)
        self.transformer, self.ln_final, self.text_projection = text.transformer, text.ln_final, text.text_projection
        self.register_buffer("attn_mask", text.attn_mask, persistent=False)

    def forward(self, tokens: Tensor, first: int = 0) -> Tensor:
        """Ids (B, T) to (B, E); END is the largest id that is no padding, as in CLIP."""
        length = tokens.shape[1]
        x = self.transformer(super().forward(tokens, first), attn_mask=self.attn_mask[:length, :length])
        ends = tokens.clamp(max=self.token_embedding.num_embeddings - 1).argmax(1)  # the first of equals
        x = self.ln_final(x)[torch.arange(len(x), device=x.device), ends]
        return self.text_projection(x) if isinstance(self.text_projection, nn.Module) else x @ self.text_projection
