"""RSICCformer's optimizer against naive computations: the decoder's learning rate on plateaus, and its clipped gradients."""

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from diffcap.lit.finetuning import Captioning
from diffcap.lit.plateau import DecoderPlateau
from diffcap.models.rsiccformer import RSICCformer


def naive(scores: list[float]) -> list[float]:
    """The decoder's rate in each epoch as the released program has it: before epoch e, it looks at the epochs before."""
    rate, rates, best, waited = 1e-4, [], 0.0, 0
    for score in scores:
        if 0 < waited < 10 and waited % 3 == 0:
            rate *= 0.7
        rates.append(rate)
        best, waited = (score, 0) if score > best else (best, waited + 1)
    return rates


SCORES = {
    "rises": [0.1, 0.2, 0.3, 0.4],
    "stays at zero": [0.0] * 9,
    "falls and rises": [0.3, 0.2, 0.3, 0.1, 0.1, 0.4, 0.4, 0.4, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1],
}


@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("resumed", [False, True])
def test_the_decoders_rate_falls_after_every_third_epoch_without_a_new_best(scores: list[float], resumed: bool) -> None:
    one, two = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    groups: Any = [{"params": [one], "name": "captioner"}, {"params": [two], "name": "decoder"}]
    optimizer = torch.optim.Adam(groups, 1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    plateau, rates = DecoderPlateau(0.7), []
    for score in scores:
        for _ in range(2):  # steps
            one.grad, two.grad = torch.ones(1), torch.ones(1)
            rates.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            scheduler.step()
        trainer: Any = SimpleNamespace(
            callback_metrics={"val/BLEU-4": torch.tensor(score)},
            checkpoint_callback=SimpleNamespace(monitor="val/BLEU-4"),
            optimizers=[optimizer],
            lr_scheduler_configs=[SimpleNamespace(scheduler=scheduler)],
        )
        plateau.on_validation_end(trainer, None)  # type: ignore[arg-type]
        if resumed:
            states = [part.state_dict() for part in (optimizer, scheduler, plateau)]
            optimizer = torch.optim.Adam(groups, 1e-4)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
            plateau = DecoderPlateau(0.7)
            for part, state in zip((optimizer, scheduler, plateau), states):
                part.load_state_dict(state)
    assert [rate for rate, _ in rates] == [1e-4] * 2 * len(scores)
    assert [rate for _, rate in rates[::2]] == pytest.approx(naive(scores), rel=1e-6)
    assert rates[::2] == rates[1::2]


def test_only_the_decoders_gradients_are_clipped_value_by_value() -> None:
    model = RSICCformer(8, 4, (2, 2), 6, width=8, heads=2)
    module = Captioning(model, decoder_clip_value=5.0)
    module.trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, log_every_n_steps=0
    )
    torch.manual_seed(0)
    before = {}
    for name, parameter in model.named_parameters():
        parameter.grad = 10 * torch.randn_like(parameter)
        before[name] = parameter.grad.clone()
    optimizer = module.optimizer()
    module.configure_gradient_clipping(optimizer, None, None)
    clipped = 0
    for name, parameter in model.named_parameters():
        expected = before[name].clone()
        if name.startswith("decoder."):
            for value in expected.view(-1):
                value.fill_(max(-5.0, min(5.0, value.item())))
        assert torch.equal(parameter.grad, expected), name
        clipped += int((expected != before[name]).sum())
    assert clipped > 100
    assert not optimizer.defaults["fused"]
