import itertools
import math

import pytest
import torch

from diffcap.worlds.blocks.geometry import CUBE, FOOTPRINT_RADII, Scenes
from diffcap.worlds.blocks.scenes import ADD, CHANGES, COLOR, DROP, MATERIAL, MOVE, sample_triples

OBJECT = ("size", "color", "material", "shape", "position", "yaw")


@pytest.fixture(scope="module")
def triples():
    return sample_triples(range(250), seed=3)


def test_a_triple_is_the_same_in_any_batch(triples):
    some = [7, 249, 0, 31]
    alone = sample_triples(some, seed=3)
    assert alone.indices.tolist() == some
    for name in ("before", "after", "distractor"):
        for field in vars(alone.before):
            found, wanted = (getattr(getattr(each, name), field) for each in (alone, triples))
            assert torch.equal(found, wanted[some]), field
    for name in ("change", "changed", "new_value"):
        assert torch.equal(getattr(alone, name), getattr(triples, name)[some])
    for seed in (4, -3, 2**63):
        assert not torch.equal(sample_triples(range(5), seed=seed).before.position, triples.before.position[:5])


def test_exactly_the_declared_attribute_changes(triples):
    for row in range(len(triples)):
        before, after = (_objects(scenes, row) for scenes in (triples.before, triples.after))
        for objects in (before.values(), after.values()):
            assert 3 <= len(objects) <= 6
            for one, other in itertools.combinations(objects, 2):
                assert any(one[name] != other[name] for name in OBJECT[:4])
                reach = FOOTPRINT_RADII[one["size"]] + FOOTPRINT_RADII[other["size"]]
                assert math.dist(one["position"], other["position"]) > reach + 0.2
        kind, slot = int(triples.change[row]), int(triples.changed[row])
        assert CHANGES[kind] == CHANGES[row % 5]
        if kind == ADD:
            assert slot not in before and {**before, slot: after[slot]} == after
        elif kind == DROP:
            assert slot not in after and {**after, slot: before[slot]} == before
        else:
            changed = {COLOR: {"color"}, MATERIAL: {"material"}, MOVE: {"position"}}[kind]
            assert {name for name in OBJECT if before[slot][name] != after[slot][name]} == changed
            assert {**before, slot: after[slot]} == after
        if kind in (COLOR, MATERIAL):
            assert after[slot][CHANGES[kind]] == triples.new_value[row] != before[slot][CHANGES[kind]]
        else:
            assert triples.new_value[row] == -1


def test_distractors_have_the_same_objects_under_another_camera_and_light(triples):
    for row in range(len(triples)):
        assert _objects(triples.before, row) == _objects(triples.distractor, row)
    for name in ("eye", "target", "light", "light_centers", "intensity"):
        assert (getattr(triples.before, name) != getattr(triples.distractor, name)).flatten(1).any(1).all(), name


def test_a_move_is_larger_than_what_the_camera_does():
    for jitter in (0.0, 1.0, 2.0):
        triples = sample_triples(range(4, 400, 5), seed=1, jitter=jitter)
        assert set(triples.change.tolist()) == {MOVE}
        for row in range(len(triples)):
            slot = int(triples.changed[row])
            shifts = {}
            for other, values in _objects(triples.before, row).items():
                height = FOOTPRINT_RADII[values["size"]] * (0.5**0.5 if values["shape"] == CUBE else 1)
                first = _project((*values["position"], height), triples.before, row)
                place = _objects(triples.after, row)[other]["position"]
                shifts[other] = math.dist(first, _project((*place, height), triples.after, row))
            moved = shifts.pop(slot)
            assert moved > 8
            assert moved > 1.2 * max(shifts.values())


def test_viewpoint_iou_falls_with_the_jitter():
    means = []
    for jitter in (0.0, 0.5, 1.0, 2.0):
        triples = sample_triples(range(100), seed=0, jitter=jitter)
        change, distractor = triples.viewpoint_iou()
        assert ((change >= 0) & (change <= 1) & (distractor >= 0) & (distractor <= 1)).all()
        means.append(float((change.mean() + distractor.mean()) / 2))
        for name in ("eye", "target", "light", "light_centers", "intensity") if not jitter else ():
            assert torch.equal(getattr(triples.before, name), getattr(triples.after, name))
            assert torch.equal(getattr(triples.before, name), getattr(triples.distractor, name))
    assert means[0] == pytest.approx(1, abs=1e-6)  # a moved object does not count
    assert means[0] > means[1] > means[2] > means[3] > 0.1


def _objects(scenes: Scenes, row: int) -> dict[int, dict]:
    slots = scenes.valid[row].nonzero().flatten().tolist()
    return {slot: {name: getattr(scenes, name)[row, slot].tolist() for name in OBJECT} for slot in slots}


def _project(point, scenes: Scenes, row: int) -> tuple[float, float]:
    """Pixels of 128 x 96, by angles: independent of the package's camera axes."""
    eye, target = scenes.eye[row].tolist(), scenes.target[row].tolist()
    way = [t - e for t, e in zip(target, eye)]
    bearing = math.atan2(way[1], way[0])
    pitch = math.atan2(way[2], math.hypot(way[0], way[1]))
    x, y, z = (p - e for p, e in zip(point, eye))
    ahead = x * math.cos(bearing) + y * math.sin(bearing)
    right = x * math.sin(bearing) - y * math.cos(bearing)
    depth = ahead * math.cos(pitch) + z * math.sin(pitch)
    up = z * math.cos(pitch) - ahead * math.sin(pitch)
    return 64 + 64 * right / depth / 0.335, 48 - 48 * up / depth / 0.25125
