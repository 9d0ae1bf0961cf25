"""SCORER and DIRL alike: what every option and weight changes, two streams, and the alignment of the two images."""

from typing import Any

import pytest
import torch
from tests.models.test_decoder import CLOSE, batch_of, build, captions, gradients
from torch import Tensor

from diffcap.methods.dirl import DIRL
from diffcap.methods.scorer.model import SCORER

WEIGHTS: dict[Any, dict[str, Any]] = {
    SCORER: {"cross_view_weight": 0.3, "cbr_weight": 0.07},
    DIRL: {"decorrelation_weight": 0.03, "ccr_weight": 0.2},
}
WORDS, CORRELATION = {"caption_loss", "ccr_loss"}, {"diagonal_loss", "off_diagonal_loss"}
PAPER = {"decoder_variant": "ln_xavier", "ccr_form": "two_way", "ccr_mask_padding": True}


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "weight", "gone", "module"),
    [
        (SCORER, "cross_view_weight", {"cross_view_loss"}, "logit_scale"),
        (SCORER, "cbr_weight", {"cbr_loss"}, "cbr"),
        (DIRL, "decorrelation_weight", CORRELATION, "projector"),
        (DIRL, "ccr_weight", {"ccr_loss"}, None),
    ],
)
def test_a_weight_of_zero_leaves_the_part_out(kind: Any, weight: str, gone: set[str], module: str | None) -> None:
    batch, weights = batch_of([3, 8, 5]), WEIGHTS[kind]
    whole, model = build(kind, **weights).loss(batch), build(kind, **{**weights, weight: 0.0})
    parts = model.loss(batch)
    assert parts.keys() == whole.keys() - gone and (module is None or getattr(model, module) is None)
    share = {"diagonal_loss": 1.0, "off_diagonal_loss": 0.003}
    removed = weights[weight] * sum(share.get(name, 1.0) * whole[name] for name in gone)
    torch.testing.assert_close(parts["loss"], whole["loss"] - removed, **CLOSE)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((SCORER, options) for options in ({}, {"mtm": "per_head", "cbr_trainable": True}, {"encoder_layers": 1})),
        (SCORER, {"difference": "subtraction", "cross_view_weight": 0.0}),
        *((DIRL, options) for options in ({}, PAPER, {"encoder_layers": 1})),
    ],
)
def test_losses_and_gradients_of_two_streams_are_the_means_of_those_of_each(kind: Any, options: dict[str, Any]) -> None:
    model, both = build(kind, **{**WEIGHTS[kind], **options}), batch_of([3, 8, 5], streams=2)
    streams = [
        {"before": both["before"], **{name: both[name][rows] for name in ("after", "tokens")}}
        for rows in (slice(0, 3), slice(3, 6))
    ]
    parts, apart = model.loss(both), [model.loss(stream) for stream in streams]
    for name, value in parts.items():
        assert abs(apart[0][name] - apart[1][name]) > 1e-3, name
        torch.testing.assert_close(value, (apart[0][name] + apart[1][name]) / 2, **CLOSE)
    together = gradients(model, parts["loss"])
    separate = gradients(model, (apart[0]["loss"] + apart[1]["loss"]) / 2)
    assert together.keys() == separate.keys()
    for name, value in together.items():
        torch.testing.assert_close(value, separate[name], atol=1e-5, rtol=1e-4, msg=name)


def only_appearance(model: Any) -> None:
    """Six channels in, six orthogonal tokens out without place; the last encoder layer seeks what is like itself."""
    with torch.no_grad():
        model.embedding.rows.weight.zero_()
        model.embedding.columns.weight.zero_()
        model.embedding.projection.weight.zero_()
        model.embedding.projection.bias.zero_()
        model.embedding.projection.weight[:6, :6] = torch.eye(6)
        model.embedding.projection.weight[8:14, :6] = torch.eye(6)
        qkv = model.encoder[0].attention.qkv
        qkv.weight[:32] = torch.eye(16).repeat(2, 1)
        qkv.bias.zero_()


def things(order: list[int]) -> Tensor:
    """One image whose place p shows thing `order[p]`."""
    return 6 * torch.eye(6)[:, order].view(1, 6, 2, 3)


@torch.no_grad()
@pytest.mark.parametrize("moved", [[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0], [2, 0, 1, 4, 5, 3]], ids=str)
@pytest.mark.parametrize("kind", [SCORER, DIRL])
def test_the_alignment_follows_a_thing_that_moves(kind: Any, moved: list[int]) -> None:
    model = build(kind, feature_channels=6, encoder_layers=1)
    only_appearance(model)
    after = [moved.index(place) for place in range(6)]  # the thing of place p stands at moved[p]
    found = model.attention(things(list(range(6))), things(after), captions([3]))
    assert found.alignment is not None
    assert found.alignment[0].argmax(1).tolist() == moved and found.alignment.amax(2).min() > 0.9
