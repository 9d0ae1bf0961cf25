"""What the backbones that ship are trained on."""

from types import SimpleNamespace

import torch

from diffcap.features.blocks_backbone import CELL, COLORS, GROUP_SIZES, MARGIN
from diffcap.features.tiles_backbone import CLASSES, PREPROCESSING
from diffcap.worlds.tiles.changes import sample_pair
from diffcap.worlds.tiles.render import draw_materials, to_image
from diffcap.worlds.tiles.write import render_pair, sample_appearance
from diffcap.worlds.training.blocks import make_targets
from diffcap.worlds.training.tiles import TilesBackbone, _class_of_material


def test_targets_of_a_hand_made_picture() -> None:
    slots = torch.full((1, 96, 128), -1)
    slots[0, 30:40, 50:60] = 0  # middle (35, 55): row 1, column (55 + 8) // 24 = 2
    slots[0, 26:30, 44:50] = 1  # middle (28, 47): the same cell
    slots[0, 90:96, 0:4] = 2  # middle (93, 2): row 3, column 0
    names = {"color": [3, 5, 0, 1], "shape": [2, 0, 1, 1], "material": [1, 0, 0, 1], "size": [0, 1, 1, 1]}
    attributes = {name: torch.tensor([values]) for name, values in names.items()}
    targets = make_targets(SimpleNamespace(**attributes), slots)
    assert targets.num_objects.sum() == 3 and targets.num_objects[0, 1, 2] == 2 and targets.num_objects[0, 3, 0] == 1
    groups = dict(zip(GROUP_SIZES, targets.probabilities.split(list(GROUP_SIZES.values()), dim=1)))
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


def test_targets_are_the_fractions_of_the_rendered_materials() -> None:
    images, targets = TilesBackbone.render_batch(20, 4, seed=2, jitter=1.0)  # both images of the pairs 10 and 11
    later, shown = TilesBackbone.render_batch(21, 2, seed=2, jitter=1.0)
    assert torch.equal(images[1:3], later) and torch.equal(targets.covers[1:3], shown.covers)
    rendered = render_pair(10, 2, 1.0).images[1]
    expected = PREPROCESSING.normalize(torch.from_numpy(rendered).permute(2, 0, 1).float())
    torch.testing.assert_close(images[1], expected)
    pair, (dates, _) = sample_pair(10, 2), sample_appearance(10, 2, 1.0)
    numbers, table = draw_materials(pair.after, dates[1]), _class_of_material()
    for row, column in ((0, 0), (17, 40), (63, 63), (30, 5)):
        block = table[numbers[4 * row : 4 * row + 4, 4 * column : 4 * column + 4]]
        for cover in range(CLASSES):
            assert targets.covers[1, cover, row, column] == (block == cover).mean()
    centers = [to_image(house.center, dates[1]) for house in pair.after.houses]
    blocks = {(int(y) // 8, int(x) // 8) for x, y in centers if 0 <= x < 256 and 0 <= y < 256}
    assert {tuple(place) for place in targets.houses[1].nonzero().tolist()} == blocks
