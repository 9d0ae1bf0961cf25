"""RSICCformer's optimizer against naive computations: the rates of its groups, the decoder's on plateaus, and clipped gradients."""

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from diffcap.lit.finetuning import Captioning
from diffcap.methods.remote_sensing.callbacks import ClipDecoderGradients, DecoderPlateau
from diffcap.methods.remote_sensing.chg2cap import Chg2Cap
from diffcap.methods.remote_sensing.rsiccformer import RSICCformer


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


def small_trainer(*callbacks: pl.Callback) -> pl.Trainer:
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(accelerator="cpu", callbacks=list(callbacks), log_every_n_steps=0, **options)


def from_pixels(**options: Any) -> RSICCformer:
    """A captioner with a ResNet."""
    return RSICCformer(8, 3, (32, 32), 6, width=8, heads=2, backbone="resnet18", pool=(2, 2), **options)


@pytest.mark.parametrize("backbone", ["none", "frozen", "trained"])
def test_the_gradients_of_decoder_and_trained_backbone_are_clipped_value_by_value(backbone: str) -> None:
    """As in the released program, which does not clip the gradients of its encoder."""
    layers = {"frozen": (), "trained": ("layer2", "layer3")}
    model = RSICCformer(8, 4, (2, 2), 6, width=8, heads=2)
    if backbone != "none":
        model = from_pixels(trained_layers=layers[backbone])
    module, clip = Captioning(model), ClipDecoderGradients(5.0)
    module.trainer = small_trainer(clip)
    torch.manual_seed(0)
    before, limited = {}, ("decoder.", *(f"images.network.{layer}." for layer in layers.get(backbone, ())))
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    for name, parameter in trained:
        parameter.grad = 10 * torch.randn_like(parameter)
        before[name] = parameter.grad.clone()
    optimizer = module.optimizer()
    clip.on_before_optimizer_step(module.trainer, module, optimizer)
    clipped = 0
    for name, parameter in trained:
        expected = before[name].clone()
        if name.startswith(limited):
            expected[expected > 5] = 5.0
            expected[expected < -5] = -5.0
        assert torch.equal(parameter.grad, expected), name
        clipped += int((expected != before[name]).sum())
    assert clipped > 100
    assert not optimizer.defaults["fused"]


def chg2cap_from_pixels() -> Chg2Cap:
    sizes: dict[str, Any] = {"attention_width": 8, "ffn": 8, "width": 8, "heads": 2, "encoder_layers": 1}
    return Chg2Cap(8, 3, (32, 32), 6, table=(4, 4), backbone="resnet18", trained_layers=("layer4",), **sizes)


def parts(module: Captioning, optimizer: torch.optim.Optimizer) -> dict[str, set[str]]:
    """The parts of the captioner whose trained parameters each group has."""
    names = {id(parameter): name for name, parameter in module.captioner.named_parameters()}
    found = {}
    for group in optimizer.param_groups:
        trained = [parameter for parameter in group["params"] if parameter.requires_grad]
        found[group["name"]] = {names[id(parameter)].partition(".")[0] for parameter in trained}
    return found


@pytest.mark.parametrize("plateau", [None, 0.7])
@pytest.mark.parametrize("build", [lambda: from_pixels(trained_layers=("layer3",)), chg2cap_from_pixels])
def test_a_trained_backbone_has_its_own_rate(build: Any, plateau: float | None) -> None:
    """Every parameter is in one group, the optimizer is Adam, and its first step is each group's rate."""
    model = build()
    module = Captioning(model, 1e-3, schedule="constant", pretrained_lr=1e-5)
    module.trainer = small_trainer(*([DecoderPlateau(plateau)] if plateau else []))
    optimizer = module.optimizer()
    assert type(optimizer) is torch.optim.Adam
    found = parts(module, optimizer)
    assert found["backbone"] == {"images"} and "images" not in found["captioner"]
    assert ("decoder" in found["captioner"]) == (plateau is None)
    assert ("decoder" in found) == (plateau is not None)
    grouped = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert len(grouped) == len(set(grouped)) == len(list(model.parameters()))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    for name, parameter in model.named_parameters():
        rate = 1e-5 if name.startswith("images.") else 1e-3
        expected = before[name] - rate if parameter.requires_grad else before[name]
        torch.testing.assert_close(parameter.detach(), expected, atol=1e-7, rtol=1e-6)
