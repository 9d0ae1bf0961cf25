"""Any picture to RGB: the one place that opens images for extraction, captioning and reports."""

import io
import itertools
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from diffcap.errors import DiffcapError

Source = str | Path | bytes | Image.Image | np.ndarray

MOST_PIXELS = 100_000_000  # of a picture that is decoded whole: about 400 MB with an alpha channel
MOST_SHRUNK = 1_000_000_000  # of a JPEG that can be shrunk as it is decoded
LARGE = 25_000_000  # more pixels than a network of this field could use by far: shrunk by a whole number first
_NEVER = {"EPS"}  # its reader runs Ghostscript
_ORIENTATION = 0x0112  # of EXIF
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_DEPTHS = {255: 8, 4095: 12, 65_535: 16}  # white, and the bits that it has: those of files and of cameras
_SAMPLE_FORMAT, _NODATA = 339, 42_113  # of TIFF: 1 is unsigned; GDAL's number of a pixel without a value
_PHOTOMETRIC, _YCBCR = 262, 6
_SHALLOW = {
    "L;2": 85,
    "L;4": 17,
}  # gray of a PNG with fewer than 8 bits: by what Pillow multiplies it, but not its tRNS
_NO_VALUE = 1e30  # the least that stands for "no value here" in floats of maps
_BLOCK = 1024  # rows and columns of a deep picture that are converted at once

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

    Upright as EXIF has it; transparent parts on white; palettes, gray, CMYK and the like converted; of an animation or of
    several pages the first; more than 25 million pixels shrunk by a whole number. Of gray with more than 8 bits white is
    1.0, or the most that 8, 12 or 16 bits hold, the first that no pixel exceeds; values that no such range holds are
    stretched from black to white.

    Args:
        source: an array is (H, W), (H, W, 1), (H, W, 3) or (H, W, 4): integers from 0 to 255, uint16, bool, or floats
            from 0 to 1.
        name: what messages call a source that is no path.

    Raises:
        DiffcapError: one sentence why it is not a picture that can be read; a picture of too many pixels is refused
            before it is decoded.
    """
    if isinstance(source, str | Path):
        path = Path(source)
        named = name or str(source)
        _check_file(path, named)
        return _guarded(path, named)
    named = name or "the picture"
    if isinstance(source, np.ndarray):
        source = _from_array(source, named)
    return _guarded(source if isinstance(source, Image.Image) else io.BytesIO(source), named)


def _check_file(path: Path, name: str) -> None:
    try:
        if path.is_file():
            return
        is_folder, is_there = path.is_dir(), path.exists()
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        raise _unreadable(name, error) from None
    if is_folder:
        raise DiffcapError(f"{name}: a folder, not an image; name a picture in it.")
    kind = "no image there; put the file in place or fix the path"
    raise DiffcapError(f"{name}: {'not a regular file; name a picture' if is_there else kind}.")


def _unreadable(name: str, error: OSError) -> DiffcapError:
    return DiffcapError(f"{name}: cannot be read ({error.strerror}); check the path and its permissions.")


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
            raise _unreadable(name, error) from None
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
    if getattr(image, "is_animated", False) and image.format != "MPO":  # an MPO's others are the phone's own
        notes.append("holds several pictures, the first was taken")
        image.seek(0)
    if pixels > LARGE:
        notes.append(f"{width:,} x {height:,} pixels, shrunk before anything else")
        if shrinks:
            image.draft(None, (max(1, width // _factor(pixels)), max(1, height // _factor(pixels))))
    image = _loaded(image)  # a truncated file is said to be so, not to have broken notes
    turn = _turn(image)
    if image.mode.startswith("I") or image.mode == "F":  # convert() would cut off at 255
        image, note = _to_gray(image, name)
        notes += note
    if image.width * image.height > LARGE:
        image = _averaged(image).reduce(_factor(image.width * image.height))
    if turn is not None:
        image = image.transpose(turn)
        image.info = {
            key: value for key, value in image.info.items() if key == "transparency"
        }  # not to be turned again
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = _on_white(image)
    return Picture(image if image.mode == "RGB" else image.convert("RGB"), name, tuple(notes))


def _loaded(image: Image.Image) -> Image.Image:
    """The picture with its pixels decoded; itself, but where Pillow gets its colours or its transparent colour wrong."""
    tile: Any = (getattr(image, "tile", None) or [None])[0]
    if image.format == "TIFF" and tile and tile[0] == "raw" and image.mode == "RGB":
        _leave_ycbcr_to_libtiff(image)
    kind = tile[3] if image.format == "PNG" and tile else ""
    key = image.info.get("transparency")
    low = _lower_bytes(image) if kind == "RGB;16B" and key is not None else None
    image.load()
    if key is None or not (low or kind in _SHALLOW):
        return image
    image = image.copy()  # the caller's stays as it is
    if low is None:
        image.info["transparency"] = key * _SHALLOW[kind]
        return image
    del image.info["transparency"]
    upper, lower = ([value // 256 for value in key], [value % 256 for value in key])
    hidden = ((np.asarray(image) == upper) & (np.asarray(low) == lower)).all(-1)
    image.putalpha(Image.fromarray(np.where(hidden, 0, 255).astype(np.uint8)))
    return image


def _leave_ycbcr_to_libtiff(image: Any) -> None:
    """Pillow reads a TIFF without compression by itself, and one in YCbCr as if it were RGB with a fourth byte."""
    if image.tag_v2.get(_PHOTOMETRIC) == _YCBCR:
        image.tile = [("libtiff", (0, 0, *image.size), 0, ("RGBX", "raw", False, image.tag_v2.offset))]
        image.use_load_libtiff = True


def _lower_bytes(image: Any) -> Image.Image:
    """Of a PNG with 16 bits a channel the bytes that Pillow leaves out."""
    low: Any = Image.open(image.fp, formats=["PNG"])
    low.tile = [(*tile[:3], "RGB;16L") for tile in low.tile]  # so that the bytes change places
    low.load()
    return low


def _factor(pixels: int) -> int:
    """The smallest whole number to shrink both sides by."""
    factor = 1
    while pixels / factor**2 > LARGE:
        factor += 1
    return factor


def _turn(image: Image.Image) -> Image.Transpose | None:
    """What makes a picture upright."""
    try:
        return _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # notes that are broken turn nothing
        return None


def _averaged(image: Image.Image) -> Image.Image:
    """A picture in a mode in which neighbours can be averaged: numbers of a palette cannot."""
    if image.mode in ("P", "PA"):
        return image.convert("RGBA" if image.mode == "PA" or "transparency" in image.info else "RGB")
    return image.convert("L") if image.mode == "1" else image


def _to_gray(image: Image.Image, name: str) -> tuple[Image.Image, list[str]]:
    """Pixels of more than 8 bits to 8, and a clause where their range is a guess; see `read_picture`."""
    lowest, highest = np.inf, -np.inf
    for _, values in _blocks(image):
        known = values[~np.isnan(values)]
        if known.size:
            lowest, highest = min(lowest, float(known.min())), max(highest, float(known.max()))
    if lowest > highest:
        raise DiffcapError(f"{name}: no pixel in it has a value; export it again, with 8 or 16 bits a pixel.")
    whites = [1] if image.mode == "F" else list(_DEPTHS)
    known_white = next((white for white in whites if lowest >= 0 and highest <= white), None)
    black, white, notes = lowest, highest, []
    if known_white is None:
        notes.append(f"its values, from {lowest:,g} to {highest:,g}, were stretched from black to white")
    else:
        black, white = 0.0, float(known_white)
        if known_white in (255, 4095):
            notes.append(f"its values, at most {highest:,g}, were taken for {_DEPTHS[known_white]} bits")
    gray = Image.new("L", image.size)
    key = image.info.get("transparency")
    alpha = None if key is None else Image.new("L", image.size)
    for corner, values in _blocks(image):
        scaled = (np.nan_to_num(values, nan=black) - black) * 255 / ((white - black) or 1)
        gray.paste(Image.fromarray(scaled.round().astype(np.uint8)), corner)
        if alpha is not None:
            alpha.paste(Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8)), corner)
    return gray if alpha is None else Image.merge("LA", (gray, alpha)), notes


def _blocks(image: Image.Image) -> Iterator[tuple[tuple[int, int], np.ndarray[Any, Any]]]:
    """The parts of a gray picture, one at a time: their corners, and float64 values, NaN where there is none."""
    tags: Any = getattr(image, "tag_v2", {})
    unsigned = image.mode == "I" and tags.get(258) == (32,) and tags.get(_SAMPLE_FORMAT, (1,))[0] == 1
    try:
        nodata = float(str(tags[_NODATA]).strip(" \0"))
    except (KeyError, ValueError):
        nodata = np.nan
    for left, top in itertools.product(range(0, image.width, _BLOCK), range(0, image.height, _BLOCK)):
        box = left, top, min(image.width, left + _BLOCK), min(image.height, top + _BLOCK)
        values = np.asarray(image.crop(box))
        values = (values.view(np.uint32) if unsigned else values).astype(np.float64)
        values[(np.abs(values) >= _NO_VALUE) | (values == nodata)] = np.nan
        yield (left, top), values


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
        if array.ndim == 2:
            return Image.fromarray(array)
        array = array // 257 + (array % 257 > 128)  # rounded
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
    if start[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return "a TIFF with a kind of pixels or compression that this program cannot decode; save it with 8 or 16 bits a channel"
    if start[4:8] == b"ftyp":
        return f"a film or a HEIC photograph, which this program cannot decode; {remedy}"
    try:
        start.decode("utf-8", "strict" if len(start) < 2048 else "ignore")
        if b"\0" not in start:
            return "a text file, not an image; give a picture in its place"
    except UnicodeDecodeError:
        pass
    return "not an image that can be decoded; fetch the file again"


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:120].rstrip(". ") or type(error).__name__
