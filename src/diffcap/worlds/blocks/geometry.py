"""The scenes of `blocks`: objects, camera and light, and the projection of each solid into the image."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

SIZES = ("small", "large")
COLORS = ("gray", "red", "blue", "green", "brown", "purple", "cyan", "yellow")
MATERIALS = ("rubber", "metal")
SHAPES = ("cube", "sphere", "cylinder")
CUBE, SPHERE, CYLINDER = range(3)

RADII = (0.38, 0.72)  # radii of the circumscribed circle of an object's footprint; about CLEVR's two sizes
HALF_VIEW = (0.335, 0.25125)  # tangents of half the field of view of the 4:3 frame that every image contains
PICTURE = (128, 96)  # image size in which visibility is measured


class Columns:
    """A dataclass of tensors and of other such dataclasses, all with the same first dimension."""

    def __getitem__(self, rows: Tensor | slice | list[int]) -> Self:
        return type(self)(*(column[rows] for column in vars(self).values()))

    @classmethod
    def cat(cls, parts: list[Self]) -> Self:
        """Join along the first dimension."""
        columns: Any = zip(*(vars(part).values() for part in parts))
        joined = [
            type(column[0]).cat(column) if isinstance(column[0], Columns) else torch.cat(column) for column in columns
        ]
        return cls(*joined)


@dataclass
class Scenes(Columns):
    """B scenes, each with up to N solids on the ground z = 0, a camera and light; all numbers are float32."""

    size: Tensor  # (B, N) int64, index into `SIZES`
    color: Tensor  # (B, N) int64, index into `COLORS`
    material: Tensor  # (B, N) int64, index into `MATERIALS`
    shape: Tensor  # (B, N) int64, index into `SHAPES`
    valid: Tensor  # (B, N) bool, False for an empty slot (its other values have no meaning)
    position: Tensor  # (B, N, 2) centre of the footprint; x to the right, y away from the default camera
    yaw: Tensor  # (B, N) rotation of cubes in radians
    eye: Tensor  # (B, 3) position of the camera
    target: Tensor  # (B, 3) point at which the camera is directed
    light: Tensor  # (B, 3) unit vector to the key light
    light_centers: Tensor  # (B, 2, 2) centres of the warm and the cool light on the ground
    intensity: Tensor  # (B, 2) brightness of the warm and the cool light, about 1

    def __len__(self) -> int:
        return len(self.valid)

    @property
    def radius(self) -> Tensor:
        """(B, N) radius of the footprint's circumscribed circle: a sphere's radius, half the diagonal of a cube."""
        return torch.tensor(RADII, device=self.size.device)[self.size]

    @property
    def half(self) -> Tensor:
        """(B, N) half the height, for a cube also half the side."""
        return torch.where(self.shape == CUBE, self.radius * 0.5**0.5, self.radius)

    @property
    def centers(self) -> Tensor:
        """(B, N, 3) centres of the solids."""
        return torch.cat([self.position, self.half[..., None]], -1)


def camera_axes(scenes: Scenes) -> tuple[Tensor, Tensor, Tensor]:
    """Return the unit vectors forward, right and up of each camera, (B, 3) each; right is horizontal."""
    x, y, z = (scenes.target - scenes.eye).unbind(-1)
    level = (x * x + y * y).sqrt()
    length = (x * x + y * y + z * z).sqrt()
    forward = torch.stack([x / length, y / length, z / length], -1)
    right = torch.stack([y / level, -x / level, torch.zeros_like(x)], -1)
    up = torch.stack([-x * z / (level * length), -y * z / (level * length), level / length], -1)
    return forward, right, up


def half_view(size: tuple[int, int]) -> tuple[float, float]:
    """Return tangents of half the field of view of an image of (width, height); it contains the 4:3 frame `HALF_VIEW`."""
    aspect = size[0] / size[1]
    x, y = HALF_VIEW
    return (y * aspect, y) if aspect >= x / y else (x, x / aspect)


def to_camera(points: Tensor, scenes: Scenes) -> tuple[Tensor, Tensor, Tensor]:
    """Convert points (B, ..., 3) to coordinates right, up and forward of their scene's camera, (B, ...) each."""
    shape = (len(points), *[1] * (points.ndim - 2), 3)
    x, y, z = (points - scenes.eye.view(shape)).unbind(-1)
    forward, right, up = (axis.view(shape).unbind(-1) for axis in camera_axes(scenes))
    return (
        x * right[0] + y * right[1] + z * right[2],
        x * up[0] + y * up[1] + z * up[2],
        x * forward[0] + y * forward[1] + z * forward[2],
    )


def view_boxes(scenes: Scenes) -> Tensor:
    """Return the bounding box of each solid without occlusion, (B, N, 4): left, bottom, right, top, in tangents (up is positive).

    The boxes are exact for cubes and spheres, and a few per cent too wide for cylinders.
    """
    radius, half = scenes.radius, scenes.half
    # The corners of a cuboid that contains the solid: the cube itself, or for a cylinder a cuboid that faces the camera.
    facing = scenes.position - scenes.eye[:, None, :2]
    away = (facing[..., 0] * facing[..., 0] + facing[..., 1] * facing[..., 1]).sqrt()
    cube = scenes.shape == CUBE
    cosine = torch.where(cube, scenes.yaw.cos(), facing[..., 0] / away)
    sine = torch.where(cube, scenes.yaw.sin(), facing[..., 1] / away)
    reach = torch.where(cube, half, radius)
    signs = [[a, b, c] for a in (-1.0, 1.0) for b in (-1.0, 1.0) for c in (0.0, 2.0)]
    aside, ahead, above = torch.tensor(signs, device=radius.device).unbind(1)
    along, across, cosine, sine = (values[..., None] for values in (reach, reach, cosine, sine))
    along, across = along * aside, across * ahead  # (B, N, 8)
    corner_x = scenes.position[..., 0, None] + along * cosine - across * sine
    corner_y = scenes.position[..., 1, None] + along * sine + across * cosine
    x, y, z = to_camera(torch.stack([corner_x, corner_y, half[..., None] * above], -1), scenes)
    u, v = x / z, y / z
    boxes = torch.stack([u.amin(-1), v.amin(-1), u.amax(-1), v.amax(-1)], -1)
    # The tangent lines to a sphere, in the plane of each axis of the picture.
    x, y, z = to_camera(scenes.centers, scenes)
    square = radius * radius
    middle = torch.stack([x * z, y * z], -1)
    spread = torch.stack([radius * (a * a + z * z - square).sqrt() for a in (x, y)], -1)
    spheres = torch.cat([middle - spread, middle + spread], -1) / (z * z - square)[..., None]
    return torch.where((scenes.shape == SPHERE)[..., None], spheres, boxes)


def box_iou(first: Tensor, second: Tensor) -> Tensor:
    """Return the elementwise intersection over union of boxes (..., 4)."""
    shared = overlap(first, second)
    return shared / (box_area(first) + box_area(second) - shared)


def overlap(first: Tensor, second: Tensor) -> Tensor:
    """Return the area that boxes (..., 4) share."""
    low = torch.maximum(first[..., :2], second[..., :2])
    high = torch.minimum(first[..., 2:], second[..., 2:])
    sides = (high - low).clamp(min=0)
    return sides[..., 0] * sides[..., 1]


def box_area(boxes: Tensor) -> Tensor:
    """Return the area of boxes (..., 4)."""
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])
