"""What the backbone of tiles is trained on, and its stage by the real command."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.commands import ROOT

from diffcap.features.backbones import build_backbone
from diffcap.features.tiles_backbone import CLASSES, COVERS, tiles_preprocessing
from diffcap.worlds.tiles.changes import sample_pair
from diffcap.worlds.tiles.render import WATER, materials, to_image
from diffcap.worlds.tiles.write import appearance, render_pair
from diffcap.worlds.training.tiles_backbone import IGNORED, _class_of_material, tile_batch


def test_targets_are_the_fractions_of_the_rendered_materials() -> None:
    images, targets = tile_batch(20, 4, seed=2, jitter=1.0)  # both images of the pairs 10 and 11
    later, shown = tile_batch(21, 2, seed=2, jitter=1.0)
    assert torch.equal(images[1:3], later) and torch.equal(targets.covers[1:3], shown.covers)
    rendered = render_pair(10, 2, 1.0).images[1]
    expected = tiles_preprocessing().normalize(torch.from_numpy(rendered).permute(2, 0, 1).float())
    torch.testing.assert_close(images[1], expected)
    pair, (dates, _) = sample_pair(10, 2), appearance(10, 2, 1.0)
    numbers, table = materials(pair.after, dates[1]), _class_of_material()
    for row, column in ((0, 0), (17, 40), (63, 63), (30, 5)):
        block = table[numbers[4 * row : 4 * row + 4, 4 * column : 4 * column + 4]]
        for cover in range(CLASSES):
            assert targets.covers[1, cover, row, column] == (block == cover).mean()
    centers = [to_image(house.center, dates[1]) for house in pair.after.houses]
    blocks = {(int(y) // 8, int(x) // 8) for x, y in centers if 0 <= x < 256 and 0 <= y < 256}
    assert {tuple(place) for place in targets.houses[1].nonzero().tolist()} == blocks


def test_every_material_that_covers_ground_has_a_class() -> None:
    table = _class_of_material()
    assert table[WATER] == COVERS.index("water") and set(table) == {*range(CLASSES), IGNORED}


@pytest.mark.thorough
def test_the_stage_trains_and_writes_weights_that_load(tmp_path: Path) -> None:
    options = [
        "--model.steps=2",
        "--data.batches=2",
        "--data.batch_size=2",
        "--data.num_workers=0",
        "--probe_images=100",
    ]
    options += [f"--output={tmp_path / 'w.safetensors'}", f"--trainer.default_root_dir={tmp_path / 'run'}"]
    script = str(ROOT / "stages" / "tiles_backbone.py")
    done = subprocess.run([sys.executable, script, *options], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "on held-out scenes: {'pixels':" in done.stdout, done.stderr
    backbone = build_backbone("tiles", weights=str(tmp_path / "w.safetensors"))
    features = backbone(torch.randn(2, 3, 256, 256))
    assert torch.isfinite(features).all()
