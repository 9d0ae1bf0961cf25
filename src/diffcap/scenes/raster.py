"""Two rasters on one grid, read tile by tile with rasterio, and their pixels as RGB images."""

import math
import warnings
from collections.abc import Iterator, Sequence
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

MAX_TILE = 4096  # pixels; a batch of larger tiles would need gigabytes
TILE, OVERLAP = 256, 64  # defaults: the image size of LEVIR-CC, and a quarter of it
CACHE_MB = 256  # of GDAL's decoded blocks, for both rasters
MAX_WINDOW = 2048  # pixels per side
WGS84 = "EPSG:4326"
_SAME_POSITION = 0.01  # pixels by which the corners of equal grids may differ
PERCENTILES = (2.0, 98.0)  # default for pixels that do not have 8 bits
Pixels = npt.NDArray[Any]
Levels = tuple[tuple[float, float, float], tuple[float, float, float]]
FULL: Levels = ((0, 0, 0), (255, 255, 255))
# The 2nd and 98th percentiles of red, green and blue in images of `tiles`.
TILES: Levels = ((61, 75, 53), (197, 191, 149))


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
    log_probability: float  # of the sentence, see `Caption`
    no_change: float  # probability that nothing has changed, see `captioning.no_change_probability`


class Tiling:
    """The tiles of a raster of width x height pixels, numbered row by row.

    The last tile of a row or column is shifted inside, so that it overlaps more. A raster smaller than a tile is one tile.

    Example:
        >>> tiling = Tiling(600, 200, size=256, overlap=64)
        >>> [tiling[number] for number in range(len(tiling))]
        [Tile(x=0, y=0, width=256, height=200), Tile(x=192, y=0, width=256, height=200), Tile(x=344, y=0, width=256, height=200)]
    """

    def __init__(self, width: int, height: int, size: int = TILE, overlap: int = OVERLAP) -> None:
        if not 8 <= size <= MAX_TILE:
            raise DiffcapError(f"--tile is {size}; give 8 to {MAX_TILE:,} pixels.")
        if not 0 <= overlap < size:
            raise DiffcapError(f"--overlap is {overlap}; give 0 to {size - 1} pixels, less than --tile.")
        self.size = size
        self._columns, self._rows = (
            [*range(0, length - size, size - overlap), max(0, length - size)] for length in (width, height)
        )
        self._width, self._height = min(size, width), min(size, height)

    def __len__(self) -> int:
        return len(self._columns) * len(self._rows)

    def __getitem__(self, number: int) -> Tile:
        row, column = divmod(number, len(self._columns))
        return Tile(self._columns[column], self._rows[row], self._width, self._height)


class Sample(NamedTuple):
    """Pixels of both dates, (bands, h, w) each, and which of them have data, (h, w) each."""

    before: Pixels
    after: Pixels
    before_valid: npt.NDArray[np.bool_]
    after_valid: npt.NDArray[np.bool_]


class Scene:
    """Two open rasters on one grid. All methods must be called from one thread at a time."""

    def __init__(self, before: Any, after: Any, names: tuple[str, str], bands: list[int]) -> None:
        self.width, self.height = before.width, before.height  # in pixels
        self.bands = bands  # 1 or 3 numbers, from 1
        self.transform = before.transform  # from (column, row) to coordinates of the CRS
        is_located = before.crs is not None and not before.transform.is_identity
        self.crs = before.crs.to_string() if is_located else None  # such as "EPSG:32633"; None: no georeference
        self._datasets, self._names = (before, after), names

    def read(self, tile: Tile) -> Sample:
        """Read a window of both rasters."""
        window = Window(tile.x, tile.y, tile.width, tile.height)
        sides: list[tuple[Pixels, Pixels]] = []
        for dataset, name in zip(self._datasets, self._names):
            place = f"cannot read the pixels from column {tile.x}, row {tile.y}"
            with wrap_errors(name, place, "download or write the file again"):
                pixels = dataset.read(self.bands, window=window)
                valid = np.all(np.isfinite(pixels), axis=0)
                if not all(MaskFlags.all_valid in dataset.mask_flag_enums[band - 1] for band in self.bands):
                    # A pixel has no data if every band has the nodata value.
                    valid &= dataset.read_masks(self.bands, window=window).any(0)
                sides.append((pixels, valid))
        (before, before_valid), (after, after_valid) = sides
        return Sample(before, after, before_valid, after_valid)

    def overview(self, longest_side: int) -> Sample:
        """Read every n-th pixel of every n-th row, with the smallest n that gives at most `longest_side` pixels per side.

        All blocks are decoded once, in windows of `MAX_WINDOW` pixels: GDAL's own decimated read decodes a block for each row.
        """
        step = math.ceil(max(self.width, self.height) / longest_side)
        side = max(1, MAX_WINDOW // step) * step
        rows: list[list[Sample]] = []
        for y in range(0, self.height, side):
            rows.append([])
            for x in range(0, self.width, side):
                sample = self.read(Tile(x, y, min(side, self.width - x), min(side, self.height - y)))
                rows[-1].append(Sample(*(array[..., ::step, ::step].copy() for array in sample)))
        return Sample(*(np.block([[sample[number] for sample in row] for row in rows]) for number in range(4)))


@contextmanager
def open_scene(before: str, after: str, bands: Sequence[int] | None = None, align: bool = False) -> Iterator[Scene]:
    """Open two rasters of the same place.

    Args:
        bands: numbers of one band (gray) or three (red, green, blue), from 1; None: 1, 2, 3, or 1 if there are fewer than three.
        align: warp the second raster to the first one's grid while it is read (bilinear).
    """
    with ExitStack() as stack:
        stack.enter_context(rasterio.Env(GDAL_CACHEMAX=CACHE_MB))
        first, second = (stack.enter_context(_open(path)) for path in (before, after))
        chosen = list(bands) if bands else [1, 2, 3] if min(first.count, second.count) >= 3 else [1]
        for dataset, name in ((first, before), (second, after)):
            _check_bands(dataset, name, chosen)
        types = [{str(dataset.dtypes[band - 1]) for band in chosen} for dataset in (first, second)]
        if len(types[0] | types[1]) > 1:
            raise DiffcapError(
                f"{before} and {after}: their pixels are {', '.join(sorted(types[0]))} and {', '.join(sorted(types[1]))}; convert them to "
                "one type with the same scale."
            )
        difference = _difference_of_grids(first, second)
        if difference and not align:
            remedy = "warp the second one to the grid of the first one with --align"
            if first.crs is None or second.crs is None:
                remedy = "export both from one grid; --align needs files with a CRS"
            raise DiffcapError(f"{before} and {after}: {difference}; {remedy}.")
        if difference:
            if first.crs is None or second.crs is None:
                without = before if first.crs is None else after
                raise DiffcapError(
                    f"{without}: it has no CRS, which --align needs; assign one, for example with `rio edit-info --crs`."
                )
            grid = {"crs": first.crs, "transform": first.transform, "width": first.width, "height": first.height}
            has_mask = second.nodata is not None or ColorInterp.alpha in second.colorinterp
            warped = WarpedVRT(second, **grid, resampling=Resampling.bilinear, add_alpha=not has_mask)
            second = stack.enter_context(warped)  # pixels outside of the second raster have no data
        yield Scene(first, second, (before, after), chosen)


def _open(path: str) -> Any:
    if url := url_of(path):
        raise DiffcapError(f"{url}: a URL, not a file; download the raster and give its path.")
    if not Path(path).is_file():
        raise DiffcapError(f"{path}: file not found; a whole scene is two raster files, BEFORE and AFTER.")
    with (
        wrap_errors(path, "not a raster that GDAL can read", "download or write the file again"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
        return rasterio.open(path)


def _check_bands(dataset: Any, name: str, bands: list[int]) -> None:
    for band in bands:
        if not 1 <= band <= dataset.count:
            raise DiffcapError(f"{name}: it has no band {band}; choose from 1 to {dataset.count} with --bands.")
        if np.dtype(dataset.dtypes[band - 1]).kind not in "uif":
            raise DiffcapError(
                f"{name}: its pixels are {dataset.dtypes[band - 1]}; convert them to integers or floats."
            )
    if dataset.colorinterp[bands[0] - 1] == ColorInterp.palette:
        raise DiffcapError(
            f"{name}: its pixels are indices of a color table; convert it with `gdal_translate -expand rgb`."
        )


def _difference_of_grids(first: Any, second: Any) -> str | None:
    """Return a clause for messages about how the grids of two rasters differ; None if they are equal."""
    if first.crs != second.crs:
        names = [dataset.crs.to_string()[:80] if dataset.crs else "none" for dataset in (first, second)]
        return f"their coordinate reference systems differ ({names[0]} and {names[1]})"
    if first.shape != second.shape:
        sizes = [f"{dataset.width:,} x {dataset.height:,}" for dataset in (first, second)]
        return f"their sizes differ ({sizes[0]} and {sizes[1]} pixels)"
    corners = np.array([(x, y, 1) for x in (0, first.width) for y in (0, first.height)]).T
    to_first, from_second = (np.reshape(each, (3, 3)) for each in (~first.transform, second.transform))
    if np.abs(to_first @ from_second @ corners - corners).max() > _SAME_POSITION:
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


def fit_stretch(sample: Sample, percentiles: tuple[float, float] | None, levels: Levels = FULL) -> Stretch | None:
    """Compute the stretch from percentiles of each band over the pixels with data of both dates; None if pixels stay as they are.

    Args:
        percentiles: low and high one, 0 to 100; None: 2 and 98, or no stretch for pixels of 8 bits.
        levels: what the low and the high percentile become, for red, green and blue; a single band takes their means.
    """
    both = sample.before[:, sample.before_valid], sample.after[:, sample.after_valid]
    values = np.concatenate(both, 1)  # (bands, N)
    if not values.shape[1]:
        raise DiffcapError("no pixel of the two rasters has data; check their nodata values.")
    if percentiles is None and values.dtype == np.uint8:
        return None
    low, high = np.percentile(values, percentiles or PERCENTILES, axis=1)
    high = np.where(high > low, high, low + 1)
    dark, bright = (level if len(values) == 3 else np.mean(level, keepdims=True) for level in map(np.array, levels))
    step = (high - low) / (bright - dark)
    return Stretch(low - dark * step, high + (255 - bright) * step)


def to_rgb(pixels: Pixels, shown: npt.NDArray[np.bool_], stretch: Stretch | None) -> npt.NDArray[np.uint8]:
    """Turn pixels (1 or 3, h, w) into an RGB image (h, w, 3), in which those that are not `shown` (h, w) are black.

    Args:
        stretch: None for 8-bit pixels.
    """
    if stretch is not None:
        low, high = (value.astype(np.float32)[:, None, None] for value in stretch)
        scaled = (np.where(shown, pixels, 0).astype(np.float32) - low) * (255 / (high - low))
        pixels = scaled.round().clip(0, 255).astype(np.uint8)
    image = np.where(shown, pixels, 0).transpose(1, 2, 0)
    return np.ascontiguousarray(np.broadcast_to(image, (*image.shape[:2], 3)).astype(np.uint8))
