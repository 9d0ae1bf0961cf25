"""DIRL with CCR (Tu, Li, Su, Yan and Huang, "Distractors-Immune Representation Learning with Cross-modal Contrastive
Regularization for Change Captioning", ECCV 2024).

Order of the file: the difference layer, the decoder's block, the captioner with its losses. Where paper and released
code differ the code is the default, and the paper's way is an option.

Letters: B pairs, N visual tokens of one image, T text positions, D width, C feature channels, V vocabulary.
"""

from typing import Literal

from torch import Tensor, nn

from diffcap.losses.ccr import cross_modal_contrast
from diffcap.losses.decorrelation import cross_correlation, decorrelation
from diffcap.losses.gather import global_mean
from diffcap.models.captioner import Batch, Captioner, WordMaps
from diffcap.models.grid import GridEmbedding
from diffcap.models.layers import Attention, KeysValues, Past, linear_of_both, tiled_sum
from diffcap.models.words import (
    END,
    NULL,
    START,
    BlockOutput,
    WordDecoder,
    mean,
    next_word_losses,
    roll_out,
    streams_of,
)


class SharedParts(nn.Module):
    """One layer of `x <- LayerNorm(x + Attention(x, other))` for both images with the same weights."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)

    def forward(self, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """(b, N, D) and (B, N, D) to (B, N, D) each; where B is 2 b, `before` serves both halves of `after`."""
        first, second = self.attention.project(before), self.attention.project(after)
        taken = self.dropout(self.attention.attend(first[0], (second[1], second[2])))
        rebuilt_before = self.norm(tiled_sum(taken, before))
        taken = self.dropout(self.attention.attend(second[0], (first[1], first[2])))
        return rebuilt_before, self.norm(after + taken)


class DIRLBlock(nn.Module):
    """One post-norm transformer decoder block with ReLU in its FFN."""

    def __init__(self, width: int, heads: int, ffn: int, dropout: float) -> None:
        super().__init__()
        self.self_attention = Attention(width, heads, dropout)
        self.cross = Attention(width, heads, dropout)
        self.ffn = nn.Sequential(nn.Linear(width, ffn), nn.ReLU(), nn.Dropout(dropout), nn.Linear(ffn, width))
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: KeysValues, mask: Tensor | None, past: Past) -> BlockOutput:
        """See `BlockOutput`; arguments as `Attention`."""
        mixed, own = self.self_attention(x, mask, past)
        said = self.norm1(x + self.dropout(mixed))
        seen = self.norm2(said + self.dropout(self.cross.attend(self.cross.queries(said), memory)))
        return BlockOutput(said, seen, self.norm3(seen + self.dropout(self.ffn(seen))), own)


class DIRL(Captioner):
    """Distractors-immune representations, difference, decoder, and cross-modal contrastive regularisation.

    A batch with twice as many "after" as "before" holds two streams over the same first images: change pairs, then
    distractor pairs; every loss is the mean of both streams'.

    Args:
        vocabulary_size, feature_channels: V, C. grid: rows and columns of the feature map.
        max_length: L, positions of a caption (CLEVR-Change: 24, CLEVR-DC: 40). CCR's means are over all of them.
        width: D (512). heads: 8. ffn: 2048. encoder_layers, decoder_layers: 2. word_width: 300. dropout: 0.1.
        projector_width: inside the projector of the decorrelation, which captioning does not use (2048).
        coordinates: append x and y channels to the features (authors' code: on CLEVR-Change).
        decoder_variant: "ln_xavier": layer norms after word path and fusion, Xavier weights (authors' code, CLEVR-DC);
            "plain": neither (CLEVR-Change).
        decorrelation_weight: lambda_d (0.5 on CLEVR-Change). diagonal_weight, off_diagonal_weight: of its two terms
            (1 and 0.003, authors' code; the paper's table 7 takes them one by one).
        ccr_weight: lambda_c (0.3 on CLEVR-Change). ccr_temperature: 0.5.
        ccr_form: "symmetrised": one cross-entropy over the mean of the logits and their transpose (authors' code);
            "two_way": the mean of both directions' cross-entropies (paper, eq. 12 to 14).
        ccr_mask_padding: means over the words only (authors' code: over padding too).
    """

    begin, end, closing_pad = START, END, NULL
    vocabulary_layout = "rcc"

    def __init__(
        self,
        vocabulary_size: int,
        feature_channels: int,
        grid: tuple[int, int] = (14, 14),
        max_length: int = 24,
        width: int = 512,
        heads: int = 8,
        ffn: int = 2048,
        encoder_layers: int = 2,
        decoder_layers: int = 2,
        word_width: int = 300,
        dropout: float = 0.1,
        projector_width: int = 2048,
        coordinates: bool = True,
        decoder_variant: Literal["ln_xavier", "plain"] = "plain",
        decorrelation_weight: float = 0.5,
        diagonal_weight: float = 1.0,
        off_diagonal_weight: float = 0.003,
        ccr_weight: float = 0.3,
        ccr_temperature: float = 0.5,
        ccr_form: Literal["symmetrised", "two_way"] = "symmetrised",
        ccr_mask_padding: bool = False,
    ) -> None:
        super().__init__()
        self.hyperparameters = {key: value for key, value in locals().items() if key not in ("self", "__class__")}
        self.hyperparameters["grid"] = list(grid)
        self.embedding = GridEmbedding(feature_channels, (grid[0], grid[1]), width, coordinates)
        self.projector = (
            nn.Sequential(  # ReLU after dropout: the same value, and one tensor less is kept for the gradient
                nn.Linear(width, projector_width),
                nn.Dropout(dropout),
                nn.ReLU(inplace=True),
                nn.Linear(projector_width, width),
            )
            if decorrelation_weight
            else None
        )
        self.encoder = nn.ModuleList(SharedParts(width, heads, dropout) for _ in range(encoder_layers))
        for part in (self.embedding, self.projector, self.encoder):
            _xavier(part)
        normed = decoder_variant == "ln_xavier"
        norm = (nn.LayerNorm(width),) if normed else ()
        self.fusion = nn.Sequential(nn.Linear(2 * width, width), *norm, nn.Dropout(dropout), nn.ReLU(inplace=True))
        self.decoder = WordDecoder(
            vocabulary_size,
            max_length,
            width,
            word_width,
            nn.Sequential(nn.Linear(word_width, width), *(nn.LayerNorm(width) for _ in norm), nn.Dropout(dropout)),
            [DIRLBlock(width, heads, ffn, dropout) for _ in range(decoder_layers)],
        )
        if normed:
            _xavier(self.fusion)
            _xavier(self.decoder)
        for module in self.modules():  # as torch's own multi-head attention begins
            if isinstance(module, Attention):
                nn.init.xavier_uniform_(module.qkv.weight)
                nn.init.zeros_(module.qkv.bias)
                nn.init.zeros_(module.out.bias)  # type: ignore[arg-type]
        self.decorrelation_weight, self.ccr_weight = decorrelation_weight, ccr_weight
        self.term_weights = diagonal_weight, off_diagonal_weight
        self.ccr_temperature, self.ccr_form, self.ccr_mask_padding = ccr_temperature, ccr_form, ccr_mask_padding

    def differences(self, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """What each embedded image, (b, N, D) and (B, N, D), does not share with the other: (B, N, D) each (eq. 6)."""
        first, second = before, after
        for layer in self.encoder:
            first, second = layer(first, second)
        return tiled_sum(-first, before), after - second

    def encode(self, before: Tensor, after: Tensor) -> list[KeysValues]:
        """Two feature maps (B, C, h, w) to each decoder block's keys and values of the fused difference."""
        return self._memory(self.embedding(before), self.embedding(after))

    def _memory(self, before: Tensor, after: Tensor) -> list[KeysValues]:
        fused = linear_of_both(self.fusion[0], *self.differences(before, after))  # type: ignore[arg-type]
        return self.decoder.memory(self.fusion[1:](fused))

    def step(
        self, tokens: Tensor, memory: list[KeysValues], cache: list[KeysValues] | None
    ) -> tuple[Tensor, list[KeysValues]]:
        """See `Captioner.step`."""
        return self.decoder.step(tokens, memory, cache)

    def next_logits(self, tokens: Tensor, memory: list[KeysValues]) -> Tensor:
        """See `Captioner.next_logits`."""
        return self.decoder.next_logits(tokens, memory)

    def attention(self, before: Tensor, after: Tensor, tokens: Tensor) -> WordMaps:
        """See `Captioner.attention`, and `words.roll_out` for how a fused token is shared out to the two images."""
        first, second = self.embedding(before), self.embedding(after)
        looked = self.decoder.attention(tokens, self._memory(first, second))
        for layer in self.encoder[:-1]:
            first, second = layer(first, second)
        last: Attention = self.encoder[-1].attention  # type: ignore[assignment]
        one, two = last.project(first), last.project(second)
        return roll_out(looked, last.weights(two[0], one[1]), last.weights(one[0], two[1]), self.embedding.grid)

    def decorrelation_terms(self, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """The two sums of L_dirl over projected tokens of the global batch, (B, N, D) each: diagonal, off-diagonal."""
        return decorrelation(cross_correlation(before.flatten(0, 1), after.flatten(0, 1)))

    def sentence_and_sight(self, output: BlockOutput, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What CCR compares: means over positions after self-attention and after cross-attention, (B, D) each."""
        if not self.ccr_mask_padding:
            return output.said.mean(1), output.seen.mean(1)
        real = (tokens != NULL).to(output.said.dtype)[..., None]
        return tuple((part * real).sum(1) / real.sum(1) for part in (output.said, output.seen))  # type: ignore[return-value]

    def validate(self, batch: Batch) -> dict[str, Tensor]:
        """See `Captioner.validate`: the words' losses only; the other losses depend on the size of the batch."""
        hidden = self.decoder(batch["tokens"], self.encode(batch["before"], batch["after"])).last.hidden
        return {"caption_loss": next_word_losses(self.decoder.logit(hidden), batch["tokens"])}

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """`caption + lambda_d decorrelation + lambda_c ccr` over the global batch, each the mean of the streams'.

        Needs `before` (b, C, h, w), `after` (B, C, h, w) with B = b, or B = 2 b for two streams, and `tokens` (B, T).
        """
        before, after, tokens = self.embedding(batch["before"]), self.embedding(batch["after"]), batch["tokens"]
        streams = streams_of(before, after)
        output = self.decoder(tokens, self._memory(before, after)).last
        logits = self.decoder.logit(output.hidden)
        parts = {"caption_loss": mean([global_mean(next_word_losses(logits[rows], tokens[rows])) for rows in streams])}
        loss = parts["caption_loss"]
        if self.projector is not None:
            first, second = self.projector(before), self.projector(after).split(len(before))
            terms = [self.decorrelation_terms(first, stream) for stream in second]
            for name, values in zip(("diagonal", "off_diagonal"), zip(*terms)):
                parts[f"{name}_loss"] = mean(list(values))
            weighted = self.term_weights[0] * parts["diagonal_loss"] + self.term_weights[1] * parts["off_diagonal_loss"]
            loss = loss + self.decorrelation_weight * weighted
        if self.ccr_weight:
            said, seen = self.sentence_and_sight(output, tokens)
            losses = [
                global_mean(cross_modal_contrast(said[rows], seen[rows], self.ccr_temperature, self.ccr_form))
                for rows in streams
            ]
            parts["ccr_loss"] = mean(losses)
            loss = loss + self.ccr_weight * parts["ccr_loss"]
        return {"loss": loss, **{name: value.detach() for name, value in parts.items()}}


def _xavier(module: nn.Module | None) -> None:
    """Xavier-uniform on everything with two dimensions or more, the padding's row too (authors' code)."""
    for parameter in module.parameters() if module is not None else ():
        if parameter.ndim >= 2:
            nn.init.xavier_uniform_(parameter)
