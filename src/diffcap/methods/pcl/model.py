"""IDC-PCL (Yao, Wang and Jin, "Image Difference Captioning with Pre-training and Contrastive Learning", AAAI 2022).

Embeddings and encoders (`PCLTrunk`), and the captioner (`PCL`), which decodes with [MASK] tokens. Where the paper and the released
code differ, the code is the default and the paper's version is an option.

Letters: B pairs, N patches of an image, T text positions, D width, C feature channels, V vocabulary.
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffcap.data.masking import IGNORED
from diffcap.losses.gather import ddp_scaled_sum, global_mean
from diffcap.models.captioner import AttentionMaps, Batch, Captioner, constructor_arguments, patch_attention
from diffcap.models.layers import (
    ALL_POSITIONS,
    Dropout,
    KeyValue,
    Linear,
    Positions,
    PreNormStack,
    UnbiasedLayerNorm,
    init_difference_attention_,
    padded_nonzero,
    repeat_batch,
    sinusoidal_positions,
)
from diffcap.utils.errors import DiffcapError

PAD, BOS, EOS, UNK, CLS, MASK = range(6)  # BOS and MASK are fixed in the authors' decoder; the others are ours
FIRST_CLS, FIRST_IMAGE, SECOND_CLS, SECOND_IMAGE, TEXT_CLS, TEXT = range(1, 7)  # type ids; 0 is unused
EMBEDDING_EPS = 1e-12


class PCLTrunk(nn.Module):
    """Embeddings, the single-image, pair and cross-modal encoders, and the word classifier.

    Args:
        vocabulary_size: V, specials included.
        feature_channels: C (ResNet-101 layer4: 2048).
        width: D (paper: 512). heads: H (paper: 8). ffn: inner width (authors' code: 2048).
        single_layers, pair_layers: layers of the single-image and the pair encoder (paper: 1 and 1); `pair_layers=0` is the
            paper's ablation without the pair encoder.
        cross_layers: layers of the cross-modal encoder (paper: 3 for CLEVR-Change, 2 for Birds-to-Words).
        dropout: authors' code: 0.2 everywhere.
        positions: length of the fixed position table (authors' code: 200); at least the numbers of patches and of text positions.
        image_activation: "sigmoid" after the image projection (authors' code), or "linear": none (paper).
        word_std, type_std: standard deviations of the initial word and type vectors (authors' code: 1, PyTorch's default).
            Words are scaled by sqrt(D), and types are added to sigmoids of small numbers, so with 1 they are much larger than
            positions and image content at first; 1 / sqrt(D) and about 0.2 learn several times faster (ours).
        pair_init: initial weights of the pair encoder's attention: "random", or "difference", see
            `layers.init_difference_attention_` (ours).
    """

    position_table: Tensor

    def __init__(
        self,
        vocabulary_size: int,
        feature_channels: int,
        width: int = 512,
        heads: int = 8,
        ffn: int = 2048,
        single_layers: int = 1,
        pair_layers: int = 1,
        cross_layers: int = 3,
        dropout: float = 0.2,
        positions: int = 200,
        image_activation: Literal["sigmoid", "linear"] = "sigmoid",
        word_std: float = 1.0,
        type_std: float = 1.0,
        pair_init: Literal["random", "difference"] = "random",
    ) -> None:
        super().__init__()
        self.hyperparameters = constructor_arguments(locals())
        self.width = width
        self.word_embedding = nn.Embedding(vocabulary_size, width)
        self.image_projection = Linear(feature_channels, width)
        self.image_activation = nn.Sigmoid() if image_activation == "sigmoid" else nn.Identity()
        self.type_embedding = nn.Embedding(7, width)
        self.embedding_norm = UnbiasedLayerNorm(width, EMBEDDING_EPS)
        self.dropout = Dropout(dropout)
        self.single_encoder = PreNormStack(single_layers, width, heads, ffn, dropout)
        self.pair_encoder = PreNormStack(pair_layers, width, heads, ffn, dropout)
        self.cross_encoder = PreNormStack(cross_layers, width, heads, ffn, dropout)
        self.output_layer = Linear(width, vocabulary_size)
        nn.init.normal_(self.word_embedding.weight, std=word_std)
        nn.init.normal_(self.type_embedding.weight, std=type_std)
        if pair_init == "difference":
            for layer in self.pair_encoder.layers:
                init_difference_attention_(layer.attention.qkv.weight, layer.attention.out.weight)  # type: ignore[union-attr, arg-type]
        position_table = sinusoidal_positions(positions, width, own_frequencies=True)
        self.register_buffer("position_table", position_table, persistent=False)

    def _finish_embedding(self, embedding: Tensor, type_id: int) -> Tensor:
        return self.dropout(self.embedding_norm(embedding + self.type_embedding.weight[type_id]))

    def cls(self, batch: int, type_id: int) -> Tensor:
        """The [CLS] token of one type, (B, 1, D); all types share one word vector and have no position."""
        return self._finish_embedding(self.word_embedding.weight[CLS].expand(batch, 1, -1), type_id)

    def patches(self, features: Tensor, type_id: int) -> Tensor:
        """Feature maps (B, C, h, w) to embedded patches (B, h w, D), row by row."""
        flat = features.flatten(2).transpose(1, 2)  # (B, N, C)
        projected = self.image_activation(self.image_projection(flat))
        return self._finish_embedding(projected + self._position_embedding(0, flat.shape[1]), type_id)

    def text(self, tokens: Tensor, first: int = 0, position_ids: Tensor | None = None) -> Tensor:
        """Ids (B, T) at positions `first`, `first + 1`, ... (or at `position_ids`, (T,)) to (B, T, D)."""
        if position_ids is None:
            embedding = self._position_embedding(first, tokens.shape[1])
        else:
            embedding = self.position_table[position_ids]
        return self._finish_embedding(self.word_embedding(tokens) * self.width**0.5 + embedding, TEXT)

    def check_max_length(self, max_length: int) -> None:
        """Raise a `DiffcapError` if captions of a training are longer than the position table."""
        if max_length > len(self.position_table):
            raise DiffcapError(
                f"data.max_length is {max_length}, but model.captioner.init_args.positions is {len(self.position_table)}; raise "
                "the positions, or lower max_length."
            )

    def _position_embedding(self, first: int, length: int) -> Tensor:
        self.check_positions(first + length)
        return self.position_table[first : first + length]

    def check_positions(self, needed: int) -> None:
        """Raise a `ValueError` if the position table is too short."""
        if needed > len(self.position_table):
            raise ValueError(
                f"{needed} positions are needed, the table has {len(self.position_table)}: raise `positions`"
            )

    def _singles(self, images: list[Tensor]) -> tuple[Tensor, ...]:
        """Feature maps, (B, C, h, w) each, through the single-image encoder in one pass: (B, 1 + N, D) each."""
        types = ((FIRST_CLS, FIRST_IMAGE), (SECOND_CLS, SECOND_IMAGE))
        embedded = [
            torch.cat([self.cls(len(image), cls_type), self.patches(image, patch_type)], 1)
            for image, (cls_type, patch_type) in zip(images, types)
        ]
        return self.single_encoder(torch.cat(embedded))[0].chunk(len(images))

    def visual(self, before: Tensor, after: Tensor) -> Tensor:
        """Two feature maps (B, C, h, w) through the single-image and pair encoders: (B, 2 + 2 N, D).

        Order: [CLS] of the first image, its patches, [CLS] of the second, its patches.
        """
        return self.encode_images(before, after)[1]

    def encode_images(self, before: Tensor, after: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Output of the single-image encoder for each image, (B, 1 + N, D), and of the pair encoder, see `visual`."""
        singles = self._singles([before, after])
        return singles, self.pair_encoder(torch.cat(singles, 1))[0]

    def visual_of_one(self, image: Tensor, encode_cls: bool = False) -> Tensor:
        """Encode a single image (B, C, h, w), without a second one: (B, 2 + N, D), the second image's [CLS] last.

        With `encode_cls`, this [CLS] passes through the single-image encoder, as if image 2 were padding (authors' code: False).
        """
        (first,) = self._singles([image])
        second = self.cls(len(image), SECOND_CLS)
        if encode_cls:
            second = self.single_encoder(second)[0]
        return self.pair_encoder(torch.cat([first, second], 1))[0]

    def joint(
        self, visual: Tensor, tokens: Tensor, pad_mask: bool = False, query_positions: Positions = ALL_POSITIONS
    ) -> Tensor:
        """The cross-modal encoder over visual tokens (B, M, D) and text (B, T), without a causal mask (pre-training).

        `visual` may have b rows, each for B / b consecutive texts. The released code has no `pad_mask`. The result is (B, M + 1 + T, D):
        visual tokens, the text's [CLS], the text; or (B, Q, D), those at Q `query_positions`.
        """
        text = torch.cat([self.cls(len(tokens), TEXT_CLS), self.text(tokens)], 1)
        mask = None
        if pad_mask:
            visible = tokens.new_ones(len(tokens), visual.shape[1] + text.shape[1], dtype=torch.bool)
            visible[:, -tokens.shape[1] :] = tokens != PAD
            mask = visible[:, None, None]
        return self.cross_encoder.forward_repeated(visual, text, mask, query_positions)


class EncodedPair(NamedTuple):
    """A pair after all encoders."""

    key_values: list[KeyValue]  # of the visual tokens, in each cross-modal layer
    image_cls: Tensor  # (B, 2, D), final states of both images' [CLS]; or (B, 0, D)


class PCL(Captioner):
    """The fine-tuned captioner. Visual tokens attend to each other; a word attends to all visual tokens and to earlier words.

    Args:
        vocabulary_size, feature_channels, trunk: as `PCLTrunk`.
        distractor_judging: also learn whether anything but the viewpoint changed (paper: on CLEVR-Change).
        distractor_weight: factor of that loss (authors' code: 1, on sums).
        objective: "masked" masks 15 % of the words and predicts those (authors' code); "all_positions" predicts every word
            from its own [MASK] in one pass, which is exactly what decoding computes (ours).
        text_cls: the text begins with its own [CLS] (paper; the authors' code leaves it out).

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> model = PCL(10, 8, width=16, heads=2, ffn=24, objective="all_positions").eval()
        >>> before, after = torch.randn(3, 8, 2, 2), torch.randn(3, 8, 2, 2)
        >>> tokens = torch.tensor([[BOS, 6, 7, EOS, PAD]] * 3)
        >>> batch = {"before": before, "after": after, "tokens": tokens, "is_change": torch.tensor([1, 1, 0])}
        >>> sorted(model.loss(batch))
        ['distractor_loss', 'loss', 'word_loss']
        >>> model.teacher_forced_logits(tokens, model.encode(before, after)).shape  # (B, T - 1, V)
        torch.Size([3, 4, 10])
    """

    bos_id = BOS
    eos_id = EOS
    vocabulary_layout = "pcl"
    # The distractor head is new; the heads of MVCL and of NABirds' tasks are used in pre-training only (authors' code).
    allowed_missing = ("distractor_head",)
    allowed_unexpected = ("regress", "classifier", "matcher")

    def __init__(
        self,
        vocabulary_size: int,
        feature_channels: int,
        distractor_judging: bool = True,
        distractor_weight: float = 1.0,
        objective: Literal["masked", "all_positions"] = "masked",
        text_cls: bool = False,
        **trunk: Any,
    ) -> None:
        super().__init__()
        arguments = constructor_arguments(locals())
        del arguments["trunk"]
        self.trunk = PCLTrunk(vocabulary_size, feature_channels, **trunk)
        self.hyperparameters = {**arguments, **self.trunk.hyperparameters}
        self.distractor_head = Linear(2 * self.trunk.width, 2) if distractor_judging else None
        self.distractor_weight = distractor_weight
        self.objective = objective
        self.text_cls = text_cls

    def check(self, data: Any) -> None:
        """See `Captioner.check`; the position table must be as long as the captions, too."""
        super().check(data)
        self.trunk.check_max_length(data.max_length)

    def encode_pair(self, before: Tensor, after: Tensor, with_cls: bool = True) -> EncodedPair:
        """Two feature maps (B, C, h, w) through all encoders, without text; `with_cls`: whether `image_cls` is needed."""
        visual = self.trunk.visual(before, after)
        cls_positions = slice(0, visual.shape[1], visual.shape[1] // 2) if with_cls else slice(0)
        if self.text_cls:
            visual = torch.cat([visual, self.trunk.cls(len(visual), TEXT_CLS)], 1)
        image_cls, key_values = self.trunk.cross_encoder(visual, query_positions=cls_positions)
        return EncodedPair(key_values, image_cls)

    def encode(self, before: Tensor, after: Tensor) -> list[KeyValue]:
        """Two feature maps (B, C, h, w) to the visual tokens' keys and values in each cross-modal layer."""
        return self.encode_pair(repeat_batch(before, len(after)), after, with_cls=False).key_values

    def step(
        self, tokens: Tensor, memory: list[KeyValue], cache: list[KeyValue] | None
    ) -> tuple[Tensor, list[KeyValue]]:
        """Append [MASK] to the words so far and predict the word in its place; the cache keeps the words only."""
        past_key_values = [[visual] for visual in memory]
        position = 0
        if cache is not None:
            position = cache[0][0].shape[2]
            past_key_values = [[visual, words] for visual, words in zip(memory, cache)]
        word_and_mask = torch.stack([tokens, torch.full_like(tokens, MASK)], 1)  # (B, 2)
        x = self.trunk.text(word_and_mask, first=position)
        attention_mask = _causal_mask(2, memory[0][0].shape[2] + position, tokens.device)
        hidden, new_key_values = self.trunk.cross_encoder(
            x, attention_mask, past_key_values, query_positions=slice(1, 2)
        )
        new_cache = [(key[:, :, :1], value[:, :, :1]) for key, value in new_key_values]
        if cache is not None:
            new_cache = [
                (torch.cat([past_key, key], 2), torch.cat([past_value, value], 2))
                for (past_key, past_value), (key, value) in zip(cache, new_cache)
            ]
        return self.trunk.output_layer(hidden[:, 0]), new_cache

    def masked_logits(self, memory: list[KeyValue], batch: Batch) -> Tensor:
        """Logits at the masked positions of `mlm_tokens` (B, T), each from the words before it: (n, V)."""
        tokens = batch["mlm_tokens"]
        attention_mask = _causal_mask(tokens.shape[1], memory[0][0].shape[2], tokens.device)
        query_positions, is_masked = padded_nonzero(batch["mlm_labels"] != IGNORED)
        past = [(visual,) for visual in memory]
        hidden, _ = self.trunk.cross_encoder(self.trunk.text(tokens), attention_mask, past, query_positions)
        return self.trunk.output_layer(hidden[is_masked])

    def teacher_forced_logits(self, tokens: Tensor, memory: list[KeyValue]) -> Tensor:
        """See `Captioner.teacher_forced_logits`: each position from its own [MASK], see `_append_mask_tokens`, exactly as in `step`."""
        x, attention_mask = self._append_mask_tokens(tokens[:, :-1], memory[0][0].shape[2])
        past = [(visual,) for visual in memory]
        mask_positions = slice(tokens.shape[1] - 1, None)
        hidden, _ = self.trunk.cross_encoder(x, attention_mask, past, query_positions=mask_positions)
        return self.trunk.output_layer(hidden)

    def _append_mask_tokens(self, tokens: Tensor, visual_tokens: int) -> tuple[Tensor, Tensor]:
        """Append to words (B, T) a [MASK] for the position after each.

        Returns:
            (B, 2 T, D) embeddings, and their boolean attention mask (2 T, visual_tokens + 2 T): word i sees words 0 ... i; so does
            the [MASK] at position i + 1, which also sees itself.
        """
        words = tokens.shape[1]
        device = tokens.device
        self.trunk.check_positions(words + 1)
        position = torch.arange(words, device=device)
        ids = torch.cat([tokens, torch.full_like(tokens, MASK)], 1)
        x = self.trunk.text(ids, position_ids=torch.cat([position, position + 1]))
        attention_mask = torch.zeros(2 * words, visual_tokens + 2 * words, dtype=torch.bool, device=device)
        attention_mask[:, :visual_tokens] = True
        attention_mask[:, visual_tokens : visual_tokens + words] = (position[:, None] >= position).repeat(2, 1)
        attention_mask[words:, visual_tokens + words :].fill_diagonal_(True)
        return x, attention_mask

    def nothing_changed(self, before: Tensor, after: Tensor) -> Tensor | None:
        """See `Captioner.nothing_changed`: the output of distractor judging."""
        if self.distractor_head is None:
            return None
        image_cls = self.encode_pair(before, after).image_cls
        return self.distractor_head(image_cls.flatten(1)).softmax(-1)[:, 0]

    def attention(self, before: Tensor, after: Tensor, tokens: Tensor) -> AttentionMaps:
        """See `Captioner.attention`: attention of each word's [MASK] to the patches in the last cross-modal layer.

        Mean over the heads, normalised over the patches of both images. The method does not align the images.
        """
        memory = self.encode(before, after)
        word_count = tokens.shape[1]
        x, attention_mask = self._append_mask_tokens(tokens, memory[0][0].shape[2])
        x = self.trunk.cross_encoder.norm(x)
        *layers, last = self.trunk.cross_encoder.layers
        for layer, visual in zip(layers, memory):
            x, _ = layer(x, attention_mask, (visual,))
        query, key, _ = last.attention.project_qkv(last.attention_norm(x))  # type: ignore[union-attr, operator]
        key = torch.cat([memory[-1][0], key], 2)
        attention = last.attention.mean_weights(query[:, :, word_count:], key, attention_mask[word_count:])  # type: ignore[union-attr, operator]
        grid = (before.shape[2], before.shape[3])
        length = 1 + grid[0] * grid[1]  # of one image: [CLS] and patches
        return patch_attention(attention[..., 1:length], attention[..., length + 1 : 2 * length], grid)

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Return "loss", the sum over the global batch (authors' code), and each loss's mean over words or pairs, for the log.

        Needs `before`, `after` (B, C, h, w); `before` may have B / 2 rows: row i serves pairs i and i + B / 2. `tokens` (B, T), or
        `mlm_tokens` and `mlm_labels` for the objective "masked"; with distractor judging `is_change` (B,), 1 if something changed.
        """
        losses = self.validation_losses(batch)
        weights = {"word_loss": 1.0, "distractor_loss": self.distractor_weight}
        weighted = [weights[name] * ddp_scaled_sum(values) for name, values in losses.items()]
        means = {name: global_mean(values.detach()) for name, values in losses.items()}
        return {"loss": torch.stack(weighted).sum(), **means}

    def validation_losses(self, batch: Batch) -> dict[str, Tensor]:
        """See `Captioner.validation_losses`: `word_loss` per word, and with distractor judging `distractor_loss` per pair."""
        before = batch["before"]
        after = batch["after"]
        memory, image_cls = self.encode_pair(repeat_batch(before, len(after)), after, self.distractor_head is not None)
        if self.objective == "masked":
            labels = batch["mlm_labels"]
            logits, labels = self.masked_logits(memory, batch), labels[labels != IGNORED]
        else:
            target = batch["tokens"][:, 1:]
            is_word = target != PAD
            logits = self.teacher_forced_logits(batch["tokens"], memory)[is_word]
            labels = target[is_word]
        losses = {"word_loss": F.cross_entropy(logits, labels, reduction="none")}
        if self.distractor_head is not None:
            # Logits of "nothing changed" and "something changed", (B, 2).
            is_change = batch["is_change"].long()
            logits = self.distractor_head(image_cls.flatten(1))
            losses["distractor_loss"] = F.cross_entropy(logits, is_change, reduction="none")
        return losses


def _causal_mask(queries: int, past: int, device: torch.device) -> Tensor:
    """Boolean (queries, past + queries): query i sees all past positions and queries 0 ... i."""
    return torch.ones(queries, past + queries, dtype=torch.bool, device=device).tril(past)
