"""Attention maps as colours over an image: the renderer of the heat-map PNGs and of the web page.

report.html enlarges its maps in the browser (attention.js) and reads their colours from `color_table`: 64 pairs of ten words take
0.3 MB in it, and as images of this renderer 2.7 MB or more.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

Array = npt.NDArray[np.floating[Any]]

# RGB at equal distances from strength 0 to 1; each colour is lighter than the one before, so that the order survives in gray.
COLORMAP = np.array([(60, 0, 90), (150, 20, 110), (225, 60, 60), (250, 140, 20), (255, 235, 90)], dtype=float)
MAX_OPACITY = 0.85
OPACITY_GAIN = 1.5  # opacity grows by this factor times the strength, up to `MAX_OPACITY`
_MIN_PEAK = 4  # a peak below this many times uniform attention is drawn as weak


def scale_attention(before: Array, after: Array) -> tuple[Array, Array]:
    """Scale a word's attention weights to strengths from 0 to 1, with one scale for both images.

    Args:
        before, after: (h, w) each.

    Returns:
        (h, w) each: 0 up to uniform attention, 1 at the highest weight of both maps; a map without a clear peak stays below 1.
    """
    uniform = 1 / before.size
    highest = max(before.max(), after.max(), _MIN_PEAK * uniform)
    first, second = (np.clip((weights - uniform) / (highest - uniform), 0, 1) for weights in (before, after))
    return first, second


def colormap(strengths: Array) -> Array:
    """RGB colours, 0 to 255, of strengths from 0 to 1: (...) to (..., 3)."""
    position = np.linspace(0, 1, len(COLORMAP))
    return np.stack([np.interp(strengths, position, COLORMAP[:, channel]) for channel in range(3)], axis=-1)


def overlay(size: tuple[int, int], strengths: Array) -> Array:
    """RGBA values (H, W, 4), 0 to 255, of a map; transparent where its strength is 0.

    Args:
        size: (W, H) in pixels. strengths: (h, w) from 0 to 1; enlarged by bicubic interpolation.
    """
    enlarged = Image.fromarray(strengths.astype(np.float32)).resize(size, Image.Resampling.BICUBIC)
    return _rgba(np.clip(np.asarray(enlarged), 0, 1))


def color_table() -> npt.NDArray[np.uint8]:
    """RGBA values (256, 4) of the strengths 0, 1/255, ..., 1."""
    return _rgba(np.linspace(0, 1, 256)).round().astype(np.uint8)


def _rgba(strengths: Array) -> Array:
    """Strengths from 0 to 1 as RGBA values, 0 to 255: (...) to (..., 4)."""
    opacity = MAX_OPACITY * np.minimum(1, OPACITY_GAIN * strengths)
    return np.concatenate([colormap(strengths), 255 * opacity[..., None]], -1)


def blend(image: Image.Image, strengths: Array) -> Image.Image:
    """Draw the overlay of a map (h, w) of strengths from 0 to 1 on an RGB image."""
    colors = overlay(image.size, strengths)
    alpha = colors[..., 3:] / 255
    pixels = (1 - alpha) * np.asarray(image, dtype=float) + alpha * colors[..., :3]
    return Image.fromarray(pixels.round().astype(np.uint8))
