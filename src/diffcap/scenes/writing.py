"""Merge neighbouring tiles of a scene with the same caption into changes, and write the changes as GeoJSON (RFC 7946) and CSV."""

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
from diffcap.utils.errors import DiffcapError, one_line

Points = npt.NDArray[np.float64]
_EDGE_STEP = 256  # pixels between the points added to an edge, which is a curve in longitude and latitude
_DECIMALS = 7  # decimal places of degrees; a step of the last place is about a centimetre
# Units of the coordinates, as named in the GeoJSON file.
IN_DEGREES = "longitude and latitude (WGS84)"
IN_PIXELS = "pixels, x to the right and y down from the upper left corner; the rasters have no georeference"
_CSV_HEADER = "id,caption,tiles,no_change,log_probability,x,y,width,height,longitude,latitude,source_crs"


@dataclass(frozen=True)
class Change:
    """A change in a scene: adjacent or overlapping tiles with one caption."""

    caption: str
    polygon: shapely.Polygon  # union of its tiles, in pixels (x to the right, y down)
    num_tiles: int
    no_change: float  # lowest probability of no change among its tiles
    log_probability: float | None  # natural logarithm of the highest probability of the caption among its tiles

    @property
    def window(self) -> tuple[int, int, int, int]:
        """The bounding box in pixels: left column, upper row, width, height."""
        left, top, right, bottom = map(round, self.polygon.bounds)
        return left, top, right - left, bottom - top


def merge_tiles(captions: Iterable[TileCaption]) -> list[Change]:
    """Unite tiles with the same sentence that overlap or share an edge. The changes are sorted from top to bottom, then left to right."""
    captions_of_sentence: dict[str, list[TileCaption]] = {}
    for caption in captions:
        captions_of_sentence.setdefault(caption.caption, []).append(caption)
    changes: list[Change] = []
    for sentence, same_captions in captions_of_sentence.items():
        x, y, width, height = np.transpose([caption.tile for caption in same_captions])
        polygons = shapely.get_parts(shapely.union_all(shapely.box(x, y, x + width, y + height)))
        centers = shapely.points(x + width / 2, y + height / 2)
        captions_inside: list[list[TileCaption]] = [[] for _ in polygons]
        for tile_index, polygon_index in shapely.STRtree(polygons).query(centers, predicate="within").T:
            captions_inside[polygon_index].append(same_captions[tile_index])
        for polygon, inside in zip(polygons, captions_inside):
            no_change = min(caption.no_change for caption in inside)
            known = [caption.log_probability for caption in inside if caption.log_probability is not None]
            shape = shapely.simplify(polygon, 0)
            changes.append(Change(sentence, shape, len(inside), no_change, max(known, default=None)))
    return sorted(changes, key=lambda change: (change.window[1], change.window[0], change.caption))


def to_lon_lat(scene: Scene, points: Points) -> Points:
    """Convert points (n, 2) from pixels (column, row) to longitude and latitude."""
    pixel_to_map = np.reshape(scene.transform, (3, 3))
    x, y = pixel_to_map[:2, :2] @ points.T + pixel_to_map[:2, 2:]
    try:
        longitudes, latitudes = rasterio.warp.transform(scene.crs, WGS84, x, y)
    except Exception as error:  # PROJ's errors have many types
        fault = f"cannot be converted to longitude and latitude ({one_line(error, 80)})"
        raise DiffcapError(f"{scene.crs:.60}: {fault}; assign the right CRS.") from None
    converted = np.column_stack([longitudes, latitudes])
    if not np.isfinite(converted).all():
        raise DiffcapError(
            f"{scene.crs:.60}: the raster lies outside of the area of this CRS; assign the right CRS and transform."
        )
    return converted


def check_georeference(scene: Scene) -> None:
    """Raise an error if the corners of the raster cannot be converted to longitude and latitude."""
    if scene.crs is not None:
        to_lon_lat(scene, shapely.get_coordinates(shapely.box(0, 0, scene.width, scene.height)))


def find_position(change: Change, scene: Scene, digits: int) -> list[float] | None:
    """Return longitude and latitude of a point inside a change, rounded to `digits`; None without georeference."""
    if scene.crs is None:
        return None
    point = shapely.get_coordinates(change.polygon.representative_point())
    return list(to_lon_lat(scene, point)[0].round(digits).tolist())


def write_geojson(path: Path, changes: Sequence[Change], scene: Scene, metadata: Mapping[str, Any]) -> None:
    """Write a FeatureCollection with `metadata` as its member "diffcap".

    metadata["note"] is None, or a warning that the captions can be unreliable; every feature repeats it. Polygons are in longitude
    and latitude, with the outer ring counterclockwise. Without georeference, they are in pixels.
    """
    digits = None if scene.crs is None else _DECIMALS  # None rounds to whole pixels
    features = []
    for number, change in enumerate(changes, 1):
        polygon = change.polygon
        if scene.crs is not None:
            polygon = shapely.segmentize(polygon, _EDGE_STEP)
            polygon = shapely.transform(polygon, lambda points: to_lon_lat(scene, points))
            polygon = shapely.orient_polygons(polygon, exterior_cw=False)
        rings = shapely.geometry.mapping(polygon)["coordinates"]
        coordinates = [[[round(x, digits), round(y, digits)] for x, y in ring] for ring in rings]
        properties = {
            "caption": change.caption,
            "tiles": change.num_tiles,
            "no_change": change.no_change,
            "log_probability": change.log_probability,
            "pixel_window": list(change.window),
            "source_crs": scene.crs,
            **({} if metadata["note"] is None else {"note": metadata["note"]}),
        }
        geometry = {"type": "Polygon", "coordinates": coordinates}
        features.append({"type": "Feature", "id": number, "geometry": geometry, "properties": properties})
    lines = ",\n".join(json.dumps(feature, ensure_ascii=False) for feature in features)
    member = json.dumps({"coordinates": IN_DEGREES if scene.crs else IN_PIXELS, **metadata}, ensure_ascii=False)
    write_text(path, f'{{"type": "FeatureCollection",\n"diffcap": {member},\n"features": [\n{lines}\n]}}\n')


def write_csv(path: Path, changes: Sequence[Change], scene: Scene, note: str | None) -> None:
    """Write one line per change. Longitude and latitude are those of a point in the change; without georeference, they are empty."""
    notes = [] if note is None else [note]
    text = io.StringIO()
    text.write(_CSV_HEADER + (",note\n" if notes else "\n"))
    table = csv.writer(text, lineterminator="\n")
    for number, change in enumerate(changes, 1):
        position: list[Any] = find_position(change, scene, _DECIMALS) or ["", ""]
        values = change.caption, change.num_tiles, change.no_change, change.log_probability, *change.window, *position
        table.writerow([number, *values, scene.crs or "", *notes])
    write_text(path, text.getvalue())
