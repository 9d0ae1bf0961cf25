"""Masks of the change: reading them, and their outline over the images of a pair."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter

from diffcap.evaluation.localisation import Mask
from diffcap.records import ChangePair
from diffcap.report.drawing import BOX, LARGE, Thumbnail, picture, webp
from diffcap.utils.errors import DiffcapError
from diffcap.utils.image_io import read_image

Size = tuple[int, int]


def read_mask(path: Path, size: Size) -> Mask:
    """Read a mask: (H, W), True where any channel is not 0. Its aspect ratio must be that of the images' size (width, height)."""
    image = read_image(path).image
    if abs(image.width * size[1] - image.height * size[0]) > max(*image.size, *size):
        raise DiffcapError(
            f"{path}: a mask of {image.width} x {image.height} pixels has another shape than the images of its pair; save it in their "
            "size."
        )
    return np.asarray(np.asarray(image).any(-1))


class Masks:
    """The masks of a dataset. One that cannot be read is left out."""

    def __init__(self, root: Path) -> None:
        self.root = root  # the paths of the masks are relative to it
        self.problems: dict[str, str] = {}  # path -> why the mask cannot be used, of the masks that were asked for

    def read(self, pair: ChangePair, size: Size) -> Mask | None:
        """The mask of a pair, see `read_mask`; None if it has none, or none that can be used."""
        path = pair.extra.get("mask")
        if not isinstance(path, str):
            return None
        try:
            return read_mask(self.root / path, size)
        except DiffcapError as error:
            self.problems[path] = str(error)
            return None


def outline(mask: Mask, size: Size, width: int = 1) -> Image.Image:
    """The outline of a mask, outside its pixels except at the edges of the image: an image of mode L, 255 on the line.

    Args:
        mask: (H, W). size: (width, height) of the result. width: of the line in pixels of the result.
    """
    area = Image.fromarray(mask.astype(np.uint8) * 255).resize(size, Image.Resampling.NEAREST)
    inner = np.zeros((size[1], size[0]), bool)
    inner[width:-width, width:-width] = True
    wide = np.asarray(area.filter(ImageFilter.MaxFilter(2 * width + 1))) > 0
    return Image.fromarray((wide & ~((np.asarray(area) > 0) & inner)).astype(np.uint8) * 255)


def colored_outline(mask: Mask, size: Size, width: int = 1) -> Image.Image:
    """`outline` in the color of the boxes, RGBA, transparent beside the line."""
    colored = Image.new("RGBA", size, (*BOX, 0))
    colored.putalpha(outline(mask, size, width))
    return colored


def outline_thumbnails(
    masks: Masks, pairs: Sequence[ChangePair], sizes: Mapping[str, Size], frames: Mapping[str, Size]
) -> dict[str, Thumbnail]:
    """The outlines of the masks of pairs by path of the mask, computed on all cores; an empty mask has none.

    Args:
        sizes: path of an image -> its (width, height); pairs without one are left out. frames: path of an image -> frame of its
            thumbnail, `SMALL` or `LARGE`.
    """

    def outline_of(pair: ChangePair) -> Thumbnail | None:
        size = size_of(pair, sizes)
        mask = masks.read(pair, size) if size else None
        if size is None or mask is None or not mask.any():
            return None
        frame = frames[pair.before]
        scale = min(1.0, frame[0] / size[0], frame[1] / size[1])
        reduced = max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
        return Thumbnail(*size, webp(colored_outline(mask, reduced, 2 if frame == LARGE else 1), lossless=True))

    with ThreadPoolExecutor() as pool:
        return {pair.extra["mask"]: one for pair, one in zip(pairs, pool.map(outline_of, pairs)) if one}


def size_of(pair: ChangePair, sizes: Mapping[str, Size]) -> Size | None:
    """The (width, height) of the first image of a pair that has one in `sizes`."""
    return next((sizes[path] for path in pair.images if path in sizes), None)


def mask_counts(masks: Masks, pairs: Sequence[ChangePair], sizes: Mapping[str, Size]) -> dict[str, float] | None:
    """What the masks of pairs are.

    Args:
        sizes: path of an image -> its (width, height).

    Returns:
        {"pairs": number of pairs whose mask is not empty, "empty": of pairs whose mask is empty, "unreadable": of pairs whose mask
        cannot be used, "share": mean share of the image that a mask covers, of those that are not empty}; None if no pair has a mask.
    """
    shares, unreadable = [], 0
    for pair in pairs:
        if "mask" in pair.extra:
            size = size_of(pair, sizes)
            mask = masks.read(pair, size) if size else None
            unreadable += mask is None
            shares += [] if mask is None else [float(mask.mean())]
    if not shares and not unreadable:
        return None
    filled = [share for share in shares if share]
    empty = len(shares) - len(filled)
    mean = {"share": sum(filled) / len(filled)} if filled else {}
    return {"pairs": len(filled), "empty": empty, "unreadable": unreadable, **mean}


def pair_pictures(pair: ChangePair, masks: Masks) -> list[Image.Image]:
    """Both images of a pair, fitted into `PICTURE`, with the outline of its mask; without a mask with its boxes."""
    images = [picture(masks.root, path, values=pair.ranges.get(path)) for path in pair.images]
    mask = masks.read(pair, images[0].size)
    if mask is not None:
        for image in images:
            image.paste(BOX, mask=outline(mask, image.size))
        return images
    boxes = pair.extra.get("boxes") or {}
    return [
        picture(masks.root, path, boxes.get(side), values=pair.ranges.get(path))
        for side, path in zip(("before", "after"), pair.images)
    ]
