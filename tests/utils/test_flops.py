"""The counter of floating-point operations."""

import pytest
import torch
from torch import nn

from diffcap.models.layers import Linear
from diffcap.utils.flops import flop_counter
from diffcap.utils.linear import HAS_ONEDNN


@pytest.mark.parametrize("layer", [nn.Linear, Linear])
def test_a_multiplication_with_its_addition_is_two_operations(
    monkeypatch: pytest.MonkeyPatch, layer: type[nn.Linear]
) -> None:
    monkeypatch.setattr("diffcap.utils.linear.MIN_PRODUCTS", 0)
    monkeypatch.setattr("diffcap.utils.linear.USE_ONEDNN", HAS_ONEDNN)
    x = torch.randn(2, 5, 16, requires_grad=True)
    with flop_counter() as counter:
        layer(16, 24)(x).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 10 * 16 * 24  # the layer, and the gradients of x and of the weight
