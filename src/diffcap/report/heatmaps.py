"""Draw attention maps as colours over images, for `attention.png` of a report and `diffcap caption --heatmap`.

A strength is an attention weight scaled to 0 to 1. An alignment is the attention of each position in the before image to the after image.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from diffcap.change import AttentionMaps, Caption, change_probability
from diffcap.records import ChangePair
from diffcap.report import drawing
from diffcap.report.drawing import CAPTION_FONT, GAP, LABEL_COLOR, LABEL_FONT, MARGIN, SHEET_FRAME, SHEET_WIDTH

Array = npt.NDArray[np.floating[Any]]
PairMaps = tuple[ChangePair, AttentionMaps]

# RGB at equal distances from strength 0 to 1; each colour is lighter than the colour before it, so that a gray print shows the order.
COLORMAP = np.array([(60, 0, 90), (150, 20, 110), (225, 60, 60), (250, 140, 20), (255, 235, 90)], dtype=float)
MAX_OPACITY = 0.85
OPACITY_GAIN = 1.5  # opacity is MAX_OPACITY * min(1, OPACITY_GAIN * strength)
_MIN_PEAK = 4  # a peak below 4 times the weight of uniform attention gets a strength below 1

NUM_COLUMNS = 7  # number of words in a row of the sheet
WORD_FRAME = ((SHEET_WIDTH - 2 * MARGIN - (NUM_COLUMNS - 1) * GAP) // NUM_COLUMNS, 88)
_IMAGE_GAP = 2  # pixels between the two images of a word
_COMMON_SHIFT_COLOR = (0, 160, 230)
_OTHER_SHIFT_COLOR = (240, 120, 0)
_MAX_MATCHES = 24
_SUPERSAMPLING = 4  # lines are drawn 4 times larger and then shrunk, for smooth edges
_LINE_WIDTH, _DOT_RADIUS = 1.5, 3.5  # pixels of the sheet
_NUM_LINE_POINTS = 33  # a bent line is drawn as a polyline


class Match(NamedTuple):
    """A position in the before image and the position in the after image to which it is aligned."""

    start: tuple[float, float]  # (x, y) in the before image, as fractions of its size
    end: tuple[float, float]  # in the after image
    weight: float  # of the alignment
    has_common_shift: bool  # end - start differs by at most one cell from the median of all matches


def scale_attention(before: Array, after: Array) -> tuple[Array, Array]:
    """Scale a word's attention weights, (h, w) each, to strengths from 0 to 1, with one scale for both images.

    Weights up to the weight of uniform attention, 1 / (h w), become 0. The highest weight of both maps becomes 1, or less if it is below
    `_MIN_PEAK` times the weight of uniform attention.
    """
    uniform = 1 / before.size
    highest = max(before.max(), after.max(), _MIN_PEAK * uniform)
    first, second = (np.clip((weights - uniform) / (highest - uniform), 0, 1) for weights in (before, after))
    return first, second


def colormap(strengths: Array) -> Array:
    """Convert strengths (...) to RGB colours (..., 3) from 0 to 255."""
    position = np.linspace(0, 1, len(COLORMAP))
    return np.stack([np.interp(strengths, position, COLORMAP[:, channel]) for channel in range(3)], axis=-1)


def overlay(size: tuple[int, int], strengths: Array) -> Array:
    """Enlarge strengths (h, w) to `size` (W, H) by bicubic interpolation, and convert them to RGBA values (H, W, 4) from 0 to 255."""
    enlarged = Image.fromarray(strengths.astype(np.float32)).resize(size, Image.Resampling.BICUBIC)
    return _rgba(np.clip(np.asarray(enlarged), 0, 1))


def color_table() -> npt.NDArray[np.uint8]:
    """Return RGBA values (256, 4) of the strengths 0, 1/255, ..., 1."""
    return _rgba(np.linspace(0, 1, 256)).round().astype(np.uint8)


def _rgba(strengths: Array) -> Array:
    """Convert strengths (...) to RGBA values (..., 4) from 0 to 255."""
    opacity = MAX_OPACITY * np.minimum(1, OPACITY_GAIN * strengths)
    return np.concatenate([colormap(strengths), 255 * opacity[..., None]], -1)


def blend(image: Image.Image, strengths: Array) -> Image.Image:
    """Draw strengths (h, w) as colours over an RGB image."""
    colors = overlay(image.size, strengths)
    alpha = colors[..., 3:] / 255
    pixels = (1 - alpha) * np.asarray(image, dtype=float) + alpha * colors[..., :3]
    return Image.fromarray(pixels.round().astype(np.uint8))


def strongest_matches(alignment: Array, grid: tuple[int, int], count: int = _MAX_MATCHES) -> list[Match]:
    """Return the strongest matches of an alignment (h w, h w), whose rows are positions of the before image.

    Returns:
        At most one match for each row, strongest first. Each weight is at least half the highest weight and twice the uniform weight.
    """
    weights = alignment.max(1)
    ends = alignment.argmax(1)
    threshold = max(weights.max() / 2, 2 / len(weights))
    strongest = np.argsort(-weights, kind="stable")[:count]
    starts = strongest[weights[strongest] >= threshold]
    if not len(starts):
        return []
    positions = np.arange(len(weights))
    coordinates = np.stack([positions % grid[1], positions // grid[1]], 1)  # (N, 2), x and y
    shifts = coordinates[ends[starts]] - coordinates[starts]
    has_common_shift = (np.abs(shifts - np.median(shifts, axis=0)) <= 1).all(1)
    centers = list(map(tuple, ((coordinates + 0.5) / (grid[1], grid[0])).tolist()))
    columns = starts, ends[starts], weights[starts], has_common_shift
    matches = zip(*(column.tolist() for column in columns))
    return [Match(centers[start], centers[end], *values) for start, end, *values in matches]


def draw_attention(
    maps_by_system: Mapping[str, Sequence[PairMaps]], captions: drawing.SystemCaptions, masks: drawing.Masks
) -> Image.Image:
    """Draw `attention.png`: for each system and pair, the images, the caption and the attention maps of each word.

    `masks` has the folder of the dataset (`root`) and the masks of the changed regions.
    """
    entries = [(name, pair, maps) for name, pair_maps in maps_by_system.items() for pair, maps in pair_maps]
    has_object_labels = any("changed" in pair.extra for _, pair, _ in entries)  # "changed": the changed object
    blocks = []
    for name, pair, maps in entries:
        texts = drawing.caption_lines(pair, {name: captions[name][pair.id]}, has_object_labels)
        images = drawing.read_images(pair, masks.root)
        blocks.append(_draw_maps(images, drawing.draw_region(pair, images, masks), texts, maps))
    has_alignment = any(maps.alignment is not None for _, _, maps in entries)
    return drawing.draw_sheet(blocks, _draw_legend(has_alignment))


def draw_caption(
    before: Image.Image, after: Image.Image, caption: Caption, attention: AttentionMaps | None
) -> Image.Image:
    """Draw the sheet of a pair: both images with lines between matched positions, the caption, and the maps of each word."""
    texts = drawing.text_lines(caption.text)
    details = confidence_lines(caption)
    if caption.alternatives:
        details += ["", "Alternatives with their log-probabilities:"]
        details += [f"{alternative.log_probability:.3f}  {alternative.text}" for alternative in caption.alternatives]
    for detail in details:
        empty_line = drawing.TextLine("", LABEL_COLOR, LABEL_FONT)
        texts += drawing.text_lines(detail, LABEL_COLOR, LABEL_FONT) if detail else [empty_line]
    images = [before, after]
    fitted = [drawing.fit_image(image) for image in images]
    if attention is None:
        return drawing.draw_sheet([drawing.draw_block(fitted, texts)[0]])
    probabilities = [percent(math.exp(word.log_probability)) for word in caption.words]
    block = _draw_maps(images, fitted, texts, attention, probabilities)
    return drawing.draw_sheet([block], _draw_legend(attention.alignment is not None))


def _draw_maps(
    images: Sequence[Image.Image],
    fitted: Sequence[Image.Image],
    texts: Sequence[drawing.TextLine],
    maps: AttentionMaps,
    word_labels: Sequence[str] = (),
) -> Image.Image:
    """Draw the images (`fitted`: scaled to `SHEET_FRAME`), the matches and the text, and below them small images with each word's map."""
    text_height = drawing.line_height(CAPTION_FONT) + bool(word_labels) * drawing.line_height(LABEL_FONT)
    row_height = 2 * WORD_FRAME[1] + _IMAGE_GAP + text_height + GAP
    words_height = math.ceil(len(maps.words) / NUM_COLUMNS) * row_height
    block, places = drawing.draw_block(fitted, texts, 2 * GAP + words_height)
    if maps.alignment is not None:
        grid = maps.before.shape[1], maps.before.shape[2]
        _draw_matches(block, strongest_matches(maps.alignment, grid), places, grid[0])
    draw = ImageDraw.Draw(block)
    small_images = [drawing.fit_image(image, WORD_FRAME) for image in images]
    for index, word in enumerate(maps.words):
        row, column = divmod(index, NUM_COLUMNS)
        left = MARGIN + column * (WORD_FRAME[0] + GAP)
        center = left + WORD_FRAME[0] // 2
        top = block.height - words_height + row * row_height
        strengths = scale_attention(maps.before[index], maps.after[index])
        for side, (image, image_strengths) in enumerate(zip(small_images, strengths)):
            corner = left + (WORD_FRAME[0] - image.width) // 2, top + side * (WORD_FRAME[1] + _IMAGE_GAP)
            block.paste(blend(image, image_strengths), corner)
        text_top = top + 2 * WORD_FRAME[1] + _IMAGE_GAP + 2
        draw.text((center, text_top), word, drawing.TEXT_COLOR, CAPTION_FONT, anchor="ma")
        if word_labels:
            text_top += drawing.line_height(CAPTION_FONT)
            draw.text((center, text_top), word_labels[index], LABEL_COLOR, LABEL_FONT, anchor="ma")
    return block


def _draw_matches(block: Image.Image, matches: Sequence[Match], places: Sequence[drawing.Place], rows: int) -> None:
    """Draw a line for each match between the images, whose places in the block are `places`; an attention map has `rows` rows.

    Straight lines between cells of one row would cover each other, so each line is bent by less than the height of a row.
    """
    width = max(left + width for left, _, width, _ in places) + GAP  # the rest of the block has no lines
    lines = Image.new("RGBA", (width * _SUPERSAMPLING, SHEET_FRAME[1] * _SUPERSAMPLING))
    draw = ImageDraw.Draw(lines)
    progress = np.linspace(0, 1, _NUM_LINE_POINTS)[:, None]
    for match in sorted(matches, key=lambda match: match.weight):
        start, end = (
            np.array([place[axis] + position[axis] * place[2 + axis] for axis in (0, 1)])
            for position, place in zip((match.start, match.end), places)
        )
        bend = (match.start[0] - 0.5) * places[0][3] / rows
        path = (start + progress * (end - start) + np.sin(np.pi * progress) * (0, bend)) * _SUPERSAMPLING
        color: drawing.Color = _COMMON_SHIFT_COLOR if match.has_common_shift else _OTHER_SHIFT_COLOR
        points = [tuple(point) for point in path.tolist()]
        opacity = round(255 * match.weight / matches[0].weight)
        draw.line(points, (*color, opacity), round(_LINE_WIDTH * _SUPERSAMPLING))
        radius = _DOT_RADIUS * _SUPERSAMPLING
        for x, y in (path[0], path[-1]):
            draw.ellipse([x - radius, y - radius, x + radius, y + radius], color, "white", _SUPERSAMPLING // 2)
    lines = lines.resize((width, SHEET_FRAME[1]), Image.Resampling.LANCZOS)
    block.paste(lines, (0, 0), lines)


def _draw_legend(has_alignment: bool) -> Image.Image:
    height = drawing.line_height(LABEL_FONT)
    legend = Image.new("RGB", (SHEET_WIDTH, 3 * height + MARGIN), "white")
    draw = ImageDraw.Draw(legend)
    strengths = np.tile(np.linspace(0, 1, 120), (10, 1))
    bar = Image.fromarray(colormap(strengths).astype(np.uint8))
    legend.paste(bar, (MARGIN, 3))
    text = "attention of each word, low to high, in the images before (above) and after (below); no colour: uniform or less"
    draw.text((MARGIN + bar.width + GAP, 0), text, LABEL_COLOR, LABEL_FONT)
    if has_alignment:
        x = MARGIN
        meanings = {
            _COMMON_SHIFT_COLOR: "matched position in the image after, with the shift of most matches",
            _OTHER_SHIFT_COLOR: "with another shift",
        }
        for color, meaning in meanings.items():
            middle = height + height // 2
            draw.line([(x, middle), (x + 24, middle)], color, 2)
            draw.text((x + 32, height), meaning, LABEL_COLOR, LABEL_FONT)
            x += 32 + round(LABEL_FONT.getlength(meaning)) + 3 * GAP
    return legend


def confidence_lines(caption: Caption) -> list[str]:
    """Return lines with the probability of a change, if the captioner has one, and with the sentence's log-probability, if there is one.

    The log-probability does not measure confidence: it is also low for a correct caption that is long or has other wordings as good.
    """
    lines = []
    if caption.nothing_changed is not None:
        lines.append(f"probability that something changed: {percent(change_probability(caption))}")
    if caption.log_probability is not None:
        log_probability = f"{caption.log_probability:.3f} (sum over its words; not a confidence)"
        lines.append(f"log-probability of the sentence: {log_probability}")
    return lines


def percent(probability: float) -> str:
    """Format a probability as "97 %" or "0.3 %"."""
    value = 100 * min(1.0, probability)
    if value < 0.1:
        return "< 0.1 %"
    return f"{value:.0f} %" if value >= 10 else f"{value:.1f} %"
