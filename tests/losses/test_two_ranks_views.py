"""SCORER and DIRL over the global batch: two gloo processes with shares of it give the loss and the gradients of one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.losses.ranks import on_two_ranks
from tests.losses.views_worker import METHODS, learn, share
from tests.models.test_decoder import batch_of, build

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "scorer": ("scorer", {"cross_view_weight": 0.3, "cbr_weight": 0.2}),
    "scorer, paper": ("scorer", {"mtm": "per_head", "cbr_trainable": True, "cbr_weight": 0.2}),
    "dirl": ("dirl", {"decorrelation_weight": 0.05}),
    "dirl, paper": ("dirl", {"ccr_form": "two_way", "ccr_mask_padding": True, "decoder_variant": "ln_xavier"}),
}
PAIRS, CUTS = 6, (3, 2)  # pairs of the first of two ranks


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    models = {}
    for name, (method, options) in MODELS.items():
        model = build(METHODS[method], **options)
        models[name] = method, model.hyperparameters, model.state_dict()
    batches = {streams: batch_of([3, 8, 5, 1, 6, 4], streams=streams) for streams in (1, 2)}
    data = {"models": models, "batches": batches, "cuts": CUTS}
    folder = tmp_path_factory.mktemp("views")
    return {**data, "ranks": on_two_ranks(Path(__file__).with_name("views_worker.py"), data, folder)}


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_give_the_loss_and_the_gradients_of_one(
    data: dict[str, Any], name: str, streams: int, cut: int
) -> None:
    method, options = MODELS[name]
    model = build(METHODS[method], **options)
    wanted, wanted_gradients = learn(model, data["batches"][streams])
    shares = [rank[name, streams, cut] for rank in data["ranks"]]
    for part, value in wanted.items():
        torch.testing.assert_close((shares[0][0][part] + shares[1][0][part]) / 2, value, atol=1e-5, rtol=1e-5, msg=part)
    frozen = {name for name, part in model.named_parameters() if not part.requires_grad}
    for _, found in shares:
        assert found.keys() == wanted_gradients.keys() == dict(model.named_parameters()).keys() - frozen
        for part, value in wanted_gradients.items():
            # Standardising takes the last bias of the projector away: it has no gradient but noise.
            assert value.abs().max() > 1e-5 or part == "projector.3.bias", part
            scale = value.abs().max().item()
            torch.testing.assert_close(found[part], value, atol=1e-5 * max(scale, 1), rtol=1e-4, msg=part)


@pytest.mark.parametrize("name", MODELS)
def test_the_ranks_apart_would_give_another_loss(name: str) -> None:
    """Each pair is compared with those of the other rank, so a mean of two losses is not the loss."""
    method, options = MODELS[name]
    model, batch = build(METHODS[method], **options), batch_of([3, 8, 5, 1, 6, 4])
    whole = learn(model, batch)[0]
    apart = [learn(model, share(batch, rows))[0] for rows in (slice(0, 3), slice(3, 6))]
    for part in whole.keys() - {"caption_loss"}:
        assert abs(whole[part] - (apart[0][part] + apart[1][part]) / 2) > 1e-3, part
