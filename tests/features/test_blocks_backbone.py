"""The embedded backbone: layout, folding of batch norm, and the weights that ship."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from diffcap.features.backbones import build_backbone
from diffcap.features.blocks_backbone import CELL, CHANNELS, MARGIN, SHIPPED, BlocksNetwork, cell_centers
from diffcap.features.convolutions import fuse_batch_norms
from diffcap.features.tiles_backbone import TilesNetwork


@pytest.mark.parametrize(("build", "size"), [(BlocksNetwork, (96, 128)), (TilesNetwork, (256, 256))])
def test_folding_batch_norm_changes_nothing(build: type, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    network = build(norm=True).eval()
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(module.running_mean)
            torch.nn.init.uniform_(module.running_var, 0.5, 2)
            torch.nn.init.normal_(module.weight)
    network.mean.normal_()
    images = torch.randn(2, 3, *size)
    fused = fuse_batch_norms(network)
    torch.testing.assert_close(fused(images), network(images), rtol=1e-4, atol=1e-4)
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in fused.modules())


def test_each_cell_looks_round_its_own_middle() -> None:
    """The gradient of a cell with respect to the picture is centred on the cell."""
    torch.manual_seed(0)
    network = BlocksNetwork().eval()
    x, y = cell_centers()
    for row, column in ((1, 2), (2, 3)):
        images = torch.randn(8, 3, 96, 128, requires_grad=True)
        network.raw(network.blocks(images))[0][:, :, row, column].square().sum().backward()
        weight = images.grad.abs().sum((0, 1))  # (96, 128)
        middle_y = (weight.sum(1) * torch.arange(96)).sum() / weight.sum()
        middle_x = (weight.sum(0) * torch.arange(128)).sum() / weight.sum()
        assert abs(middle_y - (y[row] + 1) * 48) < 6 and abs(middle_x - (x[column] + 1) * 64) < 6
        assert torch.isclose((x[column] + 1) * 64, torch.tensor((column + 0.5) * CELL - MARGIN))


def test_shipped_weights_are_small_and_say_where_they_come_from() -> None:
    assert SHIPPED.stat().st_size < 2_000_000
    with safe_open(SHIPPED, "pt") as file:
        notes = file.metadata()
    assert {"command", "seed", "steps", "date", "held_out"} <= set(notes)
    assert json.loads(notes["held_out"])["color"] > 0.95


def test_the_backbone_is_built_by_name_and_takes_any_picture() -> None:
    backbone = build_backbone("blocks")
    assert backbone.shape() == (CHANNELS, 4, 6)
    image = backbone.preprocess(Image.fromarray(np.zeros((240, 320, 3), dtype=np.uint8)))
    assert image.shape == (3, 96, 128)
    assert torch.isfinite(backbone(image[None])).all()
