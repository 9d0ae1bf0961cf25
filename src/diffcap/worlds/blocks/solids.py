"""Intersections of rays with the three solids, and their soft shadows.

All functions take flat float tensors with one value per ray or point, in the solid's coordinate system: the origin is its
centre (for shadows, the centre of its footprint), z is up, and the sides of a cube are parallel to x and y. Only +, -, *, /
and square roots are used. Their results do not depend on the batch, so an image does not depend on the other images.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diffcap.worlds.blocks.geometry import CUBE, SPHERE

Vector = tuple[Tensor, Tensor, Tensor]


def intersect(shape: int, origin: Vector, ray: Vector, radius: Tensor, half: Tensor) -> Tensor:
    """Return the distance to the solid along each ray, in multiples of the ray's length; infinite if the ray misses it."""
    (x, y, z), (dx, dy, dz) = origin, ray
    if shape == CUBE:
        near, far = _slab(x, dx, half)
        for start, step in ((y, dy), (z, dz)):
            enter, leave = _slab(start, step, half)
            near, far = torch.maximum(near, enter), torch.minimum(far, leave)
        return torch.where(near < far, near, torch.inf)
    a, b, c = dx * dx + dy * dy, x * dx + y * dy, x * x + y * y - radius * radius
    if shape == SPHERE:
        a, b, c = a + dz * dz, b + z * dz, c + z * z
    inside = b * b - a * c
    root = inside.clamp(min=0).sqrt()
    if shape == SPHERE:
        return torch.where(inside > 0, (-b - root) / a, torch.inf)
    enter, leave = _slab(z, dz, half)
    near, far = torch.maximum((-b - root) / a, enter), torch.minimum((root - b) / a, leave)
    return torch.where((inside > 0) & (near < far), near, torch.inf)


def _slab(start: Tensor, step: Tensor, half: Tensor) -> tuple[Tensor, Tensor]:
    inverse = 1 / step
    middle, reach = -start * inverse, half * inverse.abs()
    return middle - reach, middle + reach


def surface(shape: int, point: Vector, radius: Tensor, half: Tensor) -> tuple[Vector, Tensor]:
    """Return the outward normal at points of the surface, and the number of their face (int32; 0: the top, or a sphere)."""
    x, y, z = point
    if shape == SPHERE:
        return (x / radius, y / radius, z / radius), torch.zeros_like(x, dtype=torch.int32)
    tall = _bevel(z.abs(), half)
    if shape == CUBE:
        ax, ay = x.abs(), y.abs()
        top = (z >= ax) & (z >= ay)
        on_x = ~top & (ax > ay)
        normal = (x.sign() * _bevel(ax, half), y.sign() * _bevel(ay, half), z.sign() * tall)
        return _unit(normal), torch.where(top, 0, 2 - on_x.int())
    from_axis = (x * x + y * y).sqrt()
    out = _bevel(from_axis, radius) / from_axis.clamp(min=1e-6)
    return _unit((x * out, y * out, z.sign() * tall)), (z < 0.999 * half).int()


def _bevel(distance: Tensor, end: Tensor) -> Tensor:
    """0 on most of a face, increasing to 1 at its edge, to bend normals so that edges look rounded."""
    return ((distance - end + 0.075) / 0.075).clamp(0, 1)


def _unit(vector: Vector) -> Vector:
    x, y, z = vector
    length = (x * x + y * y + z * z).sqrt().clamp(min=1e-6)
    return x / length, y / length, z / length


def key_visibility(shape: int, point: Vector, light: Vector, radius: Tensor, half: Tensor) -> Tensor:
    """Return the fraction of the key light that a solid does not block, in [0, 1].

    The shadow is computed from the distance between the solid and the line from the point to the centre of the light. Its edge
    is softer if the solid is further away, as for a large light. `light` is the unit vector to it; z is the height above the ground.
    """
    (x, y, z), (lx, ly, lz) = point, light
    if shape == SPHERE:
        z = half - z
        toward = z * lz - x * lx - y * ly
        beside = (x * x + y * y + z * z - toward * toward).clamp(min=0).sqrt() - radius
        return torch.where(toward > 0, _smooth(beside, 0.05 + 0.13 * toward), 1.0)
    # While the line to the light rises by 1, it runs by the horizontal vector (sx, sy).
    sx, sy = lx / lz, ly / lz
    rise = 2 * half - z
    square = sx * sx + sy * sy
    along = torch.minimum(-(x * sx + y * sy) / square, rise).clamp(min=0)
    if shape == CUBE:
        run_x, run_y = sx * rise, sy * rise
        beside = torch.maximum(
            (x + run_x / 2).abs() - (half + run_x.abs() / 2), (y + run_y / 2).abs() - (half + run_y.abs() / 2)
        )
        across = ((x * sy - y * sx).abs() - half * (sx.abs() + sy.abs())) / square.sqrt()
        beside = torch.maximum(beside, across)
    else:
        near_x, near_y = x + along * sx, y + along * sy
        beside = (near_x * near_x + near_y * near_y).sqrt() - radius
    return torch.where(rise > 0, _smooth(beside, 0.05 + 0.16 * along), 1.0)


def _smooth(distance: Tensor, width: Tensor) -> Tensor:
    step = (distance / (2 * width) + 0.5).clamp(0, 1)
    return step * step * (3 - 2 * step)


def sky_occlusion(shape: int, x: Tensor, y: Tensor, radius: Tensor, half: Tensor) -> Tensor:
    """Return the fraction of the sky that a solid hides from a point of the ground, in [0, 1) (ambient occlusion).

    It is 0 at distances greater than `half` from the footprint.
    """
    if shape == SPHERE:  # it touches the ground in a single point
        near = (1 - (x * x + y * y).sqrt() / (radius + half)).clamp(min=0)
        return 0.9 * near * near
    if shape == CUBE:
        out_x, out_y = (x.abs() - half).clamp(min=0), (y.abs() - half).clamp(min=0)
        away = (out_x * out_x + out_y * out_y).sqrt()
    else:
        away = ((x * x + y * y).sqrt() - radius).clamp(min=0)
    near = (1 - away / half).clamp(min=0)
    return 0.65 * near * near * near
