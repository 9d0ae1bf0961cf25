"""Compare two screenshots pixel by pixel, by the rule of the program pixelmatch: edges that are only smoothed differently are equal."""

from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from diffcap.utils.errors import DiffcapError

Pixels = npt.NDArray[np.uint8]  # (H, W, 3)
Mask = npt.NDArray[np.bool_]  # (H, W)
Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels; right and bottom are outside

_SMALL_SIDE = 512  # longer side of the images that `find_difference` compares
_BAND = 128  # rows that are compared at once; it limits the memory
_REACH = 3  # pixels around a pixel that decide whether it differs
# From RGB to brightness and two color differences (YIQ), with the digits of pixelmatch.
_YIQ = np.array(
    [
        [0.29889531, 0.59597799, 0.21147017],
        [0.58662247, -0.27417610, -0.52261711],
        [0.11448223, -0.32180189, 0.31114694],
    ]
)
_YIQ_WEIGHTS = np.array([0.5053, 0.299, 0.1957])
_LARGEST_DELTA = 35_215  # weighted squared YIQ distance of the two most different colors
# Offsets (x, y) of the eight neighbors. Among equal neighbors the first one counts, so the order is pixelmatch's.
_NEIGHBORS = [(x, y) for x in (-1, 0, 1) for y in (-1, 0, 1) if x or y]
_MANY_EQUAL = 2  # a pixel with more equal neighbors belongs to an area, not to a smoothed edge


def differing_pixels(before: Pixels, after: Pixels, threshold: float = 0.1, ignored: Mask | None = None) -> Mask:
    """Mark the pixels whose colors differ visibly, except those of a smoothed edge (antialiasing).

    Args:
        before: (H, W, 3), 8 bits. after: the same shape.
        threshold: smallest difference of colors that counts, from 0 (all) to 1 (black and white only).
        ignored: (H, W), True for pixels that are not compared.

    Returns:
        (H, W), True for the pixels that differ. The marked pixels are those of pixelmatch 0.4.0.
    """
    if before.shape != after.shape:
        raise DiffcapError(
            f"the images have the shapes {before.shape} and {after.shape}; only equal ones are compared."
        )
    packed = [_packed(before), _packed(after)]
    mask: Mask = packed[0] != packed[1]
    if ignored is not None:
        mask &= ~ignored
    height, width = mask.shape
    columns = np.flatnonzero(mask.any(axis=0))
    if not len(columns):
        return mask
    left, right = max(columns[0] - _REACH, 0), min(columns[-1] + 1 + _REACH, width)
    found = np.zeros_like(mask)
    for top in range(0, height, _BAND):
        bottom = min(top + _BAND, height)
        if not mask[top:bottom].any():
            continue
        first, last = max(top - _REACH, 0), min(bottom + _REACH, height)
        area = np.s_[first:last, left:right]
        candidates = np.zeros((last - first, right - left), bool)
        candidates[top - first : bottom - first] = mask[top:bottom, left:right]
        visible = _visible(before[area], after[area], packed[0][area], packed[1][area], candidates, threshold)
        found[top:bottom, left:right] = visible[top - first : bottom - first]
    return found


def box_of(mask: Mask) -> Box | None:
    """Return the smallest box around the pixels that are True; None if there are none."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return (int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1) if len(rows) else None


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
    """Return `box_of` a mask as fractions of its width and height."""
    box = box_of(mask)
    return tuple(np.divide(box, 2 * mask.shape[::-1]).tolist()) if box else None


def _packed(pixels: Pixels) -> npt.NDArray[np.int32]:
    """Return the color of each pixel as one number."""
    red, green, blue = (pixels[..., channel].astype(np.int32) for channel in range(3))
    return red << 16 | green << 8 | blue


def _visible(before: Pixels, after: Pixels, first: Any, second: Any, candidates: Mask, threshold: float) -> Mask:
    """Return the candidates that differ visibly and not by antialiasing. `first` and `second` are the packed images."""
    colors = [pixels.astype(np.float64) @ _YIQ for pixels in (before, after)]
    delta = (colors[0] - colors[1]) ** 2 @ _YIQ_WEIGHTS
    visible = candidates & (delta > _LARGEST_DELTA * threshold**2)
    rows, columns = np.nonzero(visible)
    if len(rows):
        areas = _in_area(first) & _in_area(second)
        smoothed = [
            _on_smoothed_edge(color[..., 0], image, areas, rows, columns)
            for color, image in zip(colors, (first, second))
        ]
        is_smoothed = smoothed[0] | smoothed[1]
        visible[rows[is_smoothed], columns[is_smoothed]] = False
    return visible


def _in_area(packed: Any) -> Mask:
    """Return whether more than two neighbors have a pixel's color; the border of the image counts as one."""
    height, width = packed.shape
    padded = np.pad(packed, 1, constant_values=-1)
    count = np.ones((height, width), np.int8)
    count[1:-1, 1:-1] = 0
    for x, y in _NEIGHBORS:
        count += padded[1 + y : 1 + y + height, 1 + x : 1 + x + width] == packed
    return count > _MANY_EQUAL


def _on_smoothed_edge(brightness: Any, packed: Any, areas: Mask, rows: Any, columns: Any) -> Mask:
    """Return for each pixel (row, column) whether it lies on a smoothed edge: between a darker and a brighter neighbor, of which one
    belongs to an area in both images (`areas`), and with at most two neighbors of its own brightness.
    """
    height, width = packed.shape
    padded, padded_brightness = np.pad(packed, 1, constant_values=-1), np.pad(brightness, 1, constant_values=np.nan)
    near = [(rows + 1 + y, columns + 1 + x) for x, y in _NEIGHBORS]
    deltas = brightness[rows, columns] - np.stack([padded_brightness[place] for place in near])
    deltas[np.stack([padded[place] == packed[rows, columns] for place in near])] = 0
    on_border = (rows == 0) | (rows == height - 1) | (columns == 0) | (columns == width - 1)
    num_equal = (deltas == 0).sum(axis=0) + on_border
    deltas = np.nan_to_num(deltas)  # NaN: outside the image
    is_between = (deltas.min(axis=0) < 0) & (deltas.max(axis=0) > 0) & (num_equal <= _MANY_EQUAL)
    offsets = np.array(_NEIGHBORS)

    def in_area(neighbor: Any) -> Any:
        x, y = (columns + offsets[neighbor, 0]).clip(0, width - 1), (rows + offsets[neighbor, 1]).clip(0, height - 1)
        return areas[y, x]

    return is_between & (in_area(deltas.argmin(axis=0)) | in_area(deltas.argmax(axis=0)))
