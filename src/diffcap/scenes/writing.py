"""Changes of a scene: neighbouring tiles with the same sentence as one polygon, and GeoJSON (RFC 7946) and CSV of them."""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import rasterio.warp
import shapely

from diffcap.records import write_text
from diffcap.scenes.raster import WGS84, Scene, TileCaption
from diffcap.utils.errors import DiffcapError

Points = npt.NDArray[np.float64]
_STEP = 256  # pixels between the points of an edge, which is a curve in longitude and latitude
_DECIMALS = 7  # of a degree: about a centimetre
IN_DEGREES = "longitude and latitude (WGS84)"
IN_PIXELS = "pixels, x to the right and y down from the upper left corner; the rasters have no georeference"
COLUMNS = (
    "id", "caption", "tiles", "no_change", "log_probability", "x", "y", "width", "height", "longitude", "latitude", "source_crs",
)  # fmt: skip


@dataclass(frozen=True)
class Change:
    """A change in a scene."""

    caption: str
    polygon: shapely.Polygon  # union of its tiles, in pixels (x to the right, y down)
    tiles: int  # their number
    no_change: float  # the lowest probability of no change of a tile
    log_probability: float  # natural logarithm of the caption's probability, the highest of a tile

    @property
    def window(self) -> tuple[int, int, int, int]:
        """The bounding box in pixels: left column, upper row, width, height."""
        left, top, right, bottom = map(round, self.polygon.bounds)
        return left, top, right - left, bottom - top


def merge(captions: Iterable[TileCaption]) -> list[Change]:
    """Unite tiles with the same sentence that overlap or share an edge; sorted from the top to the bottom, then left to right."""
    by_sentence: dict[str, list[TileCaption]] = {}
    for each in captions:
        by_sentence.setdefault(each.caption, []).append(each)
    changes: list[Change] = []
    for caption, group in by_sentence.items():
        tiles = [each.tile for each in group]
        union = shapely.union_all([shapely.box(x, y, x + width, y + height) for x, y, width, height in tiles])
        parts = shapely.get_parts(union)
        centers = [shapely.Point(x + width / 2, y + height / 2) for x, y, width, height in tiles]
        members: list[list[TileCaption]] = [[] for _ in parts]
        for number, part in shapely.STRtree(parts).query(centers, predicate="within").T:
            members[part].append(group[number])
        for part, part_captions in zip(parts, members):
            no_change = min(each.no_change for each in part_captions)
            log_probability = max(each.log_probability for each in part_captions)
            polygon = shapely.simplify(part, 0)
            changes.append(Change(caption, polygon, len(part_captions), no_change, log_probability))
    return sorted(changes, key=lambda change: (change.window[1], change.window[0], change.caption))


def lon_lat(scene: Scene, points: Points) -> Points:
    """Convert points (N, 2) from pixels (column, row) to longitude and latitude."""
    grid = np.reshape(scene.transform, (3, 3))
    x, y = (grid @ np.column_stack([points, np.ones(len(points))]).T)[:2]
    try:
        longitudes, latitudes = rasterio.warp.transform(scene.crs, WGS84, x, y)
    except Exception as error:  # PROJ's errors have many types
        reason = " ".join(str(error).split())[:80].rstrip(". ")
        raise DiffcapError(
            f"{scene.crs:.60}: cannot be converted to longitude and latitude ({reason}); assign the right CRS."
        ) from None
    converted = np.column_stack([longitudes, latitudes])
    if not np.isfinite(converted).all():
        raise DiffcapError(
            f"{scene.crs:.60}: the raster lies outside of the area of this CRS; assign the right CRS and transform."
        )
    return converted


def check_position(scene: Scene) -> None:
    """Raise an error if the corners of the raster cannot be converted to longitude and latitude."""
    if scene.crs is not None:
        lon_lat(scene, np.array([(x, y) for x in (0, scene.width) for y in (0, scene.height)], float))


def position(change: Change, scene: Scene, digits: int) -> list[float] | None:
    """Return longitude and latitude of a point inside a change; None without georeference."""
    if scene.crs is None:
        return None
    inside = change.polygon.representative_point()
    return [round(float(value), digits) for value in lon_lat(scene, np.array([[inside.x, inside.y]]))[0]]


def write_geojson(path: Path, changes: Sequence[Change], scene: Scene, metadata: Mapping[str, Any]) -> None:
    """Write a FeatureCollection. `metadata` is its foreign member "diffcap", and the note in it is also a property of each feature.

    Polygons are in longitude and latitude, with the outer ring counterclockwise, or in pixels without georeference.
    """
    digits = None if scene.crs is None else _DECIMALS
    features = []
    for number, change in enumerate(changes, 1):
        polygon = change.polygon
        if scene.crs is not None:
            polygon = shapely.transform(shapely.segmentize(polygon, _STEP), lambda points: lon_lat(scene, points))
            polygon = shapely.orient_polygons(polygon, exterior_cw=False)
        rings = shapely.geometry.mapping(polygon)["coordinates"]
        coordinates = [[[round(x, digits), round(y, digits)] for x, y in ring] for ring in rings]
        properties = {
            "caption": change.caption,
            "tiles": change.tiles,
            "no_change": change.no_change,
            "log_probability": change.log_probability,
            "pixel_window": list(change.window),
            "source_crs": scene.crs,
            **({} if metadata["note"] is None else {"note": metadata["note"]}),
        }
        geometry = {"type": "Polygon", "coordinates": coordinates}
        features.append({"type": "Feature", "id": number, "geometry": geometry, "properties": properties})
    lines = ",\n".join(json.dumps(feature, ensure_ascii=False) for feature in features)
    unit = IN_PIXELS if scene.crs is None else IN_DEGREES
    head = json.dumps({"coordinates": unit, **metadata}, ensure_ascii=False)
    write_text(path, f'{{"type": "FeatureCollection",\n"diffcap": {head},\n"features": [\n{lines}\n]}}\n')


def write_csv(path: Path, changes: Sequence[Change], scene: Scene, note: str | None) -> None:
    """Write one line per change; longitude and latitude are those of a point inside it, empty without georeference."""
    notes = [] if note is None else [note]
    lines = io.StringIO()
    table = csv.writer(lines, lineterminator="\n")
    table.writerow([*COLUMNS, *(["note"] if notes else [])])
    for number, change in enumerate(changes, 1):
        place: list[Any] = position(change, scene, _DECIMALS) or ["", ""]
        values = change.caption, change.tiles, change.no_change, change.log_probability, *change.window, *place
        table.writerow([number, *values, scene.crs or "", *notes])
    write_text(path, lines.getvalue())
