"""The pairs of `tiles`: a scene before and after one change, and the facts of the change that captions may state.

Pair k has the change `CHANGES[k // 2 % 8]` if k is even, and none if k is odd. A pair without change is drawn in the same way, and
then has the same state of the scene in both images, so that a single image does not show whether the pair has a change.
"""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from diffcap.utils.errors import DiffcapError
from diffcap.worlds.tiles import geometry, scenes
from diffcap.worlds.tiles.geometry import Polygon, along, blob, bounds, curve, offset, outline, rectangle
from diffcap.worlds.tiles.scenes import FIELD, FOREST, GRASS, OPEN, ROAD, SIZE, House, Layer, Plan, Road, Tree, Zone

INNER = 12  # a changed object, except a road, keeps this distance from the image's edges in pixels
NEAR = {"road": 16, "river": 25, "pond": 25, "forest": 20, "houses": 18}  # largest distances of "near" in pixels
_REMOVED = ("houses_removed", "trees_cleared", "water_gone")  # their objects are in the before image
_ATTEMPTS = 200
Points = npt.NDArray[np.float64]  # (n, 2)


class NoRoom(Exception):
    """A scene has no room for a change."""


@dataclass
class Change:
    """What differs between the states with and without the changed objects."""

    noun: str  # "house", "building" (a large one), "road", "trees", "forest", "clearing", "pond", "lake" or "ground"
    present: Layer  # things that are only in the image with the objects
    covers: set[int]  # what is below the objects, see `scenes.Plan`
    absent: Layer = field(default_factory=Layer)  # things that are only in the image without the objects
    count: int = 1  # of houses, or of single trees; 1 for other objects
    arrangement: str = ""  # of houses, "single", "group", "row" or "block"; "" for other objects
    # Further words that captions may use: "paved" or "dirt" and "joins" (a road that meets another one), "horizontal" or "vertical"
    # (one that crosses the image); "mud" (a pond that leaves mud), "only" (no other pond); the color of a single house's roof.
    details: list[str] = field(default_factory=list)
    kind: str = ""  # of `CHANGES`
    location: str = ""  # see `location_of`; "" if the change has none
    # Keys of `NEAR`, and "fields", "grass", "forest inside", that are true of all changed objects.
    relations: list[str] = field(default_factory=list)

    @property
    def in_before(self) -> bool:
        """Whether the objects are in the before image, and not in the after image."""
        return self.kind in _REMOVED

    def polygons(self) -> list[Polygon]:
        """Footprints of the changed objects, without roads."""
        areas = [zone.polygon for zone in (self.absent if self.noun == "clearing" else self.present).zones]
        houses = [house.footprint for house in self.present.houses]
        trees = [tree.footprint for tree in self.present.trees]
        return [*areas, *self.present.ponds, *houses, *trees]

    def facts(self) -> dict[str, Any]:
        """The facts as JSON values, for the manifest."""
        names = ("noun", "count", "arrangement", "details", "location", "relations")
        return {name: getattr(self, name) for name in names}


@dataclass
class Pair:
    """A pair of scenes: `change` is None if nothing has changed."""

    before: Layer
    after: Layer
    change: Change | None


def sample_pair(number: int, seed: int = 0) -> Pair:
    """Sample a pair by its number, which determines it together with the seed."""
    kind, changed = CHANGES[number // 2 % len(CHANGES)], number % 2 == 0
    variant = random.Random(f"tiles variant {seed} {number}").random()
    for attempt in range(_ATTEMPTS):
        rng = random.Random(f"tiles {seed} {number} {attempt}")
        try:
            scene, change = _attempt(rng, kind, variant)
        except NoRoom:
            continue
        states = scene.with_change(change.absent), scene.with_change(change.present)
        before, after = states[::-1] if change.in_before else states
        if not changed:
            before = after = rng.choice(states)
        return Pair(before, after, change if changed else None)
    raise DiffcapError(f"tiles: no scene has room for the change of pair {number} with seed {seed}; take another seed.")


def _attempt(rng: random.Random, kind: str, variant: float) -> tuple[Layer, Change]:
    """Sample a scene with a change.

    `variant`, 0 to 1, selects the form of a change. It is the same in all attempts, so that large forms are not rarer than intended.
    """
    theme = rng.choice(scenes.THEMES)
    clears = kind == "trees_cleared" and variant < 0.4
    plan = scenes.landscape(rng, theme, road=kind.startswith("houses"), forest=clears)
    change = _clearing(rng, plan) if clears else _MAKERS[kind](rng, plan, variant)
    change.kind = kind
    polygons = change.polygons()
    if polygons:
        box = bounds(polygons)
        if min(box) < INNER or max(box) > SIZE - INNER:
            raise NoRoom
        change.location = location_of(box)
    for polygon in polygons:
        plan.mark(scenes.grown(polygon, 3), scenes.RESERVED)
    scenes.furnish(rng, plan, theme)
    change.relations = _relations(change, plan.scene)
    return plan.scene, change


def _houses(rng: random.Random, plan: Plan, variant: float) -> Change:
    form, sample_houses = next((form, function) for form, limit, function in _HOUSE_FORMS if variant <= limit)
    for _ in range(12):
        houses = sample_houses(rng, plan)
        found = [plan.covers(*house.room(6)) for house in houses]
        box = bounds([house.footprint for house in houses]) if houses else (0, 0, SIZE, SIZE)
        if min(box) > INNER and max(box) < SIZE - INNER and all(covers <= OPEN for covers in found):
            break
    else:
        raise NoRoom
    arrangement = "single" if form == "building" else form
    details = [scenes.ROOFS[houses[0].roof]] if arrangement == "single" else []
    noun = "building" if form == "building" else "house"
    below = set().union(*found)
    return Change(noun, Layer(houses=houses), below, count=len(houses), arrangement=arrangement, details=details)


def _single(rng: random.Random, plan: Plan, large: bool = False) -> list[House]:
    if not large and rng.random() < 0.6:
        row = rng.choice(scenes.lots(rng, plan, 28))
        return [rng.choice(row)] if row else []
    return [scenes.random_house(rng, scenes.random_place(rng, 30), rng.uniform(0, math.pi), large)]


def _group(rng: random.Random, plan: Plan) -> list[House]:
    center, angle = scenes.random_place(rng, 30), rng.uniform(0, math.pi)
    houses: list[House] = []
    for _ in range(40):
        spot = center[0] + rng.uniform(-42, 42), center[1] + rng.uniform(-42, 42)
        house = scenes.random_house(rng, spot, angle + rng.choice((0, math.pi / 2)) + rng.uniform(-0.1, 0.1))
        clear = all(math.dist(spot, other.center) > 30 for other in houses)
        if clear and plan.free(*house.room(6)):
            houses.append(house)
        if len(houses) == 5:
            break
    return houses[: rng.randint(2, 5)] if len(houses) > 1 else []


def _row(rng: random.Random, plan: Plan) -> list[House]:
    for row in rng.sample(rows := scenes.lots(rng, plan, rng.uniform(23, 28), rng.uniform(5, 9)), len(rows)):
        count = rng.randint(3, 6)
        good = [
            plan.free(*house.room(6)) and all(INNER + 8 < value < SIZE - INNER - 8 for value in house.center)
            for house in row
        ]
        starts = [k for k in range(len(row) - count + 1) if all(good[k : k + count])]
        if starts:
            first = rng.choice(starts)
            return row[first : first + count]
    return []


def _block(rng: random.Random, plan: Plan) -> list[House]:
    center, angle = scenes.random_place(rng, 30), rng.uniform(0, math.pi)
    if rng.random() < 0.5 and plan.scene.roads:
        point, angle = rng.choice(along(rng.choice(plan.scene.roads).line, 10))
        center = offset(point, angle + rng.choice((-1, 1)) * math.pi / 2, rng.uniform(48, 58))
    columns, rows = rng.randint(3, 4), rng.randint(2, 3)
    houses = []
    for i in range(columns):
        for j in range(rows):
            middle = offset(center, angle, (i - (columns - 1) / 2) * 25)
            spot = offset(middle, angle + math.pi / 2, (j - (rows - 1) / 2) * 26)
            house = scenes.random_house(rng, spot, angle)
            houses.append(replace(house, length=min(house.length, 18)))
    return houses


# Arrangement, its largest variant, and the function that samples the houses.
_HOUSE_FORMS: tuple[tuple[str, float, Callable[[random.Random, Plan], list[House]]], ...] = (
    ("building", 0.1, partial(_single, large=True)),
    ("single", 0.3, _single),
    ("group", 0.57, _group),
    ("row", 0.84, _row),
    ("block", 1.0, _block),
)


def _road(rng: random.Random, plan: Plan, variant: float) -> Change:
    roads = plan.scene.roads
    paved = variant < 0.65
    spots = [spot for road in roads for spot in along(road.line, 6) if all(40 < value < SIZE - 40 for value in spot[0])]
    details = ["paved" if paved else "dirt"]
    if spots and rng.random() < 0.5:
        start, direction = rng.choice(spots)
        angle = direction + rng.choice((-1, 1)) * (math.pi / 2 + rng.uniform(-0.3, 0.3))
        control = offset(offset(start, angle, 100), angle + math.pi / 2, rng.uniform(-40, 40))
        line = curve(start, control, offset(start, angle, 330))
    else:
        sides = rng.choice(((0, 2), (1, 3), (0, 1), (1, 2), (2, 3), (3, 0)))
        line = scenes.crossing(rng, sides)
        details += {(0, 2): ["horizontal"], (1, 3): ["vertical"]}.get(sides, [])
    width = rng.uniform(9, 12) if paved else rng.uniform(7, 9)
    visible = [(point, turn) for point, turn in along(line, 3) if all(0 <= value <= SIZE for value in point)]
    found = [plan.covers(point, turn, 3, width + 2) for point, turn in visible]
    met = [index for index, covers in enumerate(found) if ROAD in covers]
    gaps = sum(later - earlier > 8 for earlier, later in itertools.pairwise(met))
    if any(not covers <= {GRASS, FIELD, FOREST, ROAD} for covers in found):
        raise NoRoom
    if len(visible) * 3 < 100 or len(met) > 14 or gaps:  # too short, or beside another road
        raise NoRoom
    if met:
        details.append("joins")
    free = [covers for covers in found if ROAD not in covers]
    share = {cover: sum(cover in covers for covers in free) / len(free) for cover in (FIELD, FOREST)}
    covers = {cover for cover in share if share[cover] > (0.6 if cover == FIELD else 0.35)}
    plan.mark_line(line, width + 5, scenes.RESERVED)
    return Change("road", Layer(roads=[Road(line, width, paved)]), covers, details=details)


def _open_blob(rng: random.Random, plan: Plan, least: float, most: float, gap: float) -> tuple[Polygon, set[int]]:
    """Sample a blob on open ground; return it with what is below it."""
    for _ in range(6):
        polygon = blob(rng, scenes.random_place(rng, 30), rng.uniform(least, most), rng.uniform(0.55, 1))
        covers = plan.covers_of(scenes.grown(polygon, gap))
        if covers <= OPEN:
            return polygon, covers
    raise NoRoom


def _trees(rng: random.Random, plan: Plan, variant: float) -> Change:
    trees: list[Tree] = []
    if variant < 0.7:
        polygon, covers = _open_blob(rng, plan, 20, 42, 12)
        for spot in scenes.edge_spots(rng, polygon):
            trees.append(Tree(spot, rng.uniform(3, 5.5), rng.randrange(scenes.TREE_TONES)))
        return Change("forest", Layer(zones=[Zone(polygon, "forest")], trees=trees), covers)
    center, spread = scenes.random_place(rng, 30), rng.uniform(26, 44)
    covers = set()
    for _ in range(60):
        spot = offset(center, rng.uniform(0, 2 * math.pi), spread * rng.random() ** 0.5)
        radius = rng.uniform(4, 6.5)
        below = plan.covers(spot, 0, 2 * radius + 2, 2 * radius + 2)
        if below <= OPEN and all(math.dist(spot, tree.center) > radius + tree.radius for tree in trees):
            trees.append(Tree(spot, radius, rng.randrange(scenes.TREE_TONES)))
            covers |= below
        if len(trees) == 14:
            break
    if len(trees) < 6:
        raise NoRoom
    return Change("trees", Layer(trees=trees), covers, count=len(trees))


def _clearing(rng: random.Random, plan: Plan) -> Change:
    forests = [zone for zone in plan.scene.zones if zone.surface == "forest"]
    for _ in range(10 if forests else 0):
        x0, y0, x1, y1 = bounds([rng.choice(forests).polygon])
        polygon = blob(rng, (rng.uniform(x0, x1), rng.uniform(y0, y1)), rng.uniform(18, 36), rng.uniform(0.6, 1))
        if plan.covers_of(scenes.grown(polygon, 9)) == {FOREST}:
            return Change("clearing", Layer(), {FOREST}, Layer(zones=[Zone(polygon, rng.choice(("bare", "grass")))]))
    raise NoRoom


def _water(rng: random.Random, plan: Plan, variant: float) -> Change:
    radius = (16.0, 22.0, 34.0)[int(3 * variant)]
    polygon, covers = _open_blob(rng, plan, radius, radius + 6, 7)
    details = [] if plan.scene.ponds else ["only"]
    return Change("lake" if radius > 30 else "pond", Layer(ponds=[polygon]), covers, details=details)


def _dried(rng: random.Random, plan: Plan, variant: float) -> Change:
    change = _water(rng, plan, variant)
    if rng.random() < 0.6:
        change.absent = Layer(zones=[Zone(change.present.ponds[0], "mud")])
        change.details.append("mud")
    return change


def _bare(rng: random.Random, plan: Plan, variant: float) -> Change:
    if variant < 0.5:
        polygon, covers = _open_blob(rng, plan, 22, 48, 4)
    else:
        center, angle = scenes.random_place(rng, 30), rng.uniform(0, math.pi)
        length, width = rng.uniform(40, 85), rng.uniform(30, 60)
        covers = plan.covers(center, angle, length + 8, width + 8)
        polygon = rectangle(center, angle, length, width)
        if not covers <= OPEN:
            raise NoRoom
    return Change("ground", Layer(zones=[Zone(polygon, "bare")]), covers)


_MAKERS: dict[str, Callable[[random.Random, Plan, float], Change]] = {
    "houses_built": _houses,
    "houses_removed": _houses,
    "road_built": _road,
    "trees_cleared": _trees,
    "trees_grown": _trees,
    "water_appeared": _water,
    "water_gone": _dried,
    "ground_bared": _bare,
}
CHANGES = tuple(_MAKERS)


def location_of(box: tuple[float, float, float, float]) -> str:
    """Return where a box (x0, y0, x1, y1) in pixels is in the image: "left", "top", "middle", "top left" and so on.

    " corner" is added if the box's middle is in the outer 27 % of both axes. "" if the box is too large or lies between these places.
    """
    places, centers = [], []
    for low, high, names in ((box[1], box[3], ("top", "bottom")), (box[0], box[2], ("left", "right"))):
        low, high = low / SIZE, high / SIZE
        center = (low + high) / 2
        centers.append(min(center, 1 - center))
        if center < 0.36 and high < 0.58:
            places.append(names[0])
        elif center > 0.64 and low > 0.42:
            places.append(names[1])
        elif 0.4 < center < 0.6 and low > 0.2 and high < 0.8:
            places.append("middle")
        else:
            places.append("")
    vertical, horizontal = places
    if vertical == horizontal == "middle":
        return "middle"
    named = [place for place in places if place not in ("", "middle")]
    if "" in places and "middle" in places:
        return ""
    corner = " corner" if len(named) == 2 and max(centers) < 0.27 else ""
    return " ".join(named) + corner


def _relations(change: Change, scene: Layer) -> list[str]:
    """Return the relations to unchanged things that hold for all changed objects."""
    wholly = {FIELD: "fields", GRASS: "grass", FOREST: "forest inside"}
    found = [wholly[cover] for cover in change.covers if len(change.covers) == 1 and cover in wholly]
    houses = [outline(house.footprint, 3) for house in scene.houses if all(4 < x < SIZE - 4 for x in house.center)]
    if change.noun == "road":
        line = change.present.roads[0]
        near = sum(_gap(points, line) < NEAR["houses"] for points in houses)
        return [*(wholly[cover] for cover in sorted(change.covers)), *(["houses"] if near > 2 else [])]
    objects = [outline(polygon, 3) for polygon in change.polygons()]
    for name, lines in (("road", scene.roads), ("river", scene.rivers)):
        if lines and all(min(_gap(points, line) for line in lines) < NEAR[name] for points in objects):
            found.append(name)
    forests = [zone.polygon for zone in scene.zones if zone.surface == "forest"]
    for name, areas in (
        ("pond", [outline(pond) for pond in scene.ponds]),
        ("forest", [outline(polygon) for polygon in forests]),
        ("houses", houses),
    ):
        areas = [points[np.all((points > 4) & (points < SIZE - 4), axis=1)] for points in areas]
        areas = [points for points in areas if len(points)]
        if change.noun != "clearing" and areas and _all_near(objects, areas, NEAR[name]):
            found.append(name)
    if "houses" in found and sum(_all_near(objects, [house], 45) for house in houses) < 2:
        found.remove("houses")
    return found


def _gap(points: Points, line: Road) -> float:
    """Return the distance of the nearest point from the edge of a road or river."""
    return float(geometry.distance_to_line(points, line.line).min()) - line.width / 2


def _all_near(objects: list[Points], areas: list[Points], limit: float) -> bool:
    return all(min(geometry.distance_between(points, area) for area in areas) < limit for points in objects)
