"""8-bit RGB images of pixels of any type, with one contrast stretch for both dates."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from diffcap.scenes.raster import Pixels, Sample
from diffcap.utils.errors import DiffcapError

PERCENTILES = (2.0, 98.0)  # default for pixels that do not have 8 bits
Levels = tuple[tuple[float, float, float], tuple[float, float, float]]
FULL: Levels = ((0, 0, 0), (255, 255, 255))
# The 2nd and 98th percentiles of red, green and blue in images of `tiles`.
TILES: Levels = ((61, 75, 53), (197, 191, 149))


class Stretch(NamedTuple):
    """The values of each band, (bands,), that become 0 and 255; values between them are scaled linearly, others are clipped."""

    low: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]


def fit_stretch(sample: Sample, percentiles: tuple[float, float] | None, levels: Levels = FULL) -> Stretch | None:
    """The percentiles of each band over the pixels with data of both dates together.

    Args:
        percentiles: low and high one, 0 to 100; None: 2 and 98, or no stretch for pixels of 8 bits.
        levels: what the low and the high percentile become, for red, green and blue; a single band takes their means.

    Returns:
        None if the pixels are used as they are.

    Raises:
        DiffcapError: no pixel has data.
    """
    values = np.concatenate(
        [sample.before[:, sample.before_valid], sample.after[:, sample.after_valid]], 1
    )  # (bands, N)
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
    """Turn pixels into an RGB image.

    Args:
        pixels: (1 or 3, h, w); one band becomes gray. shown: (h, w), the others become black. stretch: None for 8-bit pixels.

    Returns:
        (h, w, 3).
    """
    if stretch is not None:
        low, high = (value.astype(np.float32)[:, None, None] for value in stretch)
        scaled = (np.where(shown, pixels, 0).astype(np.float32) - low) * (255 / (high - low))
        pixels = scaled.round().clip(0, 255).astype(np.uint8)
    image = np.where(shown, pixels, 0).transpose(1, 2, 0)
    return np.ascontiguousarray(np.broadcast_to(image, (*image.shape[:2], 3)).astype(np.uint8))
