"""IDC-PCL (Yao, Wang and Jin, "Image Difference Captioning with Pre-training and Contrastive Learning", AAAI 2022).

Order of the file: embeddings and encoders (`PCLTrunk`), then the fine-tuned captioner (`PCL`), which predicts each word in the place
of a [MASK]. Where the paper and the authors' code differ, the code's version is the default and the paper's is an option.

Letters: B pairs, N patches of an image, M visual tokens of a pair (patches and [CLS]), T text positions, Q positions whose output is
computed, D width, H heads, C feature channels, V vocabulary.
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffcap.data.masking import IGNORED
from diffcap.losses.gather import global_mean, world_size
from diffcap.models.captioner import AttentionMaps, Batch, Captioner, constructor_arguments, patch_attention
from diffcap.models.decoder import take_flat
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

PAD, BOS, EOS, UNK, CLS, MASK = range(6)  # token ids; BOS and MASK as in the authors' decoder, the others are ours
FIRST_CLS, FIRST_IMAGE, SECOND_CLS, SECOND_IMAGE, TEXT_CLS, TEXT = range(1, 7)  # type ids; 0 is unused
EMBEDDING_EPS = 1e-12  # of the norms of the embeddings and of the regression head


class PCLTrunk(nn.Module):
    """Embeddings, the single-image, pair and cross-modal encoders, and the word classifier.

    Args:
        vocabulary_size: V, special tokens included.
        feature_channels: C (ResNet-101 layer4: 2048).
        width: D (paper: 512). heads: H (paper: 8). ffn: inner width (authors' code: 2048).
        single_layers, pair_layers: layers of the single-image and the pair encoder (paper: 1 and 1); `pair_layers=0` is the
            paper's ablation without the pair encoder.
        cross_layers: layers of the cross-modal encoder (paper: 3 for CLEVR-Change, 2 for Birds-to-Words).
        dropout: authors' code: 0.2 everywhere.
        positions: length of the fixed position table (authors' code: 200); at least the numbers of patches and of text positions.
        image_activation: "sigmoid" after the image projection (authors' code), or "linear", no activation (paper).
        word_std, type_std: standard deviations of the initial word and type vectors (authors' code: 1, PyTorch's default).
            Word vectors are multiplied by sqrt(D); type vectors are added to sigmoids of small numbers. With 1, both hide positions
            and image content at first. `word_std` 1 / sqrt(D) and `type_std` 0.2 learn several times faster (ours).
        pair_init: initial weights of the pair encoder's attention: "random", or "difference", with which it outputs approximately
            the difference of the images before training (`layers.init_difference_attention_`, ours).
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
        self.embedding_norm = UnbiasedLayerNorm(width, EMBEDDING_EPS)  # divides by the unbiased standard deviation
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
        position_table = sinusoidal_positions(positions, width, has_frequency_per_channel=True)
        self.register_buffer("position_table", position_table, persistent=False)

    def _finish_embedding(self, embedding: Tensor, type_id: int) -> Tensor:
        return self.dropout(self.embedding_norm(embedding + self.type_embedding.weight[type_id]))

    def embed_cls(self, num_rows: int, type_id: int) -> Tensor:
        """Embed the [CLS] token of one type: (B, 1, D). All types have the same word vector, and no position vector."""
        return self._finish_embedding(self.word_embedding.weight[CLS].expand(num_rows, 1, -1), type_id)

    def embed_patches(self, maps: Tensor, type_id: int) -> Tensor:
        """Embed the patches of feature maps (B, C, h, w): (B, N, D), in reading order."""
        features = maps.flatten(2).transpose(1, 2)  # (B, N, C)
        projected = self.image_activation(self.image_projection(features))
        return self._finish_embedding(projected + self.position_vectors(0, features.shape[1]), type_id)

    def embed_text(self, tokens: Tensor, position_vectors: Tensor | None = None) -> Tensor:
        """Embed ids (B, T) with `position_vectors` (T, D), or, if these are None, at positions 0 ... T - 1: (B, T, D)."""
        if position_vectors is None:
            position_vectors = self.position_vectors(0, tokens.shape[1])
        return self._finish_embedding(self.word_embedding(tokens) * self.width**0.5 + position_vectors, TEXT)

    def position_vectors(self, start: int, end: int) -> Tensor:
        """Return the vectors (end - start, D) of positions `start` ... `end - 1`; raise a DiffcapError if the table is too short."""
        if end > len(self.position_table):
            raise DiffcapError(
                f"an image or a caption needs {end} positions, but model.captioner.init_args.positions is {len(self.position_table)}; "
                "raise it, or lower data.max_length."
            )
        return self.position_table[start:end]

    def _encode_singles(self, image_maps: list[Tensor]) -> tuple[Tensor, ...]:
        """Encode the feature maps (B, C, h, w) of one or two images, each on its own: (B, 1 + N, D) each, [CLS] first."""
        types = ((FIRST_CLS, FIRST_IMAGE), (SECOND_CLS, SECOND_IMAGE))
        embedded = [
            torch.cat([self.embed_cls(len(maps), cls_type), self.embed_patches(maps, patch_type)], 1)
            for maps, (cls_type, patch_type) in zip(image_maps, types)
        ]
        return self.single_encoder(torch.cat(embedded))[0].chunk(len(image_maps))  # [1]: its keys and values

    def encode_images(self, before: Tensor, after: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the output of the single-image encoder for each image, (B, 1 + N, D), and of the pair encoder, (B, M, D), M = 2 + 2 N.

        The pair encoder's order: [CLS] of the first image, its patches, [CLS] of the second, its patches.
        """
        singles = self._encode_singles([before, after])
        return singles, self.pair_encoder(torch.cat(singles, 1))[0]

    def encode_one_image(self, maps: Tensor, encode_cls: bool = False) -> Tensor:
        """Encode the feature maps (B, C, h, w) of a single image: (B, M, D), M = 2 + N. The last token is the [CLS] of a second image.

        `encode_cls`: the single-image encoder encodes this [CLS], too, as if an attention mask hid all patches of the second image
        (authors' code: no).
        """
        (single,) = self._encode_singles([maps])
        second_cls = self.embed_cls(len(maps), SECOND_CLS)
        if encode_cls:
            second_cls = self.single_encoder(second_cls)[0]
        return self.pair_encoder(torch.cat([single, second_cls], 1))[0]

    def encode_jointly(
        self, visual: Tensor, tokens: Tensor, pad_mask: bool = False, query_positions: Positions = ALL_POSITIONS
    ) -> Tensor:
        """Run the cross-modal encoder over visual tokens (B, M, D) and ids (B, T), without a causal mask (pre-training).

        Order: visual tokens, the text's [CLS], the text, (B, M + 1 + T, D). Only `query_positions` of them are returned, (B, Q, D).
        A row of `visual` may belong to several consecutive texts, the captions of a pair. `pad_mask`: mask padding (authors' code: False).
        """
        text = torch.cat([self.embed_cls(len(tokens), TEXT_CLS), self.embed_text(tokens)], 1)
        mask = None
        if pad_mask:
            is_key = tokens.new_ones(len(tokens), visual.shape[1] + text.shape[1], dtype=torch.bool)
            is_key[:, -tokens.shape[1] :] = tokens != PAD
            mask = is_key[:, None, None]
        return self.cross_encoder.forward_repeated(visual, text, mask, query_positions)


class MaskedWords(NamedTuple):
    """The n masked words of a batch, caption by caption."""

    positions: Tensor  # (B, Q) positions of each caption's masked words, padded
    rows: Tensor  # (n,) indices of the entries of the flattened `positions` that are not padding
    ids: Tensor  # (n,) the original words


def find_masked_words(batch: Batch) -> MaskedWords:
    """Return the entry "masked_words" of a batch; if it is missing, compute it from `mlm_labels` (B, T), IGNORED at other positions."""
    if "masked_words" in batch:
        return batch["masked_words"]
    labels = batch["mlm_labels"]
    positions, rows = padded_nonzero(labels != IGNORED)
    return MaskedWords(positions, rows, take_flat(labels.gather(1, positions), rows))


class PCL(Captioner):
    """The fine-tuned captioner. Visual tokens attend to each other; a word attends to them and to earlier words.

    Args:
        vocabulary_size, feature_channels, trunk: as in `PCLTrunk`.
        distractor_judging: also learn to tell change pairs from pairs in which only the viewpoint changed (paper: on CLEVR-Change).
        distractor_weight: factor of the loss of distractor judging in the sum of the losses (authors' code: 1).
        objective: "masked" masks 15 % of the words and predicts them (authors' code); "all_positions" predicts every word
            from its own [MASK] in one pass, which is exactly what decoding computes (ours).
        text_cls: the text begins with its own [CLS] (paper; the authors' code leaves it out).
    """

    bos_id = BOS
    eos_id = EOS
    vocabulary_layout = "pcl"
    # Only fine-tuning has the distractor head; only pre-training has a head for masked patches and two for image classes.
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
        """Raise a DiffcapError if the data do not suit the captioner, or captions are longer than the position table."""
        super().check(data)
        self.trunk.position_vectors(0, data.max_length)  # raises an error if the table has fewer positions

    def encode_pair(self, before: Tensor, after: Tensor, with_cls: bool = True) -> tuple[list[KeyValue], Tensor]:
        """Run two feature maps (B, C, h, w) through all encoders, without text.

        Returns:
            The keys and values of the visual tokens in each cross-modal layer, (B, H, M, D / H) each, and the final states (B, 2, D) of
            both images' [CLS]. Without `with_cls`, these states are not computed: (B, 0, D).
        """
        visual = self.trunk.encode_images(before, after)[1]
        # The positions 0 and 1 + N, or none
        cls_positions = slice(0, visual.shape[1], visual.shape[1] // 2) if with_cls else slice(0)
        if self.text_cls:
            visual = torch.cat([visual, self.trunk.embed_cls(len(visual), TEXT_CLS)], 1)
        image_cls, key_values = self.trunk.cross_encoder(visual, query_positions=cls_positions)
        return key_values, image_cls

    def encode(self, before: Tensor, after: Tensor) -> list[KeyValue]:
        """Encode two feature maps (B, C, h, w) as the visual tokens' keys and values in each cross-modal layer."""
        return self.encode_pair(repeat_batch(before, len(after)), after, with_cls=False)[0]

    def step(self, tokens: Tensor, memory: list[KeyValue], cache: Any) -> tuple[Tensor, Any]:
        """Append [MASK] to the words so far and predict the word in its place. The cache keeps the words only. See `Captioner.step`."""
        past_key_values = [[visual_key_value] for visual_key_value in memory]  # for each layer, a list of segments
        position = 0  # position of `tokens`
        if cache is not None:
            position = cache[0][0].shape[2]
            past_key_values = [list(key_values) for key_values in zip(memory, cache)]  # visual tokens, then words
        word_and_mask = torch.stack([tokens, torch.full_like(tokens, MASK)], 1)  # (B, 2)
        x = self.trunk.embed_text(word_and_mask, self.trunk.position_vectors(position, position + 2))
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

    def word_mask(self, tokens: Tensor) -> Tensor:
        """Return a mask (B, T - 1) of the words and EOS, see `Captioner.word_mask`."""
        return tokens[:, 1:] != PAD

    def host_entries(self, batch: Batch) -> Batch:
        """Return the indices of the words that are predicted, see `Captioner.host_entries`."""
        if self.objective == "masked" and "mlm_labels" in batch:
            return {"masked_words": find_masked_words(batch)}
        return super().host_entries(batch)

    def masked_logits(self, memory: list[KeyValue], batch: Batch) -> Tensor:
        """Compute logits (n, V) of the n masked words of `mlm_tokens` (B, T) from earlier words; `mlm_labels` marks masked positions."""
        tokens = batch["mlm_tokens"]
        attention_mask = _causal_mask(tokens.shape[1], memory[0][0].shape[2], tokens.device)
        masked_words = find_masked_words(batch)
        past_key_values = [(visual_key_value,) for visual_key_value in memory]
        x = self.trunk.embed_text(tokens)
        hidden, _ = self.trunk.cross_encoder(x, attention_mask, past_key_values, masked_words.positions)
        return self.trunk.output_layer(take_flat(hidden, masked_words.rows))

    def teacher_forced_logits(self, tokens: Tensor, memory: list[KeyValue]) -> Tensor:
        """Predict each word of given captions in the place of its own [MASK], as in `step`; see `Captioner.teacher_forced_logits`."""
        x, attention_mask = self._append_mask_tokens(tokens[:, :-1], memory[0][0].shape[2])
        past_key_values = [(visual_key_value,) for visual_key_value in memory]
        mask_positions = slice(tokens.shape[1] - 1, None)  # after the words
        hidden, _ = self.trunk.cross_encoder(x, attention_mask, past_key_values, query_positions=mask_positions)
        return self.trunk.output_layer(hidden)

    def _append_mask_tokens(self, tokens: Tensor, num_visual: int) -> tuple[Tensor, Tensor]:
        """Append to the words (B, T) a [MASK] for the position after each word; `num_visual` is M.

        Returns:
            (B, 2 T, D) embeddings, and their boolean attention mask (2 T, M + 2 T). All attend to the visual tokens, and word i attends to
            words 0 ... i, too. The [MASK] for position i + 1 attends to words 0 ... i and to itself.
        """
        num_words = tokens.shape[1]
        vectors = self.trunk.position_vectors(0, num_words + 1)
        ids = torch.cat([tokens, torch.full_like(tokens, MASK)], 1)
        x = self.trunk.embed_text(ids, torch.cat([vectors[:-1], vectors[1:]]))
        positions = torch.arange(num_words, device=tokens.device)
        to_visual = torch.ones(2 * num_words, num_visual, dtype=torch.bool, device=tokens.device)
        to_words = (positions[:, None] >= positions).repeat(2, 1)
        to_mask_tokens = (positions + num_words)[None] == torch.arange(2 * num_words, device=tokens.device)[:, None]
        return x, torch.cat([to_visual, to_words, to_mask_tokens], 1)

    def nothing_changed(self, before: Tensor, after: Tensor) -> Tensor | None:
        """Return distractor judging's probability (B,) that only the viewpoint changed; None if it was not learned."""
        if self.distractor_head is None:
            return None
        image_cls = self.encode_pair(before, after)[1]
        return self.distractor_head(image_cls.flatten(1)).softmax(-1)[:, 0]

    def attention(self, before: Tensor, after: Tensor, tokens: Tensor) -> AttentionMaps:
        """Compute the attention of each word's [MASK] to the patches in the last cross-modal layer, the mean over heads."""
        memory = self.encode(before, after)
        num_words = tokens.shape[1]
        x, attention_mask = self._append_mask_tokens(tokens, memory[0][0].shape[2])
        x = self.trunk.cross_encoder.norm(x)
        *layers, last_layer = self.trunk.cross_encoder.layers
        for layer, visual_key_value in zip(layers, memory):
            x, _ = layer(x, attention_mask, (visual_key_value,))
        query, key, _ = last_layer.attention.project_qkv(last_layer.attention_norm(x))  # type: ignore[union-attr, operator]
        key = torch.cat([memory[-1][0], key], 2)
        attention = last_layer.attention.mean_weights(query[:, :, num_words:], key, attention_mask[num_words:])  # type: ignore[union-attr, operator]
        grid = (before.shape[2], before.shape[3])
        num_tokens = 1 + grid[0] * grid[1]  # of one image: [CLS] and patches
        return patch_attention(attention[..., 1:num_tokens], attention[..., num_tokens + 1 : 2 * num_tokens], grid)

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Return "loss", the sum over the global batch (authors' code), and each loss's mean over words or pairs, for the log.

        `batch` has `before` and `after` (B, C, h, w). If `before` has only B / 2 rows, row i belongs to pairs i and i + B / 2. `batch` has
        `tokens` (B, T), or for "masked" `mlm_tokens` and `mlm_labels`. For distractor judging it also has `is_change` (B,), 1 or 0.
        """
        losses = self.validation_losses(batch)
        weights = {"word_loss": 1.0, "distractor_loss": self.distractor_weight}
        # DDP divides the sum of the ranks' gradients by the number of ranks.
        weighted_sums = [weights[name] * (values.sum() * world_size()) for name, values in losses.items()]
        means = {name: global_mean(values.detach()) for name, values in losses.items()}
        return {"loss": torch.stack(weighted_sums).sum(), **means}

    def validation_losses(self, batch: Batch) -> dict[str, Tensor]:
        """Compute `word_loss` per word, and with distractor judging `distractor_loss` per pair, see `Captioner.validation_losses`."""
        before = batch["before"]
        after = batch["after"]
        memory, image_cls = self.encode_pair(repeat_batch(before, len(after)), after, self.distractor_head is not None)
        if self.objective == "masked":
            word_logits = self.masked_logits(memory, batch)
            words = find_masked_words(batch).ids
        else:
            indices = torch.cat(self.find_words(batch))  # flat, of (B, T - 1)
            word_logits = take_flat(self.teacher_forced_logits(batch["tokens"], memory), indices)
            words = take_flat(batch["tokens"][:, 1:], indices)
        losses = {"word_loss": F.cross_entropy(word_logits, words, reduction="none")}
        if self.distractor_head is not None:
            change_logits = self.distractor_head(image_cls.flatten(1))  # (B, 2): nothing changed, something changed
            losses["distractor_loss"] = F.cross_entropy(change_logits, batch["is_change"].long(), reduction="none")
        return losses


def _causal_mask(num_queries: int, num_past: int, device: torch.device) -> Tensor:
    """Return a mask (num_queries, num_past + num_queries): query i attends to all past positions and to queries 0 ... i."""
    return torch.ones(num_queries, num_past + num_queries, dtype=torch.bool, device=device).tril(num_past)
