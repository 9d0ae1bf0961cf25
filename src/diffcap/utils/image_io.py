"""Read any image as RGB: the only place that opens input images, for extraction, captioning and reports."""

import io
import re
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from diffcap.utils.errors import DiffcapError

Source = str | Path | bytes | Image.Image | np.ndarray

MAX_PIXELS = 100_000_000  # about 400 MB with an alpha channel; protects against decompression bombs
SHRINK_ABOVE = 25_000_000  # pixels; the networks use far fewer
_NO_VALUE = 1e30  # floats of this size mark pixels without a value in scientific rasters
_BITS = {255: 8, 4095: 12, 65_535: 16}  # value of white -> bits of files and cameras
_REMEDY = "save it as PNG or JPEG"
_BITS_PER_SAMPLE, _SAMPLE_FORMAT = 258, 339  # TIFF tags

warnings.filterwarnings("ignore", module=r"PIL\.")  # about large images (limited here) and broken EXIF data (ignored)


class InputImage(NamedTuple):
    """An input image.

    Attributes:
        image: mode RGB, upright.
        name: its name in messages, the path if there is one.
        notes: what was done to it that the user may not expect, one clause each.
    """

    image: Image.Image
    name: str
    notes: tuple[str, ...] = ()


def read_image(source: Source, name: str | None = None) -> InputImage:
    """Convert a path, the bytes of a file, a PIL image or an array to RGB with 8 bits per channel.

    The image is turned upright (EXIF), transparent parts become white, animations and multi-page files give their first frame,
    and more than 25 million pixels are shrunk by an integer factor. In gray images with more than 8 bits, white is 1.0 or the
    largest value of 8, 12 or 16 bits, the first that no pixel exceeds; any other range is stretched from black to white.

    Args:
        source: an array has shape (H, W), (H, W, 1), (H, W, 3) or (H, W, 4): integers from 0 to 255, uint16, bool, or floats
            from 0 to 1.
        name: the name in messages, if the source is not a path.

    Raises:
        DiffcapError: the source is not a readable image, or has too many pixels (found before they are decoded).
    """
    if isinstance(source, str | Path):
        name, source = name or str(source), Path(source)
    name = name or "the image"
    try:
        if isinstance(source, np.ndarray):
            return _to_rgb(*_from_array(source, name), name)
        if isinstance(source, Image.Image):
            return _to_rgb(source, [], name)
        with _open_file(source, name) if isinstance(source, Path) else io.BytesIO(source) as file:
            return _decode(file, name)
    except DiffcapError:
        raise
    except Exception as error:  # decoders raise many kinds of errors on damaged files
        if isinstance(error, OSError) and error.errno is not None:
            fault, remedy = f"cannot be read ({error.strerror})", "check the path and its permissions"
        else:
            reason = " ".join(str(error).split())[:120].rstrip(". ") or type(error).__name__
            fault, remedy = f"truncated or broken image ({reason})", "fetch the file again"
        raise DiffcapError(f"{name}: {fault}; {remedy}.") from None


def _too_large(name: str, size: str) -> DiffcapError:
    return DiffcapError(f"{name}: {size} pixels are more than the limit of {MAX_PIXELS:,}; shrink the image first.")


def _open_file(path: Path, name: str) -> BinaryIO:
    if not path.is_file():
        fault = (
            "a folder, not an image" if path.is_dir() else "not a regular file" if path.exists() else "file not found"
        )
        raise DiffcapError(f"{name}: {fault}; give the path of an image file.")
    return path.open("rb")


def _decode(file: BinaryIO, name: str) -> InputImage:
    Image.init()
    formats = [kind for kind in Image.ID if kind != "EPS"]  # its reader runs Ghostscript
    try:
        return _to_rgb(Image.open(file, formats=formats), [], name)
    except Image.DecompressionBombError as error:
        size = re.search(r"\d+", str(error))
        raise _too_large(name, f"{int(size[0]):,}" if size else "its") from None
    except UnidentifiedImageError:
        file.seek(0)
        start = file.read(2048)
        if start.startswith((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")):
            return _to_rgb(*_from_tiff(file, name), name)
        raise DiffcapError(f"{name}: {_describe(start)}.") from None


def _to_rgb(image: Image.Image, notes: list[str], name: str) -> InputImage:
    width, height = image.size
    if not width * height:
        raise DiffcapError(f"{name}: an image without pixels ({width} x {height}); fetch the file again.")
    if width * height > MAX_PIXELS:
        raise _too_large(name, f"{width:,} x {height:,}")
    notes = list(notes)
    if getattr(image, "is_animated", False) and image.format != "MPO":  # an MPO is a photo with a preview
        notes.append("has several frames, the first was used")
        image.seek(0)
    image.load()  # before EXIF, so that a truncated file is reported as such
    is_uint32 = image.mode == "I" and _is_unsigned_tiff(image)
    with suppress(Exception):  # an image with broken EXIF data is not turned
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I") or image.mode == "F":  # convert() would clip at 255
        deep = np.asarray(image)
        pixels, more = _to_8_bits(deep.view(np.uint32) if is_uint32 else deep, name)
        image, notes = Image.fromarray(pixels), notes + more
    if image.mode in ("RGBA", "LA", "PA", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image if image.mode == "RGB" else image.convert("RGB")
    if width * height > SHRINK_ABOVE:
        notes.append(f"{width:,} x {height:,} pixels, shrunk before anything else")
        factor = next(factor for factor in range(2, 100) if width * height <= SHRINK_ABOVE * factor**2)
        image = image.reduce(factor)
    return InputImage(image, name, tuple(notes))


def _is_unsigned_tiff(image: Image.Image) -> bool:
    """Whether a TIFF has unsigned 32-bit pixels, which Pillow reads as signed ones (mode "I")."""
    tags = getattr(image, "tag_v2", {})
    return tuple(tags.get(_BITS_PER_SAMPLE, ())) == (32,) and tuple(tags.get(_SAMPLE_FORMAT, (1,))) == (1,)


def _to_8_bits(pixels: np.ndarray[Any, Any], name: str) -> tuple[np.ndarray[Any, Any], list[str]]:
    """Scale pixels of more than 8 bits, any shape, to uint8; adds a note if their range is a guess."""
    values = pixels.astype(np.float32)
    values[~(np.abs(values) < _NO_VALUE)] = np.nan  # infinite ones, too
    if np.isnan(values).all():
        raise DiffcapError(f"{name}: no pixel has a value; export the image again, with 8 or 16 bits per channel.")
    low, high, notes = float(np.nanmin(values)), float(np.nanmax(values)), list[str]()
    whites = (1,) if pixels.dtype.kind == "f" else tuple(_BITS)
    white = next((white for white in whites if low >= 0 and high <= white), None)
    if white is None:
        notes.append(f"its values, from {low:,g} to {high:,g}, were stretched from black to white")
        values = (values - low) / ((high - low) or 1)
    else:
        if white in (255, 4095):
            notes.append(f"its values, at most {high:,g}, were taken for {_BITS[white]} bits")
        values /= white
    return (np.nan_to_num(values, copy=False) * 255).round().astype(np.uint8), notes


def _from_array(array: np.ndarray[Any, Any], name: str) -> tuple[Image.Image, list[str]]:
    """An array as an image with 8 bits per channel, and notes."""
    shape = array.shape
    if array.ndim == 3 and shape[2] == 1:
        array = array[:, :, 0]
    if not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))) or 0 in shape:
        raise DiffcapError(f"{name}: an array of shape {shape} is not an image; give (H, W), (H, W, 3) or (H, W, 4).")
    if shape[0] * shape[1] > MAX_PIXELS:
        raise _too_large(name, f"{shape[1]:,} x {shape[0]:,}")
    notes = list[str]()
    if array.dtype == np.uint16:
        array, notes = _to_8_bits(array, name)
    elif array.dtype.kind == "f":
        if not np.isfinite(array).all() or array.min() < 0 or array.max() > 1:
            raise DiffcapError(f"{name}: floats of an image must be from 0 to 1; scale them, or give uint8.")
        array = (array * 255).round()
    elif array.dtype == np.bool_:
        array = array * np.uint8(255)
    elif array.dtype.kind not in "iu" or array.min() < 0 or array.max() > 255:
        raise DiffcapError(f"{name}: an array of {array.dtype} is not from 0 to 255; give uint8, uint16 or floats.")
    return Image.fromarray(array.astype(np.uint8)), notes


def _from_tiff(file: BinaryIO, name: str) -> tuple[Image.Image, list[str]]:
    """A TIFF that Pillow cannot decode (float64, more than 4 bands, rare compressions), as tifffile reads it."""
    try:
        import tifffile
    except ImportError:
        raise DiffcapError(
            f"{name}: Pillow cannot decode the pixels of this TIFF; install diffcap[tiff], or save it with 8 or 16 bits per channel."
        ) from None
    file.seek(0)
    with tifffile.TiffFile(file) as tiff:
        page = tiff.pages[0]
        if np.prod(page.shape) > 4 * MAX_PIXELS:
            raise _too_large(name, " x ".join(map(str, page.shape)))
        pixels = page.asarray()
    if pixels.ndim == 3 and pixels.shape[2] not in (3, 4):
        raise DiffcapError(f"{name}: a TIFF of shape {pixels.shape}; save 1, 3 or 4 of its bands.")
    pixels, notes = (pixels, []) if pixels.dtype == np.uint8 else _to_8_bits(pixels, name)
    return _from_array(pixels, name)[0], notes


def _describe(start: bytes) -> str:
    """What a file is that Pillow cannot read, and what to do."""
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not start:
        return "an empty file, not an image; fetch it again"
    if text.startswith(b"<svg") or (text.startswith(b"<?xml") and b"<svg" in text):
        return f"an SVG drawing, which has no pixels; {_REMEDY}"
    if text.startswith((b"%!PS", b"\xc5\xd0\xd3\xc6", b"%PDF")):
        return f"a PostScript or PDF document, not an image; {_REMEDY}"
    if start[4:8] == b"ftyp":
        return f"a video or a HEIC photo, which Pillow cannot decode; {_REMEDY}"
    with suppress(UnicodeDecodeError):
        start.decode("utf-8", "strict" if len(start) < 2048 else "ignore")
        if b"\0" not in start:
            return "a text file, not an image; put an image in its place"
    return "not an image that can be decoded; fetch the file again"
