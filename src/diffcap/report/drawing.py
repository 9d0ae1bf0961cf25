"""Draw the images of a report: thumbnails, outlines of the masks that mark the changed area, and sheets such as `pairs.png`.

A sheet is a column of blocks. A block is the two images of a pair and a text. An image is scaled to fit into a frame, which is a size.
"""

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from diffcap.evaluation.localisation import Mask
from diffcap.evaluation.slots import ATTRIBUTES, parse_caption
from diffcap.records import ChangePair
from diffcap.report.table import ordered_type_groups
from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import atomic_write
from diffcap.utils.image_io import ValueRange, read_image

Color = tuple[int, int, int]
Size = tuple[int, int]  # (width, height) in pixels
ImageSizes = Mapping[str, Size]  # path of an image -> its size
Frames = Mapping[str, Size]  # path of an image -> `SMALL_FRAME` or `LARGE_FRAME`
Place = tuple[int, int, int, int]  # of an image in a block: left, top, width, height in pixels
Pairs = Sequence[ChangePair]
SystemCaptions = Mapping[str, Mapping[str, str]]  # system -> id -> caption

SHEET_WIDTH, MARGIN, GAP = 900, 16, 8  # pixels; GitHub shows a README 900 pixels wide
SHEET_FRAME = (256, 192)  # twice the size of the images of diffcap's own dataset, blocks
TEXT_COLOR, LABEL_COLOR, LINE_COLOR = (30, 30, 30), (120, 120, 120), (225, 225, 225)
RIGHT_COLOR, WRONG_COLOR, REGION_COLOR = (20, 125, 55), (190, 40, 40), (255, 0, 200)  # `REGION_COLOR` marks the change
CAPTION_FONT, LABEL_FONT = (ImageFont.load_default(size) for size in (15, 12))
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
# A thumbnail fits into `LARGE_FRAME` if its pair has attention maps, else into `SMALL_FRAME`. It is never larger than its image.
SMALL_FRAME, LARGE_FRAME = (144, 108), (320, 240)
_WEBP_QUALITY = {SMALL_FRAME: 55, LARGE_FRAME: 80}
_RIGHT_NOTE = "right: the type of change and the words for the changed object (in the box); its position is not checked"
_TEXT_X = MARGIN + 2 * SHEET_FRAME[0] + 3 * GAP  # x coordinate of the text beside a pair


def line_height(font: Font) -> int:
    """Return the distance in pixels from one line of text to the next."""
    return round(1.3 * getattr(font, "size", 11))


def fitted_size(size: Size, frame: Size) -> Size:
    """Scale a size to fit into a frame."""
    scale = min(frame[0] / size[0], frame[1] / size[1])
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def fit_image(image: Image.Image, frame: Size = SHEET_FRAME, box: Sequence[float] | None = None) -> Image.Image:
    """Scale an image to fit into a frame, and draw a box, which is (left, top, right, bottom) in pixels of the original image."""
    scale = min(frame[0] / image.width, frame[1] / image.height)
    image = image.resize(fitted_size(image.size, frame), Image.Resampling.BICUBIC)
    if box:
        left, top, right, bottom = (round(value * scale) for value in box)
        first = max(0, left - 2), max(0, top - 2)
        last = min(image.width - 1, right + 1), min(image.height - 1, bottom + 1)
        ImageDraw.Draw(image).rectangle([first, last], outline=REGION_COLOR)
    return image


def write_png(path: str | Path, save: Callable[..., Any]) -> None:
    """Write an image as PNG, atomically. `save`: the method of the image or of matplotlib's figure."""
    with atomic_write(path, per_process=False) as temporary:  # with one name, so killed processes leave one file
        save(temporary, format="png")  # with optimize=True, files are 4 % smaller, but take six times as long


def read_images(pair: ChangePair, root: Path) -> list[Image.Image]:
    """Read both images of a pair, whose paths are relative to `root`."""
    try:
        return [read_image(root / path, value_range=pair.ranges.get(path)).image for path in pair.images]
    except DiffcapError as error:
        raise DiffcapError(f"{str(error).rstrip('.')}, or report with --pictures 0 --attention 0.") from None


class Thumbnail(NamedTuple):
    """An image that was reduced to fit into a frame."""

    width: int  # of the original image
    height: int
    data: str  # WebP in base64


def encode_webp(image: Image.Image, **settings: Any) -> str:
    """Return an image as WebP in base64. `settings` are Pillow's for this format."""
    content = io.BytesIO()
    image.save(content, "WEBP", **settings)
    return base64.b64encode(content.getvalue()).decode()


def thumbnails(
    root: Path, frames: Frames, ranges: Mapping[str, ValueRange] | None = None
) -> dict[str, Thumbnail | None]:
    """Return path -> thumbnail; None for a broken image. `ranges`: path -> (pixel value of black, pixel value of white)."""

    def thumbnail(path: str) -> Thumbnail | None:
        value_range = (ranges or {}).get(path)
        frame = frames[path]
        try:
            if value_range:
                image = read_image(root / path, value_range=value_range).image
                size = image.size
            else:
                with Image.open(root / path) as file:
                    size = file.size
                    file.draft("RGB", frame)  # decodes a large JPEG at a lower resolution
                    image = file.convert("RGB")
        except (DiffcapError, OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # most are from Pillow
            return None
        image.thumbnail(frame, Image.Resampling.LANCZOS)
        return Thumbnail(*size, encode_webp(image, quality=_WEBP_QUALITY[frame], method=4))

    with ThreadPoolExecutor() as pool:
        return dict(zip(frames, pool.map(thumbnail, frames)))


class Masks:
    """Reads masks, images that mark the changed area, and records the masks that cannot be used."""

    def __init__(self, root: Path) -> None:
        self.root = root  # folder to which the paths of images and masks are relative
        self.problems: dict[str, str] = {}  # path of a mask that cannot be used -> reason

    def read(self, pair: ChangePair, sizes: ImageSizes) -> Mask | None:
        """Read the mask of a pair (H, W), which is True where any channel is not 0. The mask must have the images' aspect ratio.

        Returns None if the pair has no mask, if the mask cannot be used, or if `sizes` has neither image of the pair.
        """
        path = pair.extra.get("mask")
        size = next((sizes[path] for path in pair.images if path in sizes), None)
        if not isinstance(path, str) or size is None:
            return None
        try:
            image = read_image(self.root / path).image
            difference = abs(image.width * size[1] - image.height * size[0])
            if difference > max(*image.size, *size):  # rounding a size changes it by at most a pixel
                raise DiffcapError(
                    f"{self.root / path}: a mask of {image.width} x {image.height} pixels; save it in the size of its pair's images."
                )
            return np.asarray(np.asarray(image).any(-1))
        except DiffcapError as error:
            self.problems[path] = str(error)
            return None


def draw_outline(mask: Mask, size: Size, width: int = 1) -> Image.Image:
    """Draw a line around a mask, `width` pixels wide: 255 on 0, mode L. At an edge of the image, the line is inside the mask."""
    resized = Image.fromarray(mask.astype(np.uint8) * 255).resize(size, Image.Resampling.NEAREST)
    is_off_edge = np.zeros((size[1], size[0]), bool)
    is_off_edge[width:-width, width:-width] = True
    is_dilated = np.asarray(resized.filter(ImageFilter.MaxFilter(2 * width + 1))) > 0
    is_inside = (np.asarray(resized) > 0) & is_off_edge
    return Image.fromarray((is_dilated & ~is_inside).astype(np.uint8) * 255)


def colored_outline(mask: Mask, size: Size, width: int = 1) -> Image.Image:
    """Draw the outline of a mask in `REGION_COLOR` on a transparent RGBA image."""
    colored = Image.new("RGBA", size, (*REGION_COLOR, 0))
    colored.putalpha(draw_outline(mask, size, width))
    return colored


def outline_thumbnails(masks: Masks, pairs: Pairs, sizes: ImageSizes, frames: Frames) -> dict[str, Thumbnail]:
    """Return path of a mask -> thumbnail of its outline, which fits over the thumbnails of its pair. Empty masks are left out."""

    def outline_thumbnail(pair: ChangePair) -> Thumbnail | None:
        mask = masks.read(pair, sizes)
        if mask is None or not mask.any():
            return None
        size = next(sizes[path] for path in pair.images if path in sizes)
        frame = frames[pair.before]
        limits = min(frame[0], size[0]), min(frame[1], size[1])
        reduced = fitted_size(size, limits)
        outline = colored_outline(mask, reduced, 2 if frame == LARGE_FRAME else 1)
        return Thumbnail(*size, encode_webp(outline, lossless=True))

    with ThreadPoolExecutor() as pool:
        outlines = pool.map(outline_thumbnail, pairs)
        return {pair.extra["mask"]: thumbnail for pair, thumbnail in zip(pairs, outlines) if thumbnail}


def mask_counts(masks: Masks, pairs: Pairs, sizes: ImageSizes) -> dict[str, float] | None:
    """Count the masks of pairs.

    Returns:
        {"pairs": number of masks that are not empty, "empty": number of empty masks, "unreadable": number of masks that cannot be used,
        "share": mean share of the image that a mask covers, without empty masks}; None if no pair has a mask.
    """
    shares, num_unreadable = [], 0
    for pair in pairs:
        if "mask" in pair.extra:
            mask = masks.read(pair, sizes)
            num_unreadable += mask is None
            shares += [] if mask is None else [float(mask.mean())]
    if not shares and not num_unreadable:
        return None
    filled = [share for share in shares if share]
    mean = {"share": sum(filled) / len(filled)} if filled else {}
    return {"pairs": len(filled), "empty": len(shares) - len(filled), "unreadable": num_unreadable, **mean}


def draw_region(pair: ChangePair, images: Sequence[Image.Image], masks: Masks) -> list[Image.Image]:
    """Fit the images of a pair into `SHEET_FRAME`, and draw on them the outline of its mask, or its boxes if it has no mask."""
    mask = masks.read(pair, dict(zip(pair.images, (image.size for image in images))))
    if mask is None:
        boxes = pair.extra.get("boxes") or {}
        return [fit_image(image, box=boxes.get(side)) for side, image in zip(("before", "after"), images)]
    fitted_images = [fit_image(image) for image in images]
    for image in fitted_images:
        image.paste(REGION_COLOR, mask=draw_outline(mask, image.size))
    return fitted_images


def type_group(pair: ChangePair) -> str | None:
    """Return the change type ("color"), or "distractor" or "no_change" for a pair without change; None if the dataset has no types."""
    return pair.group if pair.is_distractor else pair.change_type


def choose_pairs(pairs: Pairs, count: int, seed: int = 0) -> list[ChangePair]:
    """Sample `count` pairs, equally many of each `type_group`, sorted by group. Without change types, sample from all pairs."""
    random = Random(seed)
    group_pairs: dict[str, list[ChangePair]] = {}
    for pair in pairs:
        group_pairs.setdefault(type_group(pair) or "", []).append(pair)
    groups = ordered_type_groups(set(group_pairs))
    for group in groups:
        random.shuffle(group_pairs[group])
    rounds = zip_longest(*(reversed(group_pairs[group]) for group in groups))  # a pair of each group that has one left
    chosen_pairs = [pair for round_pairs in rounds for pair in round_pairs if pair is not None][:count]
    return sorted(chosen_pairs, key=lambda pair: groups.index(type_group(pair) or ""))


def is_correct(caption: str, pair: ChangePair) -> bool | None:
    """Return True if the change type is right and, for a change, also the shape and the new value, and no other named attribute is wrong.

    Returns None if the dataset lacks the attributes of its changed objects.
    """
    parsed = parse_caption(caption)
    if pair.is_distractor:
        return parsed.change_type == "none"
    truth = pair.extra.get("changed")
    if truth is None:
        return None
    named = {attribute: value for attribute in ATTRIBUTES if (value := getattr(parsed, attribute)) is not None}
    is_same_object = "shape" in named and all(truth[attribute] == value for attribute, value in named.items())
    return parsed.change_type == pair.change_type and is_same_object and parsed.to == truth.get("to")


class TextLine(NamedTuple):
    """A line of the text beside a pair."""

    text: str
    color: Color = TEXT_COLOR
    font: Font = CAPTION_FONT
    space_above: int = 0  # pixels


def text_lines(text: str, color: Color = TEXT_COLOR, font: Font = CAPTION_FONT) -> list[TextLine]:
    """Break a text into lines that fit beside a pair. A word that is too long for a line gets its own line."""
    lines: list[str] = []
    for word in text.split():
        longer_line = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(longer_line) <= SHEET_WIDTH - MARGIN - _TEXT_X:
            lines[-1] = longer_line
        else:
            lines.append(word)
    return [TextLine(line, color, font) for line in lines or ["(nothing)"]]


def caption_lines(pair: ChangePair, captions: Mapping[str, str], has_object_labels: bool) -> list[TextLine]:
    """Return the text beside a pair: change type, reference and captions. With `has_object_labels`, it says which captions are right."""
    title = f"{pair.group.replace('_', ' ')}: nothing changed" if pair.is_distractor else pair.change_type
    lines = [TextLine(title, LABEL_COLOR, LABEL_FONT)] if title else []
    if pair.captions:
        lines += [TextLine("reference", LABEL_COLOR, LABEL_FONT, space_above=7), *text_lines(pair.captions[0])]
    for name, text in captions.items():
        correct = is_correct(text, pair) if has_object_labels else None
        if correct is None:
            label, label_color, color = name, LABEL_COLOR, TEXT_COLOR
        else:
            color = RIGHT_COLOR if correct else WRONG_COLOR
            label, label_color = f"{name}: {'right' if correct else 'wrong'}", color
        lines.append(TextLine(label, label_color, LABEL_FONT, space_above=7))
        lines += text_lines(text, color)
    return lines


def draw_block(
    images: Sequence[Image.Image], texts: Sequence[TextLine], space_below: int = 0
) -> tuple[Image.Image, list[Place]]:
    """Draw two images, which fit into `SHEET_FRAME`, and their text side by side; return the block and the places of the images."""
    height = max(SHEET_FRAME[1], sum(line.space_above + line_height(line.font) for line in texts))
    block = Image.new("RGB", (SHEET_WIDTH, height + space_below), "white")
    places = []
    for index, image in enumerate(images):
        left = MARGIN + index * (SHEET_FRAME[0] + GAP) + (SHEET_FRAME[0] - image.width) // 2
        block.paste(image, (left, 0))
        places.append((left, 0, image.width, image.height))
    draw = ImageDraw.Draw(block)
    y = 0
    for line in texts:
        y += line.space_above
        draw.text((_TEXT_X, y), line.text, line.color, line.font)
        y += line_height(line.font)
    return block, places


def draw_sheet(blocks: Sequence[Image.Image], footer: Image.Image | None = None) -> Image.Image:
    """Put the blocks of pairs below each other, with headings above the images and the footer below."""
    top = MARGIN + line_height(LABEL_FONT) + GAP
    height = top + sum(block.height + 2 * GAP for block in blocks)
    sheet = Image.new("RGB", (SHEET_WIDTH, height + (footer.height if footer else 0)), "white")
    draw = ImageDraw.Draw(sheet)
    for x, title in ((MARGIN, "before"), (MARGIN + SHEET_FRAME[0] + GAP, "after")):
        draw.text((x, MARGIN), title, LABEL_COLOR, LABEL_FONT)
    y = top
    for block in blocks:
        if y > top:
            draw.line([(MARGIN, y - GAP), (SHEET_WIDTH - MARGIN, y - GAP)], LINE_COLOR)
        sheet.paste(block, (0, y))
        y += block.height + 2 * GAP
    if footer:
        sheet.paste(footer, (0, y))
    return sheet


def draw_pairs(pairs: Pairs, captions: SystemCaptions, masks: Masks) -> Image.Image:
    """Draw a block for each pair. Right captions are green, wrong captions red, and captions that cannot be judged black."""
    has_object_labels = any("changed" in pair.extra for pair in pairs)
    blocks = []
    for pair in pairs:
        texts = caption_lines(pair, {name: by_id[pair.id] for name, by_id in captions.items()}, has_object_labels)
        blocks.append(draw_block(draw_region(pair, read_images(pair, masks.root), masks), texts)[0])
    notes = [_RIGHT_NOTE] if has_object_labels else []
    notes += ["outline: the mask of the change"] if any("mask" in pair.extra for pair in pairs) else []
    if not notes:
        return draw_sheet(blocks)
    footer = Image.new("RGB", (SHEET_WIDTH, len(notes) * line_height(LABEL_FONT) + GAP), "white")
    for index, note in enumerate(notes):
        ImageDraw.Draw(footer).text((MARGIN, index * line_height(LABEL_FONT)), note, LABEL_COLOR, LABEL_FONT)
    return draw_sheet(blocks, footer)
