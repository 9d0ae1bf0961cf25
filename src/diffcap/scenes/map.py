"""`changes.html`: a map of the changes of a scene in one file that needs no network."""

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import shapely
from markupsafe import Markup
from PIL import Image

from diffcap.records import write_text
from diffcap.report.page import as_json, read_resource, security_policy
from diffcap.scenes.raster import MAX_WINDOW, Sample, Scene, Stretch, Tile, to_rgb
from diffcap.scenes.writing import Change, find_position, to_lon_lat

_MAX_PICTURE_BYTES = 700_000  # of a JPEG; the two pictures of the whole scene have at most 1.9 MB in base64
_OVERVIEW_SIDE = 1600  # longer side of a picture of the whole scene in pixels
MAX_DETAILS, _DETAIL_SIDE = 100, 192  # number of changes with pictures, and the pictures' longer side in pixels
_QUALITIES = (80, 65, 50, 35, 20)  # JPEG qualities, which are tried in this order until a picture is small enough
_EARTH_RADIUS = 6_371_008.8  # metres
_PACKAGE = "diffcap.scenes"


def write_map(
    path: Path,
    changes: Sequence[Change],
    scene: Scene,
    overview: Sample,
    stretch: Stretch | None,
    metadata: Mapping[str, Any],
) -> None:
    """Write the page: both dates with the changes as polygons over them, and a list of the changes.

    In the list, the `MAX_DETAILS` most probable changes have pictures. `overview` is the whole scene with fewer pixels, `stretch` has
    the pixel values that become 0 and 255, and `metadata` has the settings and counts that `write_geojson` writes.
    """
    before, after = _encode_pictures(overview, stretch, _OVERVIEW_SIDE)
    most_certain = sorted(range(len(changes)), key=lambda index: changes[index].no_change)[:MAX_DETAILS]
    entries: list[dict[str, Any]] = []  # for `map.js`; "path" is an SVG path, and "position" a point inside the change
    for change in changes:
        rings = shapely.geometry.mapping(change.polygon)["coordinates"]
        svg_path = "".join("M" + "L".join(f"{round(x)},{round(y)}" for x, y in ring[:-1]) + "Z" for ring in rings)
        entries.append(
            {
                "caption": change.caption,
                "path": svg_path,
                "window": change.window,
                "tiles": change.num_tiles,
                "changed": round(1 - change.no_change, 4),
                "position": find_position(change, scene, digits=6),
            }
        )
    for index in most_certain:
        x, y, width, height = changes[index].window
        if max(width, height) <= MAX_WINDOW:
            sample = scene.read(Tile(x, y, width, height))
        else:  # too large to be read at once: take the part of the overview
            step = scene.width / overview.before.shape[2]  # pixels of the scene per pixel of the overview
            top, bottom, left, right = (int(edge / step) for edge in (y, y + height, x, x + width))
            sample = Sample(*(array[..., top : bottom + 1, left : right + 1] for array in overview))
        entries[index]["pictures"] = _encode_pictures(sample, stretch, _DETAIL_SIDE)
    pixel_width = None  # width in metres of a pixel in the middle of the scene, computed on a sphere
    if scene.crs is not None:
        x, y = scene.width / 2, scene.height / 2
        (west, south), (east, north) = np.radians(to_lon_lat(scene, np.array([[x, y], [x + 1, y]])))
        pixel_width = _EARTH_RADIUS * float(np.hypot((east - west) * np.cos(south), north - south))
    script = "\n".join([read_resource("shared.js"), read_resource("map.js", _PACKAGE)])
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(read_resource("map.html.j2", _PACKAGE)).render(
        metadata=metadata,
        changes=len(changes),
        before=before,
        after=after,
        facts=_list_facts(metadata),
        style=Markup(read_resource("page.css") + read_resource("map.css", _PACKAGE)),
        script=Markup(script),
        policy=security_policy(script),
        data=as_json({"width": scene.width, "height": scene.height, "metres": pixel_width, "changes": entries}),
    )
    write_text(path, page)


def _encode_pictures(sample: Sample, stretch: Stretch | None, max_side: int) -> list[str]:
    """Return both dates as JPEG in base64, at most `max_side` pixels wide and high; parts without data are gray."""
    is_shown = sample.before_valid & sample.after_valid
    pictures = []
    for pixels in (sample.before, sample.after):
        image = Image.fromarray(np.where(is_shown[..., None], to_rgb(pixels, is_shown, stretch), np.uint8(128)))
        image.thumbnail((max_side, max_side), Image.Resampling.BOX)
        for quality in _QUALITIES:
            content = io.BytesIO()
            image.save(content, "JPEG", quality=quality, optimize=True)
            if content.tell() <= _MAX_PICTURE_BYTES:
                break
        pictures.append(base64.b64encode(content.getvalue()).decode())
    return pictures


def _list_facts(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return headings and texts about how the changes were found, for the end of the page."""
    tiles = metadata["tiles"]
    return [
        ("before", metadata["before"]),
        ("after", metadata["after"]),
        ("size", f"{metadata['size'][0]:,} x {metadata['size'][1]:,} pixels"),
        ("coordinate reference system", metadata["source_crs"] or "none"),
        ("tiles", f"{tiles['all']:,} of {metadata['tile']} pixels, overlap {metadata['overlap']}"),
        (
            "tiles left out",
            f"{tiles['unchanged']:,} unchanged (probability of a change below {metadata['min_changed']}), {tiles['identical']:,} with "
            f"identical pixels, {tiles['no_data']:,} without data",
        ),
        ("bands", ", ".join(map(str, metadata["bands"]))),
        ("weights of the captioner", f"SHA-256 {metadata['checkpoint']}"),
    ]
