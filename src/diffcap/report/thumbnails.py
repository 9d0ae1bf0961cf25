"""Thumbnails, small enough that a page can hold thousands of them."""

import base64
import io
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from diffcap.utils.errors import DiffcapError
from diffcap.utils.image_io import Values, read_image

# Frames (width, height) of pairs without and with attention maps. Images are never enlarged.
SMALL, LARGE = (144, 108), (320, 240)
_QUALITY = {SMALL: 55, LARGE: 80}


@dataclass(frozen=True)
class Thumbnail:
    """An image reduced to a frame, as WebP in base64, and the size of the original image."""

    width: int
    height: int
    data: str


def thumbnail(path: Path, frame: tuple[int, int], values: Values | None = None) -> Thumbnail | None:
    """Reduce an image to a frame, `SMALL` or `LARGE`; None if it is missing or broken. `values` as in `read_image`."""
    try:
        if values:
            image = read_image(path, values=values).image
            size = image.size
        else:
            with Image.open(path) as file:
                size = file.size
                file.draft("RGB", frame)  # a large JPEG is decoded small
                image = file.convert("RGB")
    except (
        DiffcapError,
        OSError,
        ValueError,
        SyntaxError,
        Image.DecompressionBombError,
    ):  # errors of Pillow for damaged files
        return None
    image.thumbnail(frame, Image.Resampling.LANCZOS)
    return Thumbnail(*size, webp(image, quality=_QUALITY[frame], method=4))


def webp(image: Image.Image, **settings: Any) -> str:
    """An image as WebP in base64, with Pillow's settings of that format."""
    content = io.BytesIO()
    image.save(content, "WEBP", **settings)
    return base64.b64encode(content.getvalue()).decode()


def thumbnails(
    root: Path, frames: Mapping[str, tuple[int, int]], ranges: Mapping[str, Values] | None = None
) -> dict[str, Thumbnail | None]:
    """Thumbnails of images, by path relative to `root`, in the order of `frames` (path -> frame); computed on all cores.

    Args:
        ranges: range of values of images with more than 8 bits, by path, see `ChangePair.ranges`.
    """
    with ThreadPoolExecutor() as pool:
        made = pool.map(
            lambda entry: thumbnail(root / entry[0], entry[1], (ranges or {}).get(entry[0])), frames.items()
        )
        return dict(zip(frames, made))
