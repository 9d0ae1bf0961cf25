"""The pairs of `tiles`: a scene before and after one change, and the facts of the change that captions may state.

Pair k has the change `CHANGES[k // 2 % 8]` if k is even, and no change if k is odd. A pair without change is sampled in the same way, but
both images show the scene before the change, or both the scene after it. So one image alone does not show if its pair has a change. In this
module, a `Plan` is a scene with a map of what covers each pixel, and a `Layer` has things of a scene.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from math import dist, pi
from random import Random
from typing import Any

import numpy as np

from diffcap.utils.errors import DiffcapError
from diffcap.worlds.tiles import geometry, scenes
from diffcap.worlds.tiles.geometry import Polygon, bounding_box, offset, outline_points, points_along, sample_blob
from diffcap.worlds.tiles.scenes import FIELD, FOREST, GRASS, OPEN, ROAD, SIZE, House, Layer, Plan, Road, Tree, Zone

MIN_MARGIN = 12  # pixels between a changed object, except a road, and the image's edges
# An object is near a road, a river and so on if its distance from it is less than this number of pixels.
MAX_GAPS = {"road": 16, "river": 25, "pond": 25, "forest": 20, "houses": 18}


class NoRoomError(Exception):
    """Raised if a scene has no free place for a change."""


@dataclass
class Change:
    """The objects that appear or disappear between the two images of a pair, and what captions may state of them."""

    noun: str  # "house", "building" (a large one), "road", "trees", "forest", "clearing", "pond", "lake" or "ground"
    present: Layer  # things that are only in the image with the objects
    covers: set[int]  # what is on the ground below the objects, such as `GRASS`
    absent: Layer = field(default_factory=Layer)  # things that are only in the image without the objects
    count: int = 1  # number of houses or of single trees; 1 for other objects
    arrangement: str = ""  # how houses stand: "single", "group", "row" or "block"; "" for other objects
    # A road has "paved" or "dirt", also "joins" if it meets another road, and "horizontal" or "vertical" if it crosses the image. A pond
    # has "mud" if it leaves mud, and "only" if there is no other pond. A single house has the color of its roof.
    details: list[str] = field(default_factory=list)
    change_type: str = ""  # one of `CHANGES`
    location: str = ""  # where in the image, from `location_of`; "" if no phrase fits
    # Things that are near all changed objects (keys of `MAX_GAPS`), and the ground below them: "fields", "grass" or "forest inside".
    relations: list[str] = field(default_factory=list)

    @property
    def is_in_before(self) -> bool:
        """True if the objects are in the before image, and not in the after image."""
        return self.change_type in ("houses_removed", "trees_cleared", "water_gone")

    def polygons(self) -> list[Polygon]:
        """Return the footprints of the changed objects, without roads."""
        areas = [zone.polygon for zone in (self.absent if self.noun == "clearing" else self.present).zones]
        houses = [house.footprint for house in self.present.houses]
        trees = [tree.footprint for tree in self.present.trees]
        return [*areas, *self.present.ponds, *houses, *trees]

    def facts(self) -> dict[str, Any]:
        """Return what captions may state, as JSON values for `facts.json`."""
        names = ("noun", "count", "arrangement", "details", "location", "relations")
        return {name: getattr(self, name) for name in names}


@dataclass
class Pair:
    """A pair of scenes: `change` is None if nothing has changed."""

    before: Layer
    after: Layer
    change: Change | None


def sample_pair(number: int, seed: int = 0) -> Pair:
    """Sample a pair. Its number and the seed determine it."""
    change_type, has_change = CHANGES[number // 2 % len(CHANGES)], number % 2 == 0
    variant = Random(f"tiles variant {seed} {number}").random()
    for attempt in range(200):
        rng = Random(f"tiles {seed} {number} {attempt}")
        try:
            scene, change = _sample_scene(rng, change_type, variant)
        except NoRoomError:
            continue
        states = scene.with_change(change.absent), scene.with_change(change.present)  # without and with the objects
        before, after = states[::-1] if change.is_in_before else states
        if not has_change:
            before = after = rng.choice(states)
        return Pair(before, after, change if has_change else None)
    raise DiffcapError(f"tiles: no scene has room for the change of pair {number} with seed {seed}; take another seed.")


def _sample_scene(rng: Random, change_type: str, variant: float) -> tuple[Layer, Change]:
    """Sample a scene with a change. `variant`, 0 to 1, selects the form of the change, such as one house or a row.

    All attempts of a pair use the same variant. Otherwise large forms, for which many scenes have no room, would be rare.
    """
    theme = rng.choice(("suburb", "village", "forest"))  # kind of landscape
    is_clearing = change_type == "trees_cleared" and variant < 0.4
    plan = scenes.sample_landscape(rng, theme, needs_road=change_type.startswith("houses"), needs_forest=is_clearing)
    change = _sample_clearing(rng, plan) if is_clearing else _SAMPLERS[change_type](rng, plan, variant)
    change.change_type = change_type
    polygons = change.polygons()
    if polygons:
        box = bounding_box(polygons)
        if min(box) < MIN_MARGIN or max(box) > SIZE - MIN_MARGIN:
            raise NoRoomError
        change.location = location_of(box)
    for polygon in polygons:
        plan.mark_polygon(scenes.grow_polygon(polygon, 3), scenes.RESERVED)
    scenes.add_things(rng, plan, theme)
    change.relations = _find_relations(change, plan.scene)
    return plan.scene, change


def _sample_houses(rng: Random, plan: Plan, variant: float) -> Change:
    form, sampler = next((form, sampler) for form, limit, sampler in _HOUSE_FORMS if variant <= limit)
    for _ in range(12):
        houses = sampler(rng, plan)
        house_covers = [plan.covers_in(*house.padded(6)) for house in houses]
        box = bounding_box([house.footprint for house in houses]) if houses else (0, 0, SIZE, SIZE)
        is_inside = min(box) > MIN_MARGIN and max(box) < SIZE - MIN_MARGIN
        if is_inside and all(covers <= OPEN for covers in house_covers):
            break
    else:
        raise NoRoomError
    arrangement = "single" if form == "building" else form
    details = [scenes.ROOF_COLORS[houses[0].roof]] if arrangement == "single" else []
    noun = "building" if form == "building" else "house"
    covers = set().union(*house_covers)
    return Change(noun, Layer(houses=houses), covers, count=len(houses), arrangement=arrangement, details=details)


def _sample_single_house(rng: Random, plan: Plan, is_large: bool = False) -> list[House]:
    if not is_large and rng.random() < 0.6:
        row = rng.choice(scenes.sample_house_rows(rng, plan, 28))
        return [rng.choice(row)] if row else []
    return [scenes.sample_house(rng, scenes.sample_place(rng, 30), rng.uniform(0, pi), is_large)]


def _sample_group(rng: Random, plan: Plan) -> list[House]:
    center, angle = scenes.sample_place(rng, 30), rng.uniform(0, pi)
    houses: list[House] = []
    for _ in range(40):
        place = center[0] + rng.uniform(-42, 42), center[1] + rng.uniform(-42, 42)
        house = scenes.sample_house(rng, place, angle + rng.choice((0, pi / 2)) + rng.uniform(-0.1, 0.1))
        is_apart = all(dist(place, other.center) > 30 for other in houses)
        if is_apart and plan.is_free(*house.padded(6)):
            houses.append(house)
        if len(houses) == 5:
            break
    return houses[: rng.randint(2, 5)] if len(houses) > 1 else []


def _sample_row(rng: Random, plan: Plan) -> list[House]:
    rows = scenes.sample_house_rows(rng, plan, rng.uniform(23, 28), rng.uniform(5, 9))
    for row in rng.sample(rows, len(rows)):
        count = rng.randint(3, 6)
        has_room = [
            plan.is_free(*house.padded(6)) and all(MIN_MARGIN + 8 < x < SIZE - MIN_MARGIN - 8 for x in house.center)
            for house in row
        ]
        starts = [start for start in range(len(row) - count + 1) if all(has_room[start : start + count])]
        if starts:
            start = rng.choice(starts)
            return row[start : start + count]
    return []


def _sample_block(rng: Random, plan: Plan) -> list[House]:
    center, angle = scenes.sample_place(rng, 30), rng.uniform(0, pi)
    if rng.random() < 0.5 and plan.scene.roads:
        point, angle = rng.choice(points_along(rng.choice(plan.scene.roads).line, 10))
        center = offset(point, angle + rng.choice((-1, 1)) * pi / 2, rng.uniform(48, 58))
    num_columns, num_rows = rng.randint(3, 4), rng.randint(2, 3)
    houses = []
    for column in range(num_columns):
        for row in range(num_rows):
            column_center = offset(center, angle, (column - (num_columns - 1) / 2) * 25)
            place = offset(column_center, angle + pi / 2, (row - (num_rows - 1) / 2) * 26)
            house = scenes.sample_house(rng, place, angle)
            houses.append(replace(house, length=min(house.length, 18)))
    return houses


# Name of the form, the largest `variant` that selects it, and the function that samples the houses.
_HOUSE_FORMS: tuple[tuple[str, float, Callable[[Random, Plan], list[House]]], ...] = (
    ("building", 0.1, partial(_sample_single_house, is_large=True)),
    ("single", 0.3, _sample_single_house),
    ("group", 0.57, _sample_group),
    ("row", 0.84, _sample_row),
    ("block", 1.0, _sample_block),
)


def _sample_road(rng: Random, plan: Plan, variant: float) -> Change:
    roads = plan.scene.roads
    is_paved = variant < 0.65
    places = (place for road in roads for place in points_along(road.line, 6))
    start_places = [place for place in places if all(40 < value < SIZE - 40 for value in place[0])]
    details = ["paved" if is_paved else "dirt"]
    if start_places and rng.random() < 0.5:
        start, direction = rng.choice(start_places)
        angle = direction + rng.choice((-1, 1)) * (pi / 2 + rng.uniform(-0.3, 0.3))
        control = offset(offset(start, angle, 100), angle + pi / 2, rng.uniform(-40, 40))
        line = geometry.bezier_curve(start, control, offset(start, angle, 330))
    else:
        sides = rng.choice(((0, 2), (1, 3), (0, 1), (1, 2), (2, 3), (3, 0)))
        line = scenes.sample_crossing(rng, sides)
        details += {(0, 2): ["horizontal"], (1, 3): ["vertical"]}.get(sides, [])
    width = rng.uniform(9, 12) if is_paved else rng.uniform(7, 9)
    visible_places = [place for place in points_along(line, 3) if all(0 <= value <= SIZE for value in place[0])]
    place_covers = [plan.covers_in(point, angle, 3, width + 2) for point, angle in visible_places]
    crossed_places = [index for index, covers in enumerate(place_covers) if ROAD in covers]
    num_gaps = sum(later - earlier > 8 for earlier, later in pairwise(crossed_places))  # between crossings
    if any(not covers <= {GRASS, FIELD, FOREST, ROAD} for covers in place_covers):
        raise NoRoomError
    # A road is refused if it is too short, runs along an old road, or meets old roads twice.
    if len(visible_places) * 3 < 100 or len(crossed_places) > 14 or num_gaps:
        raise NoRoomError
    if crossed_places:
        details.append("joins")
    free_covers = [covers for covers in place_covers if ROAD not in covers]
    shares = {cover: sum(cover in covers for covers in free_covers) / len(free_covers) for cover in (FIELD, FOREST)}
    covers = {cover for cover in shares if shares[cover] > (0.6 if cover == FIELD else 0.35)}
    plan.mark_line(line, width + 5, scenes.RESERVED)
    return Change("road", Layer(roads=[Road(line, width, is_paved)]), covers, details=details)


def _sample_area(rng: Random, plan: Plan, low: float, high: float, gap: float) -> tuple[Polygon, set[int]]:
    """Sample a round area of radius `low` to `high` on grass or fields, with `gap` free pixels around it. Return its outline and covers."""
    for _ in range(6):
        center = scenes.sample_place(rng, 30)
        polygon = sample_blob(rng, center, rng.uniform(low, high), rng.uniform(0.55, 1))
        covers = plan.covers_in_polygon(scenes.grow_polygon(polygon, gap))
        if covers <= OPEN:
            return polygon, covers
    raise NoRoomError


def _sample_trees(rng: Random, plan: Plan, variant: float) -> Change:
    trees: list[Tree] = []
    if variant < 0.7:
        polygon, covers = _sample_area(rng, plan, 20, 42, 12)
        for place in scenes.sample_edge_places(rng, polygon):
            trees.append(Tree(place, rng.uniform(3, 5.5), rng.randrange(scenes.NUM_TREE_TONES)))
        return Change("forest", Layer(zones=[Zone(polygon, "forest")], trees=trees), covers)
    center, spread = scenes.sample_place(rng, 30), rng.uniform(26, 44)
    covers = set()
    for _ in range(60):
        place = offset(center, rng.uniform(0, 2 * pi), spread * rng.random() ** 0.5)
        radius = rng.uniform(4, 6.5)
        tree_covers = plan.covers_in(place, 0, 2 * radius + 2, 2 * radius + 2)
        if tree_covers <= OPEN and all(dist(place, tree.center) > radius + tree.radius for tree in trees):
            trees.append(Tree(place, radius, rng.randrange(scenes.NUM_TREE_TONES)))
            covers |= tree_covers
        if len(trees) == 14:
            break
    if len(trees) < 6:
        raise NoRoomError
    return Change("trees", Layer(trees=trees), covers, count=len(trees))


def _sample_clearing(rng: Random, plan: Plan) -> Change:
    forests = [zone for zone in plan.scene.zones if zone.surface == "forest"]
    for _ in range(10 if forests else 0):
        x0, y0, x1, y1 = bounding_box([rng.choice(forests).polygon])
        polygon = sample_blob(rng, (rng.uniform(x0, x1), rng.uniform(y0, y1)), rng.uniform(18, 36), rng.uniform(0.6, 1))
        if plan.covers_in_polygon(scenes.grow_polygon(polygon, 9)) == {FOREST}:
            return Change("clearing", Layer(), {FOREST}, Layer(zones=[Zone(polygon, rng.choice(("bare", "grass")))]))
    raise NoRoomError


def _sample_water(rng: Random, plan: Plan, variant: float) -> Change:
    radius = (16.0, 22.0, 34.0)[int(3 * variant)]
    polygon, covers = _sample_area(rng, plan, radius, radius + 6, 7)
    details = [] if plan.scene.ponds else ["only"]
    return Change("lake" if radius > 30 else "pond", Layer(ponds=[polygon]), covers, details=details)


def _sample_dried_water(rng: Random, plan: Plan, variant: float) -> Change:
    change = _sample_water(rng, plan, variant)
    if rng.random() < 0.6:
        change.absent = Layer(zones=[Zone(change.present.ponds[0], "mud")])
        change.details.append("mud")
    return change


def _sample_bare_ground(rng: Random, plan: Plan, variant: float) -> Change:
    if variant < 0.5:
        polygon, covers = _sample_area(rng, plan, 22, 48, 4)
    else:
        center, angle = scenes.sample_place(rng, 30), rng.uniform(0, pi)
        length, width = rng.uniform(40, 85), rng.uniform(30, 60)
        covers = plan.covers_in(center, angle, length + 8, width + 8)
        polygon = geometry.rectangle(center, angle, length, width)
        if not covers <= OPEN:
            raise NoRoomError
    return Change("ground", Layer(zones=[Zone(polygon, "bare")]), covers)


_SAMPLERS = {
    "houses_built": _sample_houses,
    "houses_removed": _sample_houses,
    "road_built": _sample_road,
    "trees_cleared": _sample_trees,
    "trees_grown": _sample_trees,
    "water_appeared": _sample_water,
    "water_gone": _sample_dried_water,
    "ground_bared": _sample_bare_ground,
}
CHANGES = tuple(_SAMPLERS)


def location_of(box: tuple[float, float, float, float]) -> str:
    """Return where a box (x0, y0, x1, y1) in pixels is in the image: "left", "top", "middle", "top left" and so on.

    " corner" is added if the middle of the box is in the outer 27 % of both axes. If no place fits, return "".
    """
    parts, edge_distances = [], []  # for each axis, the part of the image, and the distance from the nearest edge
    for low, high, sides in ((box[1], box[3], ("top", "bottom")), (box[0], box[2], ("left", "right"))):
        low, high = low / SIZE, high / SIZE
        center = (low + high) / 2
        edge_distances.append(min(center, 1 - center))
        if center < 0.36 and high < 0.58:
            parts.append(sides[0])
        elif center > 0.64 and low > 0.42:
            parts.append(sides[1])
        elif 0.4 < center < 0.6 and low > 0.2 and high < 0.8:
            parts.append("middle")
        else:
            parts.append("")
    if parts == ["middle", "middle"]:
        return "middle"
    if "" in parts and "middle" in parts:
        return ""
    names = [part for part in parts if part not in ("", "middle")]
    corner = " corner" if len(names) == 2 and max(edge_distances) < 0.27 else ""
    return " ".join(names) + corner


def _find_relations(change: Change, scene: Layer) -> list[str]:
    """Return the relations that all changed objects have to things that do not change, as in `Change.relations`."""
    relation_of_cover = {FIELD: "fields", GRASS: "grass", FOREST: "forest inside"}
    covers = change.covers if len(change.covers) == 1 else ()
    relations = [relation_of_cover[cover] for cover in covers if cover in relation_of_cover]
    visible_houses = [house for house in scene.houses if all(4 < value < SIZE - 4 for value in house.center)]
    house_points = [outline_points(house.footprint, 3) for house in visible_houses]
    if change.noun == "road":
        road = change.present.roads[0]
        num_near = sum(_gap_to_road(points, road) < MAX_GAPS["houses"] for points in house_points)
        relations = [relation_of_cover[cover] for cover in sorted(change.covers)]
        return [*relations, "houses"] if num_near > 2 else relations
    object_points = [outline_points(polygon, 3) for polygon in change.polygons()]
    for name, roads in (("road", scene.roads), ("river", scene.rivers)):
        gaps = [min(_gap_to_road(points, road) for road in roads) for points in object_points] if roads else []
        if roads and all(gap < MAX_GAPS[name] for gap in gaps):
            relations.append(name)
    forest_polygons = [zone.polygon for zone in scene.zones if zone.surface == "forest"]
    for name, areas in (
        ("pond", [outline_points(pond) for pond in scene.ponds]),
        ("forest", [outline_points(polygon) for polygon in forest_polygons]),
        ("houses", house_points),
    ):
        areas = [points[np.all((points > 4) & (points < SIZE - 4), axis=1)] for points in areas]
        areas = [points for points in areas if len(points)]
        if change.noun != "clearing" and areas and _are_all_near(object_points, areas, MAX_GAPS[name]):
            relations.append(name)
    # "near the houses" is only true if at least two houses are near.
    if "houses" in relations and sum(_are_all_near(object_points, [house], 45) for house in house_points) < 2:
        relations.remove("houses")
    return relations


def _gap_to_road(points: geometry.Points, road: Road) -> float:
    """Return the smallest distance between one of the points and the edge of a road or river."""
    return float(geometry.distance_to_line(points, road.line).min()) - road.width / 2


def _are_all_near(objects: list[geometry.Points], areas: list[geometry.Points], max_gap: float) -> bool:
    return all(min(geometry.distance_between(points, area) for area in areas) < max_gap for points in objects)
