"""Random scenes of `blocks`: objects, the change, and the variation of camera and light.

Every random number is a hash of (seed, triple, attempt, position in the sequence). So triple k of a seed is always the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffcap.utils.errors import DiffcapError
from diffcap.worlds.blocks import geometry
from diffcap.worlds.blocks.geometry import COLORS, HALF_VIEW, MATERIALS, PICTURE, RADII, SHAPES, SIZES, Scenes

CHANGES = ("color", "material", "add", "drop", "move")
COLOR, MATERIAL, ADD, DROP, MOVE = range(5)

OBJECTS = (3, 6)  # minimum and maximum number of objects in an image
MIN_GAP = 0.25  # distance between the circumscribed circles of two footprints
MIN_PIXELS = 34.0  # visible pixels of a changed object in an image of `PICTURE`, a lower bound computed from boxes
MIN_MOVE = 14.0  # pixels of `PICTURE` by which an object moves, absolutely and relative to the other objects
_MIN_FILL = 0.72  # the minimum fraction of its box that a solid covers
_ATTEMPTS_PER_ROUND = 4  # attempts that are sampled in one batch
_TRIES = 12  # positions that are sampled for one object
_ROUNDS = 100  # after them, an error is raised


@dataclass
class Triples(geometry.Columns):
    """T triples of scenes: before, after (one change) and distractor (only camera and light differ).

    Slot n is the same object in all three scenes.
    """

    indices: Tensor  # (T,) int64, index of each triple; with the seed, it determines the triple
    before: Scenes
    after: Scenes
    distractor: Scenes
    change: Tensor  # (T,) int64, index into `CHANGES`
    changed: Tensor  # (T,) int64, slot of the changed object (empty in `before` for "add", in `after` for "drop")
    new_value: Tensor  # (T,) int64, index of the new color or material; -1 for other changes

    def __len__(self) -> int:
        return len(self.indices)

    def scenes(self) -> Scenes:
        """Return all scenes as one batch of 3 T: before, then after, then distractor."""
        return Scenes.cat([self.before, self.after, self.distractor])

    def viewpoint_iou(self) -> tuple[Tensor, Tensor]:
        """Measure the similarity of the viewpoints of the change pairs (T,) and the distractor pairs (T,); 1 for the same camera.

        It is the mean intersection over union of the objects' bounding boxes (without occlusion) in both images, over all
        objects that exist in both and did not move.
        """
        before, after, distractor = (
            geometry.view_boxes(scenes) for scenes in (self.before, self.after, self.distractor)
        )
        unmoved = self.before.valid & self.after.valid
        unmoved[(self.change == MOVE).nonzero().flatten(), self.changed[self.change == MOVE]] = False
        change = _mean_over(geometry.box_iou(before, after), unmoved)
        return change, _mean_over(geometry.box_iou(before, distractor), self.before.valid)


def _mix(values: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014) on int64, which wraps."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        values = values ^ ((values >> shift) & (2 ** (64 - shift) - 1))
        values = values * (factor if factor < 2**63 else factor - 2**64)
    return values


class _Sampler:
    """Random numbers, hashed from each row's key and the number of previous samples."""

    def __init__(self, key: Tensor) -> None:
        self.key = key
        self.sampled = 0

    def uniform(self, count: int) -> Tensor:
        """Sample (A, count) float32 in [0, 1)."""
        position = torch.arange(self.sampled + 1, self.sampled + count + 1)
        self.sampled += count
        bits = _mix(self.key[:, None] + position * (0x9E3779B97F4A7C15 - 2**64))
        return ((bits >> 40) & (2**24 - 1)).float() * 2.0**-24

    def signed(self, count: int) -> Tensor:
        """Sample (A, count) float32 in [-1, 1)."""
        return 2 * self.uniform(count) - 1

    def choice(self, option_count: int, count: int) -> Tensor:
        """Sample (A, count) int64 in [0, option_count)."""
        return (self.uniform(count) * option_count).long()


def sample_triples(indices: Sequence[int] | Tensor, seed: int = 0, jitter: float = 1.0) -> Triples:
    """Sample triples by their indices. Triple k has the change `CHANGES[k % 5]`.

    All scenes satisfy these conditions: every object is in the image and partly visible, and the changed one is well visible;
    no two objects of a triple have the same four attributes, before and after the change; a moved object moves more
    in the image than any object moves because of the camera.

    Args:
        indices: indices of the triples, each at least 0.
        jitter: strength of the variation of camera and light within a triple; 0: none, 1: about that of CLEVR-Change.
    """
    indices = torch.as_tensor(indices, dtype=torch.int64)
    base = _mix(torch.tensor((seed + 2**63) % 2**64 - 2**63))  # any seed as an int64
    pending = torch.arange(len(indices))
    accepted: list[tuple[Tensor, Triples]] = []
    for round_ in range(_ROUNDS):
        if not len(pending):
            break
        attempts = torch.arange(round_ * _ATTEMPTS_PER_ROUND, (round_ + 1) * _ATTEMPTS_PER_ROUND)
        rows = indices[pending].repeat_interleave(_ATTEMPTS_PER_ROUND)
        keys = _mix(_mix(rows + base) + attempts.repeat(len(pending)))
        candidates, good = _sample_candidates(rows, keys, jitter)
        good = good.view(-1, _ATTEMPTS_PER_ROUND)
        done = good.any(1)
        first = good.to(torch.uint8).argmax(1) + torch.arange(len(pending)) * _ATTEMPTS_PER_ROUND
        accepted.append((pending[done], candidates[first[done]]))
        pending = pending[~done]
    if len(pending):
        index = int(indices[pending[0]])
        raise DiffcapError(
            f"blocks: no arrangement found for triple {index} with jitter {jitter:g}; use a weaker jitter."
        )
    order = torch.cat([rows for rows, _ in accepted]).argsort()
    return Triples.cat([triples for _, triples in accepted])[order]


def _sample_candidates(indices: Tensor, key: Tensor, jitter: float) -> tuple[Triples, Tensor]:
    """Sample one triple for each of A keys; return the triples, and (A,) whether each is valid."""
    sampler = _Sampler(key)
    rows, slots = torch.arange(len(key)), torch.arange(OBJECTS[1])
    change = indices % len(CHANGES)
    # For "add" and "drop", one image has one object more than the other, and the other must have the minimum number.
    min_count = OBJECTS[0] + ((change == ADD) | (change == DROP)).long()
    count = min_count + (sampler.uniform(1)[:, 0] * (OBJECTS[1] + 1 - min_count)).long()
    present = slots < count[:, None]
    attributes = (SIZES, COLORS, MATERIALS, SHAPES)
    size, color, material, shape = (sampler.choice(len(names), len(slots)) for names in attributes)
    changed = (sampler.uniform(1)[:, 0] * count).long()
    is_changed = slots == changed[:, None]

    color_step = 1 + sampler.choice(len(COLORS) - 1, 1)[:, 0]
    other_color = (color[rows, changed] + color_step) % len(COLORS)
    other_material = 1 - material[rows, changed]
    new_value = torch.where(change == COLOR, other_color, torch.where(change == MATERIAL, other_material, -1))
    after_color = torch.where(is_changed & (change == COLOR)[:, None], other_color[:, None], color)
    after_material = torch.where(is_changed & (change == MATERIAL)[:, None], other_material[:, None], material)
    good = _distinct(size, color, material, shape, present)
    good &= _distinct(size, after_color, after_material, shape, present)

    eye, target, light, light_centers, intensity = _sample_views(sampler, jitter)
    radius = torch.tensor(RADII)[size]
    position, moved_to, placed = _sample_positions(sampler, radius, present, changed, change == MOVE)
    yaw = sampler.uniform(len(slots)) * (math.pi / 2)
    after_position = torch.where((is_changed & (change == MOVE)[:, None])[..., None], moved_to[:, None], position)

    def make_scenes(k: int, valid: Tensor, color: Tensor, material: Tensor, position: Tensor) -> Scenes:
        view = [values[:, k] for values in (eye, target, light, light_centers, intensity)]
        return Scenes(size, color, material, shape, valid, position, yaw, *view)

    before_valid = present & ~(is_changed & (change == ADD)[:, None])
    after_valid = present & ~(is_changed & (change == DROP)[:, None])
    triples = Triples(
        indices,
        make_scenes(0, before_valid, color, material, position),
        make_scenes(1, after_valid, after_color, after_material, after_position),
        make_scenes(2, before_valid, color, material, position),
        change,
        changed,
        new_value,
    )
    return triples, good & placed & _all_visible(triples) & _clear_move(triples)


def _sample_views(sampler: _Sampler, jitter: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sample camera and light of three images: a default for each triple, and a random offset for each image."""
    home = sampler.signed(8)[:, None]  # (A, 1, 8) the default
    step = jitter * sampler.signed(3 * 14).view(-1, 3, 14)  # (A, 3, 14) the offset
    turn = 0.09 * step[..., 0]
    rise = 0.56 + 0.05 * home[..., 0] + 0.045 * step[..., 1]
    away = 11.0 * (1 + 0.03 * home[..., 1]) * (1 + 0.05 * step[..., 2])
    zero = torch.zeros_like(turn)
    target = torch.stack([0.22 * step[..., 3], 0.22 * step[..., 4], zero + 0.3], -1)
    level = away * rise.cos()
    eye = target + torch.stack([level * turn.sin(), -level * turn.cos(), away * rise.sin()], -1)
    # The key light comes from the left and from behind the camera, as in CLEVR.
    bearing = 2.3 + 0.35 * home[..., 2] + 0.2 * step[..., 5]
    height = 0.92 + 0.08 * home[..., 3] + 0.06 * step[..., 6]
    light = torch.stack([height.cos() * bearing.cos(), -height.cos() * bearing.sin(), height.sin()], -1)
    # x and y of the warm and of the cool light: mean, and how far it varies between triples.
    means, ranges = torch.tensor([1.2, -2.6, -2.8, 0.8]), torch.tensor([0.8, 0.6, 0.8, 0.8])
    light_centers = means + ranges * home[..., 4:8] + 0.6 * step[..., 7:11]
    intensity = 1 + 0.07 * step[..., 11:13]
    return eye, target, light, light_centers.unflatten(-1, (2, 2)), intensity


def _sample_positions(
    sampler: _Sampler, radius: Tensor, present: Tensor, changed: Tensor, moves: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample (A, N, 2) positions; return them, (A, 2) the changed object's second one, and (A,) whether all were found."""
    rows, slot_count = torch.arange(len(radius)), radius.shape[1]
    position = torch.zeros(len(radius), slot_count, 2)
    placed = torch.ones(len(radius), dtype=torch.bool)
    moved_to = torch.zeros(len(radius), 2)
    for slot in range(slot_count + 1):
        last = slot == slot_count  # the second position of a moved object is sampled after all others
        tries = sampler.uniform(2 * _TRIES).view(-1, _TRIES, 2)
        y = -2.6 + 5.4 * tries[..., 1]
        x = (2 * tries[..., 0] - 1) * (2.55 + 0.25 * y)  # the visible ground is wider at a greater distance
        spots = torch.stack([x, y], -1)
        own_radius = radius[rows, changed] if last else radius[:, slot]
        gap = spots[:, :, None] - position[:, None]
        distance = (gap[..., 0] * gap[..., 0] + gap[..., 1] * gap[..., 1]).sqrt()  # (A, tries, N)
        min_distance = radius + own_radius[:, None] + MIN_GAP
        if last:  # it must also keep a distance from its first position
            is_changed = torch.arange(slot_count) == changed[:, None]
            min_distance = torch.where(is_changed, min_distance.clamp(min=1.5), min_distance)
        ignored = ~present if last else torch.arange(slot_count)[None] >= slot
        free = ((distance > min_distance[:, None]) | ignored[:, None]).all(2)
        pick = spots[rows, free.to(torch.uint8).argmax(1)]
        if last:
            moved_to, placed = pick, placed & (free.any(1) | ~moves)
        else:
            position[:, slot] = pick
            placed &= free.any(1) | ~present[:, slot]
    return position, moved_to, placed


def _all_visible(triples: Triples) -> Tensor:
    """Return (A,) whether all objects are inside the frame and visible enough, in all three images."""
    scenes = triples.scenes()
    boxes = geometry.view_boxes(scenes)
    x, y = (HALF_VIEW[axis] * (1 - 2 / PICTURE[axis]) for axis in range(2))
    left, bottom, right, top = boxes.unbind(-1)
    inside = (left > -x) & (bottom > -y) & (right < x) & (top < y)
    *_, depth = geometry.to_camera(scenes.centers, scenes)
    hides = (depth[:, None] < depth[:, :, None]) & scenes.valid[:, None]  # [b, i, j]: object j is in front of object i
    area = geometry.box_area(boxes) * _MIN_FILL
    visible = area - (geometry.overlap(boxes[:, :, None], boxes[:, None]) * hides).sum(-1)
    pixels = visible * (PICTURE[0] * PICTURE[1] / (4 * HALF_VIEW[0] * HALF_VIEW[1]))
    partly_visible = (visible > 0.3 * area) & (pixels > 12)
    well_visible = (visible > 0.55 * area) & (pixels > MIN_PIXELS)
    is_changed = torch.arange(boxes.shape[1]) == triples.changed.repeat(3)[:, None]
    shown = (inside & torch.where(is_changed, well_visible, partly_visible)) | ~scenes.valid
    return shown.all(1).view(3, -1).all(0)


def _clear_move(triples: Triples) -> Tensor:
    """Return (A,) whether a moved object moves visibly, and more than the camera moves any other; True if none moved."""
    before, after = geometry.view_boxes(triples.before), geometry.view_boxes(triples.after)
    before_sum = before[..., :2] + before[..., 2:]
    after_sum = after[..., :2] + after[..., 2:]
    shift = (after_sum - before_sum) / 2  # (A, N, 2) movement of the boxes' centres, in tangents
    still = triples.before.valid & (torch.arange(before.shape[1]) != triples.changed[:, None])
    drift = torch.stack([_mean_over(shift[..., axis], still) for axis in range(2)], -1)
    pixels = PICTURE[0] / (2 * HALF_VIEW[0])
    changed_shift = shift[torch.arange(len(shift)), triples.changed]
    relative_shift = changed_shift - drift
    camera_shift = ((shift * shift).sum(-1) * still).amax(1).sqrt()  # the largest one of an object that did not move
    squares = [(values * values).sum(-1) for values in (changed_shift, relative_shift)]
    moved = torch.minimum(*squares).sqrt()
    return (triples.change != MOVE) | ((moved * pixels > MIN_MOVE) & (moved > 1.5 * camera_shift))


def _distinct(size: Tensor, color: Tensor, material: Tensor, shape: Tensor, present: Tensor) -> Tensor:
    """Return (A,) whether no two present objects have the same four attributes."""
    code = ((size * len(COLORS) + color) * len(MATERIALS) + material) * len(SHAPES) + shape
    both = present[:, :, None] & present[:, None] & ~torch.eye(code.shape[1], dtype=torch.bool)
    return ~((code[:, :, None] == code[:, None]) & both).flatten(1).any(1)


def _mean_over(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum(1) / mask.sum(1)
