"""Convolutions with batch norm for the small backbones that the package ships, and their weights."""

import copy
from pathlib import Path
from typing import TypeVar

from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from diffcap.features.weights import load_weights, read_state_dict

Network = TypeVar("Network", bound=nn.Module)


def conv_block(
    inputs: int,
    outputs: int,
    kernel: int,
    stride: int = 1,
    padding: int | tuple[int, int] = 0,
    norm: bool = False,
    dilation: int = 1,
) -> nn.Sequential:
    """Convolution, batch norm (if `norm`) and ReLU."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs) if norm else nn.Identity(), nn.ReLU(inplace=True))


def fuse_batch_norms(network: Network) -> Network:
    """A copy for inference, in which every batch norm of a `conv_block` is folded into the convolution before it."""
    network = copy.deepcopy(network).eval()
    for module in network.modules():
        if isinstance(module, nn.Sequential) and len(module) == 3 and isinstance(module[1], nn.BatchNorm2d):
            conv = module[0]
            assert isinstance(conv, nn.Conv2d)
            module[0], module[1] = fuse_conv_bn_eval(conv, module[1]), nn.Identity()
    return network


def with_weights(network: Network, weights: str, shipped: Path) -> Network:
    """The network with the weights of a file, "random", or "default": those that ship with the package."""
    if weights != "random":
        path = shipped if weights == "default" else Path(weights)
        load_weights(network, read_state_dict(path), str(path))
    return network
