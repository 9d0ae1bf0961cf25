"""Random scenes of `tiles`. A `Plan` has the things of a scene, and a map of what covers each pixel, to place things on free ground."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, cos, floor, hypot, pi, sin
from random import Random

from PIL import Image, ImageDraw

from diffcap.worlds.tiles import geometry
from diffcap.worlds.tiles.geometry import Point, Polygon, offset, points_along, rectangle, sample_blob

SIZE = 256  # width and height of an image in pixels
MARGIN = 16  # pixels around an image that are drawn as well, because the after image is shifted and rotated
NUM_FIELD_TONES = 20  # number of colors of fields
ROOF_COLORS = ("red", "brown", "gray", "dark", "blue", "white")
NUM_TREE_TONES = 3  # number of colors of trees
NUM_CAR_COLORS = 6


@dataclass(frozen=True)
class Zone:
    """An area of one surface."""

    polygon: Polygon
    surface: str  # "field", "forest", "bare", "mud", "grass" or "parking"
    tone: int = 0  # color of a field, 0 to `NUM_FIELD_TONES` - 1
    direction: float = 0.0  # angle of a field's crop rows


@dataclass(frozen=True)
class Road:
    """A road or a river: its middle line, and its width in pixels."""

    line: Polygon  # points along the middle line, from one end to the other; not closed
    width: float
    is_paved: bool = True


@dataclass(frozen=True)
class House:
    """A building. `length` is the side in the direction `angle`; the ridge of a gable roof has this direction. Lengths are in pixels."""

    center: Point
    angle: float
    length: float
    width: float
    height: float
    roof: int  # index into `ROOF_COLORS`
    has_gable: bool

    @property
    def footprint(self) -> Polygon:
        """The four corners of its rectangle on the ground."""
        return rectangle(self.center, self.angle, self.length, self.width)

    def padded(self, gap: float) -> tuple[Point, float, float, float]:
        """Return center, angle, length and width of the footprint, with length and width larger by `gap` pixels."""
        return self.center, self.angle, self.length + gap, self.width + gap


@dataclass(frozen=True)
class Tree:
    """A single tree with a round crown."""

    center: Point
    radius: float
    tone: int  # color, 0 to `NUM_TREE_TONES` - 1

    @property
    def height(self) -> float:
        """Height of the middle of the crown, in pixels."""
        return 1.3 * self.radius

    @property
    def footprint(self) -> Polygon:
        """The outline of the crown."""
        return tuple(offset(self.center, k * pi / 6, self.radius) for k in range(12))


@dataclass(frozen=True)
class Car:
    """A parked car."""

    center: Point
    angle: float
    color: int  # 0 to `NUM_CAR_COLORS` - 1


@dataclass
class Layer:
    """The things of a scene, or the things that a change adds to it. They are drawn in the order of these lists."""

    zones: list[Zone] = field(default_factory=list)
    rivers: list[Road] = field(default_factory=list)
    ponds: list[Polygon] = field(default_factory=list)
    roads: list[Road] = field(default_factory=list)
    houses: list[House] = field(default_factory=list)
    trees: list[Tree] = field(default_factory=list)
    cars: list[Car] = field(default_factory=list)

    def with_change(self, added: "Layer") -> "Layer":
        """Return a layer with the things of this layer and of `added`. Roads of `added` are drawn below the roads of this layer."""
        zones, ponds, roads = self.zones + added.zones, self.ponds + added.ponds, added.roads + self.roads
        houses, trees = self.houses + added.houses, self.trees + added.trees
        return Layer(zones, self.rivers, ponds, roads, houses, trees, self.cars)


# Covers: what can be at a pixel of a plan. RESERVED pixels are kept free for a change; places outside of the map count as RESERVED, too.
GRASS, FIELD, FOREST, WATER, ROAD, BUILT, TREE, RESERVED = range(8)
OPEN = frozenset({GRASS, FIELD})  # covers on which things can be placed


class Plan:
    """A map with the cover of each pixel, and the things of the scene so far."""

    def __init__(self) -> None:
        self.map = Image.new("L", (SIZE + 2 * MARGIN, SIZE + 2 * MARGIN), GRASS)
        self._draw = ImageDraw.Draw(self.map)
        self._map_pixels = self.map.load()
        self.scene = Layer()

    def mark_polygon(self, polygon: Polygon, cover: int) -> None:
        """Set the cover of the pixels in a polygon."""
        self._draw.polygon([(x + MARGIN, y + MARGIN) for x, y in polygon], fill=cover)

    def mark_line(self, line: Polygon, width: float, cover: int) -> None:
        """Set the cover of the pixels on a line of a width in pixels."""
        points = [(x + MARGIN, y + MARGIN) for x, y in line]
        self._draw.line(points, fill=cover, width=ceil(width), joint="curve")

    def covers_in(self, center: Point, angle: float, length: float, width: float) -> set[int]:
        """Return the covers in a rectangle, read every three pixels; `RESERVED` is one of them if a part is outside of the map."""
        num_columns, num_rows = max(2, ceil(length / 3) + 1), max(2, ceil(width / 3) + 1)
        cosine, sine = cos(angle), sin(angle)
        distances = ((row / (num_rows - 1) - 0.5) * width for row in range(num_rows))  # from the middle of a column
        steps = [(distance * sine, distance * cosine) for distance in distances]
        points = []
        for column in range(num_columns):
            distance = (column / (num_columns - 1) - 0.5) * length
            x0, y0 = center[0] + distance * cosine + MARGIN, center[1] + distance * sine + MARGIN
            points += [(x0 - dx, y0 + dy) for dx, dy in steps]
        map_size, map_pixels = SIZE + 2 * MARGIN, self._map_pixels
        edges = [value for k in (0, num_rows - 1, -num_rows, -1) for value in points[k]]  # x and y of the four corners
        is_inside = min(edges) >= 0 and max(edges) < map_size
        if not is_inside:
            points = [(x, y) for x, y in points if 0 <= x < map_size and 0 <= y < map_size]
        covers: set[int] = {map_pixels[point] for point in points}  # type: ignore[index, misc]  # of an "L" image
        return covers if is_inside else covers | {RESERVED}

    def is_free(self, center: Point, angle: float, length: float, width: float, allowed: frozenset[int] = OPEN) -> bool:
        """Return True if a rectangle is on the map and has only allowed covers."""
        return self.covers_in(center, angle, length, width) <= allowed

    def covers_in_polygon(self, polygon: Polygon) -> set[int]:
        """Return the covers in the part of a polygon that is on the map."""
        x0, y0, x1, y1 = (floor(value) + MARGIN for value in geometry.bounding_box([polygon]))
        mask = Image.new("L", (x1 - x0 + 2, y1 - y0 + 2))
        ImageDraw.Draw(mask).polygon([(x + MARGIN - x0, y + MARGIN - y0) for x, y in polygon], fill=255)
        counts = self.map.crop((x0, y0, x0 + mask.width, y0 + mask.height)).histogram(mask)
        return {cover for cover in range(RESERVED + 1) if counts[cover]}

    def add_house(self, house: House) -> None:
        """Add a house to the scene."""
        self.scene.houses.append(house)
        self.mark_polygon(rectangle(*house.padded(6)), BUILT)

    def add_tree(self, tree: Tree) -> None:
        """Add a tree to the scene."""
        self.scene.trees.append(tree)
        x, y = tree.center[0] + MARGIN, tree.center[1] + MARGIN
        self._draw.ellipse((x - tree.radius, y - tree.radius, x + tree.radius, y + tree.radius), fill=TREE)


def sample_place(rng: Random, margin: float) -> Point:
    """Sample a place that is at least `margin` pixels away from the image's edges."""
    return rng.uniform(margin, SIZE - margin), rng.uniform(margin, SIZE - margin)


def sample_house(rng: Random, center: Point, angle: float, is_large: bool = False) -> House:
    """Sample a house with a gable or a flat roof, or a large building with a flat roof."""
    if is_large:
        length, width = rng.uniform(38, 54), rng.uniform(24, 34)
        return House(center, angle, length, width, rng.uniform(8, 13), rng.choice((2, 2, 4, 5)), False)
    has_gable = rng.random() < 0.75
    roof = rng.choice((0, 0, 1, 1, 2, 3)) if has_gable else rng.choice((2, 3, 4, 5))
    return House(center, angle, rng.uniform(15, 22), rng.uniform(11, 15), rng.uniform(5, 8), roof, has_gable)


def sample_landscape(rng: Random, theme: str, needs_road: bool, needs_forest: bool) -> Plan:
    """Sample fields, water, forests and roads, but no houses or single trees.

    With `needs_road`, there is a road. With `needs_forest`, there is a forest, unless a river is in its place.
    """
    plan = Plan()
    if theme == "village" or (theme == "forest" and rng.random() < 0.4):
        # Cover the scene with a rotated grid of fields, a few of which are left out.
        angle = rng.uniform(-0.5, 0.5)
        column_edges, row_edges = ([-190.0], [-190.0])  # pixels from the middle of the image
        for edges, min_size, max_size in ((column_edges, 60, 130), (row_edges, 45, 100)):
            while edges[-1] < 190:
                edges.append(edges[-1] + rng.uniform(min_size, max_size))
        cosine, sine = cos(angle), sin(angle)
        for left, right in pairwise(column_edges):
            for top, bottom in pairwise(row_edges):
                if rng.random() < 0.12:
                    continue
                corners = ((left + 2, top + 2), (right - 2, top + 2), (right - 2, bottom - 2), (left + 2, bottom - 2))
                polygon = tuple((128 + x * cosine - y * sine, 128 + x * sine + y * cosine) for x, y in corners)
                direction = angle + rng.choice((0, pi / 2))
                plan.scene.zones.append(Zone(polygon, "field", rng.randrange(NUM_FIELD_TONES), direction))
                plan.mark_polygon(polygon, FIELD)
    if rng.random() < {"suburb": 0.12, "village": 0.25, "forest": 0.25}[theme]:
        river = Road(sample_crossing(rng, bend=90), rng.uniform(14, 30))
        plan.scene.rivers.append(river)
        plan.mark_line(river.line, river.width + 8, WATER)
    if theme == "forest" or needs_forest or rng.random() < 0.35:
        is_large = theme == "forest"
        for _ in range(rng.choice((2, 3)) if is_large else 1):
            radius = rng.uniform(65, 95) if is_large else rng.uniform(38, 62)
            polygon = sample_blob(rng, sample_place(rng, 10), radius, rng.uniform(0.6, 1), corners=60)
            if WATER not in plan.covers_in_polygon(polygon):
                plan.scene.zones.append(Zone(polygon, "forest"))
                plan.mark_polygon(polygon, FOREST)
    if needs_road or theme == "suburb" or rng.random() < 0.7:
        num_roads = 1 if theme != "suburb" else rng.choice((1, 2, 2, 3))
        _add_roads(rng, plan, num_roads, is_paved=theme == "suburb" or rng.random() < 0.7)
    if rng.random() < 0.2:
        for _ in range(5):
            pond = sample_blob(rng, sample_place(rng, 30), rng.uniform(14, 30), rng.uniform(0.55, 1))
            if plan.covers_in_polygon(pond) <= OPEN:
                plan.scene.ponds.append(pond)
                plan.mark_polygon(grow_polygon(pond, 4), WATER)
                break
    return plan


def grow_polygon(polygon: Polygon, distance: float) -> Polygon:
    """Return a polygon whose corners are moved away from its middle by a distance in pixels."""
    x, y = (sum(values) / len(polygon) for values in zip(*polygon))
    corners = []
    for x1, y1 in polygon:
        length = max(1e-6, hypot(x1 - x, y1 - y))
        corners.append((x1 + distance * (x1 - x) / length, y1 + distance * (y1 - y) / length))
    return tuple(corners)


def sample_crossing(rng: Random, sides: tuple[int, int] | None = None, bend: float = 60.0) -> Polygon:
    """Sample a curve between two sides of the image: 0 left, 1 upper, 2 right, 3 lower. `bend`, in pixels, limits how far it is bent."""
    ends: list[Point] = []
    for side in sides or rng.choice(((0, 2), (1, 3), (0, 2), (1, 3), (0, 1), (1, 2), (2, 3), (3, 0))):
        position = rng.uniform(40, SIZE - 40)
        ends.append(((-30, position), (position, -30), (SIZE + 30, position), (position, SIZE + 30))[side])
    x, y = (sum(values) / 2 + rng.uniform(-bend, bend) for values in zip(*ends))
    return geometry.bezier_curve(ends[0], (x, y), ends[1])


def _add_roads(rng: Random, plan: Plan, num_roads: int, is_paved: bool) -> None:
    sides = rng.choice(((0, 2), (1, 3)))
    main_road = Road(sample_crossing(rng, sides), rng.uniform(9, 13) if is_paved else rng.uniform(6, 8), is_paved)
    plan.scene.roads.append(main_road)
    places = points_along(main_road.line, 6)
    junctions = [place for place in places if all(50 < value < SIZE - 50 for value in place[0])]
    turns = rng.sample((pi / 2, -pi / 2), 2)
    for turn in turns[: num_roads - 1] if junctions else ():
        start, direction = rng.choice(junctions)
        angle = direction + turn + rng.uniform(-0.15, 0.15)
        end = offset(start, angle, 330)
        control = offset(offset(start, angle, 120), angle + pi / 2, rng.uniform(-25, 25))
        plan.scene.roads.append(Road(geometry.bezier_curve(start, control, end), main_road.width - 2, is_paved))
    for road in plan.scene.roads:
        plan.mark_line(road.line, road.width + 4, ROAD)


def sample_house_rows(rng: Random, plan: Plan, spacing: float, setback: float = 7.0) -> list[list[House]]:
    """Sample a row of houses on each side of each road, `setback` pixels from it, in order along it. Houses can overlap other things."""
    rows = []
    for road in plan.scene.roads:
        for side in (-1, 1):
            row = []
            for point, direction in points_along(road.line, spacing, rng.uniform(0, spacing)):
                house = sample_house(rng, point, direction)
                center = offset(point, direction + side * pi / 2, road.width / 2 + setback + house.width / 2)
                row.append(replace(house, center=center, length=min(house.length, spacing - 7)))
            rows.append(row)
    return rows


def add_things(rng: Random, plan: Plan, theme: str) -> None:
    """Add houses along the roads, a parking lot, and single trees, where the ground is free."""
    density = {"suburb": rng.uniform(0.35, 0.95), "village": rng.uniform(0, 0.3), "forest": rng.uniform(0, 0.2)}[theme]
    if theme == "suburb" and rng.random() < 0.4:
        _add_parking(rng, plan)
    for row in sample_house_rows(rng, plan, rng.uniform(25, 32)):
        for house in row:
            if rng.random() < density and plan.is_free(*house.padded(6)):
                plan.add_house(house)
    if rng.random() < (0.5 if theme == "suburb" else 0.2):
        for _ in range(8):
            center = sample_place(rng, -5)
            house = sample_house(rng, center, rng.uniform(0, pi), is_large=theme == "suburb")
            if plan.is_free(*house.padded(8)):
                plan.add_house(house)
                break
    for zone in plan.scene.zones:  # trees along the edges of the forests
        for center in sample_edge_places(rng, zone.polygon) if zone.surface == "forest" else ():
            radius = rng.uniform(3, 5.5)
            nearby_covers = plan.covers_in(center, 0.0, 2 * radius + 2, 2 * radius + 2)
            if nearby_covers <= {GRASS, FIELD, FOREST, TREE} and nearby_covers & OPEN:  # not inside of another forest
                plan.add_tree(Tree(center, radius, rng.randrange(NUM_TREE_TONES)))
    num_trees = rng.randint(15, 60) if theme == "suburb" else rng.randint(5, 30)
    for _ in range(num_trees):
        center, radius = sample_place(rng, -10), rng.uniform(2.5, 6)
        allowed = frozenset({GRASS}) if theme != "village" or rng.random() < 0.7 else OPEN
        if plan.is_free(center, 0.0, 2 * radius + 3, 2 * radius + 3, allowed):
            plan.add_tree(Tree(center, radius, rng.randrange(NUM_TREE_TONES)))


def sample_edge_places(rng: Random, polygon: Polygon) -> Iterator[Point]:
    """Yield random places for trees along the edge of a forest."""
    for (x, y), _ in points_along((*polygon, polygon[0]), rng.uniform(6, 8)):
        yield x + rng.uniform(-2, 2), y + rng.uniform(-2, 2)


def _add_parking(rng: Random, plan: Plan) -> None:
    for _ in range(12):
        length, width = rng.uniform(44, 76), rng.choice((30.0, 44.0))
        road_places = [spot for road in plan.scene.roads for spot in points_along(road.line, 9)]
        if not road_places:
            return
        point, angle = rng.choice(road_places)
        center = offset(point, angle + rng.choice((-1, 1)) * pi / 2, width / 2 + 12)
        if not plan.is_free(center, angle, length + 4, width + 4):
            continue
        polygon = rectangle(center, angle, length, width)
        plan.scene.zones.append(Zone(polygon, "parking"))
        plan.mark_polygon(polygon, BUILT)
        for row in range(int(width / 14)):
            start = offset(center, angle + pi / 2, (row + 0.5) * 14 - width / 2)
            for column in range(int(length / 6)):
                if rng.random() < 0.6:
                    car_center = offset(start, angle, (column + 0.5) * 6 - length / 2)
                    plan.scene.cars.append(Car(car_center, angle + pi / 2, rng.randrange(NUM_CAR_COLORS)))
        return
