"""Random scenes of `blocks`: objects, the change, and the variation of camera and light.

Every random number is a hash of (seed, triple, attempt, position in the sequence). So triple k of a seed is the same in every
batch, on every worker and in a dataset of any size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffcap.utils.errors import DiffcapError
from diffcap.worlds.blocks import geometry
from diffcap.worlds.blocks.geometry import (
    COLORS,
    HALF_VIEW,
    MATERIALS,
    PICTURE,
    RADII,
    SHAPES,
    SIZES,
    Scenes,
    view_boxes,
)

CHANGES = ("color", "material", "add", "drop", "move")
COLOR, MATERIAL, ADD, DROP, MOVE = range(5)

OBJECTS = (3, 6)  # minimum and maximum number in an image
MIN_GAP = 0.25  # between the circumscribed circles of two footprints
MIN_PIXELS = 34.0  # visible pixels of a changed object in an image of `PICTURE`, a lower bound computed from boxes
MIN_MOVE = 14.0  # pixels of `PICTURE`, absolute and relative to the other objects
_MIN_FILL = 0.72  # the minimum fraction of its box that a solid covers
_ATTEMPTS_PER_ROUND = 4  # attempts that are drawn in one batch
_TRIES = 12  # positions that are drawn for one object
_ROUNDS = 100


@dataclass
class Triples(geometry.Columns):
    """T triples of scenes: before, after (one change) and distractor (only camera and light differ).

    Slot n is the same object in all three scenes.
    """

    indices: Tensor  # (T,) int64, number of each triple; with the seed, it determines the triple
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
        before, after, distractor = (view_boxes(scenes) for scenes in (self.before, self.after, self.distractor))
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


class _Draw:
    """Random numbers, hashed from each row's key and the number of previous draws."""

    def __init__(self, key: Tensor) -> None:
        self.key, self.drawn = key, 0

    def uniform(self, count: int) -> Tensor:
        """(A, count) float32 in [0, 1)."""
        position = torch.arange(self.drawn + 1, self.drawn + count + 1)
        self.drawn += count
        bits = _mix(self.key[:, None] + position * (0x9E3779B97F4A7C15 - 2**64))
        return ((bits >> 40) & (2**24 - 1)).float() * 2.0**-24

    def signed(self, count: int) -> Tensor:
        """(A, count) float32 in [-1, 1)."""
        return 2 * self.uniform(count) - 1

    def choice(self, options: int, count: int) -> Tensor:
        """(A, count) int64 in [0, options)."""
        return (self.uniform(count) * options).long()


def sample_triples(indices: Sequence[int] | Tensor, seed: int = 0, jitter: float = 1.0) -> Triples:
    """Draw triples by their numbers. Triple k has the change `CHANGES[k % 5]`.

    All scenes satisfy these conditions: every object is in the image and partly visible, and the changed one is well visible;
    no two objects of a triple have the same four attributes, before and after the change; a moved object moves more
    in the image than any object moves because of the camera.

    Args:
        indices: numbers of the triples, each at least 0.
        jitter: strength of the variation of camera and light within a triple; 0: none, 1: about that of CLEVR-Change.
    """
    indices = torch.as_tensor(indices, dtype=torch.int64)
    base = _mix(torch.tensor((seed + 2**63) % 2**64 - 2**63))  # any seed as an int64
    pending = torch.arange(len(indices))
    drawn: list[tuple[Tensor, Triples]] = []
    for round_ in range(_ROUNDS):
        if not len(pending):
            break
        attempts = torch.arange(round_ * _ATTEMPTS_PER_ROUND, (round_ + 1) * _ATTEMPTS_PER_ROUND)
        rows = indices[pending].repeat_interleave(_ATTEMPTS_PER_ROUND)
        keys = _mix(_mix(rows + base) + attempts.repeat(len(pending)))
        found, good = _attempt(rows, keys, jitter)
        good = good.view(-1, _ATTEMPTS_PER_ROUND)
        done = good.any(1)
        first = good.to(torch.uint8).argmax(1) + torch.arange(len(pending)) * _ATTEMPTS_PER_ROUND
        drawn.append((pending[done], found[first[done]]))
        pending = pending[~done]
    if len(pending):
        number = int(indices[pending[0]])
        raise DiffcapError(
            f"blocks: no arrangement found for triple {number} with jitter {jitter:g}; use a weaker jitter."
        )
    order = torch.cat([rows for rows, _ in drawn]).argsort()
    return Triples.cat([triples for _, triples in drawn])[order]


def _attempt(indices: Tensor, key: Tensor, jitter: float) -> tuple[Triples, Tensor]:
    """Draw one triple for each of A keys; returns the triples, and (A,) whether each is valid."""
    draw = _Draw(key)
    rows, slots = torch.arange(len(key)), torch.arange(OBJECTS[1])
    change = indices % len(CHANGES)
    # For "add" and "drop", one image has one object more than the other, and the other must have the minimum number.
    least = OBJECTS[0] + ((change == ADD) | (change == DROP)).long()
    count = least + (draw.uniform(1)[:, 0] * (OBJECTS[1] + 1 - least)).long()
    present = slots < count[:, None]
    size, color, material, shape = (draw.choice(len(names), len(slots)) for names in (SIZES, COLORS, MATERIALS, SHAPES))
    changed = (draw.uniform(1)[:, 0] * count).long()
    is_changed = slots == changed[:, None]

    other_color = (color[rows, changed] + 1 + draw.choice(len(COLORS) - 1, 1)[:, 0]) % len(COLORS)
    other_material = 1 - material[rows, changed]
    new_value = torch.where(change == COLOR, other_color, torch.where(change == MATERIAL, other_material, -1))
    after_color = torch.where(is_changed & (change == COLOR)[:, None], other_color[:, None], color)
    after_material = torch.where(is_changed & (change == MATERIAL)[:, None], other_material[:, None], material)
    good = _distinct(size, color, material, shape, present)
    good &= _distinct(size, after_color, after_material, shape, present)

    eye, target, light, light_centers, intensity = _views(draw, jitter)
    radius = torch.tensor(RADII)[size]
    position, moved_to, placed = _places(draw, radius, present, changed, change == MOVE)
    yaw = draw.uniform(len(slots)) * (math.pi / 2)
    after_position = torch.where((is_changed & (change == MOVE)[:, None])[..., None], moved_to[:, None], position)

    def picture(k: int, valid: Tensor, color: Tensor, material: Tensor, position: Tensor) -> Scenes:
        view = (eye[:, k], target[:, k], light[:, k], light_centers[:, k], intensity[:, k])
        return Scenes(size, color, material, shape, valid, position, yaw, *view)

    before_valid = present & ~(is_changed & (change == ADD)[:, None])
    triples = Triples(
        indices,
        picture(0, before_valid, color, material, position),
        picture(1, present & ~(is_changed & (change == DROP)[:, None]), after_color, after_material, after_position),
        picture(2, before_valid, color, material, position),
        change,
        changed,
        new_value,
    )
    return triples, good & placed & _all_visible(triples) & _clear_move(triples)


def _views(draw: _Draw, jitter: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Draw camera and light of three images: a default for each triple, and a random offset for each image."""
    home = draw.signed(8)[:, None]  # (A, 1, 8)
    step = jitter * draw.signed(3 * 14).view(-1, 3, 14)  # (A, 3, 14)
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


def _places(
    draw: _Draw, radius: Tensor, present: Tensor, changed: Tensor, moves: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(A, N, 2) positions that keep their distance, (A, 2) second one of the changed object, and (A,) whether all were found."""
    rows, slots = torch.arange(len(radius)), radius.shape[1]
    position = torch.zeros(len(radius), slots, 2)
    ok = torch.ones(len(radius), dtype=torch.bool)
    moved_to = torch.zeros(len(radius), 2)
    for slot in range(slots + 1):
        last = slot == slots  # the second position of a moved object is drawn after all others
        tries = draw.uniform(2 * _TRIES).view(-1, _TRIES, 2)
        y = -2.6 + 5.4 * tries[..., 1]
        x = (2 * tries[..., 0] - 1) * (2.55 + 0.25 * y)  # the visible ground is wider at a greater distance
        spots = torch.stack([x, y], -1)
        own = radius[rows, changed] if last else radius[:, slot]
        gap = spots[:, :, None] - position[:, None]
        distance = (gap[..., 0] * gap[..., 0] + gap[..., 1] * gap[..., 1]).sqrt()  # (A, tries, N)
        least = radius + own[:, None] + MIN_GAP
        if last:  # it must also keep a distance from its first position
            least = torch.where(torch.arange(slots) == changed[:, None], least.clamp(min=1.5), least)
        ignore = ~present if last else torch.arange(slots)[None] >= slot
        free = ((distance > least[:, None]) | ignore[:, None]).all(2)
        pick = spots[rows, free.to(torch.uint8).argmax(1)]
        if last:
            moved_to, ok = pick, ok & (free.any(1) | ~moves)
        else:
            position[:, slot], ok = pick, ok & (free.any(1) | ~present[:, slot])
    return position, moved_to, ok


def _all_visible(triples: Triples) -> Tensor:
    """Return (A,) whether all objects are inside the frame and visible enough, in all three images."""
    scenes = triples.scenes()
    boxes = view_boxes(scenes)
    x, y = (HALF_VIEW[axis] * (1 - 2 / PICTURE[axis]) for axis in range(2))
    inside = (boxes[..., 0] > -x) & (boxes[..., 1] > -y) & (boxes[..., 2] < x) & (boxes[..., 3] < y)
    *_, depth = geometry.to_camera(scenes.centers, scenes)
    hides = (depth[:, None] < depth[:, :, None]) & scenes.valid[:, None]  # [b, i, j]: object j is in front of object i
    area = geometry.box_area(boxes) * _MIN_FILL
    shows = area - (geometry.overlap(boxes[:, :, None], boxes[:, None]) * hides).sum(-1)
    pixels = shows * (PICTURE[0] * PICTURE[1] / (4 * HALF_VIEW[0] * HALF_VIEW[1]))
    ordinary = (shows > 0.3 * area) & (pixels > 12)
    good = (shows > 0.55 * area) & (pixels > MIN_PIXELS)
    is_changed = torch.arange(boxes.shape[1]) == triples.changed.repeat(3)[:, None]
    fine = (inside & torch.where(is_changed, good, ordinary)) | ~scenes.valid
    return fine.all(1).view(3, -1).all(0)


def _clear_move(triples: Triples) -> Tensor:
    """Return (A,) whether a moved object moves visibly, and more than the camera moves any other; True if none moved."""
    first, second = view_boxes(triples.before), view_boxes(triples.after)
    shift = ((second[..., :2] + second[..., 2:]) - (first[..., :2] + first[..., 2:])) / 2  # (A, N, 2) tangents
    still = triples.before.valid & (torch.arange(first.shape[1]) != triples.changed[:, None])
    drift = torch.stack([_mean_over(shift[..., axis], still) for axis in range(2)], -1)
    pixels = PICTURE[0] / (2 * HALF_VIEW[0])
    own = shift[torch.arange(len(shift)), triples.changed]
    seeming = ((shift * shift).sum(-1) * still).amax(1).sqrt()
    moved = torch.minimum((own * own).sum(-1), ((own - drift) * (own - drift)).sum(-1)).sqrt()
    return (triples.change != MOVE) | ((moved * pixels > MIN_MOVE) & (moved > 1.5 * seeming))


def _distinct(size: Tensor, color: Tensor, material: Tensor, shape: Tensor, present: Tensor) -> Tensor:
    """Return (A,) whether no two present objects have the same four attributes."""
    code = ((size * len(COLORS) + color) * len(MATERIALS) + material) * len(SHAPES) + shape
    both = present[:, :, None] & present[:, None] & ~torch.eye(code.shape[1], dtype=torch.bool)
    return ~((code[:, :, None] == code[:, None]) & both).flatten(1).any(1)


def _mean_over(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum(1) / mask.sum(1)
