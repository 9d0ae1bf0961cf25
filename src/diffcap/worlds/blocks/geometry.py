"""The scenes of `blocks`: objects (cubes, spheres and cylinders), camera and light, and the objects' boxes in the image."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

SIZES = ("small", "large")
COLORS = ("gray", "red", "blue", "green", "brown", "purple", "cyan", "yellow")
MATERIALS = ("rubber", "metal")
SHAPES = ("cube", "sphere", "cylinder")
CUBE, SPHERE, CYLINDER = range(3)

FOOTPRINT_RADII = (0.38, 0.72)  # of the circles around small and large objects on the ground, about as in CLEVR
VIEW_TANGENTS = (0.335, 0.25125)  # tangents of half the horizontal and half the vertical angle of view of a 4:3 image
REFERENCE_SIZE = (128, 96)  # width and height of the image in which visibility is measured
TensorTriple = tuple[Tensor, Tensor, Tensor]


class TensorFields:
    """Base of dataclasses whose fields are tensors or `TensorFields`. All tensors have the same first dimension."""

    def __getitem__(self, rows: Tensor | slice | list[int]) -> Self:
        return type(self)(*(field_value[rows] for field_value in vars(self).values()))

    @classmethod
    def cat(cls, batches: list[Self]) -> Self:
        """Join along the first dimension."""
        values_by_field: Any = zip(*(vars(batch).values() for batch in batches))
        joined = [
            type(values[0]).cat(values) if isinstance(values[0], TensorFields) else torch.cat(values)
            for values in values_by_field
        ]
        return cls(*joined)


@dataclass
class Scenes(TensorFields):
    """B scenes, each with up to N objects on the ground z = 0, a camera and light. A slot is one of the N places for an object."""

    size: Tensor  # (B, N) int64, index into `SIZES`
    color: Tensor  # (B, N) int64, index into `COLORS`
    material: Tensor  # (B, N) int64, index into `MATERIALS`
    shape: Tensor  # (B, N) int64, index into `SHAPES`
    valid: Tensor  # (B, N) bool, False for an empty slot (its other values have no meaning)
    position: Tensor  # (B, N, 2) centre of the footprint; x to the right, y away from the mean camera position
    yaw: Tensor  # (B, N) rotation of cubes around the vertical axis in radians
    eye: Tensor  # (B, 3) position of the camera
    target: Tensor  # (B, 3) point at which the camera is directed
    light: Tensor  # (B, 3) unit vector to the key light, which is warm and casts the shadows
    light_centers: Tensor  # (B, 2, 2) centres of the warm and the cool light on the ground
    intensity: Tensor  # (B, 2) brightness of the warm and the cool light, about 1

    def __len__(self) -> int:
        return len(self.valid)

    @property
    def radius(self) -> Tensor:
        """(B, N) radius of the footprint's circumscribed circle: a sphere's radius, half the diagonal of a cube."""
        return torch.tensor(FOOTPRINT_RADII)[self.size]

    @property
    def half_height(self) -> Tensor:
        """(B, N) half of each object's height, for a cube also half of its side."""
        return torch.where(self.shape == CUBE, self.radius * 0.5**0.5, self.radius)

    @property
    def object_centers(self) -> Tensor:
        """(B, N, 3) centres of the objects."""
        return torch.cat([self.position, self.half_height[..., None]], -1)


def camera_axes(scenes: Scenes) -> TensorTriple:
    """Return the unit vectors forward, right and up of each camera, (B, 3) each; right is horizontal."""
    to_target = scenes.target - scenes.eye
    x, y, z = to_target.unbind(-1)
    flat_length = (x * x + y * y).sqrt()
    length = (x * x + y * y + z * z).sqrt()
    forward = to_target / length[:, None]
    right = torch.stack([y / flat_length, -x / flat_length, torch.zeros_like(x)], -1)
    up = torch.stack([-x * z / (flat_length * length), -y * z / (flat_length * length), flat_length / length], -1)
    return forward, right, up


def view_tangents(image_size: tuple[int, int]) -> tuple[float, float]:
    """Return `VIEW_TANGENTS` for an image of (width, height); an image that is not 4:3 shows more on one axis."""
    aspect = image_size[0] / image_size[1]
    horizontal, vertical = VIEW_TANGENTS
    return (vertical * aspect, vertical) if aspect >= horizontal / vertical else (horizontal, horizontal / aspect)


def to_camera(points: Tensor, scenes: Scenes) -> TensorTriple:
    """Convert points (B, ..., 3) to coordinates right, up and forward of their scene's camera, (B, ...) each."""
    broadcast_shape = (len(points), *[1] * (points.ndim - 2), 3)
    x, y, z = (points - scenes.eye.view(broadcast_shape)).unbind(-1)
    forward, right, up = (axis.view(broadcast_shape).unbind(-1) for axis in camera_axes(scenes))
    x, y, z = (x * axis[0] + y * axis[1] + z * axis[2] for axis in (right, up, forward))
    return x, y, z


def view_boxes(scenes: Scenes) -> Tensor:
    """Return the bounding boxes of whole objects, including parts that other objects hide, (B, N, 4): left, bottom, right, top.

    Values are tangents of angles from the middle of the view, positive to the right and up. Cylinders' boxes are a few per cent too wide.
    """
    radius, half_height = scenes.radius, scenes.half_height
    # The corners of a cuboid that contains the object: the cube itself, or for a cylinder a cuboid that faces the camera.
    from_eye = scenes.position - scenes.eye[:, None, :2]
    distance = (from_eye[..., 0] * from_eye[..., 0] + from_eye[..., 1] * from_eye[..., 1]).sqrt()
    is_cube = scenes.shape == CUBE
    cosine = torch.where(is_cube, scenes.yaw.cos(), from_eye[..., 0] / distance)
    sine = torch.where(is_cube, scenes.yaw.sin(), from_eye[..., 1] / distance)
    half_side = torch.where(is_cube, half_height, radius)
    corners = [[x, y, z] for x in (-1.0, 1.0) for y in (-1.0, 1.0) for z in (0.0, 2.0)]  # in units of half a side
    unit_x, unit_y, unit_z = torch.tensor(corners).unbind(1)
    cosine, sine = cosine[..., None], sine[..., None]
    local_x, local_y = half_side[..., None] * unit_x, half_side[..., None] * unit_y  # (B, N, 8)
    corner_x = scenes.position[..., 0, None] + local_x * cosine - local_y * sine
    corner_y = scenes.position[..., 1, None] + local_x * sine + local_y * cosine
    x, y, z = to_camera(torch.stack([corner_x, corner_y, half_height[..., None] * unit_z], -1), scenes)
    tangents = torch.stack([x / z, y / z], -1)
    boxes = torch.cat([tangents.amin(-2), tangents.amax(-2)], -1)
    # A sphere's box is bounded by the lines through the camera that touch the sphere, on each axis of the image.
    x, y, z = to_camera(scenes.object_centers, scenes)
    radius_squared = radius * radius
    middle = torch.stack([x * z, y * z], -1)
    extent = torch.stack([radius * (axis * axis + z * z - radius_squared).sqrt() for axis in (x, y)], -1)
    sphere_boxes = torch.cat([middle - extent, middle + extent], -1) / (z * z - radius_squared)[..., None]
    return torch.where((scenes.shape == SPHERE)[..., None], sphere_boxes, boxes)


def box_iou(first: Tensor, second: Tensor) -> Tensor:
    """Return the elementwise intersection over union of boxes (..., 4)."""
    intersection = intersection_area(first, second)
    return intersection / (box_area(first) + box_area(second) - intersection)


def intersection_area(first: Tensor, second: Tensor) -> Tensor:
    """Return the area of the intersection of boxes (..., 4), elementwise."""
    lower = torch.maximum(first[..., :2], second[..., :2])
    upper = torch.minimum(first[..., 2:], second[..., 2:])
    sides = (upper - lower).clamp(0)
    return sides[..., 0] * sides[..., 1]


def box_area(boxes: Tensor) -> Tensor:
    """Return the area of boxes (..., 4)."""
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])
