"""Render the scenes of `tiles`: colors by season, textures, shadows by the sun's position, haze, shift of the camera and noise.

A scene is a `Layer`: lists of zones, roads, houses and other things. Each image of a pair has a `Date`, with season, light and so on. The
id of the material at every place is drawn on a canvas, which has two samples per pixel on each axis and a margin around the image. A table
for the date gives each material's color and strength of texture. The colored canvas is sampled at the pixels of the image, which can be
shifted and rotated. Textures and noise are cut out of larger arrays, which are computed once.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import atan2, cos, hypot, pi, radians, sin, tan

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageChops, ImageDraw

from diffcap.worlds.tiles.changes import Change
from diffcap.worlds.tiles.geometry import Point, convex_hull, offset, points_along, rectangle
from diffcap.worlds.tiles.scenes import MARGIN, NUM_FIELD_TONES, NUM_TREE_TONES, ROOF_COLORS, SIZE, House, Layer

FloatArray = npt.NDArray[np.float32]
ByteArray = npt.NDArray[np.uint8]
Color = tuple[float, float, float]

_SCALE = 2  # samples per pixel and axis
_CANVAS_SIZE = SIZE + 2 * MARGIN  # width and height of the canvas in pixels
_TEXTURE_SIZE = 640  # width and height of the computed textures in pixels
_NUM_SUN_ANGLES = 8  # directions of the light for which the texture of forests is computed
_NUM_CROP_ANGLES = 24  # directions of crop rows for which the texture of fields is computed
_ROOF_LEVELS = 5  # brightness levels of a roof; the level depends on its direction to the sun

# Ids of the materials. In shadow, SHADOW_OFFSET is added to the id.
GRASS, BARE, MUD, FOREST, WATER, SHORE, ASPHALT, MARKING, VERGE, DIRT_ROAD, PARKING, FIXTURE, CHIMNEY = range(13)
FIRST_FIELD = 16  # one id for each tone
FIRST_ROOF = FIRST_FIELD + NUM_FIELD_TONES  # one id for each color and brightness level
FIRST_TREE = FIRST_ROOF + len(ROOF_COLORS) * _ROOF_LEVELS  # two ids for each tone: dark and bright part of the crown
FIRST_CAR = FIRST_TREE + 2 * NUM_TREE_TONES  # one id for each color
SHADOW_OFFSET = 128

_ROOF_RGB = {
    "red": (170, 92, 72),
    "brown": (128, 96, 76),
    "gray": (142, 142, 144),
    "dark": (88, 90, 98),
    "blue": (84, 112, 160),
    "white": (214, 212, 206),
}
_CAR_COLORS = ((226, 226, 226), (40, 42, 48), (150, 152, 156), (168, 46, 44), (52, 76, 132), (196, 190, 176))


@dataclass(frozen=True)
class Date:
    """The season, light, atmosphere and sensor of one image of a pair, which determine how a scene looks. Angles are in radians."""

    greenness: float  # color of the vegetation, 0 (dry) to 1 (green)
    azimuth: float  # direction of the shadows
    elevation: float  # of the sun above the horizon
    gain: float  # brightness
    gamma: float  # contrast
    color_balance: Color  # factors of red, green and blue
    haze: float  # fraction of the color of haze in each pixel
    brightness_slope: Point  # relative increase of brightness from the middle to the right and the lower edge
    noise: float  # standard deviation of the sensor's noise in gray levels
    rotation: float  # angle by which the image is rotated relative to the before image
    shift: Point  # offset of the image from the before image, in pixels
    noise_start: tuple[int, int]  # x and y of the part of the computed noise that the image uses


def sample_dates(rng: random.Random, jitter: float) -> tuple[Date, Date]:
    """Sample the dates of a pair; `jitter` is the strength of their differences and of the noise, 0 (none) to 1."""
    greenness, azimuth = rng.uniform(0.25, 1), rng.uniform(0, 2 * pi)
    elevation = radians(rng.uniform(32, 58))
    gain, haze, gamma = rng.uniform(0.92, 1.08), rng.uniform(0, 0.12), rng.uniform(0.95, 1.08)
    dates = []
    for is_after in (False, True):
        variation = [jitter * rng.uniform(-1, 1) for _ in range(11)]
        noise_start = rng.randrange(_TEXTURE_SIZE - SIZE), rng.randrange(_TEXTURE_SIZE - SIZE)
        haze_variation = jitter * rng.random()
        shift = (2.5 * jitter * rng.uniform(-1, 1), 2.5 * jitter * rng.uniform(-1, 1)) if is_after else (0.0, 0.0)
        date = Date(
            greenness=min(1.0, max(0.0, greenness + 0.45 * variation[0])),
            azimuth=azimuth + 0.7 * variation[1],
            elevation=elevation + 0.2 * variation[2],
            gain=gain + 0.12 * variation[3],
            gamma=gamma + 0.1 * variation[4],
            color_balance=(1 + 0.05 * variation[5], 1.0, 1 + 0.06 * variation[6]),
            haze=haze + 0.16 * haze_variation,
            brightness_slope=(0.06 * variation[7], 0.06 * variation[8]),
            noise=jitter * (1.5 + 2 * abs(variation[9])),
            rotation=radians(0.8) * variation[10] if is_after else 0.0,
            shift=shift,
            noise_start=noise_start,
        )
        dates.append(date)
    return dates[0], dates[1]


def to_image(point: Point, date: Date) -> Point:
    """Convert a point from pixels of the before image to pixels of the image of a date."""
    middle = SIZE / 2
    x, y = point[0] - middle - date.shift[0], point[1] - middle - date.shift[1]
    cosine, sine = cos(date.rotation), sin(date.rotation)
    return x * cosine + y * sine + middle, y * cosine - x * sine + middle


def _sample_canvas(canvas: Image.Image, date: Date, scale: int, resampling: Image.Resampling) -> Image.Image:
    """Sample a canvas, which has `scale` samples per pixel, at the pixels of the image of a date."""
    middle, cosine, sine = SIZE / 2, cos(date.rotation), sin(date.rotation)
    x = -cosine * middle + sine * middle + middle + date.shift[0] + MARGIN
    y = -sine * middle - cosine * middle + middle + date.shift[1] + MARGIN
    affine_map = scale * cosine, -scale * sine, scale * x, scale * sine, scale * cosine, scale * y
    return canvas.transform((SIZE, SIZE), Image.Transform.AFFINE, affine_map, resampling)


def render(scene: Layer, date: Date, texture_start: tuple[int, int], ground: Image.Image | None = None) -> ByteArray:
    """Render a scene at a date as an RGB image (SIZE, SIZE, 3).

    Args:
        texture_start: x and y of the part of the computed textures that is used, 0 to `NUM_TEXTURE_STARTS` - 1.
        ground: `draw_ground(scene)`, if it was computed already.
    """
    material_map = np.asarray(_draw_scene(scene, date, ground or draw_ground(scene)))
    packed_colors = np.take(_make_palette(date), material_map)
    # Pillow's mode "CMYK" serves for four channels: red, green, blue and strength of the texture.
    layers = Image.frombuffer("CMYK", material_map.shape[::-1], packed_colors, "raw", "CMYK", 0, 1)
    texture = _draw_texture(scene, date, texture_start)
    if date.rotation or any(date.shift):
        layers = _sample_canvas(layers, date, _SCALE, Image.Resampling.BILINEAR)
        texture = _sample_canvas(texture, date, 1, Image.Resampling.BILINEAR)
    else:
        start, end = MARGIN, MARGIN + SIZE
        layers = layers.reduce(_SCALE, (_SCALE * start, _SCALE * start, _SCALE * end, _SCALE * end))
        texture = texture.crop((start, start, end, end))
    *color_bands, strength = (np.asarray(band).astype(np.float32) for band in layers.split())
    light = np.asarray(texture).astype(np.float32)
    light -= 128
    light *= strength
    light *= np.float32(1 / (128 * 255))
    light += 1
    ramp = np.linspace(-1, 1, SIZE, dtype=np.float32)
    light *= 1 + date.brightness_slope[0] * ramp[None] + date.brightness_slope[1] * ramp[:, None]
    image = np.empty((SIZE, SIZE, 3), np.uint8)
    x, y = date.noise_start
    for channel, (values, noise) in enumerate(zip(color_bands, _make_noise())):  # faster than all channels at once
        values *= light
        values += noise[y : y + SIZE, x : x + SIZE] * np.float32(date.noise)
        values += np.float32(0.5)
        image[..., channel] = np.clip(values, 0, 255, out=values).astype(np.uint8)
    return image


def draw_materials(scene: Layer, date: Date) -> ByteArray:
    """Return the material id of each pixel of the image of a date, (SIZE, SIZE), without shadows."""
    canvas = _draw_scene(scene, date, draw_ground(scene))
    return np.asarray(_sample_canvas(canvas, date, _SCALE, Image.Resampling.NEAREST)) % SHADOW_OFFSET


def change_mask(change: Change | None, scene: Layer) -> ByteArray:
    """Return a mask in pixels of the before image, (SIZE, SIZE): 255 where an object is added or removed, else 0.

    Shadows do not count as changes, nor does the place where a new road meets an old one. `scene` (before or after) has the old roads.
    """
    mask = Image.new("L", (SIZE, SIZE))
    if change is not None:
        draw = ImageDraw.Draw(mask)
        for polygon in change.polygons():
            draw.polygon(polygon, fill=255)
        for road in change.present.roads:  # roads that only one of the images has
            draw.line(road.line, fill=255, width=round(road.width), joint="curve")
            for other in scene.roads:
                if other is not road:
                    draw.line(other.line, fill=0, width=round(other.width), joint="curve")
    return np.array(mask)


class _Canvas:
    """A canvas on which ids are drawn; points and lengths are in pixels of the before image."""

    def __init__(self, scale: int = _SCALE, image: Image.Image | None = None) -> None:
        self.image = image or Image.new("L", (scale * _CANVAS_SIZE, scale * _CANVAS_SIZE))
        self._draw = ImageDraw.Draw(self.image)
        self._scale = scale

    def _to_canvas(self, points: Sequence[Point]) -> list[Point]:
        scale = self._scale
        return [(scale * (x + MARGIN), scale * (y + MARGIN)) for x, y in points]

    def polygon(self, points: Sequence[Point], fill: int) -> None:
        self._draw.polygon(self._to_canvas(points), fill=fill)

    def line(self, points: Sequence[Point], width: float, fill: int) -> None:
        self._draw.line(self._to_canvas(points), fill=fill, width=max(1, round(self._scale * width)), joint="curve")

    def disc(self, center: Point, radius: float, fill: int) -> None:
        (x, y), radius = self._to_canvas([center])[0], radius * self._scale
        self._draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)


_SURFACE_MATERIALS = {"forest": FOREST, "bare": BARE, "mud": MUD, "grass": GRASS, "parking": PARKING}


def draw_ground(scene: Layer) -> Image.Image:
    """Draw the material ids of the ground on a canvas."""
    ground = _Canvas()
    for zone in scene.zones:
        is_field = zone.surface == "field"
        ground.polygon(zone.polygon, FIRST_FIELD + zone.tone if is_field else _SURFACE_MATERIALS[zone.surface])
    for river in scene.rivers:
        ground.line(river.line, river.width + 6, SHORE)
        ground.line(river.line, river.width, WATER)
    for pond in scene.ponds:
        ground.line([*pond, pond[0], pond[1]], 5, SHORE)
        ground.polygon(pond, WATER)
    for road in scene.roads:
        if road.is_paved:
            ground.line(road.line, road.width + 3, VERGE)
    for road in scene.roads:
        ground.line(road.line, road.width, ASPHALT if road.is_paved else DIRT_ROAD)
        if road.is_paved and road.width > 9:
            for point, direction in points_along(road.line, 9):
                ground.line([offset(point, direction, -2), offset(point, direction, 2)], 0.7, MARKING)
    for zone in scene.zones:
        if zone.surface == "parking":
            (x0, y0), (x1, y1), _, (x3, y3) = zone.polygon
            angle, length = atan2(y1 - y0, x1 - x0), hypot(x1 - x0, y1 - y0)
            width = hypot(x3 - x0, y3 - y0)
            for row in range(int(width / 14)):
                for column in range(int(length / 6) + 1):
                    start = offset(offset((x0, y0), angle, column * 6), angle + pi / 2, row * 14 + 2)
                    ground.line([start, offset(start, angle + pi / 2, 9)], 0.5, MARKING)
    return ground.image


def _draw_scene(scene: Layer, date: Date, ground: Image.Image) -> Image.Image:
    """Draw the material ids of a scene at a date on a canvas."""
    shadows = _Canvas()
    length = 1 / tan(date.elevation)  # length of the shadow per pixel of height
    dx, dy = length * cos(date.azimuth), length * sin(date.azimuth)
    for house in scene.houses:
        corners = house.footprint
        shadow_corners = [(x + house.height * dx, y + house.height * dy) for x, y in corners]
        shadows.polygon(convex_hull([*corners, *shadow_corners]), SHADOW_OFFSET)
    for tree in scene.trees:
        shadow_end = tree.center[0] + tree.height * dx, tree.center[1] + tree.height * dy
        shadows.line([tree.center, shadow_end], 2 * tree.radius, SHADOW_OFFSET)
        shadows.disc(shadow_end, tree.radius, SHADOW_OFFSET)
    for car in scene.cars:
        center = car.center[0] + 0.8 * dx, car.center[1] + 0.8 * dy
        shadows.polygon(rectangle(center, car.angle, 7.5, 3.6), SHADOW_OFFSET)
    canvas = _Canvas(image=ImageChops.add_modulo(ground, shadows.image))
    to_sun = date.azimuth + pi
    for house in scene.houses:
        _draw_house(canvas, house, to_sun)
    for tree in scene.trees:
        canvas.disc(tree.center, tree.radius, FIRST_TREE + 2 * tree.tone)
        bright_center = offset(tree.center, to_sun, 0.28 * tree.radius)
        canvas.disc(bright_center, 0.66 * tree.radius, FIRST_TREE + 2 * tree.tone + 1)
    for car in scene.cars:
        canvas.polygon(rectangle(car.center, car.angle, 7.5, 3.6), FIRST_CAR + car.color)
        canvas.polygon(rectangle(offset(car.center, car.angle, -0.6), car.angle, 3.2, 2.8), CHIMNEY)
    return canvas.image


def _draw_house(canvas: _Canvas, house: House, to_sun: float) -> None:
    darkest_roof = FIRST_ROOF + house.roof * _ROOF_LEVELS
    if house.has_gable:
        for side in (-1, 1):
            normal = house.angle + side * pi / 2
            level = round(2 + 2 * cos(normal - to_sun))
            middle = offset(house.center, normal, house.width / 4)
            canvas.polygon(rectangle(middle, house.angle, house.length, house.width / 2), darkest_roof + level)
        chimney = offset(offset(house.center, house.angle, house.length / 4), house.angle + pi / 2, 1.8)
        canvas.polygon(rectangle(chimney, house.angle, 1.8, 1.8), CHIMNEY)
        return
    canvas.polygon(house.footprint, darkest_roof + 4)  # the bright edge of a flat roof
    canvas.polygon(rectangle(house.center, house.angle, house.length - 2.2, house.width - 2.2), darkest_roof + 2)
    for position in (-0.28, 0.22) if house.length > 25 else (0.2,):
        center = offset(house.center, house.angle, position * house.length)
        canvas.polygon(rectangle(center, house.angle, 4, 3.4), FIXTURE)


def _make_palette(date: Date) -> npt.NDArray[np.uint32]:
    """Return (256,) integers: the color of each material id at a date and its texture strength, packed in four bytes."""
    table = np.zeros((256, 4), np.float32)  # red, green, blue, strength
    green = date.greenness

    def between(dry: Color, fresh: Color, share: float = green) -> Color:
        r, g, b = (low + share * (high - low) for low, high in zip(dry, fresh))
        return r, g, b

    table[GRASS] = *between((150, 140, 98), (98, 128, 66)), 75
    table[BARE] = 196, 170, 132, 50
    table[MUD] = 138, 116, 90, 60
    table[FOREST] = *between((104, 96, 62), (54, 84, 44)), 150
    table[WATER] = 58, 84, 92, 18
    table[SHORE] = *between((150, 134, 98), (112, 122, 78)), 60
    table[ASPHALT] = 118, 118, 120, 28
    table[MARKING] = 214, 212, 204, 10
    table[VERGE] = 166, 156, 130, 50
    table[DIRT_ROAD] = 182, 158, 122, 50
    table[PARKING] = 128, 128, 128, 25
    table[FIXTURE] = 178, 178, 178, 10
    table[CHIMNEY] = 70, 66, 64, 10
    for tone in range(NUM_FIELD_TONES):
        brighter = 10 * sin(2.4 * tone)
        if tone % 5 == 0:  # ploughed
            color = (138 + brighter, 112 + brighter, 84 + brighter)
        elif tone % 5 < 3:  # cereals
            share = min(1, max(0, 1.3 * green - 0.2))
            color = between((198 + brighter, 176 + brighter, 112), (112 + brighter, 142 + brighter, 66), share)
        else:  # meadows
            color = between((158 + brighter, 148 + brighter, 96), (90 + brighter, 128 + brighter, 62))
        table[FIRST_FIELD + tone] = *color, 60
    for number, name in enumerate(ROOF_COLORS):
        for level in range(_ROOF_LEVELS):
            factor = 0.66 + 0.14 * level
            color_at_level = (min(245.0, factor * channel) for channel in _ROOF_RGB[name])
            table[FIRST_ROOF + number * _ROOF_LEVELS + level] = *color_at_level, 26
    for tone in range(NUM_TREE_TONES):
        leaves = between((136 - 18 * tone, 120 - 8 * tone, 68), (78 - 8 * tone, 112 - 8 * tone, 56 - 3 * tone))
        table[FIRST_TREE + 2 * tone] = *(0.68 * channel for channel in leaves), 110
        table[FIRST_TREE + 2 * tone + 1] = *(1.1 * channel for channel in leaves), 110
    for number, paint in enumerate(_CAR_COLORS):
        table[FIRST_CAR + number] = *paint, 5
    table[SHADOW_OFFSET:, :3] = table[:SHADOW_OFFSET, :3] * (0.42, 0.46, 0.56)
    table[SHADOW_OFFSET:, 3] = 0.7 * table[:SHADOW_OFFSET, 3]
    rgb = 255 * (table[:, :3] / 255) ** date.gamma * date.gain * np.array(date.color_balance)
    table[:, :3] = rgb * (1 - date.haze) + np.array((196, 204, 214)) * date.haze
    packed = np.ascontiguousarray(np.clip(table + 0.5, 0, 255).astype(np.uint8))
    return packed.view(np.uint32).ravel()


NUM_TEXTURE_STARTS = _TEXTURE_SIZE - _CANVAS_SIZE


def _draw_texture(scene: Layer, date: Date, texture_start: tuple[int, int]) -> Image.Image:
    """Return the brightness of the texture at every pixel of the canvas; 128 does not change the color."""
    canvas = _Canvas(1)  # its values are indices into `_make_textures()`
    sun_angle = round((date.azimuth + pi) / (2 * pi) * _NUM_SUN_ANGLES) % _NUM_SUN_ANGLES
    for zone in scene.zones:
        index = 0
        if zone.surface == "forest":
            index = 1 + sun_angle
        elif zone.surface == "field":
            crop_angle = round(zone.direction / pi * _NUM_CROP_ANGLES) % _NUM_CROP_ANGLES
            index = 1 + _NUM_SUN_ANGLES + crop_angle
        canvas.polygon(zone.polygon, index)
    (x, y), texture_map = texture_start, np.asarray(canvas.image)
    texture = np.empty((_CANVAS_SIZE, _CANVAS_SIZE), np.uint8)
    for index in np.flatnonzero(np.bincount(texture_map.ravel())).tolist():
        part = _make_textures()[index][y : y + _CANVAS_SIZE, x : x + _CANVAS_SIZE]
        np.copyto(texture, part, where=texture_map == index)
    return Image.fromarray(texture)


@cache
def _make_noise() -> FloatArray:
    noise = np.random.default_rng(1).standard_normal((_TEXTURE_SIZE, _TEXTURE_SIZE, 3), dtype=np.float32)
    return np.ascontiguousarray(noise.transpose(2, 0, 1))


@cache
def _make_textures() -> list[ByteArray]:
    """Compute the textures: one of open ground, one of forests for each sun angle, and one of fields for each crop angle."""
    rng = np.random.default_rng(0)
    clouds = 0.7 * _sample_cloud(rng, 1.1) + 0.5 * _sample_cloud(rng, 0.35)
    tree_heights = np.zeros((_TEXTURE_SIZE, _TEXTURE_SIZE), np.float32)
    for x, y, radius in zip(*rng.uniform(0, _TEXTURE_SIZE, (2, 9000)), rng.uniform(2.5, 6, 9000)):
        x0, y0 = max(0, int(x - radius)), max(0, int(y - radius))
        x1, y1 = min(_TEXTURE_SIZE, int(x + radius) + 2), min(_TEXTURE_SIZE, int(y + radius) + 2)
        dx, dy = np.meshgrid(np.arange(x0, x1) - x, np.arange(y0, y1) - y)
        squared_distance = dx * dx + dy * dy
        crown = radius * np.sqrt(np.clip(1 - squared_distance / (radius * radius), 0, None)) + rng.uniform(0, 2)
        patch = tree_heights[y0:y1, x0:x1]
        np.maximum(patch, np.where(squared_distance < radius * radius, crown, 0), out=patch)
    slope_y, slope_x = np.gradient(tree_heights)
    forest_textures = []
    for direction in range(_NUM_SUN_ANGLES):
        angle = 2 * pi * direction / _NUM_SUN_ANGLES
        brightness = -(slope_x * cos(angle) + slope_y * sin(angle))
        relief = 0.55 * np.clip(brightness, -1.5, 1.5) + 0.16 * (tree_heights - tree_heights.mean())
        forest_textures.append(_to_bytes(relief + 0.2 * clouds))
    y, x = np.mgrid[:_TEXTURE_SIZE, :_TEXTURE_SIZE].astype(np.float32)
    field_textures = []
    for direction in range(_NUM_CROP_ANGLES):
        angle = pi * direction / _NUM_CROP_ANGLES
        across = y * cos(angle) - x * sin(angle)  # position across the crop rows
        field_textures.append(_to_bytes(0.75 * np.sin(across * (2 * pi / 5.5)) + 0.8 * clouds))
    return [_to_bytes(clouds), *forest_textures, *field_textures]


def _sample_cloud(rng: np.random.Generator, exponent: float) -> FloatArray:
    """Sample noise whose amplitude is proportional to frequency ** -exponent; its mean is 0, its standard deviation 1."""
    spectrum = np.fft.rfft2(rng.standard_normal((_TEXTURE_SIZE, _TEXTURE_SIZE)))
    frequency = np.hypot(np.fft.fftfreq(_TEXTURE_SIZE)[:, None], np.fft.rfftfreq(_TEXTURE_SIZE)[None])
    frequency[0, 0] = 1
    spectrum = spectrum / np.maximum(frequency, 4 / _TEXTURE_SIZE) ** exponent
    cloud = np.fft.irfft2(spectrum, (_TEXTURE_SIZE, _TEXTURE_SIZE))
    cloud -= cloud.mean()
    return (cloud / cloud.std()).astype(np.float32)


def _to_bytes(values: FloatArray) -> ByteArray:
    return np.clip(128 + 50 * values, 0, 255).astype(np.uint8)
