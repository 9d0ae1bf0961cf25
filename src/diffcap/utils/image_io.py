"""Read any image as RGB. Extraction, captioning and reports open input images only by this module."""

import io
import logging
import math
import re
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from diffcap.utils.errors import DiffcapError, wrap_errors
from diffcap.utils.files import url_of
from diffcap.utils.fitting import Fit, fit_pair

Source = str | Path | bytes | Image.Image | np.ndarray
Array = np.ndarray[Any, Any]
ValueRange = tuple[float, float]  # smallest and largest pixel value: two ints for integers, two floats for floats

MAX_PIXELS = 100_000_000  # about 400 MB with an alpha channel; protects against decompression bombs
SHRINK_ABOVE = 25_000_000  # an image of more pixels is shrunk; the networks use far fewer pixels
_NO_VALUE = 1e30  # floats of at least this size mark pixels without a value in scientific rasters
_BITS = {255: 8, 4095: 12, 65_535: 16}  # largest pixel value -> number of bits that files and cameras use for it
_REMEDY = "save it as PNG or JPEG"
_SOURCE_TYPES = "a path, the bytes of a file, a PIL image, or a numpy array of shape (H, W), (H, W, 3) or (H, W, 4)"
_BITS_PER_SAMPLE, _SAMPLES_PER_PIXEL, _PLANAR, _SAMPLE_FORMAT, _NODATA = 258, 277, 284, 339, 42113  # TIFF tags

warnings.filterwarnings("ignore", module=r"PIL\.")  # Pillow warns of large images and broken EXIF data
for _decoder in ("PIL", "rasterio"):
    logging.getLogger(_decoder).setLevel(logging.CRITICAL)  # this module reports what they cannot decode


class InputImage(NamedTuple):
    """An input image."""

    image: Image.Image  # mode RGB, upright
    name: str  # its name in messages: the path, if there is one
    notes: tuple[str, ...] = ()  # changes to the image that the user may not expect, one clause each
    value_range: ValueRange | None = None  # range of its pixel values before scaling to 8 bits; None: not scaled
    size: tuple[int, int] = (0, 0)  # width and height before shrinking


class InputPair(NamedTuple):
    """Both images of a pair, fitted to each other, and notes on them, one clause each."""

    before: InputImage
    after: InputImage
    notes: tuple[str, ...]
    fit: dict[str, Any] | None = None  # "kind", "size", "note" and what was measured; None if they were not fitted
    # x, y, width and height of the fitted images in the image after, in pixels of its file.
    frame: tuple[float, ...] = ()


def read_pair(
    before: Source,
    after: Source,
    names: tuple[str, str] | None = None,
    fit: Fit = "stretch",
    strict: bool = False,
    shrink: bool = True,
) -> InputPair:
    """Read both images of a pair by `read_image`, and fit them to each other by `fit_pair`.

    If both have more than 8 bits, one common range of values is used to scale them. If `shrink` is false, images keep their size.
    """
    defaults = (
        None if isinstance(source, str | Path) else f"the image {side}"
        for source, side in ((before, "before"), (after, "after"))
    )
    sources = list(zip((before, after), names or defaults))
    first, second = (read_image(source, name, shrink=shrink) for source, name in sources)
    notes = []
    kinds = [_value_kind(side.value_range) for side in (first, second)]
    ranges = [side.value_range for side in (first, second) if side.value_range is not None]
    if len(ranges) == 2 and kinds[0] == kinds[1]:
        common_range = min(low for low, _ in ranges), max(high for _, high in ranges)
        first, second = (read_image(source, name, common_range, shrink) for source, name in sources)
        notes += _range_notes(common_range, "their")
    elif ranges:
        notes.append(f"their pixels are {kinds[0]} and {kinds[1]}, so each is scaled by its own range of values")
    try:
        fitted = fit_pair(first.image, second.image, fit, strict)
    except DiffcapError as error:
        raise DiffcapError(f"{first.name} and {second.name}: {error}") from None
    (width, height), (other_width, other_height) = first.size, second.size
    if (width, height) != (other_width, other_height):
        has_same_ratio = abs(width * other_height - other_width * height) <= max(*first.size, *second.size)
        sizes = f"({width:,} x {height:,} and {other_width:,} x {other_height:,} pixels)"
        if fitted.note:
            notes.append(f"their sizes differ {sizes}; {fitted.note}")
        elif has_same_ratio:
            notes.append(f"their sizes differ {sizes}, so both are resized to one size")
        else:
            notes.append(f"their aspect ratios differ {sizes}, so both are stretched and do not match exactly")
    elif fitted.note:
        notes.append(fitted.note)
    modes = [_color_mode(side.image) for side in (first, second)]
    if sorted(modes) == ["color", "gray"]:
        notes.append(
            f"the first is in {modes[0]} and the second in {modes[1]}, which the caption may take for a change"
        )
    own_notes = (f"{side.name}: {note}" for side in (first, second) for note in side.notes)
    prefix = f"{first.name} and {second.name}: "
    notes = [prefix + note for note in notes]
    measured = {name: round(value, 3) for name, value in (fitted.measured or {}).items()}
    values = {"kind": fit, "size": list(fitted.after.size), "note": fitted.note, **measured}
    scale = second.size[0] / second.image.width  # above 1 for an image that was shrunk
    frame = tuple(scale * value for value in (*fitted.origin, *fitted.after.size))
    sides = first._replace(image=fitted.before), second._replace(image=fitted.after)
    return InputPair(*sides, (*own_notes, *notes), None if fit == "stretch" else values, frame)


def _value_kind(value_range: ValueRange | None) -> str:
    if value_range is None:
        return "8-bit integers"
    return "floats" if isinstance(value_range[0], float) else "integers of more than 8 bits"


def _color_mode(image: Image.Image) -> str:
    """Return "gray", "color", or "" if only few pixels are colored. The image is judged by at most 128 x 128 of its pixels."""
    size = min(128, image.width), min(128, image.height)
    sample = image.resize(size, Image.Resampling.NEAREST)
    # The largest minus the smallest channel. It is at most 8 for a gray pixel, and at least 16 for a colored one.
    spread = np.ptp(np.asarray(sample), axis=-1)  # uint8
    if spread.max() <= 8:
        return "gray"
    return "color" if (spread >= 16).mean() > 0.03 else ""


def read_image(
    source: Source, name: str | None = None, value_range: ValueRange | None = None, shrink: bool = True
) -> InputImage:
    """Convert a path, the bytes of a file, a PIL image or an array to RGB with 8 bits per channel.

    The image is turned upright (EXIF), transparent parts become white, only the first frame of animations and multi-page files is used,
    and an image of more than 25 million pixels is shrunk by an integer factor. In images with more than 8 bits, white is 1.0 for floats.
    For integers, white is the smallest of 255, 4095 and 65535 that no pixel exceeds. With negative or larger values, the smallest value of
    the image is black and its largest is white. The fourth band of a TIFF is left out if its values look like near infrared and not like
    transparency. In a GeoTIFF with more than 8 bits, pixels with the nodata value become black.

    Args:
        source: an array has shape (H, W), (H, W, 1), (H, W, 3) or (H, W, 4): integers from 0 to 255, uint16, bool, or floats from 0 to 1.
        name: the name in messages, if the source is not a path.
        value_range: the range that is used to scale an image with more than 8 bits. None: the range of the image's own values.
        shrink: shrink large images. If it is false, they keep their size.
    """
    if isinstance(source, str | Path):
        name = name or str(source)
        source = Path(source)
    name = name or "the image"
    conversion = _Conversion(name, value_range, shrink)
    with wrap_errors(name, "truncated or broken image", "fetch the file again"):
        if isinstance(source, np.ndarray):
            return conversion.to_rgb(conversion.from_array(source))
        if isinstance(source, Image.Image):
            return conversion.to_rgb(source)
        if not isinstance(source, Path | bytes | bytearray | memoryview):
            raise DiffcapError(f"{name}: an object of type {type(source).__name__}; give {_SOURCE_TYPES}.")
        try:
            if isinstance(source, Path) and not source.is_file():
                if url := url_of(source):
                    raise DiffcapError(f"{url}: a URL, not a file; download the image and give its path.")
                fault = "a folder, not an image" if source.is_dir() else "file not found"
                raise DiffcapError(f"{name}: {fault}; give the path of an image file.")
            with source.open("rb") if isinstance(source, Path) else io.BytesIO(source) as file:
                return conversion.decode(file)
        except OSError as error:
            if error.errno is None:  # Pillow raises such errors for a broken image
                raise
            reason = f"cannot be read ({error.strerror}); check the path and its permissions"
            raise DiffcapError(f"{name}: {reason}.") from None


@dataclass
class _Conversion:
    """The conversion of one image to RGB with 8 bits per channel."""

    name: str
    value_range: ValueRange | None  # as in `read_image`
    shrink: bool
    notes: list[str] = field(default_factory=list)
    own_range: ValueRange | None = None  # range of the values before they were scaled to 8 bits

    def decode(self, file: BinaryIO) -> InputImage:
        """Read a file of any format."""
        Image.init()
        formats = [kind for kind in Image.ID if kind != "EPS"]  # to read EPS, Pillow runs Ghostscript
        try:
            image = Image.open(file, formats=formats)
            if image.format == "TIFF":
                tags: Any = image.tag_v2  # type: ignore[attr-defined]
                has_one_of_several_bands = len(image.getbands()) == 1 < tags.get(_SAMPLES_PER_PIXEL, 1)
                is_deep = max(tags.get(_BITS_PER_SAMPLE, (1,))) > 8
                has_separate_bands = tags.get(_PLANAR) == 2  # each band is stored separately
                if has_one_of_several_bands or (is_deep and has_separate_bands):
                    raise ValueError("Pillow would decode other pixels")
            return self.to_rgb(image)
        except Image.DecompressionBombError as error:
            size = re.search(r"\d+", str(error))
            raise self.too_large(f"{int(size[0]):,}" if size else "its") from None
        except (UnidentifiedImageError, ValueError) as error:
            file.seek(0)
            start = file.read(2048)
            if start.startswith((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")):  # a TIFF
                return self.to_rgb(self.from_tiff(file))
            if start[4:8] == b"ftyp" and "HEIF" not in formats:  # a HEIC photo
                with suppress(ImportError):
                    from pillow_heif import register_heif_opener

                    register_heif_opener()
                    file.seek(0)
                    return self.decode(file)
            if isinstance(error, ValueError):
                raise
            raise DiffcapError(f"{self.name}: {_describe_fault(start)}.") from None

    def too_large(self, size: str) -> DiffcapError:
        return DiffcapError(
            f"{self.name}: {size} pixels are more than the limit of {MAX_PIXELS:,}; shrink the image first."
        )

    def to_rgb(self, image: Image.Image) -> InputImage:
        """Convert an image of any mode."""
        width, height = image.size
        if not width * height:
            raise DiffcapError(f"{self.name}: an image without pixels ({width} x {height}); fetch the file again.")
        if width * height > MAX_PIXELS:
            raise self.too_large(f"{width:,} x {height:,}")
        if getattr(image, "is_animated", False) and image.format != "MPO":  # an MPO is one photo with a preview
            self.notes.append("has several frames, the first was used")
            image.seek(0)
        image.load()  # before EXIF is read, so that the error says that a file is truncated
        is_tiff = image.format == "TIFF"
        tags = getattr(image, "tag_v2", {})
        # Pillow reads unsigned 32-bit pixels as signed ones.
        bits = tuple(tags.get(_BITS_PER_SAMPLE, ()))
        sample_format = tuple(tags.get(_SAMPLE_FORMAT, (1,)))
        is_uint32 = image.mode == "I" and (bits, sample_format) == ((32,), (1,))
        nodata = tags.get(_NODATA, "nan")
        with suppress(Exception):  # an image with broken EXIF data is not turned
            image = ImageOps.exif_transpose(image)
        size = image.size
        if image.mode.startswith("I") or image.mode == "F":  # convert() would clip at 255
            pixels = np.asarray(image)
            image = Image.fromarray(self.to_8_bits(pixels.view(np.uint32) if is_uint32 else pixels, float(nodata)))
        if image.mode in ("RGBA", "LA", "PA", "RGBa") or "transparency" in image.info:
            image = image.convert("RGBA")
            counts = image.getchannel("A").histogram()
            # GDAL marks any fourth band as transparency. True transparency has few values between 0 and 255, except for one constant
            # opacity.
            if is_tiff and sum(counts[1:255]) - max(counts[1:255]) > counts[0] + counts[255]:
                self.notes.append("its last band was left out, since its values are not those of transparency")
            elif sum(counts[:255]):
                self.notes.append("its transparent parts were made white")
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image if image.mode == "RGB" else image.convert("RGB")
        if self.shrink and width * height > SHRINK_ABOVE:
            self.notes.append(f"{width:,} x {height:,} pixels, shrunk before anything else")
            factor = next(factor for factor in range(2, 100) if width * height <= SHRINK_ABOVE * factor**2)
            image = image.reduce(factor)
        return InputImage(image, self.name, tuple(self.notes), self.own_range, size)

    def to_8_bits(self, pixels: Array, nodata: float = math.nan) -> Array:
        """Scale pixels of more than 8 bits to uint8; `nodata` and values that are not finite become black."""
        numbers: Array = pixels.astype(np.float32)
        numbers[~(np.abs(numbers) < _NO_VALUE)] = np.nan  # also infinite values
        numbers[pixels == nodata] = np.nan
        if np.isnan(numbers).all():
            raise DiffcapError(
                f"{self.name}: no pixel has a value; export the image again, with 8 or 16 bits per channel."
            )
        number_type = float if pixels.dtype.kind == "f" else int
        self.own_range = number_type(np.nanmin(numbers)), number_type(np.nanmax(numbers))
        if self.value_range is None:
            self.notes += _range_notes(self.own_range, "its")
        low, high = self.value_range or self.own_range
        white = _white_value((low, high))
        numbers = (numbers - low) / ((high - low) or 1) if white is None else numbers / white
        numbers = np.nan_to_num(numbers, copy=False).clip(0, 1)
        return (numbers * 255).round().astype(np.uint8)

    def from_array(self, array: Array) -> Image.Image:
        """Return an array as an image with 8 bits per channel."""
        shape = array.shape
        if array.ndim == 3 and shape[2] == 1:
            array = array[:, :, 0]
        if not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))) or 0 in shape:
            raise DiffcapError(
                f"{self.name}: an array of shape {shape} is not an image; give (H, W), (H, W, 3) or (H, W, 4)."
            )
        if shape[0] * shape[1] > MAX_PIXELS:
            raise self.too_large(f"{shape[1]:,} x {shape[0]:,}")
        if array.dtype == np.uint16:
            array = self.to_8_bits(array)
        elif array.dtype.kind == "f":
            if not np.isfinite(array).all() or array.min() < 0 or array.max() > 1:
                raise DiffcapError(f"{self.name}: floats of an image must be from 0 to 1; scale them, or give uint8.")
            array = (array * 255).round()
        elif array.dtype == np.bool_:
            array = array * np.uint8(255)
        elif array.dtype.kind not in "iu" or array.min() < 0 or array.max() > 255:
            raise DiffcapError(
                f"{self.name}: an array of {array.dtype} is not from 0 to 255; give uint8, uint16 or floats."
            )
        return Image.fromarray(array.astype(np.uint8))

    def from_tiff(self, file: BinaryIO) -> Image.Image:
        """Read, with rasterio, a TIFF that Pillow cannot decode. Most have several 16-bit bands, float64 or a rare compression."""
        try:
            from rasterio.io import MemoryFile
        except ImportError:
            raise DiffcapError(
                f"{self.name}: Pillow cannot decode this TIFF; run: pip install 'diffcap[tiff]', or {_REMEDY}."
            ) from None
        file.seek(0)
        with warnings.catch_warnings(), MemoryFile(file.read()) as memory:
            warnings.simplefilter("ignore")  # about files without a georeference
            with memory.open(driver="GTiff") as raster:
                bands = raster.count
                if raster.width * raster.height > MAX_PIXELS:
                    raise self.too_large(f"{raster.width:,} x {raster.height:,}")
                if bands > 4:
                    raise DiffcapError(
                        f"{self.name}: a TIFF with {bands} bands; choose three with `diffcap caption BEFORE AFTER --out changes.geojson "
                        "--bands 1,2,3`, or save 1 or 3 of them."
                    )
                pixels = np.moveaxis(raster.read([1, 2, 3] if bands > 2 else [1]), 0, -1)
                nodata = math.nan if raster.nodata is None else raster.nodata
        image = self.from_array(pixels if pixels.dtype.itemsize == 1 else self.to_8_bits(pixels, nodata))
        self.notes += ["its last band was left out"] if bands in (2, 4) else []
        return image


def _white_value(value_range: ValueRange) -> int | None:
    """Return the value of white; None if the range is stretched from black to white."""
    low, high = value_range
    whites = (1,) if isinstance(low, float) else tuple(_BITS)
    return next((white for white in whites if low >= 0 and high <= white), None)


def _range_notes(value_range: ValueRange, whose: str) -> list[str]:
    """Return a note if the values of black and white were guessed, else []. `whose` is "its" (one image) or "their" (two images)."""
    (low, high), white = value_range, _white_value(value_range)
    if white is None:
        return [f"{whose} values, from {low:,g} to {high:,g}, were stretched from black to white"]
    return [f"{whose} values, at most {high:,g}, were taken for {_BITS[white]} bits"] if white in (255, 4095) else []


def _describe_fault(start: bytes) -> str:
    """Say what a file that Pillow cannot read is, and what the user should do. `start` has the first bytes of the file."""
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not start:
        return "an empty file, not an image; fetch it again"
    if text.startswith(b"<svg") or (text.startswith(b"<?xml") and b"<svg" in text):
        return f"an SVG drawing, which has no pixels; {_REMEDY}"
    if text.startswith((b"%!PS", b"\xc5\xd0\xd3\xc6", b"%PDF")):
        return f"a PostScript or PDF document, not an image; {_REMEDY}"
    if start.startswith((b"PK\x03\x04", b"\x1f\x8b", b"7z\xbc\xaf")):
        return "an archive, not an image; extract it"
    if start[4:8] == b"ftyp":
        hint = "" if "HEIF" in Image.OPEN else "run: pip install 'diffcap[heic]', or "
        return f"a video or a HEIC photo, which cannot be decoded; {hint}{_REMEDY}"
    with suppress(UnicodeDecodeError):
        start.decode("utf-8", "strict" if len(start) < 2048 else "ignore")
        if b"\0" not in start:
            return "a text file, not an image; put an image in its place"
    return "not an image that can be decoded; fetch the file again"
