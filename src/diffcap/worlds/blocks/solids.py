"""Intersections of rays with the solids (cube, sphere, cylinder), their soft shadows, and the colors of solids and ground.

A warm key light, which casts the shadows, and a cool fill light shine on the scene. Metal reflects an imaginary room. Solids are about
1 high. Colors are red, green and blue in [0, 1]. The coefficients were chosen by eye.

All functions take flat float tensors with one value per ray or point. `intersect`, `surface` and the functions of shadows use the solid's
coordinate system: the origin is its centre (for shadows, the centre of its footprint), z is up, and the sides of a cube are parallel to x
and y. Only +, -, *, / and square roots are used: their results do not depend on the size of a tensor, so an image is the same in any batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from diffcap.worlds.blocks.geometry import CUBE, SPHERE

Vector = Tensor | Sequence[Tensor]  # x, y and z
# CLEVR's colors, 0 to 255: gray, red, blue, green, brown, purple, cyan, yellow.
OBJECT_COLORS = (
    (87, 87, 87),
    (173, 35, 35),
    (42, 75, 215),
    (29, 105, 20),
    (129, 74, 25),
    (129, 38, 192),
    (41, 208, 208),
    (255, 238, 51),
)
KEY_COLOR, FILL_COLOR = (1.0, 0.955, 0.885), (0.925, 0.95, 1.0)  # of the key and the fill light
_GROUND_ALBEDO = 0.60  # the fraction of red, green and blue light that the ground reflects


def intersect(shape: int, origin: Vector, ray: Vector, radius: Tensor, half_height: Tensor) -> Tensor:
    """Return the distance to the solid along each ray, in multiples of the length of `ray`; infinite if the ray misses the solid."""
    (x, y, z), (dx, dy, dz) = origin, ray
    if shape == CUBE:
        enter, leave = _intersect_slab(x, dx, half_height)
        for start, direction in ((y, dy), (z, dz)):
            slab_enter, slab_leave = _intersect_slab(start, direction, half_height)
            enter, leave = torch.maximum(enter, slab_enter), torch.minimum(leave, slab_leave)
        return torch.where(enter < leave, enter, torch.inf)
    quadratic, linear, constant = dx * dx + dy * dy, x * dx + y * dy, x * x + y * y - radius * radius
    if shape == SPHERE:
        quadratic, linear, constant = quadratic + dz * dz, linear + z * dz, constant + z * z
    discriminant = linear * linear - quadratic * constant
    root = discriminant.clamp(0).sqrt()
    if shape == SPHERE:
        return torch.where(discriminant > 0, (-linear - root) / quadratic, torch.inf)
    slab_enter, slab_leave = _intersect_slab(z, dz, half_height)
    enter = torch.maximum((-linear - root) / quadratic, slab_enter)
    leave = torch.minimum((root - linear) / quadratic, slab_leave)
    return torch.where((discriminant > 0) & (enter < leave), enter, torch.inf)


def _intersect_slab(start: Tensor, direction: Tensor, half_height: Tensor) -> tuple[Tensor, Tensor]:
    """Return where rays enter and leave the space between two parallel planes, each at `half_height` from the origin."""
    inverse = 1 / direction
    middle, half_length = -start * inverse, half_height * inverse.abs()
    return middle - half_length, middle + half_length


def surface(shape: int, point: Vector, radius: Tensor, half_height: Tensor) -> tuple[Vector, Tensor]:
    """Return the outward normal at points of the surface, and the index of each point's face (int32): 0 top or sphere, 1 and 2 sides."""
    x, y, z = point
    if shape == SPHERE:
        return (x / radius, y / radius, z / radius), torch.zeros_like(x, dtype=torch.int32)
    edge_z = _edge_weight(z.abs(), half_height)
    if shape == CUBE:
        abs_x, abs_y = x.abs(), y.abs()
        is_top = (z >= abs_x) & (z >= abs_y)
        is_x_face = ~is_top & (abs_x > abs_y)
        edge_x, edge_y = _edge_weight(abs_x, half_height), _edge_weight(abs_y, half_height)
        normal = (x.sign() * edge_x, y.sign() * edge_y, z.sign() * edge_z)
        return _normalize(normal), torch.where(is_top, 0, 2 - is_x_face.int())
    from_axis = (x * x + y * y).sqrt()
    scale = _edge_weight(from_axis, radius) / from_axis.clamp(1e-6)
    return _normalize((x * scale, y * scale, z.sign() * edge_z)), (z < 0.999 * half_height).int()


def _edge_weight(distance: Tensor, edge: Tensor) -> Tensor:
    """Return 1 at the edge of a face, and 0 more than 0.075 away from it. Normals depend on this weight, so that edges look rounded."""
    return ((distance - edge + 0.075) / 0.075).clamp(0, 1)


def _dot(first: Vector, second: Vector | tuple[float, ...]) -> Tensor:
    return first[0] * second[0] + first[1] * second[1] + first[2] * second[2]


def _normalize(vector: Vector) -> Vector:
    length = _dot(vector, vector).sqrt().clamp(1e-6)
    return [component / length for component in vector]


def key_visibility(shape: int, point: Vector, light: Vector, radius: Tensor, half_height: Tensor) -> Tensor:
    """Return the fraction of the key light that a solid does not block, in [0, 1].

    The fraction depends on the distance between the solid and the line from the point to the light. The shadow's edge is softer if the
    solid is further away, as if the light were large. `light` is the unit vector to the light; z is the height above the ground.
    """
    (x, y, z), (lx, ly, lz) = point, light
    if shape == SPHERE:
        z = half_height - z
        along_ray = z * lz - x * lx - y * ly
        distance = (x * x + y * y + z * z - along_ray * along_ray).clamp(0).sqrt() - radius
        return torch.where(along_ray > 0, _soft_step(distance, 0.05 + 0.13 * along_ray), 1.0)
    # While the line to the light rises by 1, it moves by the horizontal vector (slope_x, slope_y).
    slope_x, slope_y = lx / lz, ly / lz
    rise = 2 * half_height - z
    slope_squared = slope_x * slope_x + slope_y * slope_y
    nearest_rise = torch.minimum(-(x * slope_x + y * slope_y) / slope_squared, rise).clamp(0)
    if shape == CUBE:
        run_x, run_y = slope_x * rise, slope_y * rise
        distance_x = (x + run_x / 2).abs() - (half_height + run_x.abs() / 2)
        distance_y = (y + run_y / 2).abs() - (half_height + run_y.abs() / 2)
        distance = torch.maximum(distance_x, distance_y)
        reach = half_height * (slope_x.abs() + slope_y.abs())
        distance = torch.maximum(distance, ((x * slope_y - y * slope_x).abs() - reach) / slope_squared.sqrt())
    else:
        nearest_x, nearest_y = x + nearest_rise * slope_x, y + nearest_rise * slope_y
        distance = (nearest_x * nearest_x + nearest_y * nearest_y).sqrt() - radius
    return torch.where(rise > 0, _soft_step(distance, 0.05 + 0.16 * nearest_rise), 1.0)


def _soft_step(distance: Tensor, width: Tensor) -> Tensor:
    """Return 0 at -width or less, 1 at width or more, and a smooth transition between them."""
    fraction = (distance / (2 * width) + 0.5).clamp(0, 1)
    return fraction * fraction * (3 - 2 * fraction)


def sky_occlusion(shape: int, x: Tensor, y: Tensor, radius: Tensor, half_height: Tensor) -> Tensor:
    """Return the fraction of the sky that a solid hides from ground points; 0 for points further than `half_height` from its footprint."""
    if shape == SPHERE:  # a sphere touches the ground in a single point
        closeness = (1 - (x * x + y * y).sqrt() / (radius + half_height)).clamp(0)
        return 0.9 * closeness * closeness
    if shape == CUBE:
        outside_x, outside_y = (x.abs() - half_height).clamp(0), (y.abs() - half_height).clamp(0)
        distance = (outside_x * outside_x + outside_y * outside_y).sqrt()
    else:
        distance = ((x * x + y * y).sqrt() - radius).clamp(0)
    closeness = (1 - distance / half_height).clamp(0)
    return 0.65 * closeness * closeness * closeness


def shade_ground(
    x: Tensor, y: Tensor, light_centers: Tensor, intensity: Tensor, visibility: Tensor, sky_visibility: Tensor
) -> list[Tensor]:
    """Return red, green and blue, (B, ...) each, of ground points (x, y). Each light decreases with the distance from its centre.

    `visibility` and `sky_visibility`, (B, ...), are the fractions of the key light and of the sky that objects do not block.
    """
    trailing_dims = [1] * (x.ndim - 1)
    lights = []
    for index, (falloff_x, falloff_y) in enumerate(((0.020, 0.030), (0.040, 0.055))):
        dx = (x - light_centers[:, index, 0].view(-1, *trailing_dims)).square_()
        dy = (y - light_centers[:, index, 1].view(-1, *trailing_dims)).square_()
        denominator = dx.mul_(falloff_x).add_(dy.mul_(falloff_y)).add_(1)
        lights.append(denominator.reciprocal_().mul_(intensity[:, index].view(-1, *trailing_dims)))
    key = (0.22 * _GROUND_ALBEDO * sky_visibility).add_((0.62 * _GROUND_ALBEDO) * visibility).mul_(lights[0])
    fill = lights[1].mul_(0.20 * _GROUND_ALBEDO).add_(0.38 * _GROUND_ALBEDO).mul_(sky_visibility)
    return [(warm * key).add_(cool * fill) for warm, cool in zip(KEY_COLOR, FILL_COLOR)]


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

    Rubber follows the Phong reflection model. Metal is darker, has a narrow highlight, and reflects an imaginary room. Both are brighter
    where the surface is seen at a small angle (the rim).

    Args:
        normal, view, light: unit vectors, x, y and z (n,) each: normal of the surface, direction to the camera, direction to the key light.
        intensity: (2, n) brightness of the key and the fill light.
        color: red, green and blue of the paint, (n,) each.
        metal: (n,) True for metal, False for rubber.
        visibility: (n,) fraction of the key light that other solids do not block.
        height: (n,) height above the ground; low points receive less light from the sky.
    """
    nx, ny, nz = normal
    n_dot_l, n_dot_v = _dot(normal, light), _dot(normal, view)
    reflected = [2 * n_dot_v * n - v for n, v in zip(normal, view)]  # reflected view direction
    rx, ry, rz = reflected
    r_dot_l = _dot(reflected, light).clamp(0)
    clamped_height = height.clamp(max=0.5)
    sky = (0.5 + 0.5 * nz) * (0.72 + 0.56 * clamped_height)
    key = n_dot_l.clamp(0) * visibility * intensity[0]
    fill = (0.50 * nx - 0.80 * ny + 0.33 * nz).clamp(0) * intensity[1]  # the light comes from the front, half left
    bounce = (0.5 - 0.5 * nz) * (0.5 + clamped_height)  # light that the ground reflects
    rim = 1 - n_dot_v.clamp(0)
    rim = rim * rim * rim
    windows = _window_light(reflected, (0.62, -0.60, 0.5)) + 0.7 * _window_light(reflected, (-0.35, 0.52, 0.78))
    # A bright strip at the horizon, and a floor that is darker near the object, make the surface look like metal.
    strip = (1 - 4.5 * (rz - 0.10).abs()).clamp(0)
    floor = (-rz).clamp(0)
    left_streak = (1 - 3.5 * (rx + 0.25 * ry + 0.45).abs()).clamp(0)
    right_streak = (1 - 5 * (rx - 0.6).abs()).clamp(0)
    streaks = left_streak + 0.6 * right_streak
    room = 0.18 + 0.30 * rz.clamp(0) + 0.46 * floor * (0.5 + clamped_height)
    room = room + 0.40 * strip + 0.9 * windows + 0.5 * rim + 0.36 * streaks
    r_dot_l_2 = r_dot_l * r_dot_l
    r_dot_l_4 = r_dot_l_2 * r_dot_l_2
    r_dot_l_8 = r_dot_l_4 * r_dot_l_4
    r_dot_l_32 = r_dot_l_8 * r_dot_l_8 * r_dot_l_8 * r_dot_l_8
    wide_highlight = 0.07 * r_dot_l_8 * visibility
    narrow_highlight = (0.9 * r_dot_l_32 * r_dot_l_32 + 0.25 * r_dot_l_8) * (0.25 + 0.75 * visibility)
    channels = []
    for paint, warm, cool in zip(color, KEY_COLOR, FILL_COLOR):
        diffuse = warm * 0.66 * key + cool * (0.34 * fill + 0.40 * sky) + 0.20 * bounce
        rubber = paint * diffuse + wide_highlight + 0.02 * rim
        metal_color = (0.9 * paint + 0.09) * (0.30 * diffuse + 0.95 * room)
        metal_color = metal_color + narrow_highlight * warm * (0.35 + 0.65 * paint)
        channels.append(torch.where(metal, metal_color, rubber))
    return channels


def _window_light(direction: Vector, center: tuple[float, float, float]) -> Tensor:
    """Return the brightness of a round window with a soft edge: 1 in the direction of `center`, 0 outside."""
    length = sum(value * value for value in center) ** 0.5
    cosine = _dot(direction, center) / length
    fraction = ((cosine - 0.86) * 12).clamp(0, 1)
    return fraction * fraction * (3 - 2 * fraction)
