"""What the official checkpoints of RSICCformer and Chg2Cap have in common: word decoder, residual blocks and backbone."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from diffcap.interop.importer import Rule
from diffcap.interop.sizes import State, count_layers

_STATISTICS = r"(running_mean|running_var|num_batches_tracked)"
# Modules of the word decoder that the authors' programs store and do not use.
_UNUSED = (r"transformer\.layers\.\d+\.fc_alpha[123]", r"position_encoding\.(?:embedding_1D|pe)")


def decoder_rules(group: str, cross_attention: str) -> tuple[Rule, ...]:
    """Rules for the word decoder: the prefix of its official parameters, and the name of the attention that is used."""
    layer = rf"{group}\.transformer\.layers\.(\d+)\."
    return (
        (rf"{group}\.vocab_embedding", "decoder.embedding"),
        (layer + r"self_attn\.in_proj_(weight|bias)", r"decoder.blocks.\1.self_attention.qkv.\2"),
        (layer + r"self_attn\.out_proj", r"decoder.blocks.\1.self_attention.out"),
        (layer + cross_attention + r"\.in_proj_(weight|bias)", r"decoder.blocks.\1.cross.qkv.\2"),
        (layer + cross_attention + r"\.out_proj", r"decoder.blocks.\1.cross.out"),
        (layer + "linear1", r"decoder.blocks.\1.ffn.0"),
        (layer + "linear2", r"decoder.blocks.\1.ffn.3"),
        (layer + "norm([123])", r"decoder.blocks.\1.norm\2"),
        (rf"{group}\.wdc", "decoder.logit"),
        *((rf"{group}\.{name}", None) for name in _UNUSED),
    )


def residual_rules(official: str, ours: str) -> tuple[Rule, ...]:
    """Rules for residual blocks: patterns of their official and new names; a group of the pattern is the block's number."""
    place = 1 + re.compile(official).groups
    return (
        (rf"{official}\.left\.(\d+)", rf"{ours}.branch.\{place}"),
        (rf"{official}\.left\.(\d+)\.{_STATISTICS}", rf"{ours}.branch.\{place}.\{place + 1}"),
    )


def backbone_rules(network: str) -> tuple[Rule, ...]:
    """Rules for the ResNet, whose layers are numbered in the official file; `network` is a pattern of their prefix."""
    first = {0: "conv1", 1: "bn1"}
    layers = {number + 3: f"layer{number}" for number in range(1, 5)}
    return (
        *((rf"{network}\.{number}", f"images.network.{name}") for number, name in first.items()),
        (rf"{network}\.1\.{_STATISTICS}", r"images.network.bn1.\1"),
        *((rf"{network}\.{number}\.([\w.]+)", rf"images.network.{name}.\1") for number, name in layers.items()),
    )


def complete(renamed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give the weights of 1 x 1 convolutions, which `rename` makes matrices, four dimensions again, and add missing counters.

    `num_batches_tracked` of batch norm is used neither in training nor in inference; imported files are read without it.
    """
    state = dict(renamed)
    for name, value in renamed.items():
        is_convolution = name.startswith("images.network.") or ".branch." in name
        if value.ndim == 2 and is_convolution:
            state[name] = value[..., None, None]
        if name.endswith("running_mean"):
            state.setdefault(name.replace("running_mean", "num_batches_tracked"), torch.zeros((), dtype=torch.long))
    return state


IMAGE_SIZE = (256, 256)  # height and width
# By the blocks of the first three layers, and whether a block has three convolutions.
_RESNETS: dict[tuple[tuple[int, ...], bool], str] = {
    ((2, 2, 2), False): "resnet18",
    ((3, 4, 6), False): "resnet34",
    ((3, 4, 6), True): "resnet50",
    ((3, 4, 23), True): "resnet101",
    ((3, 8, 36), True): "resnet152",
}


def resnet_name(state: State, prefix: str) -> str | None:
    """torchvision's name of the ResNet with numbered layers; None if there is no such network."""
    if not any(re.match(prefix, name) for name in state):
        return None
    blocks = tuple(count_layers(state, rf"{prefix}\.{number}\.(\d+)\.") for number in (4, 5, 6))
    has_three = any(re.fullmatch(rf"{prefix}\.4\.0\.conv3\.weight", name) for name in state)
    if (blocks, has_three) not in _RESNETS:
        raise ValueError(f"its backbone has {blocks} blocks, which is no known ResNet")
    return _RESNETS[blocks, has_three]
