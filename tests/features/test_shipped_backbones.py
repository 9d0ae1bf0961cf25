"""The networks that ship with the package: channels, folding of batch norm, and what the weights recognise."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from diffcap.features import blocks_backbone, tiles_backbone
from diffcap.features.backbones import build_backbone
from diffcap.features.blocks_backbone import BlocksNetwork
from diffcap.features.tiles_backbone import CLASSES, COVERS, NUM_CHANNELS, TilesNetwork
from diffcap.features.weights import fuse_batch_norms
from diffcap.worlds.tiles.write import render_pair
from diffcap.worlds.training.tiles import TilesBackbone


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


def test_the_channels_are_fractions_and_counts_of_each_quarter_of_a_cell() -> None:
    torch.manual_seed(0)
    covers, houses = torch.randn(1, CLASSES, 64, 64), torch.randn(1, 32, 32)
    values = TilesNetwork().compute_channels(covers, houses)
    assert values.shape == (1, NUM_CHANNELS, 8, 8)
    probabilities = covers.softmax(1)
    for row, column, quarter in ((0, 0, 0), (3, 5, 1), (7, 2, 2), (6, 6, 3)):
        down, right = divmod(quarter, 2)
        y, x = 8 * row + 4 * down, 8 * column + 4 * right  # in predictions of 4 x 4 pixels
        found = values[0, :, row, column].view(CLASSES + 1, 4)[:, quarter]
        torch.testing.assert_close(found[:CLASSES], probabilities[0, :, y : y + 4, x : x + 4].mean((1, 2)))
        expected = houses[0, y // 2 : y // 2 + 2, x // 2 : x // 2 + 2].sigmoid().sum()
        torch.testing.assert_close(found[CLASSES], expected)


@pytest.mark.parametrize("module", [blocks_backbone, tiles_backbone])
def test_the_shipped_weights_are_small_and_say_where_they_come_from(module: Any) -> None:
    assert module.SHIPPED_FILE.stat().st_size < 2_000_000
    with safe_open(module.SHIPPED_FILE, "pt") as file:
        notes = file.metadata()
    assert {"command", "seed", "steps", "date", "held_out"} <= set(notes)
    assert json.loads(notes["held_out"])["color" if module is blocks_backbone else "pixels"] > 0.9


@pytest.mark.slow
def test_the_shipped_weights_recognise_the_land_cover_of_unseen_images() -> None:
    network = build_backbone("tiles").trunk
    images, targets = TilesBackbone.render_batch(2**41, 12, seed=3, jitter=1.0)
    with torch.no_grad():
        covers, houses = network.predict(images)
    right = covers.argmax(1) == targets.covers.argmax(1)
    assert right.float().mean() > 0.85
    forest = targets.covers[:, COVERS.index("forest")] > 0.9
    assert right[forest].float().mean() > 0.9
    per_image = torch.corrcoef(torch.stack([houses.sigmoid().sum((1, 2)), targets.houses.sum((1, 2))]))[0, 1]
    assert per_image > 0.9


def test_features_of_both_dates_agree_where_nothing_changed() -> None:
    """Season, light and haze change the pixels more than the features, relative to another scene."""
    backbone = build_backbone("tiles")
    images = [image for number in (1, 3) for image in render_pair(number, 4).images]  # pairs without change
    with torch.no_grad():
        features = backbone(torch.stack([backbone.preprocess(Image.fromarray(image)) for image in images]))
    assert features.shape == (4, *backbone.shape()) and backbone.shape() == (NUM_CHANNELS, 8, 8)
    pixels = np.stack(images).astype(np.float64)

    def ratio(values: np.ndarray) -> float:
        same = sum(np.square(values[2 * k] - values[2 * k + 1]).mean() for k in (0, 1))
        other = sum(np.square(values[k] - values[k + 2]).mean() for k in (0, 1))
        return same / other

    assert ratio(features.double().numpy()) < 0.5 * ratio(pixels)


def test_the_network_of_blocks_is_built_by_name() -> None:
    backbone = build_backbone("blocks")
    assert backbone.shape() == (blocks_backbone.NUM_CHANNELS, 4, 6)
    assert backbone.preprocess(Image.new("RGB", (320, 240))).shape == (3, 96, 128)
