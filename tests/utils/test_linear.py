"""Linear layers by oneDNN against torch's."""

import pytest
import torch
import torch.nn.functional as F
from tests.gradients import same_values_and_gradients
from torch import nn

from diffcap.models.clip import BlockAttention
from diffcap.models.layers import Linear
from diffcap.utils.linear import HAS_ONEDNN, flop_counter, linear, linear_is_faster

MATRICES = {
    "rows": lambda rows, columns: torch.randn(rows, columns),
    "columns": lambda rows, columns: torch.randn(columns, rows).T,
    "gaps": lambda rows, columns: torch.randn(rows, columns + 3)[:, 1 : columns + 1],
}
needs_onednn = pytest.mark.skipif(not HAS_ONEDNN, reason="torch without oneDNN")


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers of any size by oneDNN, also on processors where it is not the default."""
    monkeypatch.setattr("diffcap.utils.linear.USE_ONEDNN", True)
    monkeypatch.setattr("diffcap.utils.linear.MIN_PRODUCTS", 0)


@needs_onednn
@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("weights", MATRICES)
@pytest.mark.parametrize("inputs", MATRICES)
def test_a_linear_layer_has_the_values_and_gradients_of_torchs(inputs: str, weights: str, bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = MATRICES[inputs](6, 40), MATRICES[weights](24, 40)
    parts = [part.requires_grad_() for part in (x, weight, *([torch.randn(24)] if bias else []))]
    assert linear_is_faster(x, weight)
    same_values_and_gradients(linear(*parts), F.linear(*parts), parts)
    for shape in ((2, 3, 40), (1, 2, 3, 40)):
        images = x.reshape(shape)
        changed = F.relu(linear(images, *parts[1:]), inplace=True)
        same_values_and_gradients(changed, F.linear(images, *parts[1:]).relu(), parts)
        with torch.no_grad():
            torch.testing.assert_close(linear(images, *parts[1:]), F.linear(images, *parts[1:]), atol=1e-5, rtol=1e-5)
    wide = torch.randn(6, 48)[:, 8:32]  # a gradient with gaps
    ours, theirs = (torch.autograd.grad(layer(*parts), parts, wide) for layer in (linear, F.linear))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    frozen = linear(x.detach(), weight, None)
    torch.testing.assert_close(torch.autograd.grad(frozen.sum(), weight)[0], x.detach().sum(0).expand(24, -1))


@needs_onednn
@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize("masked", [False, True])
def test_the_attention_of_clips_blocks_is_torchs(masked: bool) -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(8, 2, batch_first=True)
    nn.init.normal_(theirs.in_proj_bias)
    ours = BlockAttention(8, 2, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 5, 8, requires_grad=True)
    mask = torch.full((5, 5), float("-inf")).triu(1) if masked else None
    expected = theirs(x, x, x, need_weights=False, attn_mask=mask)[0]
    found, weights = ours(x, x, x, need_weights=False, attn_mask=mask)
    assert weights is None
    same_values_and_gradients(found, expected, [x])
    for name, parameter in ours.named_parameters():  # the second backward pass needs new graphs
        output = ours(x, x, x, attn_mask=mask)[0], theirs(x, x, x, need_weights=False, attn_mask=mask)[0]
        grads = [
            torch.autograd.grad(out.square().sum(), weight)[0]
            for out, weight in zip(output, (parameter, theirs.get_parameter(name)))
        ]
        torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-5)


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
