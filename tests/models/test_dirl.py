"""DIRL with CCR: how it begins, and what each loss compares."""

from typing import Any

import pytest
import torch
from tests.models.test_decoder import CLOSE, LENGTH, SIZES, batch_of, build, captions, gradients
from tests.models.test_remote_sensing import is_torchs, is_xavier
from tests.models.tiny import maps

from diffcap.methods.dirl import DIRL
from diffcap.models.decoder import NULL
from diffcap.models.layers import Attention

WEIGHTS = {"decorrelation_weight": 0.03, "ccr_weight": 0.2}


def dirl(**options: Any) -> DIRL:
    return build(DIRL, **options)


@pytest.mark.parametrize("variant", ["plain", "ln_xavier"])
def test_how_it_begins(variant: Any) -> None:
    torch.manual_seed(0)
    sizes = {**SIZES, "width": 64, "word_width": 48, "vocabulary_size": 90, "grid": (14, 14), "feature_channels": 30}
    model = DIRL(**sizes, ffn=100, projector_width=80, decoder_variant=variant)
    assert model.projector is not None
    drawn = [model.embedding.projection, model.embedding.columns, model.embedding.rows]
    drawn += [model.projector[0], model.projector[3]]
    drawn += [layer.attention.out for layer in model.encoder]
    assert all(is_xavier(layer.weight) for layer in drawn)
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    assert len(attentions) == 2 + 2 * 2
    for attention in attentions:
        assert is_xavier(attention.qkv.weight)  # as one matrix
        assert (attention.qkv.bias == 0).all() and (attention.out.bias == 0).all()
    assert model.projector[0].bias.abs().max() > 0.05 and model.embedding.projection.bias.abs().max() > 0.05
    block, table = model.decoder.blocks[0], model.decoder.embedding.weight
    of_decoder = [model.fusion[0], model.decoder.lift[0], model.decoder.logit]
    of_decoder += [block.ffn[0], block.ffn[3], block.cross.out]
    if variant == "ln_xavier":
        assert all(is_xavier(layer.weight) for layer in of_decoder)
        assert is_xavier(table) and table[NULL].abs().max() > 0.1  # drawn, never trained
    else:
        assert all(is_torchs(layer.weight) for layer in of_decoder)
        assert (table[NULL] == 0).all() and table[1:].std().item() == pytest.approx(1, rel=0.05)


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [{}, {"diagonal_weight": 0.0, "off_diagonal_weight": 0.7}, {"diagonal_weight": 2.0, "off_diagonal_weight": 0.0}],
    ids=str,
)
def test_the_loss_is_the_weighted_sum_of_its_parts(options: dict[str, Any]) -> None:
    parts = dirl(**WEIGHTS, **options).loss(batch_of([3, 8, 5]))
    diagonal, off_diagonal = options.get("diagonal_weight", 1.0), options.get("off_diagonal_weight", 0.003)
    decorrelation = diagonal * parts["diagonal_loss"] + off_diagonal * parts["off_diagonal_loss"]
    total = parts["caption_loss"] + 0.03 * decorrelation + 0.2 * parts["ccr_loss"]
    torch.testing.assert_close(parts["loss"], total, **CLOSE)


def test_the_projector_serves_its_loss_alone() -> None:
    model, batch = dirl(ccr_weight=0.0, diagonal_weight=0.0, off_diagonal_weight=0.0), batch_of([3, 8, 5])
    found = gradients(model, model.loss(batch)["loss"])
    inside = [name for name in found if name.startswith("projector")]
    assert len(inside) == 4 and all((found[name] == 0).all() for name in inside)
    model = dirl()
    found = gradients(model, model.loss(batch)["loss"])
    assert all(found[name].abs().max() > 1e-3 for name in inside if name.endswith("weight"))
    with torch.no_grad():
        logits = model.step(torch.tensor([2, 2]), model.encode(*maps(2)), None)[0]
        assert model.projector is not None
        model.projector[0].weight.zero_()
        assert torch.equal(model.step(torch.tensor([2, 2]), model.encode(*maps(2)), None)[0], logits)


@torch.no_grad()
def test_the_regularisation_takes_the_last_blocks_means() -> None:
    tokens = captions([3, 8, 1])
    for masked in (False, True):
        model = dirl(ccr_mask_padding=masked)
        last = model.decoder(tokens, model.encode(*maps(3))).last_block
        parts = last.after_self_attention, last.after_cross_attention
        for found, part in zip(model.average_states(last, tokens), parts):
            for pair in range(3):
                taken = [place for place in range(LENGTH) if not masked or tokens[pair, place] != NULL]
                assert len(taken) == ([5, 10, 3][pair] if masked else LENGTH)
                expected = sum(part[pair, place] for place in taken) / len(taken)
                torch.testing.assert_close(found[pair], expected, **CLOSE)
