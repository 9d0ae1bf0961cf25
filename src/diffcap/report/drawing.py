"""Sizes, colours, fonts and image loading shared by the report's PNG files."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import atomic_write
from diffcap.utils.image_io import Values, read_image

Color = tuple[int, int, int]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

WIDTH, MARGIN, GAP = 900, 16, 8  # as wide as a README is shown
SUPERSAMPLING = 4  # lines are drawn this many times larger and then shrunk, for smooth edges
PICTURE = (256, 192)  # twice the size of the embedded dataset's images
INK, GRAY, LINE = (30, 30, 30), (120, 120, 120), (225, 225, 225)
RIGHT, WRONG, BOX = (20, 125, 55), (190, 40, 40), (255, 0, 200)


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
    """An image scaled to fit a frame (width, height), with the changed object's box; `values` as in `read_image`.

    Raises:
        DiffcapError: it is missing or broken.
    """
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
        corners = [round(value * scale) for value in box]
        ImageDraw.Draw(image).rectangle(
            [
                max(0, corners[0] - 2),
                max(0, corners[1] - 2),
                min(size[0] - 1, corners[2] + 1),
                min(size[1] - 1, corners[3] + 1),
            ],
            outline=BOX,
        )
    return image


def write_png(path: str | Path, sheet: Image.Image) -> None:
    """Write an image as PNG, atomically."""
    with atomic_write(path, per_process=False) as temporary:
        sheet.save(temporary, format="PNG")  # optimize=True takes six times as long for files 4 % smaller
