"""GeoTIFF files for tests."""

from pathlib import Path
from typing import Any

import numpy as np
import rasterio
from PIL import Image
from rasterio.transform import from_origin
from tests.commands import ROOT

UTM33 = from_origin(500_000, 5_400_000, 0.5, 0.5)  # x 500,000 is the meridian 15 degrees east


def write(path: Path, pixels: Any, **options: Any) -> str:
    """Write (bands, h, w) or (h, w) pixels; the CRS is EPSG:32633 and a pixel half a metre, unless the options say otherwise."""
    pixels = np.atleast_3d(np.moveaxis(pixels, 0, -1)).transpose(2, 0, 1) if pixels.ndim == 3 else pixels[None]
    settings = {"crs": "EPSG:32633", "transform": UTM33, **options}
    count, height, width = pixels.shape
    with rasterio.open(
        path, "w", driver="GTiff", width=width, height=height, count=count, dtype=pixels.dtype, **settings
    ) as file:
        file.write(pixels)
    return str(path)


def example(name: str) -> Any:
    """The image `before` or `after` of the examples, whose change the shipped captioner knows: (3, 256, 256), 8 bits."""
    with Image.open(ROOT / "examples" / f"{name}.png") as image:
        return np.asarray(image.convert("RGB").resize((256, 256))).transpose(2, 0, 1)


def write_scene(folder: Path, size: int = 600, places: Any = ((0, 0), (344, 344))) -> tuple[str, str]:
    """Two dates of gray ground on which the example images lie at the given columns and rows, at any other place identical."""
    paths = []
    for name in ("before", "after"):
        pixels = np.full((3, size, size), 100, np.uint8)
        for x, y in places:
            pixels[:, y : y + 256, x : x + 256] = example(name)
        paths.append(write(folder / f"{name}.tif", pixels))
    return paths[0], paths[1]
