"""CLIP4IDC (Guo, Wang and Laaksonen, "CLIP4IDC: CLIP for Image Difference Captioning", AACL 2022).

Order of the file: the adaptation by retrieval (stage 1), the decoder's blocks, the captioner (stage 2) with its baselines
FT1 and FT2. Where paper and released code differ the code is the default, and the paper's way is an option.

Letters: B pairs, N patches of an image, T text positions, D width of the captioner, E width of CLIP's words, V vocabulary.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffcap.losses.gather import global_mean
from diffcap.losses.pair_text import pair_text_contrast
from diffcap.models.captioner import Batch, Captioner, WordMaps
from diffcap.models.clip import Network, PairInit, PairTower, TextTower, WordTable, build_clip, clamp_scale, text_of
from diffcap.models.layers import Attention, KeysValues, Past
from diffcap.models.words import BlockOutput, Decoded, causal_mask, run_blocks, streams_of

EPS = 1e-12  # of the captioner's layer norms (BERT)
Padding = Literal["own", "released"]


class CLIP4IDCAdaptation(nn.Module):
    """Stage 1: find the sentence of a pair and the pair of a sentence.

    Args:
        network: open_clip's name of the model, or its configuration. image_size: height and width in pixels.
        intra_layers: blocks of the image tower that see one image only (null: three quarters, 9 of ViT-B/32's 12).
        checkpointing: compute the image tower's blocks again in the backward pass; less memory, a third more time.
        freeze_embeddings: leave what stands before the blocks as it came: patches, class token, positions of both towers,
            word vectors and the first norm (authors' code).
        vocabulary_size: of the captions' ids; null for the network's own. max_length: positions of a caption; CLIP has 77.
        pair_init: what the inter layers begin with, see `PairTower`.
    """

    def __init__(
        self,
        network: Network = "ViT-B-32-quickgelu",
        image_size: tuple[int, int] | None = None,
        intra_layers: int | None = None,
        checkpointing: bool = False,
        freeze_embeddings: bool = True,
        vocabulary_size: int | None = None,
        max_length: int = 32,
        pair_init: PairInit = "clip",
    ) -> None:
        super().__init__()
        self.hyperparameters = {key: value for key, value in locals().items() if key not in ("self", "__class__")}
        self.hyperparameters["image_size"] = list(image_size) if image_size is not None else None
        clip = build_clip(network, image_size, vocabulary_size)
        self.images = PairTower(clip, intra_layers, pair_init=pair_init, checkpointing=checkpointing)
        self.words = TextTower(clip)
        if max_length > len(self.words.positional_embedding):
            raise ValueError(
                f"max_length {max_length} needs as many text positions, CLIP has {len(self.words.positional_embedding)}; lower it"
            )
        self.logit_scale: nn.Parameter = clip.logit_scale
        if freeze_embeddings:
            self.images.freeze_embeddings()
            self.words.requires_grad_embeddings(False)

    def pair(self, before: Tensor, after: Tensor) -> Tensor:
        """Pixels (B, 3, height, width) each to one vector a pair, (B, E): the mean of both class tokens."""
        first, second = self.images.class_tokens(
            self.images(self.images.normalize(before), self.images.normalize(after))
        )
        return (first + second) / 2

    def loss(self, batch: Batch) -> Tensor:
        """The contrast over the global batch. Needs `before`, `after` (B, 3, height, width) and `tokens` (B, T)."""
        text, pair = self.words(batch["tokens"]), self.pair(batch["before"], batch["after"])
        return global_mean(pair_text_contrast(text, pair, self.logit_scale.exp()))

    def clamp(self) -> None:
        """Keep the scale of the cosines at 100 or less, after an optimiser's step (authors' code)."""
        clamp_scale(self.logit_scale)


class EncoderBlock(nn.Module):
    """A post-norm block of the captioner's encoder: self-attention, then an FFN with GELU (BERT)."""

    def __init__(self, width: int, heads: int, ffn: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout)
        self.norm1, self.norm2 = nn.LayerNorm(width, EPS), nn.LayerNorm(width, EPS)
        self.inner, self.outer, self.dropout = nn.Linear(width, ffn), nn.Linear(ffn, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        x = self.norm1(x + self.dropout(self.attention(x)[0]))
        return self.norm2(x + self.dropout(self.outer(F.gelu(self.inner(x)))))


class DecoderBlock(nn.Module):
    """A post-norm block of the captioner's decoder: as the encoder's, with cross-attention before the FFN."""

    def __init__(self, width: int, heads: int, ffn: int, dropout: float) -> None:
        super().__init__()
        self.self_attention, self.cross = Attention(width, heads, dropout), Attention(width, heads, dropout)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width, EPS) for _ in range(3))
        self.inner, self.outer, self.dropout = nn.Linear(width, ffn), nn.Linear(ffn, width), nn.Dropout(dropout)

    def looks(self, said: Tensor) -> Tensor:
        """What words (B, T, D) look for in the images: queries (B, H, T, D / H)."""
        return self.cross.queries(said)

    def forward(self, x: Tensor, memory: KeysValues, mask: Tensor | None, past: Past) -> BlockOutput:
        """See `BlockOutput`; arguments as `Attention`."""
        mixed, own = self.self_attention(x, mask, past)
        said = self.norm1(x + self.dropout(mixed))
        seen = self.norm2(said + self.dropout(self.cross.attend(self.looks(said), memory)))
        return BlockOutput(said, seen, self.norm3(seen + self.dropout(self.outer(F.gelu(self.inner(seen))))), own)


class TextBlock(nn.Module):
    """A pre-norm block of CLIP's text tower with a cross-attention put in before its FFN (FT1; ours, the paper is silent).

    The cross-attention begins at nothing, so that the block begins as CLIP's.
    """

    def __init__(self, width: int, heads: int, ffn: int, dropout: float, activation: nn.Module) -> None:
        super().__init__()
        self.self_attention, self.cross = Attention(width, heads), Attention(width, heads, dropout)
        self.norm1, self.norm_cross, self.norm2 = (nn.LayerNorm(width) for _ in range(3))
        self.inner, self.outer, self.activation = nn.Linear(width, ffn), nn.Linear(ffn, width), activation

    def looks(self, said: Tensor) -> Tensor:
        """What words (B, T, D) look for in the images: queries (B, H, T, D / H)."""
        return self.cross.queries(self.norm_cross(said))

    def forward(self, x: Tensor, memory: KeysValues, mask: Tensor | None, past: Past) -> BlockOutput:
        """See `BlockOutput`; arguments as `Attention`."""
        mixed, own = self.self_attention(self.norm1(x), mask, past)
        said = x + mixed
        seen = said + self.cross.attend(self.looks(said), memory)
        return BlockOutput(said, seen, seen + self.outer(self.activation(self.inner(self.norm2(seen)))), own)


class CLIP4IDC(Captioner):
    """Stage 2: pixels of both images to a sentence, CLIP trained on with the captioner.

    A batch with twice as many "after" as "before" holds two streams over the same first images: change pairs, then
    distractor pairs; their losses are added (authors' code).

    Args:
        vocabulary_size: V. network, image_size, intra_layers, checkpointing, freeze_embeddings: as `CLIP4IDCAdaptation`.
        max_length: positions of a caption, START and END included (authors' code: 33, of which 32 go in).
        width: D (authors' code: 512; paper: 768, for which linear layers lead in from CLIP's width and out again, ours).
        heads: 8 (paper: 12). ffn: 2048. encoder_layers, decoder_layers: 3 and 3 (authors' code).
        dropout: 0.1.
        layerwise_cross_attention: decoder block i sees encoder block i (authors' code), or all see the last (paper).
        images: "together" after the intra layers, or "apart" (FT1, FT2).
        decoder: "captioner", or "clip_text": CLIP's text tower with cross-attention put in (FT1). The latter has as many
            blocks and the widths of the tower, and the encoder blocks' last output for memory.
        train_words: train CLIP's word vectors even so (authors' code: on Spot-the-Diff only).
        pair_init: see `PairTower`; where there is no adaptation's checkpoint.
        init_std: of the captioner's first weights (authors' code: 0.02 at widths of 512; far less than 1 / sqrt(width) leaves
            what words see in the images too faint to be learned from).
        padding: "own": an id beyond the vocabulary. "released": id 0, which is the word "!" of CLIP: never learned, and
            said it ends the caption (authors' code).
    """

    vocabulary_layout = "clip"
    fresh_parts = ("visual_in", "words_in", "words_norm", "encoder", "decoder", "head", "word_bias")
    earlier_parts = ("words.transformer", "words.ln_final", "words.text_projection", "logit_scale")

    def __init__(
        self,
        vocabulary_size: int,
        network: Network = "ViT-B-32-quickgelu",
        image_size: tuple[int, int] | None = None,
        intra_layers: int | None = None,
        checkpointing: bool = False,
        freeze_embeddings: bool = True,
        max_length: int = 33,
        width: int = 512,
        heads: int = 8,
        ffn: int = 2048,
        encoder_layers: int = 3,
        decoder_layers: int = 3,
        dropout: float = 0.1,
        layerwise_cross_attention: bool = True,
        images: Literal["together", "apart"] = "together",
        decoder: Literal["captioner", "clip_text"] = "captioner",
        train_words: bool = False,
        padding: Padding = "own",
        pair_init: PairInit = "clip",
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        self.hyperparameters = {key: value for key, value in locals().items() if key not in ("self", "__class__")}
        self.hyperparameters["image_size"] = list(image_size) if image_size is not None else None
        clip = build_clip(network, image_size, vocabulary_size)
        self.images = PairTower(clip, intra_layers, images == "together", pair_init, checkpointing=checkpointing)
        self.words = WordTable(clip)
        self.begin, self.end = vocabulary_size - 2, vocabulary_size - 1  # the last two, as CLIP has them
        self.pad = 0 if padding == "released" else vocabulary_size
        if padding == "released":
            self.vocabulary_layout, self.closing_pad = "clip_released", 0
        self.max_length, self.layerwise = max_length, layerwise_cross_attention
        word_width, visual_width = self.words.token_embedding.embedding_dim, self.images.visual.proj.shape[1]
        text_blocks = text_of(clip).transformer.resblocks
        if decoder == "clip_text":
            width, heads, decoder_layers = word_width, text_blocks[0].attn.num_heads, len(text_blocks)
        if layerwise_cross_attention and encoder_layers != decoder_layers:
            raise ValueError(
                f"layerwise_cross_attention needs as many encoder as decoder blocks, not {encoder_layers} and {decoder_layers}"
            )
        positions = len(self.words.positional_embedding)
        if max_length - 1 > positions:
            raise ValueError(
                f"max_length {max_length} needs {max_length - 1} text positions, CLIP has {positions}; lower it"
            )
        self.visual_in = nn.Linear(visual_width, width) if width != visual_width else nn.Identity()
        self.words_in = nn.Linear(word_width, width) if width != word_width else nn.Identity()
        self.encoder = nn.ModuleList(EncoderBlock(width, heads, ffn, dropout) for _ in range(encoder_layers))
        if decoder == "clip_text":
            inner, activation = text_blocks[0].mlp.c_fc.out_features, text_blocks[0].mlp.gelu
            self.decoder = nn.ModuleList(
                TextBlock(width, heads, inner, dropout, activation) for _ in range(decoder_layers)
            )
            self.words_norm: nn.Module = nn.Identity()
            self.head: nn.Module = nn.Identity()
            self.head_norm = nn.LayerNorm(width)
        else:
            self.decoder = nn.ModuleList(DecoderBlock(width, heads, ffn, dropout) for _ in range(decoder_layers))
            self.words_norm = nn.LayerNorm(width, EPS)
            self.head = nn.Sequential(nn.Linear(width, word_width), nn.GELU())
            self.head_norm = nn.LayerNorm(word_width, EPS)
        self.dropout = nn.Dropout(dropout)
        self.word_bias = nn.Parameter(torch.zeros(vocabulary_size))
        for module in (self.visual_in, self.words_in, self.encoder, self.decoder, self.head):
            for part in module.modules():
                _begin(part, init_std)
        if decoder == "clip_text":
            for block in self.decoder:
                nn.init.zeros_(block.cross.out.weight)  # type: ignore[union-attr, arg-type]
        if freeze_embeddings:
            self.images.freeze_embeddings()
            self.words.requires_grad_embeddings(False)
        if train_words:
            self.words.token_embedding.requires_grad_(True)

    def views(self, before: Tensor, after: Tensor) -> Tensor:
        """Pixels (b, 3, height, width) and (B, ...), B a multiple of b, to the pair's tokens (B, 2 + 2 N, E)."""
        return self.images(self.images.normalize(before), self.images.normalize(after))

    def encoded(self, views: Tensor) -> list[Tensor]:
        """The pair's tokens (B, 2 + 2 N, E) as they enter the captioner's encoder, then after each of its blocks, (B, 2 + 2 N, D)."""
        states = [self.visual_in(views)]
        for block in self.encoder:
            states.append(block(states[-1]))
        return states

    def memory(self, encoded: list[Tensor]) -> list[KeysValues]:
        """What `encoded` gives to each decoder block's keys and values."""
        seen = encoded[1:] if self.layerwise else encoded[-1:] * len(self.decoder)
        return [block.cross.keys_values(part) for block, part in zip(self.decoder, seen)]  # type: ignore[union-attr, operator]

    def encode(self, before: Tensor, after: Tensor) -> list[KeysValues]:
        """Pixels (B, 3, height, width) each to each decoder block's keys and values."""
        return self.memory(self.encoded(self.views(before, after)))

    def decode(self, tokens: Tensor, memory: list[KeysValues], past: list[KeysValues] | None = None) -> Decoded:
        """Run ids (B, T) at the positions after `past`; without `past`, padding is not seen."""
        first = past[0][0].shape[2] if past else 0
        x = self.dropout(self.words_norm(self.words_in(self.words(tokens, first))))
        return run_blocks(self.decoder, x, memory, None if past else causal_mask(tokens != self.pad), past)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next word, (..., D) to (..., V): CLIP's own word vectors, and a bias."""
        return F.linear(self.head_norm(self.head(hidden)), self.words.token_embedding.weight, self.word_bias)

    def step(
        self, tokens: Tensor, memory: list[KeysValues], cache: list[KeysValues] | None
    ) -> tuple[Tensor, list[KeysValues]]:
        """See `Captioner.step`."""
        last, cache = self.decode(tokens[:, None], memory, cache)
        return self.logits(last.hidden[:, 0]), cache

    def next_logits(self, tokens: Tensor, memory: list[KeysValues]) -> Tensor:
        """See `Captioner.next_logits`."""
        return self.logits(self.decode(tokens[:, :-1], memory).last.hidden)

    def attention(self, before: Tensor, after: Tensor, tokens: Tensor) -> WordMaps:
        """See `Captioner.attention`: the decoder's last cross-attention, mean over the heads.

        What class tokens get is shared out among the patches. Nothing in the method aligns the images.
        """
        memory = self.encode(before, after)
        said, last = self.decode(tokens, memory).last.said, self.decoder[-1]
        looked = last.cross.weights(last.looks(said), memory[-1][0])  # type: ignore[union-attr, operator]
        one, two = (looked[..., rows] for rows in self._patches(looked.shape[2]))
        both = (one.sum(2) + two.sum(2))[..., None, None] / 2
        grid = self.images.grid
        return WordMaps(one.unflatten(2, grid) / both, two.unflatten(2, grid) / both, None)

    @staticmethod
    def _patches(tokens: int) -> tuple[slice, slice]:
        """Where the patches of each image stand among a pair's tokens."""
        return slice(1, tokens // 2), slice(tokens // 2 + 1, tokens)

    def word_losses(self, tokens: Tensor, memory: list[KeysValues]) -> Tensor:
        """Cross-entropy of every word and END of captions (B, T) given the words before, (n,) in nats."""
        hidden = self.decode(tokens[:, :-1], memory).last.hidden
        target = tokens[:, 1:]
        real = target != self.pad
        return F.cross_entropy(self.logits(hidden[real]), target[real], reduction="none")

    def validate(self, batch: Batch) -> dict[str, Tensor]:
        """See `Captioner.validate`: the words' losses."""
        return {"caption_loss": self.word_losses(batch["tokens"], self.encode(batch["before"], batch["after"]))}

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """The sum over the streams of the mean over the global batch's words.

        Needs `before` (b, 3, height, width), `after` (B, ...) with B = b, or B = 2 b for two streams, and `tokens` (B, T).
        """
        before, after, tokens = batch["before"], batch["after"], batch["tokens"]
        memory, parts = self.encode(before, after), {}
        losses = [
            global_mean(self.word_losses(tokens[rows], [(key[rows], value[rows]) for key, value in memory]))
            for rows in streams_of(before, after)
        ]
        for name, part in zip(("caption_loss", "distractor_caption_loss"), losses):
            parts[name] = part.detach()
        return {"loss": torch.stack(losses).sum(), **parts}

    def trained_parts(self) -> list[nn.Parameter]:
        """See `Captioner.trained_parts`: CLIP, with what the adaptation has put into it."""
        trained = [*self.images.parameters(), *self.words.parameters()]
        for block in self.decoder:
            if isinstance(block, TextBlock):  # CLIP's, but for what looks at the images
                new = {id(part) for module in (block.cross, block.norm_cross) for part in module.parameters()}
                trained += [part for part in block.parameters() if id(part) not in new]
        if any(isinstance(block, TextBlock) for block in self.decoder):
            trained += self.head_norm.parameters()
        return trained


def _begin(module: nn.Module, std: float) -> None:
    """BERT's first weights: N(0, std) and no bias (authors' code)."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=std)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
