"""IDC-PCL (Yao, Wang and Jin, "Image Difference Captioning with Pre-training and Contrastive Learning", AAAI 2022).

Order of the file: embeddings and encoders (`PCLTrunk`), and the captioner with its [MASK] decoding (`PCL`); the
pre-training tasks stand in `pcl_pretraining`. Where paper and released code differ the code is the default, and the
paper's way is an option.

Letters: B pairs, N patches of an image, T text positions, D width, C feature channels, V vocabulary.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from diffcap.losses.gather import global_mean, global_sum
from diffcap.losses.mlm import IGNORED, masked_cross_entropy
from diffcap.models.captioner import Batch, Captioner, WordMaps
from diffcap.models.layers import (
    ALL,
    KeysValues,
    PreNormStack,
    UnbiasedLayerNorm,
    begin_with_the_difference,
    doubled_sinusoid,
    tile,
)

PAD, BOS, EOS, UNK, CLS, MASK = range(6)  # BOS and MASK are fixed in the authors' decoder; the others are ours
FIRST_CLS, FIRST_IMAGE, SECOND_CLS, SECOND_IMAGE, TEXT_CLS, TEXT = range(1, 7)  # type ids; 0 is unused
EMBEDDING_EPS = 1e-12


class PCLTrunk(nn.Module):
    """Embeddings, the single-image, pair and cross-modal encoders, and the word classifier.

    Args:
        vocabulary_size: V, specials included.
        feature_channels: C (ResNet-101 layer4: 2048).
        width: D (paper: 512). heads: paper: 8. ffn: inner width (authors' code: 2048).
        single_layers, pair_layers: paper: 1 and 1; `pair_layers=0` is the ablation without the difference encoder.
        cross_layers: paper: 3 for CLEVR-Change, 2 for Birds-to-Words.
        dropout: authors' code: 0.2 everywhere.
        positions: length of the fixed position table (authors' code: 200); patches and text positions must fit.
        image_activation: "sigmoid" after the image projection (authors' code), or "linear": none (paper).
        word_std, type_std: of the initial word and type vectors (released: 1, PyTorch's default). As words are scaled
            by sqrt(D) and types added to sigmoids of small numbers, 1 drowns positions and image content at first;
            1 / sqrt(D) and about 0.2 learn several times faster (ours).
    """

    positions: Tensor

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
        self.settings = {key: value for key, value in locals().items() if key not in ("self", "__class__")}
        self.width = width
        self.word_embedding = nn.Embedding(vocabulary_size, width)
        self.image_projection = nn.Linear(feature_channels, width)
        self.image_activation = nn.Sigmoid() if image_activation == "sigmoid" else nn.Identity()
        self.type_embedding = nn.Embedding(7, width)
        self.embedding_norm = UnbiasedLayerNorm(width, EMBEDDING_EPS)
        self.dropout = nn.Dropout(dropout)
        self.single_encoder = PreNormStack(single_layers, width, heads, ffn, dropout)
        self.pair_encoder = PreNormStack(pair_layers, width, heads, ffn, dropout)
        self.cross_encoder = PreNormStack(cross_layers, width, heads, ffn, dropout)
        self.output_layer = nn.Linear(width, vocabulary_size)
        nn.init.normal_(self.word_embedding.weight, std=word_std)
        nn.init.normal_(self.type_embedding.weight, std=type_std)
        if pair_init == "difference":
            for layer in self.pair_encoder.layers:
                begin_with_the_difference(layer.attention.qkv.weight, layer.attention.out.weight)  # type: ignore[union-attr, arg-type]
        self.register_buffer("positions", doubled_sinusoid(positions, width), persistent=False)

    def _embed(self, content: Tensor, kind: int) -> Tensor:
        return self.dropout(self.embedding_norm(content + self.type_embedding.weight[kind]))

    def cls(self, batch: int, kind: int) -> Tensor:
        """The [CLS] token of one kind, (B, 1, D); all kinds share one word vector and have no position."""
        return self._embed(self.word_embedding.weight[CLS].expand(batch, 1, -1), kind)

    def patches(self, features: Tensor, kind: int) -> Tensor:
        """Feature maps (B, C, h, w) to embedded patches (B, h w, D), row by row."""
        flat = features.flatten(2).transpose(1, 2)  # (B, N, C)
        projected = self.image_activation(self.image_projection(flat))
        return self._embed(projected + self._position(0, flat.shape[1]), kind)

    def text(self, tokens: Tensor, first: int = 0, position: Tensor | None = None) -> Tensor:
        """Ids (B, T) at positions `first`, `first + 1`, ... (or `position`, (T,)) to (B, T, D)."""
        table = self._position(first, tokens.shape[1]) if position is None else self.positions[position]
        return self._embed(self.word_embedding(tokens) * self.width**0.5 + table, TEXT)

    def _position(self, first: int, length: int) -> Tensor:
        if first + length > len(self.positions):
            raise ValueError(
                f"{first + length} positions asked for, the table has {len(self.positions)}: raise `positions`"
            )
        return self.positions[first : first + length]

    def _singles(self, images: list[Tensor]) -> tuple[Tensor, ...]:
        """Feature maps, (B, C, h, w) each, through the single-image encoder in one pass: (B, 1 + N, D) each."""
        kinds = ((FIRST_CLS, FIRST_IMAGE), (SECOND_CLS, SECOND_IMAGE))
        embedded = [
            torch.cat([self.cls(len(image), cls), self.patches(image, patch)], 1)
            for image, (cls, patch) in zip(images, kinds)
        ]
        return self.single_encoder(torch.cat(embedded))[0].chunk(len(images))

    def visual(self, before: Tensor, after: Tensor) -> Tensor:
        """Two feature maps (B, C, h, w) through the single-image and pair encoders: (B, 2 + 2 N, D).

        Order: [CLS] of the first image, its patches, [CLS] of the second, its patches.
        """
        return self.pair(before, after)[1]

    def pair(self, before: Tensor, after: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """As `visual`, and before it what the single-image encoder gives for each image, (B, 1 + N, D)."""
        singles = self._singles([before, after])
        return singles, self.pair_encoder(torch.cat(singles, 1))[0]

    def visual_of_one(self, image: Tensor, encode_cls: bool = False) -> Tensor:
        """One feature map (B, C, h, w) where there is no second: (B, 2 + N, D), the second image's [CLS] last.

        Args:
            encode_cls: take the second [CLS] through the single-image encoder, too, as in a padded image whose patches
                are masked; else it joins before the pair encoder (authors' code).
        """
        (first,) = self._singles([image])
        second = self.cls(len(image), SECOND_CLS)
        if encode_cls:
            second = self.single_encoder(second)[0]
        return self.pair_encoder(torch.cat([first, second], 1))[0]

    def joint(self, visual: Tensor, tokens: Tensor, pad_mask: bool = False) -> Tensor:
        """The cross-modal encoder over visual tokens and text, everything seeing everything (pre-training).

        Args:
            visual: (B, M, D). tokens: (B, T).
            pad_mask: hide padding; released code does not.

        Returns:
            (B, M + 1 + T, D): visual tokens, the text's [CLS], the text.
        """
        x = torch.cat([visual, self.cls(len(tokens), TEXT_CLS), self.text(tokens)], 1)
        mask = None
        if pad_mask:
            seen = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
            seen[:, -tokens.shape[1] :] = tokens != PAD
            mask = seen[:, None, None]
        return self.cross_encoder(x, mask)[0]


class States(NamedTuple):
    """A pair after encoding: each cross-encoder layer's keys and values of the visual tokens, and their final states."""

    keys_values: list[KeysValues]
    final: Tensor  # (B, 2 + 2 N, D)


class PCL(Captioner):
    """The fine-tuned captioner: visual tokens see each other, a word sees all visual tokens and the words before it.

    Args:
        vocabulary_size, feature_channels, trunk: as `PCLTrunk`.
        distractor_judging: learn beside the words whether anything changed (paper: on CLEVR-Change).
        distractor_weight: factor of that loss (authors' code: 1, on sums).
        objective: "masked" hides 15 % of the words and predicts those (released); "all_positions" predicts every word
            from its own [MASK] in one pass, exactly what decoding computes (ours).
        text_cls: the text begins with its own [CLS] (the paper's input; released code leaves it out).
    """

    begin, end = BOS, EOS
    vocabulary_layout = "pcl"
    # The distractor head is new, and the heads of MVCL and of NABirds' tasks have done their work (authors' code).
    fresh_parts, earlier_parts = ("distractor_head",), ("regress", "classifier", "matcher")

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
        own = {key: value for key, value in locals().items() if key not in ("self", "__class__", "trunk")}
        self.trunk = PCLTrunk(vocabulary_size, feature_channels, **trunk)
        self.hyperparameters = {**own, **self.trunk.settings}
        self.distractor_head = nn.Linear(2 * self.trunk.width, 2) if distractor_judging else None
        self.distractor_weight, self.objective, self.text_cls = distractor_weight, objective, text_cls

    def states(self, before: Tensor, after: Tensor, rows: slice = ALL) -> States:
        """Two feature maps (B, C, h, w) through all encoders; the cross-modal one over visual rows only.

        Args:
            rows: the visual tokens whose final states are wanted.
        """
        visual = self.trunk.visual(before, after)
        if self.text_cls:
            visual = torch.cat([visual, self.trunk.cls(len(visual), TEXT_CLS)], 1)
        final, keys_values = self.trunk.cross_encoder(visual, rows=rows)
        return States(keys_values, final)

    def encode(self, before: Tensor, after: Tensor) -> list[KeysValues]:
        """Two feature maps (B, C, h, w) to what words see: each cross-encoder layer's keys and values."""
        return self.states(tile(before, len(after)), after, rows=slice(0)).keys_values

    def step(
        self, tokens: Tensor, memory: list[KeysValues], cache: list[KeysValues] | None
    ) -> tuple[Tensor, list[KeysValues]]:
        """Put [MASK] after the words so far and score what it hides; the word joins the cache, the [MASK] does not."""
        past, position = [[seen] for seen in memory], 0
        if cache is not None:
            position = cache[0][0].shape[2]
            past = [[seen, said] for seen, said in zip(memory, cache)]
        pair = torch.stack([tokens, torch.full_like(tokens, MASK)], 1)  # (B, 2)
        mask = _causal(2, memory[0][0].shape[2] + position, tokens.device)
        hidden, own = self.trunk.cross_encoder(self.trunk.text(pair, first=position), mask, past, rows=slice(1, 2))
        word = [(key[:, :, :1], value[:, :, :1]) for key, value in own]
        if cache is not None:
            word = [(torch.cat([ck, k], 2), torch.cat([cv, v], 2)) for (ck, cv), (k, v) in zip(cache, word)]
        return self.trunk.output_layer(hidden[:, 0]), word

    def next_logits(self, tokens: Tensor, memory: list[KeysValues]) -> Tensor:
        """See `Captioner.next_logits`, and `all_position_logits`."""
        return self.all_position_logits(memory, tokens)

    def masked_logits(self, seen: list[KeysValues], batch: Batch) -> Tensor:
        """Word scores at the hidden positions of `mlm_tokens` (B, T), each from the words before it: (n, V)."""
        tokens = batch["mlm_tokens"]
        mask = _causal(tokens.shape[1], seen[0][0].shape[2], tokens.device)
        hidden, _ = self.trunk.cross_encoder(self.trunk.text(tokens), mask, [(part,) for part in seen])
        return self.trunk.output_layer(hidden[batch["mlm_labels"] != IGNORED])

    def all_position_logits(self, seen: list[KeysValues], tokens: Tensor) -> Tensor:
        """Word scores at positions 1 ... T - 1 of `tokens` (B, T), each exactly as `step` would give: (B, T - 1, V).

        The text stands twice: the real words at positions 0 ... T - 2, and a copy of [MASK] alone at 1 ... T - 1. The
        copy at t sees the visual tokens, the real words before t, and itself.
        """
        x, mask = self._with_copies(tokens[:, :-1], seen[0][0].shape[2])
        hidden, _ = self.trunk.cross_encoder(x, mask, [(part,) for part in seen])
        return self.trunk.output_layer(hidden[:, tokens.shape[1] - 1 :])

    def _with_copies(self, tokens: Tensor, visual: int) -> tuple[Tensor, Tensor]:
        """Words (B, T) and a [MASK] for the one after each, (B, 2 T, D), and what each may see of `visual` + 2 T tokens."""
        words, device = tokens.shape[1], tokens.device
        position = torch.arange(words, device=device)
        copies = torch.full_like(tokens, MASK)
        x = self.trunk.text(torch.cat([tokens, copies], 1), position=torch.cat([position, position + 1]))
        causal = position[:, None] >= position  # (words, words): real word i sees 0 ... i; the copy for i + 1 likewise
        itself = torch.eye(words, dtype=torch.bool, device=device)
        real = torch.cat([causal, torch.zeros_like(causal)], 1)
        shown = torch.ones(2 * words, visual, dtype=torch.bool, device=device)
        return x, torch.cat([shown, torch.cat([real, torch.cat([causal, itself], 1)])], 1)

    def distractor_logits(self, final: Tensor) -> Tensor:
        """Scores of "nothing changed" and "something changed" from the final states of the two [CLS]: (B, 2)."""
        assert self.distractor_head is not None
        tokens = final.shape[1] - self.text_cls
        return self.distractor_head(torch.cat([final[:, 0], final[:, tokens // 2]], -1))

    def nothing_changed(self, before: Tensor, after: Tensor) -> Tensor | None:
        """See `Captioner.nothing_changed`: what distractor judging has learned."""
        if self.distractor_head is None:
            return None
        return self.distractor_logits(self.states(before, after).final).softmax(-1)[:, 0]

    def attention(self, before: Tensor, after: Tensor, tokens: Tensor) -> WordMaps:
        """See `Captioner.attention`: where each word's [MASK] looks among the patches in the last cross-modal block.

        Mean over the heads; what other tokens get is shared out among the patches. Nothing in the method aligns the images.
        """
        seen, count = self.encode(before, after), tokens.shape[1]
        x, mask = self._with_copies(tokens, seen[0][0].shape[2])
        x = self.trunk.cross_encoder.norm(x)
        *layers, last = self.trunk.cross_encoder.layers
        for layer, part in zip(layers, seen):
            x, _ = layer(x, mask, (part,))
        query, key, _ = last.attention.project(last.attention_norm(x))  # type: ignore[union-attr, operator]
        keys = torch.cat([seen[-1][0], key], 2)
        looked = last.attention.weights(query[:, :, count:], keys, mask[count:])  # type: ignore[union-attr, operator]
        patches = before.shape[2] * before.shape[3]
        one, two = looked[..., 1 : 1 + patches], looked[..., 2 + patches : 2 + 2 * patches]
        both = (one.sum(2) + two.sum(2))[..., None, None] / 2
        grid = (before.shape[2], before.shape[3])
        return WordMaps(one.unflatten(2, grid) / both, two.unflatten(2, grid) / both, None)

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Sums over the global batch, as the released code has them: weight 1, no averaging.

        Needs `before`, `after` (B, C, h, w), or half as many `before`, each for both of its scene's pairs; `tokens` (B, T), or
        `mlm_tokens` and `mlm_labels`; with distractor judging `is_change` (B,), 1 where something changed. Logged beside
        the loss: means per word and per pair.
        """
        losses = self._losses(batch)
        weights = {"word_loss": 1.0, "distractor_loss": self.distractor_weight}
        return {
            "loss": torch.stack([weights[name] * global_sum(values) for name, values in losses.items()]).sum(),
            **{name: global_mean(values.detach()) for name, values in losses.items()},
        }

    def validate(self, batch: Batch) -> dict[str, Tensor]:
        """See `Captioner.validate`: `word_loss` per word, and with distractor judging `distractor_loss` per pair."""
        return self._losses(batch)

    def _losses(self, batch: Batch) -> dict[str, Tensor]:
        before, after = batch["before"], batch["after"]
        seen, final = self.states(tile(before, len(after)), after)
        if self.objective == "masked":
            labels = batch["mlm_labels"]
            words = masked_cross_entropy(self.masked_logits(seen, batch), labels[labels != IGNORED])
        else:
            target = batch["tokens"][:, 1:]
            real = target != PAD
            words = masked_cross_entropy(self.all_position_logits(seen, batch["tokens"])[real], target[real])
        losses = {"word_loss": words}
        if self.distractor_head is not None:
            judged = masked_cross_entropy(self.distractor_logits(final), batch["is_change"].long())
            losses["distractor_loss"] = judged
        return losses


def _causal(rows: int, past: int, device: torch.device) -> Tensor:
    """(rows, past + rows) boolean: row i sees everything past and rows 0 ... i."""
    return torch.ones(rows, past + rows, dtype=torch.bool, device=device).tril(past)
