"""`stages/backbone.py` by its real command, and what it trains on."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from diffcap.features.backbones import build_backbone
from diffcap.features.blocks_backbone import CELL, COLORS, GROUPS, MARGIN
from diffcap.worlds.training.blocks_backbone import scene_batch, targets_of

ROOT = Path(__file__).parents[3]


def test_targets_of_a_hand_made_picture() -> None:
    slots = torch.full((1, 96, 128), -1)
    slots[0, 30:40, 50:60] = 0  # middle (35, 55): row 1, column (55 + 8) // 24 = 2
    slots[0, 26:30, 44:50] = 1  # middle (28, 47): the same cell
    slots[0, 90:96, 0:4] = 2  # middle (93, 2): row 3, column 0
    names = {"color": [3, 5, 0, 1], "shape": [2, 0, 1, 1], "material": [1, 0, 0, 1], "size": [0, 1, 1, 1]}
    attributes = {name: torch.tensor([values]) for name, values in names.items()}
    targets = targets_of(attributes, slots)
    assert targets.objects.sum() == 3 and targets.objects[0, 1, 2] == 2 and targets.objects[0, 3, 0] == 1
    groups = dict(zip(GROUPS, targets.probabilities.split(list(GROUPS.values()), dim=1)))
    assert groups["color"][0, :, 1, 2].nonzero().flatten().tolist() == [3, 5]
    assert groups["color_shape"][0, :, 1, 2].nonzero().flatten().tolist() == [3 * 3 + 2, 5 * 3 + 0]
    assert groups["color_size"][0, :, 3, 0].nonzero().flatten().tolist() == [0 * 2 + 1]
    assert groups["solid"][0, :, 3, 0].nonzero().flatten().tolist() == [(1 * 2 + 0) * 2 + 1]
    assert groups["shape"].sum() == 3  # the fourth slot is nowhere to be seen
    # 93 is 21 into its row of 24: the lowest third; 2 + 8 is 10 into its column: the middle third
    assert groups["ninth"][0, :, 3, 0].nonzero().flatten().tolist() == [2 * 3 + 1]
    share = (slots[0, 24:48, 2 * CELL - MARGIN : 3 * CELL - MARGIN] == 0).float().mean()
    torch.testing.assert_close(groups["share"][0, 3, 1, 2], share)
    torch.testing.assert_close(targets.positions[0, [3, COLORS + 3], 1, 2], torch.tensor([55 / 64 - 1, 35 / 48 - 1]))
    assert targets.dense[0, :, 4, 6].tolist() == [4, 3, 2, 1]  # the block whose middle is pixel (36, 52): slot 0
    assert targets.dense[0, :, 0, 0].tolist() == [0, 0, 0, 0]


def test_scenes_are_the_same_for_the_same_numbers() -> None:
    images, targets = scene_batch(40, 3, seed=5, jitter=1.0)
    later, shown = scene_batch(41, 2, seed=5, jitter=1.0)
    assert torch.equal(images[1:], later) and torch.equal(targets.probabilities[1:], shown.probabilities)
    assert images.shape == (3, 3, 96, 128)


@pytest.mark.thorough
def test_the_stage_trains_goes_on_and_writes_weights_that_load(tmp_path: Path) -> None:
    def run(steps: int, name: str) -> subprocess.CompletedProcess[str]:
        options = [f"--model.steps={steps}", "--data.batches=2", "--data.batch_size=4", "--data.num_workers=0"]
        options += [
            f"--output={tmp_path / name}",
            "--probe_images=30",
            f"--trainer.default_root_dir={tmp_path / 'run'}",
        ]
        script = str(ROOT / "stages" / "backbone.py")
        return subprocess.run([sys.executable, script, *options], capture_output=True, text=True, cwd=tmp_path)

    done = run(4, "w.safetensors")
    assert done.returncode == 0, done.stderr
    assert "on held-out scenes" in done.stdout
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        notes = file.metadata()
    assert notes["steps"] == "4 of 4 images" and "--model.steps=4" in notes["command"]
    again = run(
        4, "again.safetensors"
    )  # the checkpoint of a finished run: nothing is trained, the weights are the same
    assert again.returncode == 0, again.stderr
    first, second = (
        build_backbone("blocks", weights=str(tmp_path / name)) for name in ("w.safetensors", "again.safetensors")
    )
    images = scene_batch(0, 2, seed=1, jitter=1.0)[0]
    assert torch.equal(first(images), second(images))
