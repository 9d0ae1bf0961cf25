"""Batch norm on two ranks against torch's on one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.losses.ranks import on_two_ranks
from torch import nn

from diffcap.losses.gather import rank
from diffcap.models.resnet import GlobalBatchNorm2d


def share(data: dict[str, Any]) -> dict[str, Any]:
    """Two training steps of a batch norm on the images of a rank: the first has three, the second two."""
    layer, mine = GlobalBatchNorm2d(3), slice(0, 3) if rank() == 0 else slice(3, None)
    layer.load_state_dict(data["state"])
    outputs = []
    for images, weights in data["steps"]:
        images, weights = images[mine].requires_grad_(), weights[mine]
        output = layer(images)
        (output * weights).sum().backward()
        outputs.append((output.detach(), images.grad))
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    alone = layer.eval()(data["steps"][0][0]).detach()
    return {"outputs": outputs, "gradients": gradients, "state": layer.state_dict(), "eval": alone}


@pytest.mark.slow  # two processes
def test_two_ranks_have_the_statistics_of_all_images(tmp_path: Path) -> None:
    """The mean is a hundred standard deviations from 0."""
    draws = torch.Generator().manual_seed(0)
    theirs = nn.BatchNorm2d(3)
    with torch.no_grad():
        theirs.weight.copy_(torch.randn(3, generator=draws))
        theirs.bias.copy_(torch.randn(3, generator=draws))
        theirs.running_mean.fill_(99.0)
    steps = [tuple(torch.randn(5, 3, 2, 4, generator=draws) for _ in range(2)) for _ in range(2)]
    steps = [(images + 100, weights) for images, weights in steps]
    first, second = on_two_ranks(share, {"state": theirs.state_dict(), "steps": steps}, tmp_path)
    for number, (images, weights) in enumerate(steps):
        images = images.clone().requires_grad_()
        output = theirs(images)
        (output * weights).sum().backward()
        for index, expected in enumerate((output.detach(), images.grad)):
            found = torch.cat([part["outputs"][number][index] for part in (first, second)])
            torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    for name, parameter in theirs.named_parameters():
        total = first["gradients"][name] + second["gradients"][name]
        torch.testing.assert_close(total, parameter.grad, atol=1e-3, rtol=1e-3)
    for part in (first, second):
        for name, value in theirs.state_dict().items():
            torch.testing.assert_close(part["state"][name], value)
        torch.testing.assert_close(part["eval"], theirs.eval()(steps[0][0]).detach(), atol=1e-4, rtol=1e-4)
