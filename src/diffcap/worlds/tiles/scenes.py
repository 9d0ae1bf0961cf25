"""Random scenes of `tiles`. Things are only placed where `Plan` has room, so that houses overlap no road, water, tree or other house."""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from PIL import Image, ImageDraw

from diffcap.worlds.tiles.geometry import Point, Polygon, along, blob, bounds, curve, offset, rectangle

SIZE = 256  # width and height of an image in pixels
MARGIN = 16  # pixels around an image that are drawn as well, because the after image is shifted and rotated
FIELD_TONES = 20
ROOFS = ("red", "brown", "gray", "dark", "blue", "white")
TREE_TONES = 3
CAR_COLORS = 6
THEMES = ("suburb", "village", "forest")


@dataclass(frozen=True)
class Zone:
    """An area of one surface. `tone` is 0 to `FIELD_TONES` - 1 for a field, and `direction` that of its crop rows."""

    polygon: Polygon
    surface: str  # "field", "forest", "bare", "mud", "grass" or "parking"
    tone: int = 0
    direction: float = 0.0


@dataclass(frozen=True)
class Road:
    """A road or a river: its middle line, and its width in pixels."""

    line: Polygon
    width: float
    paved: bool = True


@dataclass(frozen=True)
class House:
    """A building. `length` is along `angle`, the direction of a gable roof's ridge; all lengths are in pixels."""

    center: Point
    angle: float
    length: float
    width: float
    height: float
    roof: int  # index into `ROOFS`
    gable: bool

    @property
    def footprint(self) -> Polygon:
        """Its four corners."""
        return rectangle(self.center, self.angle, self.length, self.width)

    def room(self, gap: float) -> tuple[Point, float, float, float]:
        """Center, angle, length and width of a rectangle that is larger by a gap."""
        return self.center, self.angle, self.length + gap, self.width + gap


@dataclass(frozen=True)
class Tree:
    """A single tree with a round crown."""

    center: Point
    radius: float
    tone: int

    @property
    def height(self) -> float:
        """Height of the middle of the crown, in pixels."""
        return 1.3 * self.radius

    @property
    def footprint(self) -> Polygon:
        """The outline of the crown."""
        return tuple(offset(self.center, k * math.pi / 6, self.radius) for k in range(12))


@dataclass(frozen=True)
class Car:
    """A parked car."""

    center: Point
    angle: float
    color: int


@dataclass
class Layer:
    """Things of a scene; each list is drawn in its order, and the lists in the order of the attributes."""

    zones: list[Zone] = field(default_factory=list)
    rivers: list[Road] = field(default_factory=list)
    ponds: list[Polygon] = field(default_factory=list)
    roads: list[Road] = field(default_factory=list)
    houses: list[House] = field(default_factory=list)
    trees: list[Tree] = field(default_factory=list)
    cars: list[Car] = field(default_factory=list)

    def with_change(self, changed: "Layer") -> "Layer":
        """Return this layer with the things of another one. New roads are below the old ones, which look the same at junctions."""
        return Layer(
            self.zones + changed.zones,
            self.rivers,
            self.ponds + changed.ponds,
            changed.roads + self.roads,
            self.houses + changed.houses,
            self.trees + changed.trees,
            self.cars,
        )


# What covers a pixel of the plan. For `Plan.free`, everything outside of OPEN is an obstacle unless it is allowed.
GRASS, FIELD, FOREST, WATER, ROAD, BUILT, TREE, RESERVED = range(8)
OPEN = frozenset({GRASS, FIELD})


class Plan:
    """A map of what covers the ground, and the things of the scene so far."""

    def __init__(self) -> None:
        self.map = Image.new("L", (SIZE + 2 * MARGIN, SIZE + 2 * MARGIN), GRASS)
        self._draw = ImageDraw.Draw(self.map)
        self._pixels = self.map.load()
        self.scene = Layer()

    def mark(self, polygon: Polygon, cover: int) -> None:
        """Cover a polygon."""
        self._draw.polygon([(x + MARGIN, y + MARGIN) for x, y in polygon], fill=cover)

    def mark_line(self, line: Polygon, width: float, cover: int) -> None:
        """Cover a line of a width."""
        points = [(x + MARGIN, y + MARGIN) for x, y in line]
        self._draw.line(points, fill=cover, width=math.ceil(width), joint="curve")

    def _points(
        self, center: Point, angle: float, length: float, width: float
    ) -> tuple[list[Point], list[Point], bool]:
        """Points of a rectangle every three pixels, its corners, and whether all of them are on the map."""
        columns, rows = max(2, math.ceil(length / 3) + 1), max(2, math.ceil(width / 3) + 1)
        ux, uy = math.cos(angle), math.sin(angle)
        steps = [(b * uy, b * ux) for b in ((j / (rows - 1) - 0.5) * width for j in range(rows))]
        points = []
        for i in range(columns):
            a = (i / (columns - 1) - 0.5) * length
            x0, y0 = center[0] + a * ux + MARGIN, center[1] + a * uy + MARGIN
            points += [(x0 - dx, y0 + dy) for dx, dy in steps]
        corners = [points[k] for k in (0, rows - 1, -rows, -1)]
        xs, ys = zip(*corners)
        return points, corners, min(*xs, *ys) >= 0 and max(*xs, *ys) < SIZE + 2 * MARGIN

    def _found(self, points: list[Point]) -> set[int]:
        pixels = self._pixels
        return {pixels[point] for point in points}  # type: ignore[index, misc]  # load() of an "L" image gives integers

    def covers(self, center: Point, angle: float, length: float, width: float) -> set[int]:
        """What covers a rectangle, looked up every three pixels; RESERVED outside of the map."""
        points, _, inside = self._points(center, angle, length, width)
        if inside:
            return self._found(points)
        end = SIZE + 2 * MARGIN
        return {RESERVED} | self._found([(x, y) for x, y in points if 0 <= x < end and 0 <= y < end])

    def free(self, center: Point, angle: float, length: float, width: float, allowed: frozenset[int] = OPEN) -> bool:
        """Return whether a rectangle has no obstacle."""
        points, corners, inside = self._points(center, angle, length, width)
        return inside and self._found(corners) <= allowed and self._found(points) <= allowed

    def covers_of(self, polygon: Polygon) -> set[int]:
        """What covers the part of a polygon that is on the map."""
        x0, y0, x1, y1 = (math.floor(value) + MARGIN for value in bounds([polygon]))
        mask = Image.new("L", (x1 - x0 + 2, y1 - y0 + 2))
        ImageDraw.Draw(mask).polygon([(x + MARGIN - x0, y + MARGIN - y0) for x, y in polygon], fill=255)
        counts = self.map.crop((x0, y0, x0 + mask.width, y0 + mask.height)).histogram(mask)
        return {cover for cover in range(RESERVED + 1) if counts[cover]}

    def build(self, house: House) -> None:
        """Add a house to the scene."""
        self.scene.houses.append(house)
        self.mark(rectangle(*house.room(6)), BUILT)

    def plant(self, tree: Tree) -> None:
        """Add a tree to the scene."""
        self.scene.trees.append(tree)
        (x, y), r = tree.center, tree.radius
        self._draw.ellipse((x + MARGIN - r, y + MARGIN - r, x + MARGIN + r, y + MARGIN + r), fill=TREE)


def random_place(rng: random.Random, margin: float) -> Point:
    """Sample a place that is at least `margin` pixels away from the image's edges."""
    return rng.uniform(margin, SIZE - margin), rng.uniform(margin, SIZE - margin)


def random_house(rng: random.Random, center: Point, angle: float, large: bool = False) -> House:
    """Sample a house with a gable or a flat roof, or a large building with a flat roof."""
    if large:
        length, width = rng.uniform(38, 54), rng.uniform(24, 34)
        return House(center, angle, length, width, rng.uniform(8, 13), rng.choice((2, 2, 4, 5)), False)
    gable = rng.random() < 0.75
    roof = rng.choice((0, 0, 1, 1, 2, 3)) if gable else rng.choice((2, 3, 4, 5))
    return House(center, angle, rng.uniform(15, 22), rng.uniform(11, 15), rng.uniform(5, 8), roof, gable)


def landscape(rng: random.Random, theme: str, road: bool, forest: bool) -> Plan:
    """Sample a scene with ground, water and roads, but without houses and single trees; `road`, `forest`: it must have one."""
    plan = Plan()
    if theme == "village" or (theme == "forest" and rng.random() < 0.4):
        _add_fields(rng, plan)
    if rng.random() < {"suburb": 0.12, "village": 0.25, "forest": 0.25}[theme]:
        river = Road(crossing(rng, bend=90), rng.uniform(14, 30))
        plan.scene.rivers.append(river)
        plan.mark_line(river.line, river.width + 8, WATER)
    if theme == "forest" or forest or rng.random() < 0.35:
        large = theme == "forest"
        for _ in range(rng.choice((2, 3)) if large else 1):
            radius = rng.uniform(65, 95) if large else rng.uniform(38, 62)
            polygon = blob(rng, random_place(rng, 10), radius, rng.uniform(0.6, 1), corners=60)
            if WATER not in plan.covers_of(polygon):
                plan.scene.zones.append(Zone(polygon, "forest"))
                plan.mark(polygon, FOREST)
    if road or theme == "suburb" or rng.random() < 0.7:
        count = 1 if theme != "suburb" else rng.choice((1, 2, 2, 3))
        _add_roads(rng, plan, count, paved=theme == "suburb" or rng.random() < 0.7)
    if rng.random() < 0.2:
        for _ in range(5):
            pond = blob(rng, random_place(rng, 30), rng.uniform(14, 30), rng.uniform(0.55, 1))
            if plan.covers_of(pond) <= OPEN:
                plan.scene.ponds.append(pond)
                plan.mark(grown(pond, 4), WATER)
                break
    return plan


def grown(polygon: Polygon, distance: float) -> Polygon:
    """Return a polygon whose corners are moved away from its middle by a distance in pixels."""
    x, y = (sum(values) / len(polygon) for values in zip(*polygon))
    moved = []
    for px, py in polygon:
        length = max(1e-6, math.hypot(px - x, py - y))
        moved.append((px + distance * (px - x) / length, py + distance * (py - y) / length))
    return tuple(moved)


def _add_fields(rng: random.Random, plan: Plan) -> None:
    """Cover the scene with a rotated grid of fields, a few of which are left out."""
    angle = rng.uniform(-0.5, 0.5)
    columns, rows = ([-190.0], [-190.0])
    for edges, least, most in ((columns, 60, 130), (rows, 45, 100)):
        while edges[-1] < 190:
            edges.append(edges[-1] + rng.uniform(least, most))
    ux, uy = math.cos(angle), math.sin(angle)
    for a0, a1 in itertools.pairwise(columns):
        for b0, b1 in itertools.pairwise(rows):
            if rng.random() < 0.12:
                continue
            corners = ((a0 + 2, b0 + 2), (a1 - 2, b0 + 2), (a1 - 2, b1 - 2), (a0 + 2, b1 - 2))
            polygon = tuple((128 + a * ux - b * uy, 128 + a * uy + b * ux) for a, b in corners)
            direction = angle + rng.choice((0, math.pi / 2))
            plan.scene.zones.append(Zone(polygon, "field", rng.randrange(FIELD_TONES), direction))
            plan.mark(polygon, FIELD)


def crossing(rng: random.Random, sides: tuple[int, int] | None = None, bend: float = 60.0) -> Polygon:
    """Sample a curve through the image, between two of its sides (0 left, 1 upper, 2 right, 3 lower)."""
    ends: list[Point] = []
    for side in sides or rng.choice(((0, 2), (1, 3), (0, 2), (1, 3), (0, 1), (1, 2), (2, 3), (3, 0))):
        place = rng.uniform(40, SIZE - 40)
        ends.append(((-30, place), (place, -30), (SIZE + 30, place), (place, SIZE + 30))[side])
    x, y = (sum(values) / 2 + rng.uniform(-bend, bend) for values in zip(*ends))
    return curve(ends[0], (x, y), ends[1])


def _add_roads(rng: random.Random, plan: Plan, count: int, paved: bool) -> None:
    sides = rng.choice(((0, 2), (1, 3)))
    main = Road(crossing(rng, sides), rng.uniform(9, 13) if paved else rng.uniform(6, 8), paved)
    plan.scene.roads.append(main)
    spots = [spot for spot in along(main.line, 6) if 50 < spot[0][0] < SIZE - 50 and 50 < spot[0][1] < SIZE - 50]
    turns = rng.sample((math.pi / 2, -math.pi / 2), 2)
    for number in range(count - 1):
        if not spots:
            break
        start, direction = rng.choice(spots)
        angle = direction + turns[number] + rng.uniform(-0.15, 0.15)
        end = offset(start, angle, 330)
        control = offset(offset(start, angle, 120), angle + math.pi / 2, rng.uniform(-25, 25))
        plan.scene.roads.append(Road(curve(start, control, end), main.width - 2, paved))
    for road in plan.scene.roads:
        plan.mark_line(road.line, road.width + 4, ROAD)


def lots(rng: random.Random, plan: Plan, spacing: float, setback: float = 7.0) -> list[list[House]]:
    """Sample houses along the roads, without checking for room: a list for each side of each road, in the order along it."""
    rows = []
    for road in plan.scene.roads:
        for side in (-1, 1):
            row = []
            for point, direction in along(road.line, spacing, rng.uniform(0, spacing)):
                house = random_house(rng, point, direction)
                center = offset(point, direction + side * math.pi / 2, road.width / 2 + setback + house.width / 2)
                row.append(replace(house, center=center, length=min(house.length, spacing - 7)))
            rows.append(row)
    return rows


def furnish(rng: random.Random, plan: Plan, theme: str) -> None:
    """Add houses along the roads, a parking lot, and single trees, where there is room."""
    density = {"suburb": rng.uniform(0.35, 0.95), "village": rng.uniform(0, 0.3), "forest": rng.uniform(0, 0.2)}[theme]
    if theme == "suburb" and rng.random() < 0.4:
        _add_parking(rng, plan)
    for row in lots(rng, plan, rng.uniform(25, 32)):
        for house in row:
            if rng.random() < density and plan.free(*house.room(6)):
                plan.build(house)
    if rng.random() < (0.5 if theme == "suburb" else 0.2):
        for _ in range(8):
            center = random_place(rng, -5)
            house = random_house(rng, center, rng.uniform(0, math.pi), large=theme == "suburb")
            if plan.free(*house.room(8)):
                plan.build(house)
                break
    for zone in plan.scene.zones:  # trees along the edges of the forests
        for center in edge_spots(rng, zone.polygon) if zone.surface == "forest" else ():
            radius = rng.uniform(3, 5.5)
            near = plan.covers(center, 0.0, 2 * radius + 2, 2 * radius + 2)
            if near <= {GRASS, FIELD, FOREST, TREE} and near & OPEN:  # not inside of another forest
                plan.plant(Tree(center, radius, rng.randrange(TREE_TONES)))
    count = rng.randint(15, 60) if theme == "suburb" else rng.randint(5, 30)
    for _ in range(count):
        center, radius = random_place(rng, -10), rng.uniform(2.5, 6)
        allowed = frozenset({GRASS}) if theme != "village" or rng.random() < 0.7 else OPEN
        if plan.free(center, 0.0, 2 * radius + 3, 2 * radius + 3, allowed):
            plan.plant(Tree(center, radius, rng.randrange(TREE_TONES)))


def edge_spots(rng: random.Random, polygon: Polygon) -> Iterator[Point]:
    """Yield random places for trees along the edge of a forest."""
    for (x, y), _ in along((*polygon, polygon[0]), rng.uniform(6, 8)):
        yield x + rng.uniform(-2, 2), y + rng.uniform(-2, 2)


def _add_parking(rng: random.Random, plan: Plan) -> None:
    """Add a parking lot with rows of cars, next to a road if there is room."""
    for _ in range(12):
        length, width = rng.uniform(44, 76), rng.choice((30.0, 44.0))
        spots = [spot for road in plan.scene.roads for spot in along(road.line, 9)]
        if not spots:
            return
        point, angle = rng.choice(spots)
        center = offset(point, angle + rng.choice((-1, 1)) * math.pi / 2, width / 2 + 12)
        if not plan.free(center, angle, length + 4, width + 4):
            continue
        polygon = rectangle(center, angle, length, width)
        plan.scene.zones.append(Zone(polygon, "parking"))
        plan.mark(polygon, BUILT)
        for row in range(int(width / 14)):
            start = offset(center, angle + math.pi / 2, (row + 0.5) * 14 - width / 2)
            for column in range(int(length / 6)):
                if rng.random() < 0.6:
                    place = offset(start, angle, (column + 0.5) * 6 - length / 2)
                    plan.scene.cars.append(Car(place, angle + math.pi / 2, rng.randrange(CAR_COLORS)))
        return
