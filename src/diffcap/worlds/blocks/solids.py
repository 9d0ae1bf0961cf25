"""Intersections of rays with the three solids, their soft shadows, and the shading of solids and ground.

There are a warm key light, a cool fill light, and a room that metal reflects. Objects are about 1 high; colors are red, green and
blue in [0, 1]. The coefficients were chosen by eye.

The geometric functions take flat float tensors with one value per ray or point, in the solid's coordinate system: the origin is its
centre (for shadows, the centre of its footprint), z is up, and the sides of a cube are parallel to x and y. Only +, -, *, / and square
roots are used, so an image does not depend on the other images of the batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from diffcap.worlds.blocks.geometry import CUBE, SPHERE

Vector = Tensor | Sequence[Tensor]  # x, y and z
# CLEVR's palette, 0 to 255, in the order of `geometry.COLORS`.
PALETTE = (
    (87, 87, 87), (173, 35, 35), (42, 75, 215), (29, 105, 20),
    (129, 74, 25), (129, 38, 192), (41, 208, 208), (255, 238, 51),
)  # fmt: skip
WARM, COOL = (1.0, 0.955, 0.885), (0.925, 0.95, 1.0)  # colors of the key and the fill light
_GROUND = 0.60  # albedo of the ground, the same for red, green and blue


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
    """Return the outward normal at points of the surface, and the index of their face (int32; 0: the top, or a sphere)."""
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
    """Return 0 on most of a face, increasing to 1 at its edge. Normals are bent by it, so that edges look rounded."""
    return ((distance - end + 0.075) / 0.075).clamp(0, 1)


def _unit(vector: Vector) -> Vector:
    x, y, z = vector
    length = (x * x + y * y + z * z).sqrt().clamp(min=1e-6)
    return x / length, y / length, z / length


def key_visibility(shape: int, point: Vector, light: Vector, radius: Tensor, half: Tensor) -> Tensor:
    """Return the fraction of the key light that a solid does not block, in [0, 1].

    It is computed from the distance between the solid and the line from the point to the centre of the light. The shadow's edge is
    softer if the solid is further away, as for a large light. `light` is the unit vector to it; z is the height above the ground.
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
        beside_x = (x + run_x / 2).abs() - (half + run_x.abs() / 2)
        beside_y = (y + run_y / 2).abs() - (half + run_y.abs() / 2)
        beside = torch.maximum(beside_x, beside_y)
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


def shade_ground(
    x: Tensor, y: Tensor, light_centers: Tensor, intensity: Tensor, visibility: Tensor, sky_visibility: Tensor
) -> list[Tensor]:
    """Return red, green and blue, (B, ...) each, of ground points (x, y). Each light decreases with the distance from its centre.

    `visibility` and `sky_visibility`, (B, ...), are the fractions of the key light and of the sky that objects do not block.
    """
    trailing = [1] * (x.ndim - 1)
    lights = []
    for index, (falloff_x, falloff_y) in enumerate(((0.020, 0.030), (0.040, 0.055))):
        dx = (x - light_centers[:, index, 0].view(-1, *trailing)).square_()
        dy = (y - light_centers[:, index, 1].view(-1, *trailing)).square_()
        denominator = dx.mul_(falloff_x).add_(dy.mul_(falloff_y)).add_(1)
        lights.append(denominator.reciprocal_().mul_(intensity[:, index].view(-1, *trailing)))
    key = (0.22 * _GROUND * sky_visibility).add_((0.62 * _GROUND) * visibility).mul_(lights[0])
    fill = lights[1].mul_(0.20 * _GROUND).add_(0.38 * _GROUND).mul_(sky_visibility)
    return [(warm * key).add_(cool * fill) for warm, cool in zip(WARM, COOL)]


def shade_solids(
    normal: Vector,
    view: Vector,
    light: Vector,
    intensity: Tensor,
    color: Vector,
    metal: Tensor,
    visibility: Tensor,
    height: Tensor,
) -> list[Tensor]:
    """Return red, green and blue, (n,) each, of points on solids; highlights can exceed 1.

    Rubber follows the Phong reflection model. Metal is darker, has a narrow highlight, and reflects an imaginary room. Both are brighter at
    the rim, where the surface is seen at a small angle.

    Args:
        normal, view, light: unit vectors, (n,) for each of x, y and z: the surface's normal, to the camera, to the key light.
        intensity: (2, n) brightness of the key and the fill light.
        color: red, green and blue of the paint, (n,) each.
        metal: (n,) True for metal, False for rubber.
        visibility: (n,) fraction of the key light that other solids do not block.
        height: (n,) height above the ground; low points receive less light from the sky.
    """
    nx, ny, nz = normal
    vx, vy, vz = view
    lx, ly, lz = light
    n_dot_l = nx * lx + ny * ly + nz * lz
    n_dot_v = nx * vx + ny * vy + nz * vz
    rx, ry, rz = 2 * n_dot_v * nx - vx, 2 * n_dot_v * ny - vy, 2 * n_dot_v * nz - vz  # reflected view direction
    r_dot_l = (rx * lx + ry * ly + rz * lz).clamp(min=0)
    clamped_height = height.clamp(max=0.5)
    sky = (0.5 + 0.5 * nz) * (0.72 + 0.56 * clamped_height)
    key = n_dot_l.clamp(min=0) * visibility * intensity[0]
    fill = (0.50 * nx - 0.80 * ny + 0.33 * nz).clamp(min=0) * intensity[1]  # from the front, half left
    bounce = (0.5 - 0.5 * nz) * (0.5 + clamped_height)  # light that the ground reflects

    rim = 1 - n_dot_v.clamp(min=0)
    rim = rim * rim * rim
    reflected = (rx, ry, rz)
    windows = _window(reflected, (0.62, -0.60, 0.5)) + 0.7 * _window(reflected, (-0.35, 0.52, 0.78))
    # A bright strip at the horizon, and a floor that is darker near the object, make the surface look like metal.
    strip = (1 - 4.5 * (rz - 0.10).abs()).clamp(min=0)
    floor = (-rz).clamp(min=0)
    left_streak = (1 - 3.5 * (rx + 0.25 * ry + 0.45).abs()).clamp(min=0)
    right_streak = (1 - 5 * (rx - 0.6).abs()).clamp(min=0)
    streaks = left_streak + 0.6 * right_streak
    room = 0.18 + 0.30 * rz.clamp(min=0) + 0.46 * floor * (0.5 + clamped_height)
    room = room + 0.40 * strip + 0.9 * windows + 0.5 * rim + 0.36 * streaks
    r_dot_l_2 = r_dot_l * r_dot_l
    r_dot_l_4 = r_dot_l_2 * r_dot_l_2
    r_dot_l_8 = r_dot_l_4 * r_dot_l_4
    r_dot_l_32 = r_dot_l_8 * r_dot_l_8 * r_dot_l_8 * r_dot_l_8
    wide_highlight = 0.07 * r_dot_l_8 * visibility
    narrow_highlight = (0.9 * r_dot_l_32 * r_dot_l_32 + 0.25 * r_dot_l_8) * (0.25 + 0.75 * visibility)

    channels = []
    for paint, warm, cool in zip(color, WARM, COOL):
        diffuse = warm * 0.66 * key + cool * (0.34 * fill + 0.40 * sky) + 0.20 * bounce
        rubber = paint * diffuse + wide_highlight + 0.02 * rim
        metal_color = (0.9 * paint + 0.09) * (0.30 * diffuse + 0.95 * room)
        metal_color = metal_color + narrow_highlight * warm * (0.35 + 0.65 * paint)
        channels.append(torch.where(metal, metal_color, rubber))
    return channels


def _window(direction: Vector, center: tuple[float, float, float]) -> Tensor:
    """Return the brightness of a round window with a soft edge: 1 in the direction of `center`, 0 outside."""
    length = sum(value * value for value in center) ** 0.5
    cosine = (direction[0] * center[0] + direction[1] * center[1] + direction[2] * center[2]) / length
    step = ((cosine - 0.86) * 12).clamp(0, 1)
    return step * step * (3 - 2 * step)
