"""SCORER with CBR and DIRL with CCR against the authors' implementations: the arrays of the fixtures; test_import.py has the captions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity.loading import Fixture, assert_close, load
from torch import Tensor

from diffcap.methods import dirl
from diffcap.methods.dirl import DIRL, cross_correlation, cross_modal_contrastive_loss, decorrelation_terms
from diffcap.methods.scorer import model as scorer
from diffcap.methods.scorer.model import SCORER, two_way_nce
from diffcap.models.cross_image import CrossImageOutput
from diffcap.models.decoder import flat_indices, next_word_losses

DECODERS = {"clevr_dc": "ln_xavier", "clevr_change": "plain"}
WEIGHTS = {
    "scorer": {"cross_view_weight": 0.3, "cbr_weight": 0.07},
    "dirl": {"decorrelation_weight": 0.03, "ccr_weight": 0.05},
}
LOSSES = {"scorer": ("cross_view_loss", "cbr_loss"), "dirl": ("dirl_loss", "ccr_loss")}  # in the order of the weights


def captioner(official: Fixture, **options: Any) -> Any:
    names = ("feature_channels", "grid", "max_length", "width", "heads", "encoder_layers", "decoder_layers")
    sizes = {name: official.hyperparameters[name] for name in (*names, "word_width", "coordinates")}
    shapes, words = official.shapes, official.hyperparameters["vocabulary"]
    if official.method == "scorer":
        model: Any = SCORER(words, **sizes, **options)
        model.load_state_dict(scorer.from_official(official.weights()))
        return model.eval()
    model = DIRL(
        words,
        **sizes,
        ffn=shapes["speaker_state.core.layer.0.linear1.weight"][0],
        projector_width=shapes["change_detector_state.mlp.0.weight"][0],
        decoder_variant=DECODERS[official.hyperparameters["variant"]],
        **options,
    )
    model.load_state_dict(dirl.IMPORTER.rename(official.weights(), "finetune"))
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("times", [1, 2])
def test_loss(views_fixture: Path, times: int) -> None:
    """The weighted sum; the same pairs as both streams change nothing."""
    official = load(views_fixture)
    arrays, weights = official.arrays, WEIGHTS[official.method]
    batch = {"before": arrays["before"]} | {name: torch.cat([arrays[name]] * times) for name in ("after", "tokens")}
    parts = [weight * arrays[name] for weight, name in zip(weights.values(), LOSSES[official.method])]
    loss = captioner(official, **weights).loss(batch)["loss"]
    assert_close(loss, arrays["caption_loss"] + sum(parts))


def compare(model: SCORER, official: Fixture) -> tuple[Tensor, Tensor, CrossImageOutput]:
    before, after = model.embedding(official.arrays["before"]), model.embedding(official.arrays["after"])
    encoded = model.run_encoder(before, after)
    assert encoded is not None
    return before, after, encoded


@torch.no_grad()
def test_difference_and_cross_view_contrast_of_scorer(scorer_fixture: Path) -> None:
    official = load(scorer_fixture)
    model = captioner(official)
    before, after, encoded = compare(model, official)
    fused = model.fuse(before, after, encoded)
    assert_close(fused[:, ::7, ::8], official.arrays["difference"])
    similarities = model.cross_view_similarities(*model.merge_query_keys(encoded))
    for number, similarity in enumerate(similarities, start=1):
        assert_close(similarity, official.arrays[f"similarity_{number}"])
    assert_close(two_way_nce(*similarities), official.arrays["cross_view_loss"])


@torch.no_grad()
def test_words_and_backward_reasoning_of_scorer(scorer_fixture: Path) -> None:
    official = load(scorer_fixture)
    model, tokens = captioner(official), official.arrays["tokens"]
    before, after, encoded = compare(model, official)
    hidden = model.decoder(tokens, model.decoder.project_memory(model.fuse(before, after, encoded))).last_block.hidden
    logits = model.decoder.compute_logits(hidden)
    assert_close(logits, official.arrays["logits"])
    assert_close(
        next_word_losses(logits, tokens, flat_indices(model.word_mask(tokens))).mean(), official.arrays["caption_loss"]
    )
    cbr = two_way_nce(*model.cbr_similarities(*model.predict_after_images(before, after, hidden, tokens)[0]))
    assert_close(cbr, official.arrays["cbr_loss"])


@torch.no_grad()
def test_differences_and_decorrelation_of_dirl(dirl_fixture: Path) -> None:
    official = load(dirl_fixture)
    model = captioner(official)
    maps = [model.embedding(official.arrays[name]) for name in ("before", "after")]
    for name, difference in zip(("before", "after"), model.subtract_shared(*maps, model.run_encoder(*maps))):
        assert_close(difference[:, ::7, ::8], official.arrays[f"difference_{name}"])
    correlation = cross_correlation(*(model.projector(tokens).flatten(0, 1) for tokens in maps))
    diagonal, off_diagonal = decorrelation_terms(correlation)
    assert_close(diagonal + 0.003 * off_diagonal, official.arrays["dirl_loss"])


@torch.no_grad()
def test_words_regularisation_and_attention_of_dirl(dirl_fixture: Path) -> None:
    official = load(dirl_fixture)
    model, arrays = captioner(official), official.arrays
    memory = model.encode(arrays["before"], arrays["after"])
    output = model.decoder(arrays["tokens"], memory).last_block
    logits = model.decoder.compute_logits(output.hidden)
    assert_close(logits, arrays["logits"])
    words = flat_indices(model.word_mask(arrays["tokens"]))
    assert_close(next_word_losses(logits, arrays["tokens"], words).mean(), arrays["caption_loss"])
    printed, seen = model.average_states(output, arrays["tokens"])
    assert_close(cross_modal_contrastive_loss(printed, seen).mean(), arrays["ccr_loss"])
    attended = model.decoder.attention(arrays["tokens"], memory)
    assert_close(attended, arrays["attention"])
