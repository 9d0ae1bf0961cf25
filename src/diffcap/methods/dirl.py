"""DIRL with CCR (Tu, Li, Su, Yan and Huang, "Distractors-Immune Representation Learning with Cross-modal Contrastive
Regularization for Change Captioning", ECCV 2024).

Where the paper and the authors' code differ, the code's version is the default and the paper's is an option.

Letters: B pairs, b pairs of a group (the change pairs of a batch, or the distractor pairs of the same before images, in which only
the viewpoint changed), N visual tokens of one image, T text positions, D width, C feature channels, V vocabulary.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffcap.checkpoints.importing import ImportOptions, Sizes, State, count_layers, rename
from diffcap.losses.gather import gather_rows, global_mean, sum_over_ranks
from diffcap.methods import rcc
from diffcap.models.captioner import Batch, constructor_arguments
from diffcap.models.change_head import ChangeHead
from diffcap.models.cross_image import CrossImageCaptioner, CrossImageLayer, CrossImageOutput
from diffcap.models.decoder import NULL, BlockOutput, PostNormBlock, WordDecoder, next_word_losses, pair_groups
from diffcap.models.fast import add_repeated, linear_of_concatenation
from diffcap.models.layers import Dropout, GridEmbedding, Linear, init_attention_, init_xavier_

CCRForm = Literal["symmetrised", "two_way"]  # see `cross_modal_contrastive_loss`


def cross_correlation(before: Tensor, after: Tensor) -> Tensor:
    """Correlate the channels of both images over the tokens of the global batch (DIRL, eq. 3).

    `before` and `after` are this rank's n tokens, (n, D) each; n may differ between ranks. Entry (i, j) of the result, (D, D), is the
    mean over all tokens of channel i of before times channel j of after. All channels are standardised by mean and unbiased
    standard deviation (authors' code; the paper's eq. 3 does not subtract the mean). A constant channel gives NaN, as in the authors' code.

    Example:
        >>> before = torch.tensor([[0.0, 1.0], [1.0, 3.0], [2.0, -1.0]])
        >>> cross_correlation(before, 2 * before)  # mean over n, variance with n - 1: (n - 1) / n = 2 / 3 on the diagonal
        tensor([[ 0.6667, -0.3333],
                [-0.3333,  0.6667]])
    """
    before, after = before.float(), after.float()
    num_tokens = sum_over_ranks(before.new_full((), len(before)))
    means = sum_over_ranks(torch.stack([before.sum(0), after.sum(0)])) / num_tokens  # (2, D)
    centred_before = before - means[0]
    centred_after = after - means[1]
    norms = [torch.linalg.vector_norm(centred, dim=0) for centred in (centred_before, centred_after)]
    std = (sum_over_ranks(torch.stack(norms).square()) / (num_tokens - 1)).sqrt()  # (2, D)
    with torch.autocast(before.device.type, enabled=False):
        # Dividing the (D, D) products by both standard deviations is less work than dividing all tokens.
        return sum_over_ranks(centred_before.T @ centred_after) / num_tokens / std[0, :, None] / std[1]


def decorrelation_terms(correlation: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the terms of DIRL's eq. 4 for a correlation C (D, D): the sum of `(C_ii - 1)^2`, and the sum of `C_ij^2` over i != j.

    Example:
        >>> [round(term.item(), 4) for term in decorrelation_terms(torch.tensor([[1.0, 0.5], [0.0, 0.5]]))]
        [0.25, 0.25]
    """
    diagonal = correlation.diagonal()
    return ((diagonal - 1) ** 2).sum(), (correlation**2).sum() - (diagonal**2).sum()


def cross_modal_contrastive_loss(
    text: Tensor, vision: Tensor, temperature: float = 0.5, form: CCRForm = "symmetrised"
) -> Tensor:
    """Contrast each caption's text vector with the visual vectors of all captions; its own visual vector is the correct one.

    With `G = text vision^T / temperature` over the global batch, "symmetrised" is the cross-entropy of the rows of
    `(G + G^T) / 2` (authors' code); "two_way" is the mean of the cross-entropies of the rows of G and of G^T (DIRL, eq. 12 to
    14). The vectors are not normalised. The loss is computed in float32, because the products reach several hundred.

    Args:
        text, vision: (B, D) of this rank; rows with the same index belong together. temperature: the paper's tau.

    Returns:
        (B,) losses in nats.

    Example:
        >>> text, vision = torch.eye(3), torch.eye(3)
        >>> cross_modal_contrastive_loss(text, vision)
        tensor([0.2395, 0.2395, 0.2395])
    """
    text, vision = text.float(), vision.float()
    all_text, first_row = gather_rows(text)
    all_vision, _ = gather_rows(vision)
    with torch.autocast(text.device.type, enabled=False):
        text_logits = text @ all_vision.T / temperature  # rows of G, (B, all B)
        vision_logits = vision @ all_text.T / temperature  # rows of G^T, (B, all B)
    target = torch.arange(len(text), device=text.device) + first_row
    if form == "symmetrised":
        return F.cross_entropy((text_logits + vision_logits) / 2, target, reduction="none")
    text_losses = F.cross_entropy(text_logits, target, reduction="none")
    vision_losses = F.cross_entropy(vision_logits, target, reduction="none")
    return (text_losses + vision_losses) / 2


class DIRL(CrossImageCaptioner):
    """DIRL: an encoder whose representations do not depend on distractors, a decoder, and the losses of decorrelation and CCR.

    Args:
        vocabulary_size, feature_channels: V, C. grid: rows and columns of the feature map.
        max_length: positions of a caption (CLEVR-Change: 24, CLEVR-DC: 40). CCR averages over all positions.
        width: D (512). heads: 8. ffn: inner width of the decoder's FFNs (2048). encoder_layers, decoder_layers: 2.
        word_width: channels of the word vectors (300). dropout: 0.1.
        projector_width: inner width of the projector, an MLP that only the decorrelation loss uses (2048).
        coordinates: append x and y channels to the features (authors' code: on CLEVR-Change).
        decoder_variant: "ln_xavier": layer norms after the word projection and the fusion, Xavier initialisation (authors'
            code, CLEVR-DC); "plain" has neither (authors' code, CLEVR-Change).
        decorrelation_weight: lambda_d (0.5 on CLEVR-Change). diagonal_weight, off_diagonal_weight: weights of the decorrelation
            loss's two terms (1 and 0.003, authors' code; the paper's table 7 removes one at a time).
        ccr_weight: lambda_c (0.3 on CLEVR-Change). ccr_temperature: 0.5.
        ccr_form: "symmetrised": one cross-entropy over the mean of the logits and their transpose (authors' code);
            "two_way": the mean of both directions' cross-entropies (paper, eq. 12 to 14).
        ccr_mask_padding: CCR averages over the words only (authors' code: over padding, too).
        change_weight: factor of the losses of a `models.change_head.ChangeHead` that reads the fused tokens (ours); None: no head.
        change_types: names of the types of changes in the training data, which the head distinguishes.
    """

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
        ccr_form: CCRForm = "symmetrised",
        ccr_mask_padding: bool = False,
        change_weight: float | None = None,
        change_types: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__()
        self.hyperparameters = constructor_arguments(locals())
        self.embedding = GridEmbedding(feature_channels, grid, width, coordinates)
        self.projector = None
        if decorrelation_weight:
            activation = Dropout(dropout), nn.ReLU(inplace=True)  # in this order autograd keeps one tensor less
            self.projector = nn.Sequential(Linear(width, projector_width), *activation, Linear(projector_width, width))
        self.encoder = nn.ModuleList(
            CrossImageLayer(width, heads, dropout, output_dropout=dropout, out_proj=True) for _ in range(encoder_layers)
        )
        for part in (self.embedding, self.projector, self.encoder):
            if part is not None:
                init_xavier_(part)
        has_norms = decoder_variant == "ln_xavier"
        fusion_norm = [nn.LayerNorm(width)] if has_norms else []
        word_norm = [nn.LayerNorm(width)] if has_norms else []
        self.fusion = nn.Sequential(Linear(2 * width, width), *fusion_norm, Dropout(dropout), nn.ReLU(inplace=True))
        self.decoder = WordDecoder(
            vocabulary_size,
            max_length,
            width,
            word_width,
            nn.Sequential(Linear(word_width, width), *word_norm, Dropout(dropout)),
            [PostNormBlock(width, heads, ffn, dropout) for _ in range(decoder_layers)],
        )
        if has_norms:
            init_xavier_(self.fusion)
            init_xavier_(self.decoder)
        init_attention_(self)
        self.decorrelation_weight = decorrelation_weight
        self.ccr_weight = ccr_weight
        self.term_weights = diagonal_weight, off_diagonal_weight
        self.ccr_temperature = ccr_temperature
        self.ccr_form = ccr_form
        self.ccr_mask_padding = ccr_mask_padding
        if change_weight:
            self.change_head = ChangeHead(width, change_types, change_weight)

    @staticmethod
    def subtract_shared(before: Tensor, after: Tensor, encoded: CrossImageOutput) -> tuple[Tensor, Tensor]:
        """Subtract from both embedded images, (b, N, D) and (B, N, D), what they share (`encoded`): (B, N, D) each (eq. 6)."""
        return add_repeated(-encoded.before, before), after - encoded.after

    def fuse(self, before: Tensor, after: Tensor, encoded: CrossImageOutput | None) -> Tensor:
        """Fuse the differences of both images to (B, N, D): `ReLU(W [difference of before; difference of after])` (eq. 7)."""
        assert encoded is not None  # None: an encoder without layers
        fused = linear_of_concatenation(self.fusion[0], *self.subtract_shared(before, after, encoded))  # type: ignore[arg-type]
        return self.fusion[1:](fused)

    def average_states(self, output: BlockOutput, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return CCR's text and visual vectors, (B, D): the last block's mean states after self-attention and after cross-attention."""
        text = output.after_self_attention
        vision = output.after_cross_attention
        if not self.ccr_mask_padding:
            return text.mean(1), vision.mean(1)
        is_word = (tokens != NULL).to(text.dtype)[..., None]
        num_words = is_word.sum(1)
        return (text * is_word).sum(1) / num_words, (vision * is_word).sum(1) / num_words

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Compute `caption + lambda_d decorrelation + lambda_c ccr` over the global batch; each is a mean over the groups."""
        before = self.embedding(batch["before"])  # (b, N, D)
        after = self.embedding(batch["after"])  # (B, N, D)
        tokens = batch["tokens"]
        groups = pair_groups(before, after)  # the rows of each group
        encoded = self.run_encoder(before, after)
        fused = self.fuse(before, after, encoded)
        output = self.decoder(tokens, fused).last_block
        logits = self.decoder.compute_logits(output.hidden)
        word_losses = [next_word_losses(logits, tokens, words) for words in self.find_words(batch)]
        loss = torch.stack([global_mean(losses) for losses in word_losses]).mean()
        parts = {"caption_loss": loss}
        if self.projector is not None:
            projected_before = self.projector(before)
            terms = [  # two tensors (b N, D) for each group
                decorrelation_terms(cross_correlation(projected_before.flatten(0, 1), projected_after.flatten(0, 1)))
                for projected_after in self.projector(after).split(len(before))
            ]
            parts["diagonal_loss"] = torch.stack([diagonal for diagonal, _ in terms]).mean()
            parts["off_diagonal_loss"] = torch.stack([off_diagonal for _, off_diagonal in terms]).mean()
            diagonal_weight, off_diagonal_weight = self.term_weights
            decorrelation = diagonal_weight * parts["diagonal_loss"] + off_diagonal_weight * parts["off_diagonal_loss"]
            loss = loss + self.decorrelation_weight * decorrelation
        if self.ccr_weight:
            text, vision = self.average_states(output, tokens)
            options = self.ccr_temperature, self.ccr_form
            ccr_losses = [cross_modal_contrastive_loss(text[rows], vision[rows], *options) for rows in groups]
            parts["ccr_loss"] = torch.stack([global_mean(losses) for losses in ccr_losses]).mean()
            loss = loss + self.ccr_weight * parts["ccr_loss"]
        losses = {"loss": loss, **{name: value.detach() for name, value in parts.items()}}
        return self.add_change_losses(losses, self.change_losses(fused, batch))


# Regular expressions of parameter names in the authors' checkpoints, and the names in `DIRL`.
_DECODER_LAYER = r"speaker_state\.core\.layer\.(\d+)\."
_ENCODER_LAYER = r"change_detector_state\.transformer\.(\d+)\."
_RULES = (
    *rcc.RULES,  # of the modules that SCORER's and DIRL's code have in common
    (r"change_detector_state\.mlp\.(\d+)", r"projector.\1"),
    (_ENCODER_LAYER + r"attention\.in_proj_(weight|bias)", r"encoder.\1.attention.qkv.\2"),
    (_ENCODER_LAYER + r"attention\.out_proj", r"encoder.\1.attention.out"),
    (_ENCODER_LAYER + "norm1", r"encoder.\1.norm"),
    (r"speaker_state\.core\.embed_fc\.(\d+)", r"fusion.\1"),
    (_DECODER_LAYER + r"self_att\.in_proj_(weight|bias)", r"decoder.blocks.\1.self_attention.qkv.\2"),
    (_DECODER_LAYER + r"self_att\.out_proj", r"decoder.blocks.\1.self_attention.out"),
    (_DECODER_LAYER + r"cross_att\.in_proj_(weight|bias)", r"decoder.blocks.\1.cross.qkv.\2"),
    (_DECODER_LAYER + r"cross_att\.out_proj", r"decoder.blocks.\1.cross.out"),
    (_DECODER_LAYER + "linear1", r"decoder.blocks.\1.ffn.0"),
    (_DECODER_LAYER + "linear2", r"decoder.blocks.\1.ffn.3"),
)


def official_sizes(state: State, options: ImportOptions, coordinates: bool | None = None) -> Sizes:
    """Return DIRL's hyperparameters, from the authors' state dict and the user's options; `coordinates`: see `rcc.common_sizes`."""
    sizes = rcc.common_sizes(state, options, coordinates)
    projector_weight = state.get("change_detector_state.mlp.0.weight")
    if projector_weight is None:
        sizes.model["decorrelation_weight"] = 0.0
    else:
        sizes.model["projector_width"] = len(projector_weight)
    sizes.model["encoder_layers"] = count_layers(state, _ENCODER_LAYER)
    sizes.model["ffn"] = len(state["speaker_state.core.layer.0.linear1.weight"])
    sizes.model["decoder_variant"] = "ln_xavier" if "speaker_state.core.embed_fc.1.weight" in state else "plain"
    return sizes


IMPORTER = rcc.importer(official_sizes, lambda state, stage: rename(state, _RULES, "DIRL"))
