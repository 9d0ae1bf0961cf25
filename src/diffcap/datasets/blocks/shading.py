"""Shading of the ground and of the solids of `blocks`: a warm key light, a cool fill light, and a room that metal reflects."""

from __future__ import annotations

import torch
from torch import Tensor

from diffcap.datasets.blocks.solids import Vector

# CLEVR's palette, in the order of `geometry.COLORS`.
PALETTE = (
    (87, 87, 87), (173, 35, 35), (42, 75, 215), (29, 105, 20),
    (129, 74, 25), (129, 38, 192), (41, 208, 208), (255, 238, 51),
)  # fmt: skip
WARM, COOL = (1.0, 0.955, 0.885), (0.925, 0.95, 1.0)
_GROUND = 0.60  # grey of the ground


def ground(x: Tensor, y: Tensor, pools: Tensor, power: Tensor, light: Tensor, sky: Tensor) -> list[Tensor]:
    """Compute red, green and blue of the ground, in [0, 1], (B, ...) each.

    Args:
        x, y: (B, ...) points of the ground.
        pools, power: see `Scenes`.
        light, sky: (B, ...) fractions of the key light and of the sky that reach the point.
    """
    one = [1] * (x.ndim - 1)
    fall = []
    for pool, (wide, deep) in enumerate(((0.020, 0.030), (0.040, 0.055))):
        dx, dy = (x - pools[:, pool, 0].view(-1, *one)).square_(), (y - pools[:, pool, 1].view(-1, *one)).square_()
        spread = dx.mul_(wide).add_(dy.mul_(deep)).add_(1)
        fall.append(spread.reciprocal_().mul_(power[:, pool].view(-1, *one)))
    key = (0.22 * _GROUND * sky).add_((0.62 * _GROUND) * light).mul_(fall[0])
    fill = fall[1].mul_(0.20 * _GROUND).add_(0.38 * _GROUND).mul_(sky)
    return [(warm * key).add_(cool * fill) for warm, cool in zip(WARM, COOL)]


def solid(
    normal: Vector,
    view: Vector,
    light: Vector,
    power: Tensor,
    color: Vector,
    metal: Tensor,
    lit: Tensor,
    height: Tensor,
) -> list[Tensor]:
    """Compute red, green and blue of n points on solids, (n,) each; highlights can exceed 1.

    Rubber has Phong shading: diffuse light and a weak, wide highlight. Metal is darker, has a narrow highlight, and reflects
    an imaginary room with a grey floor, dark walls and two bright windows.

    Args:
        normal, view, light: unit vectors: surface normal, to the eye, to the key light.
        power: (2, n) intensity of the warm and the cool light.
        color: red, green, blue of the paint in [0, 1].
        metal: (n,) True for metal, False for rubber.
        lit: (n,) fraction of the key light that other solids do not block.
        height: (n,) above the ground, which hides a part of the sky from low points.
    """
    nx, ny, nz = normal
    vx, vy, vz = view
    lx, ly, lz = light
    toward = nx * lx + ny * ly + nz * lz
    facing = nx * vx + ny * vy + nz * vz
    mx, my, mz = 2 * facing * nx - vx, 2 * facing * ny - vy, 2 * facing * nz - vz  # reflected view direction
    lamp = (mx * lx + my * ly + mz * lz).clamp(min=0)
    near = height.clamp(max=0.5)
    sky = (0.5 + 0.5 * nz) * (0.72 + 0.56 * near)
    key = toward.clamp(min=0) * lit * power[0]
    fill = (0.50 * nx - 0.80 * ny + 0.33 * nz).clamp(min=0) * power[1]
    bounce = (0.5 - 0.5 * nz) * (0.5 + near)

    rim = 1 - facing.clamp(min=0)
    rim = rim * rim * rim
    mirrored = (mx, my, mz)
    windows = _window(mirrored, (0.62, -0.60, 0.5)) + 0.7 * _window(mirrored, (-0.35, 0.52, 0.78))
    # A bright strip at the horizon, and a floor that is darker near the object, make the surface look like metal.
    strip = (1 - 4.5 * (mz - 0.10).abs()).clamp(min=0)
    floor = (-mz).clamp(min=0)
    streak = (1 - 3.5 * (mx + 0.25 * my + 0.45).abs()).clamp(min=0) + 0.6 * (1 - 5 * (mx - 0.6).abs()).clamp(min=0)
    room = 0.18 + 0.30 * mz.clamp(min=0) + 0.46 * floor * (0.5 + near)
    room = room + 0.40 * strip + 0.9 * windows + 0.5 * rim + 0.36 * streak
    glint2 = lamp * lamp
    glint4 = glint2 * glint2
    glint8 = glint4 * glint4
    glint32 = glint8 * glint8 * glint8 * glint8
    wide = 0.07 * glint8 * lit
    sharp = (0.9 * glint32 * glint32 + 0.25 * glint8) * (0.25 + 0.75 * lit)

    channels = []
    for paint, warm, cool in zip(color, WARM, COOL):
        diffuse = warm * 0.66 * key + cool * (0.34 * fill + 0.40 * sky) + 0.20 * bounce
        rubber = paint * diffuse + wide + 0.02 * rim
        steel = (0.9 * paint + 0.09) * (0.30 * diffuse + 0.95 * room) + sharp * warm * (0.35 + 0.65 * paint)
        channels.append(torch.where(metal, steel, rubber))
    return channels


def _window(direction: Vector, toward: tuple[float, float, float]) -> Tensor:
    length = sum(value * value for value in toward) ** 0.5
    cosine = (direction[0] * toward[0] + direction[1] * toward[1] + direction[2] * toward[2]) / length
    step = ((cosine - 0.86) * 12).clamp(0, 1)
    return step * step * (3 - 2 * step)
