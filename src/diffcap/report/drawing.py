"""What the pictures of a report share: sizes, colours, fonts, images in frames, and thumbnails for the page."""

import base64
import io
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import atomic_write
from diffcap.utils.image_io import Values, read_image

Color = tuple[int, int, int]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

WIDTH, MARGIN, GAP = 900, 16, 8  # as wide as a README is shown
PICTURE = (256, 192)  # twice the size of the embedded dataset's images
INK, GRAY, RULE = (30, 30, 30), (120, 120, 120), (225, 225, 225)
RIGHT, WRONG, BOX = (20, 125, 55), (190, 40, 40), (255, 0, 200)
# Frames (width, height) of pairs without and with attention maps. Images are never enlarged.
SMALL, LARGE = (144, 108), (320, 240)
_QUALITY = {SMALL: 55, LARGE: 80}


def fonts() -> tuple[Font, Font]:
    """The font of captions, and the smaller font of labels."""
    return ImageFont.load_default(15), ImageFont.load_default(12)


def line_height(font: Font) -> int:
    """Distance between two lines of text in pixels."""
    return round(1.3 * getattr(font, "size", 11))


def wrap(text: str, font: Font, width: int) -> list[str]:
    """Break a text between words into lines of at most `width` pixels; a longer word gets a line of its own."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines or ["(nothing)"]


def picture(
    root: Path,
    path: str,
    box: Sequence[float] | None = None,
    frame: tuple[int, int] = PICTURE,
    values: Values | None = None,
) -> Image.Image:
    """An image scaled to fit a frame (width, height), with the changed object's box; `values` as in `read_image`."""
    try:
        image = read_image(root / path, values=values).image
    except DiffcapError as error:
        raise DiffcapError(f"{str(error).rstrip('.')}, or report with --pictures 0 --attention 0.") from None
    return fit(image, frame, box)


def fit(image: Image.Image, frame: tuple[int, int] = PICTURE, box: Sequence[float] | None = None) -> Image.Image:
    """An image scaled to fit a frame (width, height), with a box of its own pixels."""
    scale = min(frame[0] / image.width, frame[1] / image.height)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    image = image.resize(size, Image.Resampling.BICUBIC)
    if box:
        left, top, right, bottom = (round(value * scale) for value in box)
        corners = [max(0, left - 2), max(0, top - 2), min(size[0] - 1, right + 1), min(size[1] - 1, bottom + 1)]
        ImageDraw.Draw(image).rectangle(corners, outline=BOX)
    return image


def write_png(path: str | Path, sheet: Image.Image) -> None:
    """Write an image as PNG, atomically."""
    with atomic_write(path, per_process=False) as temporary:
        sheet.save(temporary, format="PNG")  # optimize=True takes six times as long for files 4 % smaller


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
    ):  # Pillow's, for damaged files
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
    """Thumbnails of `frames` (path relative to `root` -> frame), computed on all cores; `ranges` as in `ChangePair`, by path."""
    values = [(ranges or {}).get(path) for path in frames]
    with ThreadPoolExecutor() as pool:
        made = pool.map(thumbnail, [root / path for path in frames], frames.values(), values)
        return dict(zip(frames, made))
