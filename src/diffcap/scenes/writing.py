"""Changes of a scene as GeoJSON (RFC 7946) and CSV."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import rasterio.warp
import shapely

from diffcap.scenes.merging import Change
from diffcap.scenes.raster import WGS84, Scene
from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import atomic_write

Points = npt.NDArray[np.float64]
_STEP = 256  # pixels between the points of an edge, which is a curve in longitude and latitude
_DECIMALS = 7  # of a degree: about a centimetre
IN_DEGREES = "longitude and latitude (WGS84)"
IN_PIXELS = "pixels, x to the right and y down from the upper left corner; the rasters have no georeference"
COLUMNS = (
    "id", "caption", "tiles", "no_change", "log_probability", "x", "y", "width", "height", "longitude", "latitude", "source_crs",
)  # fmt: skip


def lon_lat(scene: Scene, points: Points) -> Points:
    """Convert points (N, 2) from pixels (column, row) to longitude and latitude.

    Raises:
        DiffcapError: the CRS cannot be converted to WGS84.
    """
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
    """Convert the corners of the raster.

    Raises:
        DiffcapError: they have no longitude and latitude.
    """
    if scene.crs is not None:
        lon_lat(scene, np.array([(x, y) for x in (0, scene.width) for y in (0, scene.height)], float))


def geometry(change: Change, scene: Scene) -> shapely.Polygon:
    """The polygon in longitude and latitude, with the outer ring counterclockwise; in pixels without georeference."""
    if scene.crs is None:
        return change.polygon
    polygon = shapely.transform(shapely.segmentize(change.polygon, _STEP), lambda points: lon_lat(scene, points))
    return shapely.orient_polygons(polygon, exterior_cw=False)


def properties(change: Change, scene: Scene, note: str | None) -> dict[str, Any]:
    """The entries of a change besides its polygon."""
    return {
        "caption": change.caption,
        "tiles": change.tiles,
        "no_change": change.no_change,
        "log_probability": change.log_probability,
        "pixel_window": list(change.window),
        "source_crs": scene.crs,
        **({} if note is None else {"note": note}),
    }


def write_geojson(path: Path, changes: Sequence[Change], scene: Scene, metadata: Mapping[str, Any]) -> None:
    """Write a FeatureCollection; `metadata` is its foreign member "diffcap", and its note a property of each feature, too."""
    digits = None if scene.crs is None else _DECIMALS
    features = []
    for number, change in enumerate(changes, 1):
        rings = shapely.geometry.mapping(geometry(change, scene))["coordinates"]
        features.append(
            {
                "type": "Feature",
                "id": number,
                "geometry": {
                    "type": "Polygon",
                    "coordinates": [[[round(x, digits), round(y, digits)] for x, y in ring] for ring in rings],
                },
                "properties": properties(change, scene, metadata["note"]),
            }
        )
    lines = ",\n".join(json.dumps(feature, ensure_ascii=False) for feature in features)
    coordinates = IN_PIXELS if scene.crs is None else IN_DEGREES
    head = json.dumps({"coordinates": coordinates, **metadata}, ensure_ascii=False)
    text = f'{{"type": "FeatureCollection",\n"diffcap": {head},\n"features": [\n{lines}\n]}}\n'
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_csv(path: Path, changes: Sequence[Change], scene: Scene, note: str | None) -> None:
    """Write one line per change; longitude and latitude are those of a point inside it, empty without georeference.

    Args:
        note: about the captions; it has a column if it is not None.
    """
    notes = [] if note is None else [note]
    lines = io.StringIO()
    table = csv.writer(lines, lineterminator="\n")
    table.writerow([*COLUMNS, *(["note"] if notes else [])])
    for number, change in enumerate(changes, 1):
        position: list[Any] = ["", ""]
        if scene.crs is not None:
            inside = change.polygon.representative_point()
            position = [round(float(value), _DECIMALS) for value in lon_lat(scene, np.array([[inside.x, inside.y]]))[0]]
        values = change.caption, change.tiles, change.no_change, change.log_probability, *change.window, *position
        table.writerow([number, *values, scene.crs or "", *notes])
    with atomic_write(path) as temporary:
        temporary.write_text(lines.getvalue(), encoding="utf-8")
