import numpy as np
import pytest
import torch

from diffcap.worlds.blocks import render as rendering
from diffcap.worlds.blocks.geometry import CUBE, SPHERE, Scenes
from diffcap.worlds.blocks.render import render
from diffcap.worlds.blocks.scenes import ADD, DROP, sample_triples

pytestmark = pytest.mark.slow  # many rendered scenes


@pytest.fixture(scope="module")
def triples():
    return sample_triples(range(150), seed=11)


@pytest.fixture(scope="module")
def pictures(triples):
    return render(triples.scenes())


def test_every_pixel_shows_the_object_that_marching_along_its_ray_meets_first():
    scenes = sample_triples(range(6), seed=5).before
    _, index = render(scenes, (64, 48))
    agree = np.mean([np.mean(_march(scenes, row, (64, 48)) == index[row].numpy()) for row in range(len(scenes))])
    assert agree > 0.997  # the march has steps, and errs where a ray grazes an edge


def test_a_picture_does_not_depend_on_the_batch(triples, pictures):
    images, index = pictures
    scenes = triples.scenes()
    for rows in ([17], [301, 2], list(range(100, 137))):
        again, again_index = render(scenes[rows])
        assert torch.equal(again, images[rows]) and torch.equal(again_index, index[rows])


def test_the_changed_object_shows_and_no_object_is_cut_or_hidden(triples, pictures):
    index = pictures[1].view(3, 150, 96, 128)
    for view, scenes in enumerate((triples.before, triples.after, triples.distractor)):
        for row in range(150):
            shown = torch.bincount(index[view, row].flatten() + 1, minlength=7)[1:]
            assert (shown[scenes.valid[row]] >= 8).all()
            assert (shown[~scenes.valid[row]] == 0).all()
            slot = triples.changed[row]
            absent = int(triples.change[row]) == (DROP if view == 1 else ADD)
            assert shown[slot] == 0 if absent else shown[slot] >= 25
    border = torch.cat([index[..., 0, :], index[..., -1, :], index[..., :, 0], index[..., :, -1]], -1)
    assert (border == -1).all()


def test_objects_throw_shadows_and_nothing_else_on_the_ground(triples):
    scenes = triples.before[:40]
    bare = scenes[:]
    bare.valid = torch.zeros_like(scenes.valid)
    (with_objects, index), (without, empty) = render(scenes), render(bare)
    assert (empty == -1).all()
    inner = index == -1
    for dy, dx in ((0, 1), (0, -1), (1, 0), (-1, 0)):  # not the pixels that an outline crosses
        inner &= torch.roll(index, (dy, dx), (1, 2)) == -1
    change = (without.float() - with_objects.float()).mean(1)
    for row in range(40):
        ground = change[row][inner[row]]
        assert ground.min() > -1 and ground.max() > 25  # only darker
        assert (ground < 0.5).float().mean() > 0.5  # most of it untouched


def test_rays_and_shadows_left_out_would_have_changed_nothing(triples, monkeypatch):
    scenes = triples.scenes()[::9]
    expected = render(scenes)

    box = torch.tensor([-9.0, -9, 9, 9])  # everywhere
    monkeypatch.setattr(rendering, "_shadow_boxes", lambda batch: box.expand(len(batch.image), 4))
    monkeypatch.setattr(rendering, "view_boxes", lambda scenes: box.expand(len(scenes), 6, 4))
    for found, wanted in zip(render(scenes), expected):
        assert torch.equal(found, wanted)


def test_edges_are_smoothed(triples):
    scenes = triples.before[:10]
    images, index = render(scenes)
    fine = render(scenes, (768, 576))[0].float().view(10, 3, 96, 6, 128, 6).mean((3, 5))
    error = (images.float() - fine).abs().mean(1)
    edge = torch.zeros_like(index, dtype=torch.bool)
    edge[:, :, 1:] |= index[:, :, 1:] != index[:, :, :-1]
    edge[:, 1:] |= index[:, 1:] != index[:, :-1]
    assert error[~edge].mean() < 0.6
    assert error[edge].mean() < 9  # one ray a pixel: about three times as much
    assert error[edge].quantile(0.98) < 30


@pytest.mark.parametrize("size", [(480, 320), (96, 96), (64, 48)])
def test_other_sizes_show_the_same_frame(triples, size):
    _, index = render(triples.before[:10], size)
    assert index.shape == (10, size[1], size[0])
    for row in range(10):
        assert set(index[row].unique().tolist()) == {-1, *triples.before.valid[row].nonzero().flatten().tolist()}
    border = torch.cat([index[:, 0], index[:, -1], index[:, :, 0], index[:, :, -1]], -1)
    assert (border == -1).all()


def _march(scenes: Scenes, row: int, size: tuple[int, int]) -> np.ndarray:
    """(H, W) slots by walking along each ray in small steps and asking at each whether it is inside a solid."""
    width, height = size
    eye, target = scenes.eye[row].double().numpy(), scenes.target[row].double().numpy()
    forward = (target - eye) / np.linalg.norm(target - eye)
    right = np.cross(forward, [0, 0, 1])
    right /= np.linalg.norm(right)
    up = np.cross(right, forward)
    u = 0.335 * ((np.arange(width) + 0.5) * 2 / width - 1)
    v = 0.25125 * (1 - (np.arange(height) + 0.5) * 2 / height)
    rays = forward + u[None, :, None] * right + v[:, None, None] * up  # (H, W, 3)
    found = np.full((height, width), -1)
    for depth in np.arange(17, 5, -0.01):  # from far to near: the last to be found is the first that is met
        points = eye + depth * rays
        for slot in scenes.valid[row].nonzero().flatten().tolist():
            x, y, z = np.moveaxis(points - [*scenes.position[row, slot].tolist(), 0], -1, 0)
            radius = (0.38, 0.72)[scenes.size[row, slot]]
            shape = int(scenes.shape[row, slot])
            if shape == CUBE:
                half, yaw = radius / 2**0.5, float(scenes.yaw[row, slot])
                a, b = x * np.cos(yaw) + y * np.sin(yaw), y * np.cos(yaw) - x * np.sin(yaw)
                inside = (abs(a) < half) & (abs(b) < half) & (abs(z - half) < half)
            elif shape == SPHERE:
                inside = x**2 + y**2 + (z - radius) ** 2 < radius**2
            else:
                inside = (x**2 + y**2 < radius**2) & (abs(z - radius) < radius)
            found[inside] = slot
    return found
