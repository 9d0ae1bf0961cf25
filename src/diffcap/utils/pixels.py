"""Compare two screenshots pixel by pixel, by the rule of the program pixelmatch: edges that are only smoothed differently are equal."""

from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

Pixels = npt.NDArray[np.uint8]  # (H, W, 3)
Mask = npt.NDArray[np.bool_]  # (H, W)

_SMALL_SIDE = 512  # longer side of the images that `find_difference` compares
_MAX_PIXELS = 1 << 17  # number of pixels that are compared at once; it limits the memory
# Weights of red, green and blue for brightness and two color differences (YIQ), with the digits of pixelmatch.
_BRIGHTNESS = (0.29889531, 0.58662247, 0.11448223)
_YIQ = (_BRIGHTNESS, (0.59597799, -0.27417610, -0.32180189), (0.21147017, -0.52261711, 0.31114694))
_YIQ_WEIGHTS = (0.5053, 0.299, 0.1957)
_LARGEST_DELTA = 35_215  # weighted squared YIQ distance of the two most different colors
_MANY_EQUAL = 3  # a pixel is in an area, not on a smoothed edge, if more of the nine pixels around it, with itself, have its color


def differing_pixels(before: Pixels, after: Pixels, threshold: float = 0.1, ignored: Mask | None = None) -> Mask:
    """Mark the pixels whose colors differ visibly, except those of a smoothed edge (antialiasing).

    Args:
        before: (H, W, 3), 8 bits. after: the same shape.
        threshold: smallest difference of colors that counts, from 0 (all) to 1 (black and white only).
        ignored: (H, W), True for pixels that are not compared.

    Returns:
        (H, W), True for the pixels that differ. The marked pixels are those of pixelmatch 0.4.0.
    """
    height, width = before.shape[0] + 2, before.shape[1] + 2
    images = []
    for pixels in (before, after):  # as a flat array with a color as one number; 0 is a frame around the image
        framed = np.zeros((height, width, 4), np.uint8)
        framed[1:-1, 1:-1, :3] = pixels
        framed[1:-1, 1:-1, 3] = 255
        images.append(framed.view("<u4").ravel())
    differs = images[0] != images[1]
    mask: Mask = differs.reshape(height, width)[1:-1, 1:-1]
    if ignored is not None:
        mask &= ~ignored
    # From a pixel to the nine around it, with itself. Among equal ones the first counts, so the order is pixelmatch's.
    steps = np.array([x + y * width for x in (-1, 0, 1) for y in (-1, 0, 1)])
    indices = np.flatnonzero(differs)
    for part in np.array_split(indices, len(indices) // _MAX_PIXELS + 1):
        delta = np.zeros(len(part))
        for weights, factor in zip(_YIQ, _YIQ_WEIGHTS):
            difference = _weighted(images[0][part], weights) - _weighted(images[1][part], weights)
            delta += factor * difference * difference
        differs[part] = delta > _LARGEST_DELTA * threshold * threshold
        visible = part[differs[part]]
        for image, other in (images, images[::-1]):
            differs[_on_smoothed_edge(visible, steps, image, other)] = False
    return mask


def _weighted(colors: Any, weights: tuple[float, ...]) -> Any:
    red, green, blue = (colors >> shift & 255 for shift in (0, 8, 16))
    return red * weights[0] + green * weights[1] + blue * weights[2]


def _on_smoothed_edge(pixels: Any, steps: Any, image: Any, other: Any) -> Any:
    """Return the pixels on a smoothed edge: between a darker and a brighter neighbor, of which one is in an area in both images."""
    near = image[pixels[:, None] + steps]  # (n, 9)
    brightness = _weighted(near, _BRIGHTNESS)
    deltas = np.where(near == 0, 0, brightness[:, [4]] - brightness)
    is_edge = (deltas.min(axis=1) < 0) & (deltas.max(axis=1) > 0) & ~_in_area(deltas == 0, near)
    pixels, deltas = pixels[is_edge], deltas[is_edge]
    in_area = np.zeros(len(pixels), bool)
    for neighbors in (pixels + steps[deltas.argmin(axis=1)], pixels + steps[deltas.argmax(axis=1)]):
        both = [colors[neighbors[:, None] + steps] for colors in (image, other)]
        is_in_area = [_in_area(near == near[:, [4]], near) for near in both]
        in_area |= is_in_area[0] & is_in_area[1]
    return pixels[in_area]


def _in_area(is_equal: Any, near: Any) -> Any:
    """Return whether more than two neighbors are equal to a pixel; the border of the image counts as one."""
    is_outside = near == 0
    return (is_equal & ~is_outside).sum(axis=1) + is_outside.any(axis=1) > _MANY_EQUAL


def find_difference(before: Image.Image, after: Image.Image) -> tuple[float, ...] | None:
    """Return the box around the pixels that differ in two RGB images: left, top, right, bottom as fractions of the width and height.

    Large images are compared at a reduced size, to save time. If the sizes differ, the box is the whole image. None: no pixel differs.
    """
    if before.size != after.size:
        return 0.0, 0.0, 1.0, 1.0
    small = []
    for image in (before, after):
        small.append(image.copy())
        small[-1].thumbnail((_SMALL_SIDE, _SMALL_SIDE), Image.Resampling.BOX)
    return relative_box(differing_pixels(np.asarray(small[0]), np.asarray(small[1])))


def relative_box(mask: Mask) -> tuple[float, ...] | None:
    """Return the smallest box around the pixels that are True as fractions of the width and height; None if there are none."""
    box = Image.fromarray(mask).getbbox()
    return tuple(np.divide(box, 2 * mask.shape[::-1]).tolist()) if box else None
