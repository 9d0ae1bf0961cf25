"""A rank of test_batch_norm.py."""

import sys

import torch
import torch.distributed as dist
from torch import nn

from diffcap.models.resnet import GlobalBatchNorm2d


def main(number: int, meeting: str, data: str, out: str) -> None:
    """Two training steps of a batch norm on this rank's images."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=2)
    given = torch.load(data)
    layer = GlobalBatchNorm2d(3)
    layer.load_state_dict(given["state"])
    outputs = []
    for images, weights in given["steps"]:
        images, weights = (part[:3] if number == 0 else part[3:] for part in (images, weights))
        images.requires_grad_()
        output = layer(images)
        (output * weights).sum().backward()
        outputs.append((output.detach(), images.grad))
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    layer.eval()
    assert isinstance(layer, nn.BatchNorm2d)
    alone = layer(given["steps"][0][0].detach()).detach()
    torch.save({"outputs": outputs, "gradients": gradients, "state": layer.state_dict(), "eval": alone}, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
