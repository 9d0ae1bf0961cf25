"""Random scenes of `blocks`: objects, the change, and the variation of camera and light.

Scenes are sampled in triples: before a change, after the change, and a distractor (the scene before, with another camera and light).
A triple is sampled until it is valid; each sample is an attempt. Every random number is a hash of (seed, index of the
triple, attempt, position in the sequence). So triple k of a seed is always the same.

Letters in shapes: T triples, A attempts, N slots (places for the objects of a scene).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffcap.utils.errors import DiffcapError
from diffcap.worlds.blocks import geometry
from diffcap.worlds.blocks.geometry import COLORS, FOOTPRINT_RADII, MATERIALS, REFERENCE_SIZE, SHAPES, SIZES, Scenes

CHANGES = ("color", "material", "add", "drop", "move")
COLOR, MATERIAL, ADD, DROP, MOVE = range(5)

OBJECT_COUNTS = (3, 6)  # minimum and maximum number of objects in an image
MIN_GAP = 0.25  # distance between the circumscribed circles of two footprints
MIN_PIXELS = 34.0  # minimum of visible pixels of a changed object in an image of `REFERENCE_SIZE`, estimated from boxes
MIN_MOVE = 14.0  # pixels of `REFERENCE_SIZE` by which an object at least moves, also relative to the other objects
_MIN_FILL = 0.72  # an object covers at least this fraction of its box
_ATTEMPTS_PER_ROUND = 4  # attempts that are sampled in one batch
_POSITION_TRIES = 12  # positions that are sampled for one object


@dataclass
class Triples(geometry.TensorFields):
    """T triples of scenes. Slot n has the same object in all three scenes of a triple."""

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
        """Measure how similar the viewpoints are: (T,) for the pairs (before, after), and (T,) for the pairs (before, distractor).

        The measure is the intersection over union of an object's boxes in both images, as the mean over the objects that are in both
        images and did not move. It is 1 for the same camera. Boxes contain whole objects, also parts that another object hides.
        """
        before, after, distractor = map(geometry.view_boxes, (self.before, self.after, self.distractor))
        is_unmoved = self.before.valid & self.after.valid
        is_unmoved[(self.change == MOVE).nonzero().flatten(), self.changed[self.change == MOVE]] = False
        change_iou = _masked_mean(geometry.box_iou(before, after), is_unmoved)
        return change_iou, _masked_mean(geometry.box_iou(before, distractor), self.before.valid)


def _hash(values: Tensor) -> Tensor:
    """Hash int64 values with the last steps of SplitMix64 (Steele, Lea and Flood 2014); products are modulo 2 ** 64."""
    for num_bits, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        values = values ^ ((values >> num_bits) & (2 ** (64 - num_bits) - 1))
        values = values * (factor if factor < 2**63 else factor - 2**64)
    return values


class _Sampler:
    """Samples random numbers for A attempts: hashes of an attempt's key (from seed, triple and attempt) and a position in the sequence."""

    def __init__(self, key: Tensor) -> None:
        self.key = key
        self.num_sampled = 0

    def uniform(self, num_values: int) -> Tensor:
        """Sample (A, num_values) float32 in [0, 1)."""
        positions = torch.arange(self.num_sampled + 1, self.num_sampled + num_values + 1)
        self.num_sampled += num_values
        bits = _hash(self.key[:, None] + positions * (0x9E3779B97F4A7C15 - 2**64))
        return ((bits >> 40) & (2**24 - 1)).float() * 2.0**-24

    def choice(self, num_options: int, num_values: int) -> Tensor:
        """Sample (A, num_values) int64 in [0, num_options)."""
        return (self.uniform(num_values) * num_options).long()


def sample_triples(indices: Sequence[int] | Tensor, seed: int = 0, jitter: float = 1.0) -> Triples:
    """Sample triples by their indices. Triple k has the change `CHANGES[k % 5]`.

    In a valid triple, every object is at least partly visible in each image, and the changed object is well visible. No two objects of a
    scene have the same four attributes. A moved object moves more in the image than the others.

    Args:
        indices: indices of the triples, each at least 0.
        jitter: strength of the variation of camera and light within a triple; 0: none, 1: about that of CLEVR-Change.
    """
    indices = torch.as_tensor(indices, dtype=torch.int64)
    seed_hash = _hash(torch.tensor((seed + 2**63) % 2**64 - 2**63))  # int64 of any seed
    pending_rows = torch.arange(len(indices))
    accepted: list[tuple[Tensor, Triples]] = []
    for round_number in range(100):  # batches of attempts, after which an error is raised
        if not len(pending_rows):
            break
        attempts = torch.arange(round_number * _ATTEMPTS_PER_ROUND, (round_number + 1) * _ATTEMPTS_PER_ROUND)
        candidate_indices = indices[pending_rows].repeat_interleave(_ATTEMPTS_PER_ROUND)
        keys = _hash(_hash(candidate_indices + seed_hash) + attempts.repeat(len(pending_rows)))
        candidates, is_valid = _sample_candidates(candidate_indices, keys, jitter)
        is_valid = is_valid.view(-1, _ATTEMPTS_PER_ROUND)
        has_valid = is_valid.any(1)
        first_valid = is_valid.to(torch.uint8).argmax(1) + torch.arange(len(pending_rows)) * _ATTEMPTS_PER_ROUND
        accepted.append((pending_rows[has_valid], candidates[first_valid[has_valid]]))
        pending_rows = pending_rows[~has_valid]
    if len(pending_rows):
        index = int(indices[pending_rows[0]])
        raise DiffcapError(
            f"blocks: no arrangement found for triple {index} with jitter {jitter:g}; use a lower jitter."
        )
    row_order = torch.cat([rows for rows, _ in accepted]).argsort()
    return Triples.cat([triples for _, triples in accepted])[row_order]


def _sample_candidates(indices: Tensor, key: Tensor, jitter: float) -> tuple[Triples, Tensor]:
    """Sample one triple for each of A keys; return the triples, and (A,) bool, True for a valid triple."""
    sampler = _Sampler(key)
    row_numbers, slot_numbers = torch.arange(len(key)), torch.arange(OBJECT_COUNTS[1])
    change = indices % len(CHANGES)
    # For "add" and "drop", the image that lacks the changed object must still have the minimum number of objects.
    min_objects = OBJECT_COUNTS[0] + ((change == ADD) | (change == DROP)).long()
    num_objects = min_objects + (sampler.uniform(1)[:, 0] * (OBJECT_COUNTS[1] + 1 - min_objects)).long()
    is_present = slot_numbers < num_objects[:, None]
    attributes = (SIZES, COLORS, MATERIALS, SHAPES)
    size, color, material, shape = (sampler.choice(len(names), len(slot_numbers)) for names in attributes)
    changed = (sampler.uniform(1)[:, 0] * num_objects).long()
    # For each change: (A, N) bool, True for the changed object of an attempt with this change.
    has_change = [(slot_numbers == changed[:, None]) & (change == kind)[:, None] for kind in range(len(CHANGES))]
    other_color = (color + 1 + sampler.choice(len(COLORS) - 1, 1)) % len(COLORS)
    after_color = torch.where(has_change[COLOR], other_color, color)
    after_material = torch.where(has_change[MATERIAL], 1 - material, material)
    new_material = torch.where(change == MATERIAL, after_material[row_numbers, changed], -1)
    new_value = torch.where(change == COLOR, after_color[row_numbers, changed], new_material)
    is_valid = _has_distinct_objects(size, color, material, shape, is_present)
    is_valid &= _has_distinct_objects(size, after_color, after_material, shape, is_present)
    eye, target, light, light_centers, intensity = _sample_views(sampler, jitter)
    radius = torch.tensor(FOOTPRINT_RADII)[size]
    position, second_position, has_room = _sample_positions(sampler, radius, is_present, changed, change == MOVE)
    yaw = sampler.uniform(len(slot_numbers)) * (math.pi / 2)
    after_position = torch.where(has_change[MOVE][..., None], second_position[:, None], position)

    def make_scenes(image_index: int, valid: Tensor, color: Tensor, material: Tensor, position: Tensor) -> Scenes:
        view = [values[:, image_index] for values in (eye, target, light, light_centers, intensity)]
        return Scenes(size, color, material, shape, valid, position, yaw, *view)

    before_valid = is_present & ~has_change[ADD]
    after_valid = is_present & ~has_change[DROP]
    before = make_scenes(0, before_valid, color, material, position)
    after = make_scenes(1, after_valid, after_color, after_material, after_position)
    distractor = make_scenes(2, before_valid, color, material, position)
    triples = Triples(indices, before, after, distractor, change, changed, new_value)
    return triples, is_valid & has_room & _shows_all_objects(triples) & _has_clear_move(triples)


def _sample_views(sampler: _Sampler, jitter: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sample `eye`, `target`, `light`, `light_centers` and `intensity` of `Scenes` for the three images of each attempt, (A, 3, ...)."""
    default = (2 * sampler.uniform(8) - 1)[:, None]  # (A, 1, 8) in [-1, 1), the same in all images
    variation = jitter * (2 * sampler.uniform(3 * 14) - 1).view(-1, 3, 14)  # (A, 3, 14)
    azimuth = 0.09 * variation[..., 0]
    elevation = 0.56 + 0.05 * default[..., 0] + 0.045 * variation[..., 1]
    distance = 11.0 * (1 + 0.03 * default[..., 1]) * (1 + 0.05 * variation[..., 2])
    zero = torch.zeros_like(azimuth)
    target = torch.stack([0.22 * variation[..., 3], 0.22 * variation[..., 4], zero + 0.3], -1)
    ground_distance = distance * elevation.cos()
    height = distance * elevation.sin()
    eye = target + torch.stack([ground_distance * azimuth.sin(), -ground_distance * azimuth.cos(), height], -1)
    # The key light comes from the left and from behind the camera, as in CLEVR.
    light_azimuth = 2.3 + 0.35 * default[..., 2] + 0.2 * variation[..., 5]
    light_elevation = 0.92 + 0.08 * default[..., 3] + 0.06 * variation[..., 6]
    light_x, light_y = light_elevation.cos() * light_azimuth.cos(), -light_elevation.cos() * light_azimuth.sin()
    light = torch.stack([light_x, light_y, light_elevation.sin()], -1)
    # x and y of the centre of the warm light, then of the cool light.
    mean_centers, center_ranges = torch.tensor([1.2, -2.6, -2.8, 0.8]), torch.tensor([0.8, 0.6, 0.8, 0.8])
    light_centers = mean_centers + center_ranges * default[..., 4:8] + 0.6 * variation[..., 7:11]
    intensity = 1 + 0.07 * variation[..., 11:13]
    return eye, target, light, light_centers.unflatten(-1, (2, 2)), intensity


def _sample_positions(
    sampler: _Sampler, radius: Tensor, is_present: Tensor, changed: Tensor, is_move: Tensor
) -> geometry.TensorTriple:
    """Return positions (A, N, 2), the second position (A, 2) of an object that moves, and (A,) bool, True if all objects have room."""
    row_numbers, num_slots = torch.arange(len(radius)), radius.shape[1]
    # The second position of an object that moves is sampled last, as if it were another object.
    all_radii = torch.cat([radius, radius[row_numbers, changed][:, None]], 1)  # (A, N + 1)
    is_needed = torch.cat([is_present, is_move[:, None]], 1)
    positions = torch.zeros(len(radius), num_slots + 1, 2)
    has_room = torch.ones(len(radius), dtype=torch.bool)
    for slot in range(num_slots + 1):
        samples = sampler.uniform(2 * _POSITION_TRIES).view(-1, _POSITION_TRIES, 2)
        y = -2.6 + 5.4 * samples[..., 1]
        x = (2 * samples[..., 0] - 1) * (2.55 + 0.25 * y)  # the visible ground is wider at a greater distance
        tried = torch.stack([x, y], -1)
        x, y = (tried[:, :, None] - positions[:, None, :slot]).unbind(-1)
        distance = (x * x + y * y).sqrt()  # (A, tries, slot)
        min_distance = radius[:, :slot] + all_radii[:, slot, None] + MIN_GAP
        if slot == num_slots:  # the second position must also be away from the first one
            is_changed = torch.arange(num_slots) == changed[:, None]
            min_distance = torch.where(is_changed, min_distance.clamp(1.5), min_distance)
        is_free = ((distance > min_distance[:, None]) | ~is_present[:, None, :slot]).all(2)
        positions[:, slot] = tried[row_numbers, is_free.to(torch.uint8).argmax(1)]
        has_room &= is_free.any(1) | ~is_needed[:, slot]
    return positions[:, :-1], positions[:, -1], has_room


def _shows_all_objects(triples: Triples) -> Tensor:
    """Return (A,) bool, True if all objects are inside the frame and visible enough, in all three images."""
    scenes = triples.scenes()
    boxes = geometry.view_boxes(scenes)
    max_x, max_y = (geometry.VIEW_TANGENTS[axis] * (1 - 2 / REFERENCE_SIZE[axis]) for axis in range(2))
    left, bottom, right, top = boxes.unbind(-1)
    is_inside = (left > -max_x) & (bottom > -max_y) & (right < max_x) & (top < max_y)
    *_, depth = geometry.to_camera(scenes.object_centers, scenes)
    # (B, N, N): [b, i, j] is True if object j is in front of object i.
    is_in_front = (depth[:, None] < depth[:, :, None]) & scenes.valid[:, None]
    object_area = geometry.box_area(boxes) * _MIN_FILL
    visible_area = object_area - (geometry.intersection_area(boxes[:, :, None], boxes[:, None]) * is_in_front).sum(-1)
    pixels = visible_area * (math.prod(REFERENCE_SIZE) / (4 * geometry.VIEW_TANGENTS[0] * geometry.VIEW_TANGENTS[1]))
    is_partly_visible = (visible_area > 0.3 * object_area) & (pixels > 12)
    is_well_visible = (visible_area > 0.55 * object_area) & (pixels > MIN_PIXELS)
    is_changed = torch.arange(boxes.shape[1]) == triples.changed.repeat(3)[:, None]
    is_shown = (is_inside & torch.where(is_changed, is_well_visible, is_partly_visible)) | ~scenes.valid
    return is_shown.all(1).view(3, -1).all(0)


def _has_clear_move(triples: Triples) -> Tensor:
    """Return (A,) bool, True if the moved object moves visibly and more than the others do, or if there is no moved object."""
    before, after = (
        boxes[..., :2] + boxes[..., 2:] for boxes in map(geometry.view_boxes, (triples.before, triples.after))
    )
    shift = (after - before) / 2  # (A, N, 2) movement of the boxes' centres, in tangents
    is_unmoved = triples.before.valid & (torch.arange(shift.shape[1]) != triples.changed[:, None])
    mean_shift = torch.stack([_masked_mean(shift[..., axis], is_unmoved) for axis in range(2)], -1)
    pixels_per_unit = REFERENCE_SIZE[0] / (2 * geometry.VIEW_TANGENTS[0])
    changed_shift = shift[torch.arange(len(shift)), triples.changed]
    relative_shift = changed_shift - mean_shift
    camera_shift = ((shift * shift).sum(-1) * is_unmoved).amax(1).sqrt()  # the largest shift of the other objects
    squared_lengths = [(values * values).sum(-1) for values in (changed_shift, relative_shift)]
    move_length = torch.minimum(*squared_lengths).sqrt()
    return (triples.change != MOVE) | ((move_length * pixels_per_unit > MIN_MOVE) & (move_length > 1.5 * camera_shift))


def _has_distinct_objects(size: Tensor, color: Tensor, material: Tensor, shape: Tensor, is_present: Tensor) -> Tensor:
    """Return (A,) bool, True if no two present objects have the same four attributes."""
    codes = ((size * len(COLORS) + color) * len(MATERIALS) + material) * len(SHAPES) + shape
    are_both_present = is_present[:, :, None] & is_present[:, None]
    are_equal = (codes[:, :, None] == codes[:, None]) & are_both_present
    return ~are_equal.triu(1).flatten(1).any(1)


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum(1) / mask.sum(1)
