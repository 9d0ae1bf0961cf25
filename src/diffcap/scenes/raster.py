"""Read a scene, which is two rasters of one place at two dates, tile by tile, and turn its pixels into RGB images. Needs rasterio."""

import math
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from diffcap.utils.errors import DiffcapError, wrap_errors
from diffcap.utils.files import url_of

try:
    import rasterio
    import rasterio.errors
    import shapely  # noqa: F401  (other modules use it)
    from rasterio.enums import ColorInterp, MaskFlags, Resampling
    from rasterio.vrt import WarpedVRT
    from rasterio.windows import Window
except ImportError:
    raise DiffcapError("whole scenes need rasterio and shapely; run: pip install 'diffcap[geo]'") from None

_MAX_TILE_SIZE = 4096  # pixels; a batch of larger tiles would need gigabytes
TILE_SIZE, TILE_OVERLAP = 256, 64  # defaults in pixels: the image size of the dataset LEVIR-CC, and a quarter of it
_CACHE_MB = 256  # size of GDAL's cache of decoded blocks, for both rasters
MAX_WINDOW = 2048  # largest width and height in pixels that are read at once
WGS84 = "EPSG:4326"  # longitude and latitude
_MAX_CORNER_SHIFT = 0.01  # pixels by which the corners of equal grids may differ
PERCENTILES = (2.0, 98.0)  # default of `fit_stretch`, unless the pixels have 8 bits
Pixels = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
ColorRange = tuple[tuple[float, float, float], tuple[float, float, float]]  # red, green, blue: dark, then bright color
FULL_RANGE: ColorRange = ((0, 0, 0), (255, 255, 255))
TILES_RANGE: ColorRange = ((61, 75, 53), (197, 191, 149))  # 2nd and 98th percentiles in the rendered dataset "tiles"


class Tile(NamedTuple):
    """A part of a raster in pixels: its left column, upper row, width and height."""

    x: int
    y: int
    width: int
    height: int


class TileCaption(NamedTuple):
    """The caption of a tile."""

    tile: Tile
    caption: str
    # natural logarithm of the sentence's probability; None: the model only answers with text
    log_probability: float | None
    no_change: float  # probability that nothing has changed


class Tiling:
    """The tiles of a raster of width x height pixels, numbered from 0: left to right in the top row, then the rows below.

    The last tile of a row or column ends at the raster's edge, so it may overlap more. A raster that is smaller than a tile has one tile.

    Example:
        >>> tiling = Tiling(600, 200, size=256, overlap=64)
        >>> [tiling[number] for number in range(len(tiling))]
        [Tile(x=0, y=0, width=256, height=200), Tile(x=192, y=0, width=256, height=200), Tile(x=344, y=0, width=256, height=200)]
    """

    def __init__(self, width: int, height: int, size: int = TILE_SIZE, overlap: int = TILE_OVERLAP) -> None:
        if not 8 <= size <= _MAX_TILE_SIZE:
            raise DiffcapError(f"--tile is {size}; give 8 to {_MAX_TILE_SIZE:,} pixels.")
        if not 0 <= overlap < size:
            raise DiffcapError(f"--overlap is {overlap}; give 0 to {size - 1} pixels, less than --tile.")
        self.size = size
        self._lefts, self._tops = (  # left columns and upper rows of the tiles
            [*range(0, length - size, size - overlap), max(0, length - size)] for length in (width, height)
        )
        self._width, self._height = min(size, width), min(size, height)  # of a tile

    def __len__(self) -> int:
        return len(self._lefts) * len(self._tops)

    def __getitem__(self, number: int) -> Tile:
        row, column = divmod(number, len(self._lefts))
        return Tile(self._lefts[column], self._tops[row], self._width, self._height)


class Sample(NamedTuple):
    """Pixels of both dates, (bands, h, w) each, and masks (h, w) that are True for pixels with data."""

    before: Pixels
    after: Pixels
    before_valid: Mask
    after_valid: Mask


class Scene:
    """Two open rasters on one grid (size, CRS and transform). Only one thread at a time may use a scene."""

    def __init__(self, before: Any, after: Any, files: tuple[str, str], bands: list[int]) -> None:
        self.width, self.height = before.width, before.height  # in pixels
        self.bands = bands  # numbers of 1 or 3 bands, counted from 1
        self.transform = before.transform  # from (column, row) to coordinates of the CRS
        is_georeferenced = before.crs is not None and not before.transform.is_identity
        self.crs = before.crs.to_string() if is_georeferenced else None  # such as "EPSG:32633"; None: no georeference
        self._rasters, self._files = (before, after), files

    def read(self, tile: Tile) -> Sample:
        """Read a part of both rasters."""
        window = Window(tile.x, tile.y, tile.width, tile.height)
        pixels_of_dates, valid_of_dates = [], []
        for raster, file in zip(self._rasters, self._files):
            fault = f"cannot read the pixels from column {tile.x}, row {tile.y}"
            with wrap_errors(file, fault, "download or write the file again"):
                pixels = raster.read(self.bands, window=window)
                is_valid = np.all(np.isfinite(pixels), axis=0)
                if not all(MaskFlags.all_valid in raster.mask_flag_enums[band - 1] for band in self.bands):
                    # A pixel has no data if every band has the nodata value.
                    is_valid &= raster.read_masks(self.bands, window=window).any(0)
            pixels_of_dates.append(pixels)
            valid_of_dates.append(is_valid)
        return Sample(*pixels_of_dates, *valid_of_dates)

    def overview(self, longest_side: int) -> Sample:
        """Read every n-th pixel of every n-th row, with the smallest n that gives at most `longest_side` pixels per side.

        All pixels are read in large windows, and most are dropped. GDAL's read at a reduced size would decode a block again for each row.
        """
        step = math.ceil(max(self.width, self.height) / longest_side)
        window_side = max(1, MAX_WINDOW // step) * step
        sample_rows: list[list[Sample]] = []  # the samples of each row of windows
        for y in range(0, self.height, window_side):
            sample_rows.append([])
            for x in range(0, self.width, window_side):
                sample = self.read(Tile(x, y, min(window_side, self.width - x), min(window_side, self.height - y)))
                sample_rows[-1].append(Sample(*(array[..., ::step, ::step].copy() for array in sample)))
        return Sample(*(np.block([[sample[index] for sample in row] for row in sample_rows]) for index in range(4)))


@contextmanager
def open_scene(
    before_file: str, after_file: str, bands: list[int] | None = None, align: bool = False
) -> Iterator[Scene]:
    """Open two rasters of the same place.

    Args:
        bands: numbers of one band (gray) or three (red, green, blue), from 1. None means 1, 2, 3, or 1 if a raster has fewer bands.
        align: warp the second raster to the first one's grid while it is read (bilinear).
    """
    with ExitStack() as stack:
        stack.enter_context(rasterio.Env(GDAL_CACHEMAX=_CACHE_MB))
        before, after = (stack.enter_context(_open_raster(file)) for file in (before_file, after_file))
        bands = list(bands) if bands else [1, 2, 3] if min(before.count, after.count) >= 3 else [1]
        _check_bands(before, before_file, bands)
        _check_bands(after, after_file, bands)
        before_types, after_types = ({str(raster.dtypes[band - 1]) for band in bands} for raster in (before, after))
        if len(before_types | after_types) > 1:
            raise DiffcapError(
                f"{before_file} and {after_file}: their pixels are {', '.join(sorted(before_types))} and "
                f"{', '.join(sorted(after_types))}; convert them to one type with the same scale."
            )
        difference = _describe_grid_difference(before, after)
        has_crs = before.crs is not None and after.crs is not None
        if difference and not (align and has_crs):
            remedy = "warp the second one to the grid of the first one with --align"
            if not has_crs:
                remedy = "export both from one grid; --align needs a CRS in both (`rio edit-info --crs` assigns one)"
            raise DiffcapError(f"{before_file} and {after_file}: {difference}; {remedy}.")
        if difference:
            grid = {"crs": before.crs, "transform": before.transform, "width": before.width, "height": before.height}
            has_mask = after.nodata is not None or ColorInterp.alpha in after.colorinterp
            warped = WarpedVRT(after, **grid, resampling=Resampling.bilinear, add_alpha=not has_mask)
            after = stack.enter_context(warped)  # pixels outside of the second raster have no data
        yield Scene(before, after, (before_file, after_file), bands)


def _open_raster(file: str) -> Any:
    if url := url_of(file):
        raise DiffcapError(f"{url}: a URL, not a file; download the raster and give its path.")
    if not Path(file).is_file():
        raise DiffcapError(f"{file}: file not found; a whole scene is two raster files, BEFORE and AFTER.")
    with (
        wrap_errors(file, "not a raster that GDAL can read", "download or write the file again"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
        return rasterio.open(file)


def _check_bands(raster: Any, file: str, bands: list[int]) -> None:
    for band in bands:
        if not 1 <= band <= raster.count:
            raise DiffcapError(f"{file}: it has no band {band}; choose from 1 to {raster.count} with --bands.")
        dtype = raster.dtypes[band - 1]
        if np.dtype(dtype).kind not in "uif":
            raise DiffcapError(f"{file}: its pixels are {dtype}; convert them to integers or floats.")
    if raster.colorinterp[bands[0] - 1] == ColorInterp.palette:
        raise DiffcapError(f"{file}: its pixels are indices of a color table; run `gdal_translate -expand rgb` on it.")


def _describe_grid_difference(first: Any, second: Any) -> str | None:
    """Return a clause for messages about how the grids of two rasters differ; None if they are equal."""
    if first.crs != second.crs:
        names = [raster.crs.to_string()[:80] if raster.crs else "none" for raster in (first, second)]
        return f"their coordinate reference systems differ ({names[0]} and {names[1]})"
    if first.shape != second.shape:
        sizes = [f"{raster.width:,} x {raster.height:,}" for raster in (first, second)]
        return f"their sizes differ ({sizes[0]} and {sizes[1]} pixels)"
    corners = np.array([(x, y, 1) for x in (0, first.width) for y in (0, first.height)]).T  # in pixels
    second_to_map, map_to_first = (np.reshape(each, (3, 3)) for each in (second.transform, ~first.transform))
    if np.abs(map_to_first @ second_to_map @ corners - corners).max() > _MAX_CORNER_SHIFT:
        grids = [
            f"origin {transform.c:.10g}, {transform.f:.10g}, pixel {transform.a:.6g} x {transform.e:.6g}"
            for transform in (first.transform, second.transform)
        ]
        return f"their transforms differ ({grids[0]} and {grids[1]})"
    return None


class Stretch(NamedTuple):
    """The values of each band, (bands,), that become 0 and 255; values between them are scaled linearly."""

    low: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]


def fit_stretch(
    sample: Sample, percentiles: tuple[float, float] | None, colors: ColorRange = FULL_RANGE
) -> Stretch | None:
    """Compute the stretch from percentiles of each band, over the pixels of both dates that have data; return None if none is needed.

    Args:
        sample: at least one pixel must have data.
        percentiles: the low and the high percentile, 0 to 100. None means 2 and 98, or no stretch if the pixels have 8 bits.
        colors: the low and the high percentile become these colors. In a single band, they become the mean of red, green and blue.
    """
    valid_pixels = sample.before[:, sample.before_valid], sample.after[:, sample.after_valid]
    values = np.concatenate(valid_pixels, 1)  # (bands, n)
    if percentiles is None and values.dtype == np.uint8:
        return None
    low, high = np.percentile(values, percentiles or PERCENTILES, axis=1)
    high = np.where(high > low, high, low + 1)
    dark, bright = np.array(colors) if len(values) == 3 else np.mean(colors, 1, keepdims=True)
    step = (high - low) / (bright - dark)  # distance of the values that become two adjacent levels of 0 to 255
    return Stretch(low - dark * step, high + (255 - bright) * step)


def to_rgb(pixels: Pixels, is_shown: Mask, stretch: Stretch | None) -> npt.NDArray[np.uint8]:
    """Turn pixels (1 or 3, h, w), of 8 bits if there is no stretch, into RGB (h, w, 3). It is black where `is_shown` (h, w) is False."""
    if stretch is not None:
        low, high = (value.astype(np.float32)[:, None, None] for value in stretch)
        scaled = (np.where(is_shown, pixels, 0).astype(np.float32) - low) * (255 / (high - low))
        pixels = scaled.round().clip(0, 255).astype(np.uint8)
    image = np.where(is_shown, pixels, 0).transpose(1, 2, 0)
    return np.ascontiguousarray(np.broadcast_to(image, (*image.shape[:2], 3)).astype(np.uint8))
