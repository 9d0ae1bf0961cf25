"""Any picture to RGB: the one place that opens images for extraction, captioning and reports."""

import io
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from diffcap.errors import DiffcapError

Source = str | Path | bytes | Image.Image | np.ndarray

MOST_PIXELS = 100_000_000  # of a picture that is decoded whole: about 400 MB with an alpha channel
MOST_SHRUNK = 1_000_000_000  # of a JPEG that can be shrunk as it is decoded
LARGE = 25_000_000  # more pixels than a network of this field could use by far: shrunk by a whole number first
_NEVER = {"EPS"}  # its reader runs Ghostscript
_ORIENTATION = 0x0112  # of EXIF
_UNKNOWN_RANGE = "has pixels of 32 bits, whose range nobody knows; save it with 8 or 16"

# Of large pictures, for which the limits here are lower than Pillow's, and of broken EXIF data, which turn nothing.
warnings.filterwarnings("ignore", module=r"PIL\.")


class Picture(NamedTuple):
    """An RGB picture.

    Attributes:
        image: mode RGB, upright. name: for messages, the path if there is one. notes: what was done to it that one
            would not expect, a clause each ("animated, its first frame was taken").
    """

    image: Image.Image
    name: str
    notes: tuple[str, ...] = ()


def read_picture(source: Source, name: str | None = None) -> Picture:
    """Turn a path, the bytes of a file, a PIL image or an array into RGB with 8 bits a channel.

    Upright as EXIF has it; transparent parts on white; palettes, gray, CMYK and the like converted; 16 bits a channel
    scaled to 8; of an animation or of several pages the first; more than 25 million pixels shrunk by a whole number.

    Args:
        source: an array is (H, W), (H, W, 1), (H, W, 3) or (H, W, 4): uint8, uint16, bool, or floats from 0 to 1.
        name: what messages call a source that is no path.

    Raises:
        DiffcapError: one sentence why it is not a picture that can be read; a picture of too many pixels is refused
            before it is decoded.
    """
    if isinstance(source, str | Path):
        path = Path(source)
        named = name or str(source)
        if path.is_dir():
            raise DiffcapError(f"{named}: a folder, not an image; name a picture in it.")
        if not path.is_file():
            kind = "no image there; put the file in place or mend the path"
            raise DiffcapError(f"{named}: {'not a regular file; name a picture' if path.exists() else kind}.")
        return _guarded(path, named)
    named = name or "the picture"
    if isinstance(source, np.ndarray):
        source = _from_array(source, named)
    return _guarded(source if isinstance(source, Image.Image) else io.BytesIO(source), named)


def _guarded(source: Path | io.BytesIO | Image.Image, name: str) -> Picture:
    try:
        if isinstance(source, Image.Image):
            return _to_rgb(source, name)
        with _open(source, name) as file:
            return _to_rgb(file, name)
    except UnidentifiedImageError:
        raise DiffcapError(f"{name}: {_what_it_is(source)}.") from None
    except DiffcapError:
        raise
    except OSError as error:
        if error.errno is not None:  # the system's, not the decoder's
            raise DiffcapError(f"{name}: cannot be read ({error.strerror}); check its permissions.") from None
        raise DiffcapError(f"{name}: truncated or broken image ({_short(error)}); fetch the file again.") from None
    except Exception as error:  # a decoder fed with garbage may raise anything, Pillow a SyntaxError for a broken chunk
        raise DiffcapError(f"{name}: truncated or broken image ({_short(error)}); fetch the file again.") from None


def _open(source: Path | io.BytesIO, name: str) -> Image.Image:
    """As `Image.open`, but a JPEG of any size is opened: it can be shrunk as it is decoded."""
    from PIL import JpegImagePlugin

    Image.init()
    try:
        return Image.open(source, formats=[kind for kind in Image.ID if kind not in _NEVER])
    except Image.DecompressionBombError as error:
        if isinstance(source, io.BytesIO):
            source.seek(0)
        if _start_of(source)[:3] != b"\xff\xd8\xff":
            found = re.search(r"\d+", str(error))
            pixels = f"{int(found[0]):,} pixels are" if found else "its pixels are"
            raise DiffcapError(
                f"{name}: {pixels} more than the {MOST_PIXELS:,} that are read; shrink it first."
            ) from None
        return JpegImagePlugin.JpegImageFile(source)


def _to_rgb(image: Image.Image, name: str) -> Picture:
    notes: list[str] = []
    width, height = image.size
    pixels = width * height
    if not pixels:
        raise DiffcapError(f"{name}: an image without pixels ({width} x {height}); fetch the file again.")
    shrinks = image.format == "JPEG" and not image.info.get("progressive") and hasattr(image, "draft")
    if pixels > (MOST_SHRUNK if shrinks else MOST_PIXELS):
        raise DiffcapError(
            f"{name}: {width:,} x {height:,} pixels are more than the {MOST_PIXELS:,} that are read; shrink it first."
        )
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", None)):
        raise DiffcapError(f"{name}: {_UNKNOWN_RANGE}.")
    if getattr(image, "is_animated", False) and image.format != "MPO":  # an MPO's others are the phone's own
        notes.append("holds several pictures, the first was taken")
        image.seek(0)
    if pixels > LARGE:
        if shrinks:
            image.draft(None, (max(1, width // _factor(pixels)), max(1, height // _factor(pixels))))
        image.load()
        if image.width * image.height > LARGE:
            image = _upright(image).reduce(_factor(image.width * image.height))
        notes.append(f"{width:,} x {height:,} pixels, shrunk before anything else")
    image = _upright(image)
    if image.mode.startswith("I"):  # convert() would cut off at 255
        image = Image.fromarray((np.asarray(image).clip(0, 65_535) // 257).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = _on_white(image)
    return Picture(image if image.mode == "RGB" else image.convert("RGB"), name, tuple(notes))


def _factor(pixels: int) -> int:
    """The smallest whole number to shrink both sides by."""
    factor = 1
    while pixels / factor**2 > LARGE:
        factor += 1
    return factor


def _upright(image: Image.Image) -> Image.Image:
    image.load()  # a truncated file is said to be so, not to have broken notes
    try:
        if image.getexif().get(_ORIENTATION, 1) == 1:
            return image  # exif_transpose would copy it
        return ImageOps.exif_transpose(image)
    except Exception:  # notes that are broken turn nothing
        return image


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode == "La":
        image = image.convert("LA")
    image = image.convert("RGBA")
    lowest, _ = image.getchannel("A").getextrema()
    if lowest == 255:
        return image
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)


def _from_array(array: np.ndarray[Any, Any], name: str) -> Image.Image:
    shape = array.shape
    if array.ndim == 3 and shape[2] == 1:
        array = array[:, :, 0]
    if not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))) or 0 in shape:
        raise DiffcapError(f"{name}: an array of shape {shape} is no picture; give (H, W), (H, W, 3) or (H, W, 4).")
    if shape[0] * shape[1] > MOST_PIXELS:
        raise DiffcapError(
            f"{name}: {shape[1]:,} x {shape[0]:,} pixels are more than the {MOST_PIXELS:,} that are read; shrink it first."
        )
    if array.dtype.kind == "f":
        if not np.isfinite(array).all() or array.min() < 0 or array.max() > 1:
            raise DiffcapError(f"{name}: floats of a picture lie from 0 to 1; scale them, or give uint8.")
        array = (array * 255).round()
    elif array.dtype == np.uint16:
        array = array // 257
    elif array.dtype == np.bool_:
        array = array * np.uint8(255)
    elif array.dtype.kind not in "iu" or array.min() < 0 or array.max() > 255:
        raise DiffcapError(
            f"{name}: an array of {array.dtype} that is not from 0 to 255; give uint8, uint16 or floats."
        )
    return Image.fromarray(array.astype(np.uint8))


def _start_of(source: Any) -> bytes:
    if isinstance(source, Path):
        with source.open("rb") as file:
            return file.read(2048)
    source.seek(0)
    start = source.read(2048)
    source.seek(0)
    return start


def _what_it_is(source: Any) -> str:
    """What a file is that no reader knows, and what to do."""
    start = _start_of(source)
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n")
    remedy = "save it as PNG or JPEG"
    if not start:
        return "an empty file, not an image; fetch it again"
    if text.startswith(b"<svg") or (text.startswith(b"<?xml") and b"<svg" in text):
        return f"an SVG drawing, which has no pixels; {remedy}"
    if text.startswith((b"%!PS", b"\xc5\xd0\xd3\xc6")):
        return f"a PostScript drawing, which has no pixels; {remedy}"
    if text.startswith(b"%PDF"):
        return f"a PDF document, not an image; {remedy}"
    if start[4:8] == b"ftyp":
        return f"a film or a HEIC photograph, which this program cannot decode; {remedy}"
    try:
        start.decode("utf-8", "strict" if len(start) < 2048 else "ignore")
        if b"\0" not in start:
            return "a text file, not an image; check the path"
    except UnicodeDecodeError:
        pass
    return "not an image that can be decoded; fetch the file again"


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:120].rstrip(". ") or type(error).__name__
