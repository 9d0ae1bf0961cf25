"""The optimizers of CLIP4IDC against naive updates, and which parameters get which."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from tests.models.test_clip4idc import NETWORK
from torch import nn

from diffcap.lit.training import adamw, root_mean_square
from diffcap.methods.clip4idc.model import CLIP4IDC, CLIP4IDCAdaptation
from diffcap.methods.clip4idc.optimizers import BertAdam, bert_adam, half_precision_parameters


def naive_half(weights: np.ndarray, gradients: list[np.ndarray], lr: float, decay: float, beta2: float) -> np.ndarray:
    """The update in float16, one rounded operation after the other, each computed in float32 as PyTorch does."""

    def rounded(value: Any) -> np.ndarray:
        return np.asarray(value, dtype=np.float32).astype(np.float16)

    def wide(value: np.ndarray) -> np.ndarray:
        return value.astype(np.float32)

    weights = rounded(weights)
    mean, square = np.zeros_like(weights), np.zeros_like(weights)
    for gradient in map(rounded, gradients):
        mean = rounded(wide(mean) * np.float32(0.9))
        mean = rounded(wide(mean) + np.float32(1 - 0.9) * wide(gradient))
        square = rounded(wide(square) * np.float32(beta2))
        square = rounded(wide(square) + np.float32(1 - beta2) * wide(gradient) * wide(gradient))
        root = rounded(np.sqrt(wide(square)))
        update = rounded(wide(mean) / wide(rounded(wide(root) + np.float32(1e-6))))
        update = rounded(wide(update) + wide(rounded(np.float32(decay) * wide(weights))))
        weights = rounded(wide(weights) - wide(rounded(np.float32(lr) * wide(update))))
    return wide(weights)


@pytest.mark.parametrize("rms", [1e-5, 9e-5, 1e-3, 1.0])
def test_half_precision_updates_are_those_of_a_naive_loop(rms: float) -> None:
    rng = np.random.default_rng(0)
    weights = rng.normal(0, 0.02, 500).astype(np.float32)
    gradients = [rng.normal(0, rms, 500).astype(np.float32) for _ in range(30)]
    parameter = nn.Parameter(torch.from_numpy(weights.copy()))
    optimizer = BertAdam([{"params": [parameter], "lr": 1e-5, "weight_decay": 0.2, "half": True}], (0.9, 0.98))
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
    found, expected = parameter.detach().numpy(), naive_half(weights, gradients, 1e-5, 0.2, 0.98)
    # Some processors multiply and add in one operation, so that a few values are rounded to the other neighbour.
    assert (found == expected).mean() > 0.95
    moved = np.abs(expected - weights.astype(np.float16)).mean()
    assert moved > 1e-5 and np.abs(found - expected).mean() < 0.01 * moved


def test_float32_updates_have_no_bias_correction() -> None:
    gradients = torch.randn(20, 7, generator=torch.Generator().manual_seed(1)) / 100
    parameter = nn.Parameter(torch.linspace(-1, 1, 7))
    expected, mean, square = parameter.detach().double(), torch.zeros(7).double(), torch.zeros(7).double()
    optimizer = BertAdam([{"params": [parameter], "lr": 1e-2, "weight_decay": 0.2}], (0.9, 0.98))
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.98 * square + 0.02 * gradient**2
        expected = expected - 1e-2 * (mean / (square.sqrt() + 1e-6) + 0.2 * expected)
    torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-5, atol=1e-6)


def test_a_resumed_optimizer_goes_on_with_the_same_bits() -> None:
    draws = torch.Generator().manual_seed(3)
    gradients = torch.randn(10, 50, generator=draws) * 9e-5

    def group(parameter: nn.Parameter) -> list[dict[str, Any]]:
        return [{"params": [parameter], "lr": 1e-5, "weight_decay": 0.2, "half": True}]

    one = nn.Parameter(torch.randn(50, generator=draws) * 0.02)
    optimizer = BertAdam(group(one), (0.9, 0.98))
    for number, gradient in enumerate(gradients):
        if number == 5:
            two = nn.Parameter(one.detach().clone())
            resumed = BertAdam(group(two), (0.9, 0.98))
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        one.grad = gradient.clone()
        optimizer.step()
        if number >= 5:
            two.grad = gradient.clone()
            resumed.step()
    assert torch.equal(one, two)


def test_half_precision_and_weight_decay_are_those_of_the_released_program() -> None:
    with torch.device("meta"):
        official = CLIP4IDCAdaptation("ViT-B-32-quickgelu")
    parts = [part for tower in (official.images, official.words) for part in tower.modules()]
    assert len(half_precision_parameters(parts)) == 195  # of ViT-B/32
    model = CLIP4IDC(10, NETWORK, max_length=6, width=12, heads=2, ffn=24)
    optimizer = bert_adam(model, model.pretrained_parameters(), 1e-4, 1e-7, 0.01, (0.9, 0.999))
    settings = {id(part): group for group in optimizer.param_groups for part in group["params"]}
    found = {
        name: (settings[id(part)]["lr"], settings[id(part)]["weight_decay"] > 0, settings[id(part)]["half"])
        for name, part in model.named_parameters()
        if part.requires_grad
    }
    block = "images.visual.transformer.resblocks.0."
    assert found[block + "attn.in_proj_weight"] == (1e-7, True, True)
    assert found[block + "mlp.c_fc.bias"] == (1e-7, False, True)
    assert found[block + "ln_1.weight"] == (1e-7, True, False)  # CLIP's layer norms decay
    assert found[block + "ln_1.bias"] == (1e-7, False, False)
    assert found["images.visual.proj"] == (1e-7, True, True)
    assert found["images.ln_mid.weight"] == (1e-7, True, False)
    assert found["images.joint_positions"] == (1e-7, True, False)
    assert found["images.before_mark"] == found["images.after_mark"] == (1e-7, True, False)  # vectors that decay
    assert found["encoder.0.inner.weight"] == (1e-4, True, False)
    assert found["encoder.0.norm1.weight"] == (1e-4, False, False)  # the captioner's do not
    assert found["word_bias"] == (1e-4, False, False)


def test_adamw_does_not_decay_the_image_marks_the_scale_and_layer_norms_that_the_released_program_decays() -> None:
    model = CLIP4IDCAdaptation(NETWORK, max_length=6)
    rates = {"lr": 1e-4, "pretrained_lr": 1e-7, "weight_decay": 0.2, "betas": (0.9, 0.98)}
    ours, released = adamw(model, [], **rates), bert_adam(model, [], **rates)

    def decayed(optimizer: torch.optim.Optimizer) -> set[str]:
        ids = {id(part) for group in optimizer.param_groups if group["weight_decay"] for part in group["params"]}
        return {name for name, part in model.named_parameters() if id(part) in ids}

    norms = {
        f"{name}.weight"
        for name, part in model.named_modules()
        if isinstance(part, nn.LayerNorm) and part.weight.requires_grad
    }
    vectors = {"images.before_mark", "images.after_mark", "logit_scale"}
    assert len(norms) > 10 and decayed(ours) == decayed(released) - norms - vectors
    assert norms | vectors <= decayed(released)


def test_root_mean_square_is_over_all_values() -> None:
    gradients = [torch.randn(3, 4), None, torch.randn(5)]
    values = torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])
    found = root_mean_square(gradients)
    assert found is not None and found.item() == pytest.approx(values.square().mean().sqrt().item())
    assert root_mean_square([None]) is None
