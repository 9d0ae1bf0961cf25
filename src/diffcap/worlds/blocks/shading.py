"""Shading of the ground and of the solids of `blocks`: a warm key light, a cool fill light, and a room that metal reflects.

Objects are about 1 high; colors are red, green and blue in [0, 1]. The coefficients were chosen by eye.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diffcap.worlds.blocks.solids import Vector

# CLEVR's palette, 0 to 255, in the order of `geometry.COLORS`.
PALETTE = (
    (87, 87, 87), (173, 35, 35), (42, 75, 215), (29, 105, 20),
    (129, 74, 25), (129, 38, 192), (41, 208, 208), (255, 238, 51),
)  # fmt: skip
WARM, COOL = (1.0, 0.955, 0.885), (0.925, 0.95, 1.0)  # colors of the key and the fill light
_GROUND = 0.60  # albedo of the ground, the same for red, green and blue


def shade_ground(
    x: Tensor, y: Tensor, light_centers: Tensor, intensity: Tensor, key_visibility: Tensor, sky_visibility: Tensor
) -> list[Tensor]:
    """Red, green and blue, (B, ...) each, of points (x, y) on the ground; light decreases with the distance from each light's centre.

    `key_visibility` and `sky_visibility`, (B, ...), are the fractions of the key light and of the sky that objects do not block.
    """
    trailing = [1] * (x.ndim - 1)
    lights = []
    for index, (falloff_x, falloff_y) in enumerate(((0.020, 0.030), (0.040, 0.055))):
        dx = (x - light_centers[:, index, 0].view(-1, *trailing)).square_()
        dy = (y - light_centers[:, index, 1].view(-1, *trailing)).square_()
        denominator = dx.mul_(falloff_x).add_(dy.mul_(falloff_y)).add_(1)
        lights.append(denominator.reciprocal_().mul_(intensity[:, index].view(-1, *trailing)))
    key = (0.22 * _GROUND * sky_visibility).add_((0.62 * _GROUND) * key_visibility).mul_(lights[0])
    fill = lights[1].mul_(0.20 * _GROUND).add_(0.38 * _GROUND).mul_(sky_visibility)
    return [(warm * key).add_(cool * fill) for warm, cool in zip(WARM, COOL)]


def shade_solids(
    normal: Vector,
    view: Vector,
    light: Vector,
    intensity: Tensor,
    color: Vector,
    metal: Tensor,
    key_visibility: Tensor,
    height: Tensor,
) -> list[Tensor]:
    """Red, green and blue, (n,) each, of points on solids; highlights can exceed 1.

    Rubber follows the Phong reflection model: diffuse light and a weak, wide highlight. Metal is darker, has a narrow highlight,
    and reflects an imaginary room with a grey floor, dark walls, two bright windows, two bright streaks and a bright
    strip at the horizon. Both are brighter at the rim, where the surface is seen at a small angle.

    Args:
        normal, view, light: unit vectors: the surface's normal, to the camera, to the key light; (n,) for each of x, y and z.
        intensity: (2, n) of the key and the fill light.
        color: red, green and blue of the paint, (n,) each.
        metal: (n,) True for metal, False for rubber.
        key_visibility: (n,) fraction of the key light that other solids do not block.
        height: (n,) above the ground; low points receive less light from the sky.
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
    key = n_dot_l.clamp(min=0) * key_visibility * intensity[0]
    fill = (0.50 * nx - 0.80 * ny + 0.33 * nz).clamp(min=0) * intensity[1]  # from the front, half left
    bounce = (0.5 - 0.5 * nz) * (0.5 + clamped_height)  # light that the ground reflects

    rim = 1 - n_dot_v.clamp(min=0)
    rim = rim * rim * rim
    reflected = (rx, ry, rz)
    windows = _window(reflected, (0.62, -0.60, 0.5)) + 0.7 * _window(reflected, (-0.35, 0.52, 0.78))
    # A bright strip at the horizon, and a floor that is darker near the object, make the surface look like metal.
    strip = (1 - 4.5 * (rz - 0.10).abs()).clamp(min=0)
    floor = (-rz).clamp(min=0)
    streaks = (1 - 3.5 * (rx + 0.25 * ry + 0.45).abs()).clamp(min=0) + 0.6 * (1 - 5 * (rx - 0.6).abs()).clamp(min=0)
    room = 0.18 + 0.30 * rz.clamp(min=0) + 0.46 * floor * (0.5 + clamped_height)
    room = room + 0.40 * strip + 0.9 * windows + 0.5 * rim + 0.36 * streaks
    r_dot_l_2 = r_dot_l * r_dot_l
    r_dot_l_4 = r_dot_l_2 * r_dot_l_2
    r_dot_l_8 = r_dot_l_4 * r_dot_l_4
    r_dot_l_32 = r_dot_l_8 * r_dot_l_8 * r_dot_l_8 * r_dot_l_8
    wide_highlight = 0.07 * r_dot_l_8 * key_visibility
    narrow_highlight = (0.9 * r_dot_l_32 * r_dot_l_32 + 0.25 * r_dot_l_8) * (0.25 + 0.75 * key_visibility)

    channels = []
    for paint, warm, cool in zip(color, WARM, COOL):
        diffuse = warm * 0.66 * key + cool * (0.34 * fill + 0.40 * sky) + 0.20 * bounce
        rubber = paint * diffuse + wide_highlight + 0.02 * rim
        metal_color = (0.9 * paint + 0.09) * (0.30 * diffuse + 0.95 * room)
        metal_color = metal_color + narrow_highlight * warm * (0.35 + 0.65 * paint)
        channels.append(torch.where(metal, metal_color, rubber))
    return channels


def _window(direction: Vector, center: tuple[float, float, float]) -> Tensor:
    """Round window with a soft edge: 1 in the direction of `center`, 0 outside."""
    length = sum(value * value for value in center) ** 0.5
    cosine = (direction[0] * center[0] + direction[1] * center[1] + direction[2] * center[2]) / length
    step = ((cosine - 0.86) * 12).clamp(0, 1)
    return step * step * (3 - 2 * step)
