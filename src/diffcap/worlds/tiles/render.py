"""The pixels of `tiles`: colors by season, textures, shadows by the sun's position, haze, misregistration and noise.

Polygons of material numbers and of shadows are drawn with two samples per pixel and axis; a table gives each material its color and the
strength of its texture at the date; and the result is sampled in the image's own grid. Textures are cut out of images computed once.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageChops, ImageDraw

from diffcap.worlds.tiles.changes import Change
from diffcap.worlds.tiles.geometry import Point, along, hull, offset, rectangle
from diffcap.worlds.tiles.scenes import FIELD_TONES, MARGIN, ROOFS, SIZE, TREE_TONES, House, Layer

Array = npt.NDArray[np.float32]
Pixels = npt.NDArray[np.uint8]
Color = tuple[float, float, float]

_SCALE = 2  # samples per pixel and axis
_CANVAS = SIZE + 2 * MARGIN
_BANK = 640  # width and height of the precomputed textures in pixels
_SUNS = 8  # number of light directions for which the texture of forests is computed
_ROWS = 24  # number of directions of crop rows
_LEVELS = 5  # number of brightness levels of a roof, by its direction to the sun

# Numbers of the materials; SHADOW is added to them in shadows.
GRASS, BARE, MUD, FOREST, WATER, SHORE, ASPHALT, LINE, VERGE, DIRT_ROAD, PARKING, FIXTURE, CHIMNEY = range(13)
FIELDS = 16
ROOF = FIELDS + FIELD_TONES
TREES = ROOF + len(ROOFS) * _LEVELS
CARS = TREES + 2 * TREE_TONES
SHADOW = 128

_ROOF_COLORS: dict[str, Color] = {
    "red": (170, 92, 72),
    "brown": (128, 96, 76),
    "gray": (142, 142, 144),
    "dark": (88, 90, 98),
    "blue": (84, 112, 160),
    "white": (214, 212, 206),
}
_CAR_PAINT = ((226, 226, 226), (40, 42, 48), (150, 152, 156), (168, 46, 44), (52, 76, 132), (196, 190, 176))


@dataclass(frozen=True)
class Date:
    """Season, light, atmosphere and sensor of one image; angles are in radians."""

    green: float  # color of the vegetation, 0 (dry) to 1 (green)
    azimuth: float  # direction of the shadows
    elevation: float  # height of the sun
    gain: float  # brightness
    gamma: float  # contrast
    cast: Color  # color balance
    haze: float  # share of the sky's light
    slope: Point  # brightness gradient across the image
    noise: float  # standard deviation of the sensor's noise in gray levels
    turn: float  # rotation of the image against the before image
    shift: Point  # offset of the image from the before image, in pixels
    grain: tuple[int, int]  # start of the noise in its bank


def sample_dates(rng: random.Random, jitter: float) -> tuple[Date, Date]:
    """Sample the dates of a pair; `jitter` is the strength of their differences and of the noise, 0 (none) to 1."""
    green, azimuth = rng.uniform(0.25, 1), rng.uniform(0, 2 * math.pi)
    elevation = math.radians(rng.uniform(32, 58))
    gain, haze, gamma = rng.uniform(0.92, 1.08), rng.uniform(0, 0.12), rng.uniform(0.95, 1.08)
    dates = []
    for is_after in (False, True):
        step = [jitter * rng.uniform(-1, 1) for _ in range(11)]
        grain = rng.randrange(_BANK - SIZE), rng.randrange(_BANK - SIZE)
        level = jitter * rng.random()
        shift = (2.5 * jitter * rng.uniform(-1, 1), 2.5 * jitter * rng.uniform(-1, 1)) if is_after else (0.0, 0.0)
        dates.append(
            Date(
                green=min(1.0, max(0.0, green + 0.45 * step[0])),
                azimuth=azimuth + 0.7 * step[1],
                elevation=elevation + 0.2 * step[2],
                gain=gain + 0.12 * step[3],
                gamma=gamma + 0.1 * step[4],
                cast=(1 + 0.05 * step[5], 1.0, 1 + 0.06 * step[6]),
                haze=haze + 0.16 * level,
                slope=(0.06 * step[7], 0.06 * step[8]),
                noise=jitter * (1.5 + 2 * abs(step[9])),
                turn=math.radians(0.8) * step[10] if is_after else 0.0,
                shift=shift,
                grain=grain,
            )
        )
    return dates[0], dates[1]


def to_image(point: Point, date: Date) -> Point:
    """Return where a point of the before image's grid is in the image of a date."""
    middle = SIZE / 2
    x, y = point[0] - middle - date.shift[0], point[1] - middle - date.shift[1]
    cosine, sine = math.cos(date.turn), math.sin(date.turn)
    return x * cosine + y * sine + middle, y * cosine - x * sine + middle


def _to_date(canvas: Image.Image, date: Date, scale: int, filter: Image.Resampling) -> Image.Image:
    """Sample a canvas, which has `scale` samples per pixel, in the grid of the image of a date."""
    middle, cosine, sine = SIZE / 2, math.cos(date.turn), math.sin(date.turn)
    x = -cosine * middle + sine * middle + middle + date.shift[0] + MARGIN
    y = -sine * middle - cosine * middle + middle + date.shift[1] + MARGIN
    affine = scale * cosine, -scale * sine, scale * x, scale * sine, scale * cosine, scale * y
    return canvas.transform((SIZE, SIZE), Image.Transform.AFFINE, affine, filter)


def render(scene: Layer, date: Date, texture: tuple[int, int], ground: Image.Image | None = None) -> Pixels:
    """Render a scene at a date as an RGB image (SIZE, SIZE, 3).

    Args:
        texture: start of the scene's textures in their banks, in 0 to `TEXTURES` - 1.
        ground: `draw_ground(scene)`, if it was computed already.
    """
    materials = np.asarray(_draw_scene(scene, date, ground or draw_ground(scene)))
    packed = np.take(_palette(date), materials)
    layers = Image.frombuffer("CMYK", (materials.shape[1], materials.shape[0]), packed, "raw", "CMYK", 0, 1)
    grain = _texture(scene, date, texture)
    if date.turn or any(date.shift):
        layers = _to_date(layers, date, _SCALE, Image.Resampling.BILINEAR)
        grain = _to_date(grain, date, 1, Image.Resampling.BILINEAR)
    else:
        start, end = MARGIN, MARGIN + SIZE
        layers = layers.reduce(_SCALE, (_SCALE * start, _SCALE * start, _SCALE * end, _SCALE * end))
        grain = grain.crop((start, start, end, end))
    *colors, strength = (np.asarray(band).astype(np.float32) for band in layers.split())
    light = np.asarray(grain).astype(np.float32)
    light -= 128
    light *= strength
    light *= np.float32(1 / (128 * 255))  # the relief
    light += 1
    ramp = np.linspace(-1, 1, SIZE, dtype=np.float32)
    light *= 1 + date.slope[0] * ramp[None] + date.slope[1] * ramp[:, None]
    result = np.empty((SIZE, SIZE, 3), np.uint8)
    x, y = date.grain
    for channel, (values, noise) in enumerate(zip(colors, _noise())):  # numpy is faster on one channel than on (..., 3)
        values *= light
        values += noise[y : y + SIZE, x : x + SIZE] * np.float32(date.noise)
        values += np.float32(0.5)
        result[..., channel] = np.clip(values, 0, 255, out=values).astype(np.uint8)
    return result


def materials(scene: Layer, date: Date) -> Pixels:
    """Return the number of the material in each pixel of the image of a date, (SIZE, SIZE), without shadows."""
    canvas = _draw_scene(scene, date, draw_ground(scene))
    return np.asarray(_to_date(canvas, date, _SCALE, Image.Resampling.NEAREST)) % SHADOW


def change_mask(change: Change | None, scene: Layer) -> Pixels:
    """Draw the changed pixels in the before image's grid, (SIZE, SIZE); 255 where an object was added or removed, else 0.

    Shadows do not count. Where a new road meets an old one, nothing has changed. `scene` is either state of the pair.
    """
    mask = Image.new("L", (SIZE, SIZE))
    if change is not None:
        draw = ImageDraw.Draw(mask)
        for polygon in change.polygons():
            draw.polygon(polygon, fill=255)
        for road in change.present.roads:
            draw.line(road.line, fill=255, width=round(road.width), joint="curve")
            for other in scene.roads:
                if other is not road:
                    draw.line(other.line, fill=0, width=round(other.width), joint="curve")
    return np.array(mask)


class _Canvas:
    """Draws in pixels of the before image on a canvas with a margin."""

    def __init__(self, scale: int = _SCALE, image: Image.Image | None = None) -> None:
        self.image = image or Image.new("L", (scale * _CANVAS, scale * _CANVAS))
        self._draw = ImageDraw.Draw(self.image)
        self._scale = scale

    def _at(self, points: Sequence[Point]) -> list[Point]:
        scale = self._scale
        return [(scale * (x + MARGIN), scale * (y + MARGIN)) for x, y in points]

    def polygon(self, points: Sequence[Point], fill: int) -> None:
        self._draw.polygon(self._at(points), fill=fill)

    def line(self, points: Sequence[Point], width: float, fill: int) -> None:
        self._draw.line(self._at(points), fill=fill, width=max(1, round(self._scale * width)), joint="curve")

    def disc(self, center: Point, radius: float, fill: int) -> None:
        (x, y), r = self._at([center])[0], radius * self._scale
        self._draw.ellipse((x - r, y - r, x + r, y + r), fill=fill)


_SURFACES = {"forest": FOREST, "bare": BARE, "mud": MUD, "grass": GRASS, "parking": PARKING}


def draw_ground(scene: Layer) -> Image.Image:
    """Draw the number of the ground's material at every sample of the canvas."""
    ground = _Canvas()
    for zone in scene.zones:
        ground.polygon(zone.polygon, FIELDS + zone.tone if zone.surface == "field" else _SURFACES[zone.surface])
    for river in scene.rivers:
        ground.line(river.line, river.width + 6, SHORE)
        ground.line(river.line, river.width, WATER)
    for pond in scene.ponds:
        ground.line([*pond, pond[0], pond[1]], 5, SHORE)
        ground.polygon(pond, WATER)
    for road in scene.roads:
        if road.paved:
            ground.line(road.line, road.width + 3, VERGE)
    for road in scene.roads:
        ground.line(road.line, road.width, ASPHALT if road.paved else DIRT_ROAD)
        if road.paved and road.width > 9:
            for point, direction in along(road.line, 9):
                ground.line([offset(point, direction, -2), offset(point, direction, 2)], 0.7, LINE)
    for zone in scene.zones:
        if zone.surface == "parking":
            (x0, y0), (x1, y1), _, (x3, y3) = zone.polygon
            angle, length = math.atan2(y1 - y0, x1 - x0), math.hypot(x1 - x0, y1 - y0)
            width = math.hypot(x3 - x0, y3 - y0)
            for row in range(int(width / 14)):
                for column in range(int(length / 6) + 1):
                    start = offset(offset((x0, y0), angle, column * 6), angle + math.pi / 2, row * 14 + 2)
                    ground.line([start, offset(start, angle + math.pi / 2, 9)], 0.5, LINE)
    return ground.image


def _draw_scene(scene: Layer, date: Date, ground: Image.Image) -> Image.Image:
    """Draw the number of the material at every sample of the canvas."""
    shade = _Canvas()
    length = 1 / math.tan(date.elevation)
    dx, dy = length * math.cos(date.azimuth), length * math.sin(date.azimuth)
    for house in scene.houses:
        corners = house.footprint
        moved = [(x + house.height * dx, y + house.height * dy) for x, y in corners]
        shade.polygon(hull([*corners, *moved]), SHADOW)
    for tree in scene.trees:
        tip = tree.center[0] + tree.height * dx, tree.center[1] + tree.height * dy
        shade.line([tree.center, tip], 2 * tree.radius, SHADOW)
        shade.disc(tip, tree.radius, SHADOW)
    for car in scene.cars:
        shade.polygon(rectangle((car.center[0] + 0.8 * dx, car.center[1] + 0.8 * dy), car.angle, 7.5, 3.6), SHADOW)

    above = _Canvas(image=ImageChops.add_modulo(ground, shade.image))
    toward = date.azimuth + math.pi  # the sun
    for house in scene.houses:
        _draw_house(above, house, toward)
    for tree in scene.trees:
        above.disc(tree.center, tree.radius, TREES + 2 * tree.tone)
        above.disc(offset(tree.center, toward, 0.28 * tree.radius), 0.66 * tree.radius, TREES + 2 * tree.tone + 1)
    for car in scene.cars:
        above.polygon(rectangle(car.center, car.angle, 7.5, 3.6), CARS + car.color)
        above.polygon(rectangle(offset(car.center, car.angle, -0.6), car.angle, 3.2, 2.8), CHIMNEY)
    return above.image


def _draw_house(canvas: _Canvas, house: House, toward: float) -> None:
    roof = ROOF + house.roof * _LEVELS
    if house.gable:
        for side in (-1, 1):
            normal = house.angle + side * math.pi / 2
            level = round(2 + 2 * math.cos(normal - toward))
            middle = offset(house.center, normal, house.width / 4)
            canvas.polygon(rectangle(middle, house.angle, house.length, house.width / 2), roof + level)
        chimney = offset(offset(house.center, house.angle, house.length / 4), house.angle + math.pi / 2, 1.8)
        canvas.polygon(rectangle(chimney, house.angle, 1.8, 1.8), CHIMNEY)
        return
    canvas.polygon(house.footprint, roof + 4)
    canvas.polygon(rectangle(house.center, house.angle, house.length - 2.2, house.width - 2.2), roof + 2)
    for share in (-0.28, 0.22) if house.length > 25 else (0.2,):
        canvas.polygon(rectangle(offset(house.center, house.angle, share * house.length), house.angle, 4, 3.4), FIXTURE)


def _palette(date: Date) -> npt.NDArray[np.uint32]:
    """Return (256,) colors and texture strengths of the materials, packed in four bytes."""
    table = np.zeros((256, 4), np.float32)
    green = date.green

    def between(dry: Color, fresh: Color, share: float = green) -> Color:
        a, b, c = (low + share * (high - low) for low, high in zip(dry, fresh))
        return a, b, c

    table[GRASS] = *between((150, 140, 98), (98, 128, 66)), 75
    table[BARE] = 196, 170, 132, 50
    table[MUD] = 138, 116, 90, 60
    table[FOREST] = *between((104, 96, 62), (54, 84, 44)), 150
    table[WATER] = 58, 84, 92, 18
    table[SHORE] = *between((150, 134, 98), (112, 122, 78)), 60
    table[ASPHALT] = 118, 118, 120, 28
    table[LINE] = 214, 212, 204, 10
    table[VERGE] = 166, 156, 130, 50
    table[DIRT_ROAD] = 182, 158, 122, 50
    table[PARKING] = 128, 128, 128, 25
    table[FIXTURE] = 178, 178, 178, 10
    table[CHIMNEY] = 70, 66, 64, 10
    for tone in range(FIELD_TONES):
        shift = 10 * math.sin(2.4 * tone)
        if tone % 5 == 0:  # ploughed
            color: Color = (138 + shift, 112 + shift, 84 + shift)
        elif tone % 5 < 3:  # cereals
            share = min(1, max(0, 1.3 * green - 0.2))
            color = between((198 + shift, 176 + shift, 112), (112 + shift, 142 + shift, 66), share)
        else:  # meadows
            color = between((158 + shift, 148 + shift, 96), (90 + shift, 128 + shift, 62))
        table[FIELDS + tone] = *color, 60
    for number, name in enumerate(ROOFS):
        for level in range(_LEVELS):
            factor = 0.66 + 0.14 * level
            table[ROOF + number * _LEVELS + level] = *(min(245.0, factor * part) for part in _ROOF_COLORS[name]), 26
    for tone in range(TREE_TONES):
        leaves = between((136 - 18 * tone, 120 - 8 * tone, 68), (78 - 8 * tone, 112 - 8 * tone, 56 - 3 * tone))
        table[TREES + 2 * tone] = *(0.68 * part for part in leaves), 110
        table[TREES + 2 * tone + 1] = *(1.1 * part for part in leaves), 110
    for number, paint in enumerate(_CAR_PAINT):
        table[CARS + number] = *paint, 5
    table[SHADOW:, :3] = table[:SHADOW, :3] * (0.42, 0.46, 0.56)
    table[SHADOW:, 3] = 0.7 * table[:SHADOW, 3]
    rgb = 255 * (table[:, :3] / 255) ** date.gamma * date.gain * np.array(date.cast)
    table[:, :3] = rgb * (1 - date.haze) + np.array((196, 204, 214)) * date.haze
    packed = np.ascontiguousarray(np.clip(table + 0.5, 0, 255).astype(np.uint8))
    return packed.view(np.uint32).ravel()


TEXTURES = _BANK - _CANVAS


def _texture(scene: Layer, date: Date, start: tuple[int, int]) -> Image.Image:
    """Return the brightness of the texture at every pixel of the canvas, 128 where it has none."""
    numbers = _Canvas(1)  # indices of `_textures()`
    sun = round((date.azimuth + math.pi) / (2 * math.pi) * _SUNS) % _SUNS
    for zone in scene.zones:
        number = 0
        if zone.surface == "forest":
            number = 1 + sun
        elif zone.surface == "field":
            number = 1 + _SUNS + round(zone.direction / math.pi * _ROWS) % _ROWS
        numbers.polygon(zone.polygon, number)
    (x, y), chosen = start, np.asarray(numbers.image)
    texture = np.empty((_CANVAS, _CANVAS), np.uint8)
    for number in np.flatnonzero(np.bincount(chosen.ravel())).tolist():
        np.copyto(texture, _textures()[number][y : y + _CANVAS, x : x + _CANVAS], where=chosen == number)
    return Image.fromarray(texture)


@cache
def _noise() -> Array:
    noise = np.random.default_rng(1).standard_normal((_BANK, _BANK, 3), dtype=np.float32)
    return np.ascontiguousarray(noise.transpose(2, 0, 1))


@cache
def _textures() -> list[Pixels]:
    """Compute the textures of the ground, of forests by the direction of the sun, and of fields by the direction of their rows."""
    rng = np.random.default_rng(0)
    soil = 0.7 * _cloud(rng, 1.1) + 0.5 * _cloud(rng, 0.35)
    height = np.zeros((_BANK, _BANK), np.float32)
    for x, y, r in zip(*rng.uniform(0, _BANK, (2, 9000)), rng.uniform(2.5, 6, 9000)):
        x0, y0 = max(0, int(x - r)), max(0, int(y - r))
        x1, y1 = min(_BANK, int(x + r) + 2), min(_BANK, int(y + r) + 2)
        across, down = np.meshgrid(np.arange(x0, x1) - x, np.arange(y0, y1) - y)
        crown = r * np.sqrt(np.clip(1 - (across * across + down * down) / (r * r), 0, None)) + rng.uniform(0, 2)
        patch = height[y0:y1, x0:x1]
        np.maximum(patch, np.where(across * across + down * down < r * r, crown, 0), out=patch)
    slope_y, slope_x = np.gradient(height)
    crowns = []
    for k in range(_SUNS):
        angle = 2 * math.pi * k / _SUNS
        lit = -(slope_x * math.cos(angle) + slope_y * math.sin(angle))
        crowns.append(_as_bytes(0.55 * np.clip(lit, -1.5, 1.5) + 0.16 * (height - height.mean()) + 0.2 * soil))
    y, x = np.mgrid[:_BANK, :_BANK].astype(np.float32)
    rows = []
    for k in range(_ROWS):
        angle = math.pi * k / _ROWS
        across = y * math.cos(angle) - x * math.sin(angle)
        rows.append(_as_bytes(0.75 * np.sin(across * (2 * math.pi / 5.5)) + 0.8 * soil))
    return [_as_bytes(soil), *crowns, *rows]


def _cloud(rng: np.random.Generator, exponent: float) -> Array:
    """Sample noise whose amplitude falls with the frequency to the power of `exponent`; mean 0, standard deviation 1."""
    spectrum = np.fft.rfft2(rng.standard_normal((_BANK, _BANK)))
    frequency = np.hypot(np.fft.fftfreq(_BANK)[:, None], np.fft.rfftfreq(_BANK)[None])
    frequency[0, 0] = 1
    values = np.fft.irfft2(spectrum / np.maximum(frequency, 4 / _BANK) ** exponent, (_BANK, _BANK))
    values -= values.mean()
    return (values / values.std()).astype(np.float32)


def _as_bytes(values: Array) -> Pixels:
    return np.clip(128 + 50 * values, 0, 255).astype(np.uint8)
