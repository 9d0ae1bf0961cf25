"""Thumbnails, small enough that a page can hold thousands of them."""

import base64
import io
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

# Frames (width, height) of pairs without and with attention maps. Images are never enlarged.
SMALL, LARGE = (144, 108), (320, 240)
_QUALITY = {SMALL: 55, LARGE: 80}


@dataclass(frozen=True)
class Thumbnail:
    """An image reduced to a frame, as WebP in base64, and the size of the original image."""

    width: int
    height: int
    data: str


def thumbnail(path: Path, frame: tuple[int, int]) -> Thumbnail | None:
    """Reduce an image to a frame, `SMALL` or `LARGE`; None if it is missing or broken."""
    try:
        with Image.open(path) as file:
            size = file.size
            file.draft("RGB", frame)  # a large JPEG is decoded small
            image = file.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # errors of Pillow for damaged files
        return None
    image.thumbnail(frame, Image.Resampling.LANCZOS)
    return Thumbnail(*size, webp(image, quality=_QUALITY[frame], method=4))


def webp(image: Image.Image, **settings: Any) -> str:
    """An image as WebP in base64, with Pillow's settings of that format."""
    content = io.BytesIO()
    image.save(content, "WEBP", **settings)
    return base64.b64encode(content.getvalue()).decode()


def thumbnails(root: Path, frames: Mapping[str, tuple[int, int]]) -> dict[str, Thumbnail | None]:
    """Thumbnails of images, by path relative to `root`, in the order of `frames` (path -> frame); computed on all cores."""
    with ThreadPoolExecutor() as pool:
        made = pool.map(lambda entry: thumbnail(root / entry[0], entry[1]), frames.items())
        return dict(zip(frames, made))
