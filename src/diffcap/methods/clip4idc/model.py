"""CLIP4IDC (Guo, Wang and Laaksonen, "CLIP4IDC: CLIP for Image Difference Captioning", AACL 2022).

Where the paper and the authors' code differ, the code's version is the default and the paper's is an option.

Letters: B pairs, N patches of an image, T text positions, D width of the captioner, E width of CLIP's common space, V vocabulary.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffcap.losses.gather import global_mean
from diffcap.losses.pair_text import pair_text_contrastive_loss
from diffcap.methods.clip4idc.weights import load_clip
from diffcap.models.captioner import AttentionMaps, Batch, Captioner, constructor_arguments, patch_attention
from diffcap.models.change_head import ChangeHead
from diffcap.models.clip import Network, PairInit, PairTower, TextTower, TokenEmbedding, build_clip, text_tower_of
from diffcap.models.decoder import BlockOutput, DecoderOutput, causal_mask, pair_groups, run_blocks, take_flat
from diffcap.models.layers import Attention, Dropout, KeyValue, Linear, Segments
from diffcap.utils.linear import linear

NORM_EPS = 1e-12  # of the captioner's layer norms (BERT)
Padding = Literal["own", "released"]  # the id of padding, see `CLIP4IDC`


class CLIP4IDCAdaptation(nn.Module):
    """The model of stage 1, the adaptation, which learns to find a pair's captions among others, and a caption's pair.

    Args:
        network: open_clip's name of the model, or its configuration. image_size: height and width in pixels.
        intra_layers: number of the first blocks of the image tower, which encode each image separately. The others, the inter layers,
            encode both images together (null: three quarters, 9 of ViT-B/32's 12).
        checkpointing: compute the image tower's blocks again in the backward pass; less memory, more time.
        freeze_embeddings: freeze all layers before the blocks: the embeddings of patches, class token, positions and words, and the
            first norm (authors' code).
        vocabulary_size: V; null for the network's own. max_length: positions of a caption; CLIP has 77.
        pair_init: "clip": all layers start from CLIP's weights. "difference": the first inter layer is initialised
            so that its output contains the difference of the two images.
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
        self.hyperparameters = constructor_arguments(locals())
        clip = build_clip(network, image_size, vocabulary_size)
        self.images = PairTower(clip, intra_layers, pair_init=pair_init, checkpointing=checkpointing)
        self.words = TextTower(clip)
        if max_length > len(self.words.positional_embedding):
            raise ValueError(
                f"max_length {max_length} needs {max_length} text positions, CLIP has {len(self.words.positional_embedding)}; lower it"
            )
        self.logit_scale: nn.Parameter = clip.logit_scale
        if freeze_embeddings:
            self.images.freeze_embeddings()
            self.words.freeze_embeddings()

    def encode_pairs(self, before: Tensor, after: Tensor) -> Tensor:
        """Encode pixels (B, 3, height, width) of both images as one vector per pair, (B, E): the mean of both class tokens."""
        tokens = self.images(self.images.normalize(before), self.images.normalize(after))
        return (tokens[:, 0] + tokens[:, tokens.shape[1] // 2]) / 2

    def loss(self, batch: Batch) -> Tensor:
        """Compute the contrastive loss over the global batch, from `before`, `after` (B, 3, height, width) and `tokens` (B, T)."""
        text_vectors = self.words(batch["tokens"])
        pair_vectors = self.encode_pairs(batch["before"], batch["after"])
        return global_mean(pair_text_contrastive_loss(text_vectors, pair_vectors, self.logit_scale.exp()))


class EncoderBlock(nn.Module):
    """A post-norm block of the captioner's encoder: self-attention, then an FFN with GELU (BERT)."""

    def __init__(self, width: int, heads: int, ffn: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout)
        self.norm1, self.norm2 = nn.LayerNorm(width, NORM_EPS), nn.LayerNorm(width, NORM_EPS)
        self.inner, self.outer = Linear(width, ffn), Linear(ffn, width)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Run tokens x (B, T, D) through the block: (B, T, D)."""
        x = self.norm1(x + self.dropout(self.attention(x)[0]))
        return self.norm2(x + self.dropout(self.outer(F.gelu(self.inner(x)))))


class DecoderBlock(nn.Module):
    """A post-norm block of the captioner's decoder: an `EncoderBlock` with cross-attention before the FFN."""

    def __init__(self, width: int, heads: int, ffn: int, dropout: float) -> None:
        super().__init__()
        self.self_attention, self.cross = Attention(width, heads, dropout), Attention(width, heads, dropout)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width, NORM_EPS) for _ in range(3))
        self.norm_cross = nn.Identity()  # a norm of the cross-attention's input, which only a `TextBlock` has
        self.inner, self.outer = Linear(width, ffn), Linear(ffn, width)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, memory: KeyValue, mask: Tensor | None, past_segments: Segments) -> BlockOutput:
        """Run words x (B, T, D). They attend to visual tokens in `memory`, and to words in `past_segments` and x where `mask` is True."""
        attended, new_key_values = self.self_attention(x, mask, past_segments)
        words = self.norm1(x + self.dropout(attended))
        visual = self.norm2(words + self.dropout(self.cross.attend_memory(words, memory)))
        hidden = self.norm3(visual + self.dropout(self.outer(F.gelu(self.inner(visual)))))
        return BlockOutput(words, visual, hidden, new_key_values)


class TextBlock(nn.Module):
    """A pre-norm block of CLIP's text tower with cross-attention inserted before its FFN (the paper's ablation FT1; details are ours).

    The output layer of the cross-attention starts at zero, so that the block initially computes the same as CLIP's.
    """

    def __init__(self, width: int, heads: int, ffn: int, dropout: float, activation: nn.Module) -> None:
        super().__init__()
        self.self_attention, self.cross = Attention(width, heads), Attention(width, heads, dropout)
        self.norm1, self.norm_cross, self.norm2 = (nn.LayerNorm(width) for _ in range(3))
        self.inner, self.outer = Linear(width, ffn), Linear(ffn, width)
        self.activation = activation

    def forward(self, x: Tensor, memory: KeyValue, mask: Tensor | None, past_segments: Segments) -> BlockOutput:
        """Run words x (B, T, D). They attend to visual tokens in `memory`, and to words in `past_segments` and x where `mask` is True."""
        attended, new_key_values = self.self_attention(self.norm1(x), mask, past_segments)
        words = x + attended
        visual = words + self.cross.attend_memory(self.norm_cross(words), memory)
        hidden = visual + self.outer(self.activation(self.inner(self.norm2(visual))))
        return BlockOutput(words, visual, hidden, new_key_values)


class CLIP4IDC(Captioner):
    """The captioner of stage 2, which reads pixels; CLIP is fine-tuned together with it.

    A batch with twice as many "after" as "before" images contains two groups of pairs with the same before images: change pairs,
    then distractor pairs. Their losses are added (authors' code).

    Args:
        vocabulary_size: V. network, image_size, intra_layers, checkpointing, freeze_embeddings: as in `CLIP4IDCAdaptation`.
        max_length: positions of a caption, START and END included (authors' code: 33, of which 32 are the decoder's input).
        width: D (authors' code: 512; paper: 768). If it is not CLIP's width, linear layers from and to CLIP's width are added (ours).
        heads: 8 (paper: 12). ffn: inner width (2048). encoder_layers, decoder_layers: 3 and 3 (authors' code).
        dropout: 0.1.
        layerwise_cross_attention: True: decoder block i attends to encoder block i (authors' code). False: all to the last one (paper).
        images: "together": encoded jointly after the intra layers. "apart": separately in all layers (the paper's ablations FT1, FT2).
        decoder: "captioner", or "clip_text": CLIP's text tower with cross-attention inserted (FT1), whose number of blocks and
            widths replace `decoder_layers`, `width` and `heads`.
        train_words: train CLIP's word vectors in spite of `freeze_embeddings` (authors' code: on Spot-the-Diff only).
        pair_init: as in `CLIP4IDCAdaptation`; it has no effect if an adaptation's checkpoint is loaded.
        init_std: standard deviation of the captioner's initial weights (authors' code: 0.02 for a width of 512; a value far
            below 1 / sqrt(width) makes the visual signal too weak to learn from).
        padding: "own": an id beyond the vocabulary. "released": id 0, CLIP's token "!", as in the authors' code. This token is never
            learned, and ends a caption if it is generated.
        change_weight: factor of the losses of a `models.change_head.ChangeHead` that reads the encoder's output (ours); None: no head.
        change_types: names of the types of changes in the training data, which the head distinguishes.
    """

    vocabulary_layout = "clip"
    # Prefixes of parameter names that only the captioner has, and of names that only an adaptation's checkpoint has.
    allowed_missing = ("visual_in", "words_in", "words_norm", "encoder", "decoder", "head", "word_bias", "change_head")
    allowed_unexpected = ("words.transformer", "words.ln_final", "words.text_projection", "logit_scale", "change_head")

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
        change_weight: float | None = None,
        change_types: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__()
        self.hyperparameters = constructor_arguments(locals())
        clip = build_clip(network, image_size, vocabulary_size)
        self.images = PairTower(clip, intra_layers, images == "together", pair_init, checkpointing=checkpointing)
        self.words = TokenEmbedding(clip)
        self.bos_id, self.eos_id = vocabulary_size - 2, vocabulary_size - 1  # the last two ids, as in CLIP
        self.pad = 0 if padding == "released" else vocabulary_size
        if padding == "released":
            self.vocabulary_layout = "clip_released"
            self.extra_eos_id = 0
        self.max_length = max_length
        self.layerwise = layerwise_cross_attention
        word_width = self.words.token_embedding.embedding_dim
        visual_width = self.images.visual.proj.shape[1]
        text_blocks = text_tower_of(clip).transformer.resblocks
        if decoder == "clip_text":
            width = word_width
            heads = text_blocks[0].attn.num_heads
            decoder_layers = len(text_blocks)
        if layerwise_cross_attention and encoder_layers != decoder_layers:
            raise ValueError(
                f"layerwise_cross_attention needs as many encoder as decoder blocks, not {encoder_layers} and {decoder_layers}"
            )
        num_positions = len(self.words.positional_embedding)
        if max_length - 1 > num_positions:
            raise ValueError(
                f"max_length {max_length} needs {max_length - 1} text positions, CLIP has {num_positions}; lower it"
            )
        self.visual_in = Linear(visual_width, width) if width != visual_width else nn.Identity()
        self.words_in = Linear(word_width, width) if width != word_width else nn.Identity()
        self.encoder = nn.ModuleList(EncoderBlock(width, heads, ffn, dropout) for _ in range(encoder_layers))
        if decoder == "clip_text":
            ffn = text_blocks[0].mlp.c_fc.out_features
            activation = text_blocks[0].mlp.gelu
            self.decoder = nn.ModuleList(
                TextBlock(width, heads, ffn, dropout, activation) for _ in range(decoder_layers)
            )
            self.words_norm: nn.Module = nn.Identity()
            self.head: nn.Module = nn.Identity()
            self.head_norm = nn.LayerNorm(width)
        else:
            self.decoder = nn.ModuleList(DecoderBlock(width, heads, ffn, dropout) for _ in range(decoder_layers))
            self.words_norm = nn.LayerNorm(width, NORM_EPS)
            self.head = nn.Sequential(Linear(width, word_width), nn.GELU())
            self.head_norm = nn.LayerNorm(word_width, NORM_EPS)
        self.dropout = Dropout(dropout)
        self.word_bias = nn.Parameter(torch.zeros(vocabulary_size))
        for part in (self.visual_in, self.words_in, self.encoder, self.decoder, self.head):
            for layer in part.modules():
                if isinstance(layer, nn.Linear):  # as BERT (authors' code)
                    nn.init.normal_(layer.weight, std=init_std)
                    if layer.bias is not None:
                        nn.init.zeros_(layer.bias)
        for block in self.decoder if decoder == "clip_text" else ():
            nn.init.zeros_(block.cross.out.weight)  # type: ignore[union-attr, arg-type]
        if freeze_embeddings:
            self.images.freeze_embeddings()
            self.words.freeze_embeddings()
        if train_words:
            self.words.token_embedding.requires_grad_(True)
        if change_weight:
            self.change_head = ChangeHead(width, change_types, change_weight)

    def encode_pixels(self, before: Tensor, after: Tensor) -> Tensor:
        """Encode pixels (b, 3, height, width) and (B, ...), B a multiple of b, as the tokens of each pair, (B, 2 + 2 N, E)."""
        return self.images(self.images.normalize(before), self.images.normalize(after))

    def run_encoder(self, pair_tokens: Tensor) -> list[Tensor]:
        """Return the input of the captioner's encoder and the outputs of its blocks, (B, 2 + 2 N, D) each."""
        states = [self.visual_in(pair_tokens)]
        for block in self.encoder:
            states.append(block(states[-1]))
        return states

    def project_memory(self, states: list[Tensor]) -> list[KeyValue]:
        """Compute the keys and values that each decoder block attends to, from the result of `run_encoder`."""
        attended = states[1:] if self.layerwise else states[-1:] * len(self.decoder)
        return [block.cross.project_key_value(state) for block, state in zip(self.decoder, attended)]  # type: ignore[union-attr, operator]

    def encode_tokens(self, before: Tensor, after: Tensor) -> Tensor:
        """Encode pixels (B, 3, height, width) of both images as the tokens (B, 2 + 2 N, D) of the last encoder block."""
        return self.run_encoder(self.encode_pixels(before, after))[-1]

    def encode(self, before: Tensor, after: Tensor) -> list[KeyValue]:
        """Encode pixels (B, 3, height, width) of both images as the keys and values for each decoder block."""
        return self.project_memory(self.run_encoder(self.encode_pixels(before, after)))

    def decode(
        self, tokens: Tensor, memory: list[KeyValue], past_key_values: list[KeyValue] | None = None
    ) -> DecoderOutput:
        """Run ids (B, T), which follow the words of `past_key_values`. If it is None, they begin captions, and padding is masked."""
        first_position = past_key_values[0][0].shape[2] if past_key_values else 0
        x = self.dropout(self.words_norm(self.words_in(self.words(tokens, first_position))))
        mask = None if past_key_values else causal_mask(tokens != self.pad)
        return run_blocks(self.decoder, x, memory, mask, past_key_values)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits of the next word, (..., D) to (..., V). The output matrix is CLIP's word vectors."""
        return linear(self.head_norm(self.head(hidden)), self.words.token_embedding.weight, self.word_bias)

    def step(self, tokens: Tensor, memory: list[KeyValue], cache: Any) -> tuple[Tensor, Any]:
        """Score the next word, see `Captioner.step`."""
        last, cache = self.decode(tokens[:, None], memory, cache)
        return self.compute_logits(last.hidden[:, 0]), cache

    def teacher_forced_logits(self, tokens: Tensor, memory: list[KeyValue]) -> Tensor:
        """Score the words of given captions in one pass, see `Captioner.teacher_forced_logits`."""
        return self.compute_logits(self.decode(tokens[:, :-1], memory).last_block.hidden)

    def attention(self, before: Tensor, after: Tensor, tokens: Tensor) -> AttentionMaps:
        """Compute the maps of the decoder's last cross-attention to the patches, the mean over heads, see `Captioner.attention`."""
        memory = self.encode(before, after)
        words = self.decode(tokens, memory).last_block.after_self_attention
        last: Any = self.decoder[-1]
        query = last.cross.project_query(last.norm_cross(words))
        attention = last.cross.mean_weights(query, memory[-1][0])
        before_tokens, after_tokens = attention.chunk(2, 2)
        return patch_attention(before_tokens[..., 1:], after_tokens[..., 1:], self.images.grid)

    def word_mask(self, tokens: Tensor) -> Tensor:
        """Return a mask (B, T - 1) of the words and ENDs, see `Captioner.word_mask`."""
        return tokens[:, 1:] != self.pad

    def word_losses(self, tokens: Tensor, memory: list[KeyValue], words: Tensor) -> Tensor:
        """Return cross-entropies (n,), in nats, of captions (B, T) at the indices `words` (n,) of the flattened `word_mask`."""
        hidden = take_flat(self.decode(tokens[:, :-1], memory).last_block.hidden, words)
        return F.cross_entropy(self.compute_logits(hidden), take_flat(tokens[:, 1:], words), reduction="none")

    def validation_losses(self, batch: Batch) -> dict[str, Tensor]:
        """Compute the word losses of validation pairs, see `Captioner.validation_losses`."""
        (words,) = self.find_words(batch)
        states = self.run_encoder(self.encode_pixels(batch["before"], batch["after"]))
        word_losses = self.word_losses(batch["tokens"], self.project_memory(states), words)
        return {"caption_loss": word_losses, **self.change_losses(states[-1], batch)}

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Compute the mean cross-entropy over each group's words in the global batch, and add those of the groups.

        `batch` has `before` (b, 3, height, width), `after` (B, ...), where B is b, or 2 b for two groups, and `tokens` (B, T).
        """
        before = batch["before"]
        after = batch["after"]
        tokens = batch["tokens"]
        states = self.run_encoder(self.encode_pixels(before, after))
        memory = self.project_memory(states)
        losses = []
        for rows, words in zip(pair_groups(before, after), self.find_words(batch)):
            group_memory = [(key[rows], value[rows]) for key, value in memory]
            group_words = words - rows.start * (tokens.shape[1] - 1)
            losses.append(global_mean(self.word_losses(tokens[rows], group_memory, group_words)))
        names = ("caption_loss", "distractor_caption_loss")
        logged = {name: group_loss.detach() for name, group_loss in zip(names, losses)}
        losses_by_name = {"loss": torch.stack(losses).sum(), **logged}
        return self.add_change_losses(losses_by_name, self.change_losses(states[-1], batch))

    load_initial = load_clip

    def pretrained_parameters(self) -> list[nn.Parameter]:
        """Return CLIP's parameters, and those that the adaptation adds to the image tower."""
        pretrained = [*self.images.parameters(), *self.words.parameters()]
        text_blocks = [block for block in self.decoder if isinstance(block, TextBlock)]
        for block in text_blocks:  # all parameters are CLIP's, except those of the cross-attention
            named = block.named_parameters()
            pretrained += [parameter for name, parameter in named if not name.startswith(("cross.", "norm_cross."))]
        if text_blocks:
            pretrained += self.head_norm.parameters()
        return pretrained
