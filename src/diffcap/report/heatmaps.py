"""Attention maps as colours over images: `attention.png` of a report, and `--heatmap` of `diffcap caption`.

report.html enlarges its maps in the browser (attention.js), which takes a ninth of the space, with the colours of `color_table`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from diffcap.pair_captioner import AttentionMaps, Caption
from diffcap.records import ChangePair
from diffcap.report import drawing
from diffcap.report.drawing import (
    FONT,
    GAP,
    GRAY,
    INK,
    MARGIN,
    PICTURE,
    SMALL_FONT,
    WIDTH,
    fit,
    line_height,
    text_lines,
)

Array = npt.NDArray[np.floating[Any]]

# RGB at equal distances from strength 0 to 1; each colour is lighter than the one before, so that the order survives in gray.
COLORMAP = np.array([(60, 0, 90), (150, 20, 110), (225, 60, 60), (250, 140, 20), (255, 235, 90)], dtype=float)
MAX_OPACITY = 0.85
OPACITY_GAIN = 1.5  # opacity is MAX_OPACITY * min(1, OPACITY_GAIN * strength)
_MIN_PEAK = 4  # times uniform attention; a lower peak gets a strength below 1

COLUMNS = 7  # words in a row
TILE = ((WIDTH - 2 * MARGIN - (COLUMNS - 1) * GAP) // COLUMNS, 88)
_TILE_GAP = 2  # pixels between the two images of a word
_COMMON_SHIFT_COLOR = (0, 160, 230)
_OTHER_SHIFT_COLOR = (240, 120, 0)
_MAX_MATCHES = 24
_SUPERSAMPLING = 4  # lines are drawn this many times larger and then shrunk, for smooth edges
_LINE_WIDTH, _DOT_RADIUS = 1.5, 3.5  # pixels of the sheet
_LINE_POINTS = 33  # a bent line is drawn as a polyline of this many points


class Match(NamedTuple):
    """A position in the before image and the position in the after image that it is aligned with."""

    start: tuple[float, float]  # (x, y) as fractions of the image's size
    end: tuple[float, float]
    weight: float  # of the alignment
    is_common: bool  # its shift differs by at most one cell from the median shift of all matches


def scale_attention(before: Array, after: Array) -> tuple[Array, Array]:
    """Scale a word's attention weights, (h, w) each, to strengths from 0 to 1, with one scale for both images.

    A strength is 0 up to uniform attention and 1 at the highest weight of both maps. A map without a clear peak stays below 1.
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
    """RGBA values (H, W, 4), 0 to 255, of a map of strengths (h, w), enlarged to the size (W, H) by bicubic interpolation."""
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
    """Draw a map (h, w) of strengths from 0 to 1 over an RGB image."""
    colors = overlay(image.size, strengths)
    alpha = colors[..., 3:] / 255
    pixels = (1 - alpha) * np.asarray(image, dtype=float) + alpha * colors[..., :3]
    return Image.fromarray(pixels.round().astype(np.uint8))


def strongest_matches(alignment: Array, grid: tuple[int, int], count: int = _MAX_MATCHES) -> list[Match]:
    """Return the strongest matches of an alignment (h w, h w), whose rows are positions of the before image.

    Returns:
        At most one match for each row, strongest first. A match's weight is at least half the highest weight, and at least twice a
        uniform weight.
    """
    weights = alignment.max(1)
    ends = alignment.argmax(1)
    threshold = max(weights.max() / 2, 2 / len(weights))
    strongest = [int(start) for start in np.argsort(-weights, kind="stable")[:count]]
    starts = [start for start in strongest if weights[start] >= threshold]
    if not starts:
        return []
    positions = np.arange(len(weights))
    coordinates = np.stack([positions % grid[1], positions // grid[1]], 1)  # (N, 2), x and y
    shifts = coordinates[ends[starts]] - coordinates[starts]
    is_common = (np.abs(shifts - np.median(shifts, axis=0)) <= 1).all(1)

    def center(position: int) -> tuple[float, float]:
        x, y = coordinates[position]
        return float((x + 0.5) / grid[1]), float((y + 0.5) / grid[0])

    return [
        Match(center(start), center(int(ends[start])), float(weights[start]), bool(common))
        for start, common in zip(starts, is_common)
    ]


def draw_attention(
    run_maps: Mapping[str, Sequence[tuple[ChangePair, AttentionMaps]]], captions: drawing.Captions, masks: drawing.Masks
) -> Image.Image:
    """Draw `attention.png`: the maps of each run and pair as in `draw_caption`; captions are by run and id."""
    entries = [(name, pair, maps) for name, pair_maps in run_maps.items() for pair, maps in pair_maps]
    has_object_labels = any("changed" in pair.extra for _, pair, _ in entries)
    blocks = []
    for name, pair, maps in entries:
        texts = drawing.caption_lines(pair, {name: captions[name][pair.id]}, has_object_labels)
        images = drawing.read_images(pair, masks.root)
        blocks.append(_draw_maps(images, drawing.with_region(pair, images, masks), texts, maps))
    has_alignment = any(maps.alignment is not None for _, _, maps in entries)
    return drawing.draw_sheet(blocks, _draw_legend(has_alignment))


def draw_caption(
    before: Image.Image, after: Image.Image, caption: Caption, attention: AttentionMaps | None
) -> Image.Image:
    """Draw the sheet of a pair: both images with lines between matched positions, the caption, and the maps of each word."""
    texts = text_lines(caption.text)
    details = confidence_lines(caption)
    if caption.alternatives:
        details += ["", "Alternatives with their log-probabilities:"]
        details += [f"{one.log_probability:.3f}  {one.text}" for one in caption.alternatives]
    for detail in details:
        texts += text_lines(detail, GRAY, SMALL_FONT) if detail else [drawing.TextLine("", GRAY, SMALL_FONT)]
    images = [before, after]
    fitted = [fit(image) for image in images]
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
    """Draw the fitted images with the matches and the text; below them, for each word, both images with its map, and its label."""
    row_height = 2 * TILE[1] + _TILE_GAP + line_height(FONT) + bool(word_labels) * line_height(SMALL_FONT) + GAP
    words_height = math.ceil(len(maps.words) / COLUMNS) * row_height
    block, frames = drawing.draw_block(fitted, texts, 2 * GAP + words_height)
    if maps.alignment is not None:
        grid = maps.before.shape[1], maps.before.shape[2]
        _draw_matches(block, strongest_matches(maps.alignment, grid), frames, grid[0])
    draw = ImageDraw.Draw(block)
    small_images = [fit(image, TILE) for image in images]
    for number, word in enumerate(maps.words):
        row, column = divmod(number, COLUMNS)
        left = MARGIN + column * (TILE[0] + GAP)
        center = left + TILE[0] // 2
        top = block.height - words_height + row * row_height
        strengths = scale_attention(maps.before[number], maps.after[number])
        for side, (image, image_strengths) in enumerate(zip(small_images, strengths)):
            corner = left + (TILE[0] - image.width) // 2, top + side * (TILE[1] + _TILE_GAP)
            block.paste(blend(image, image_strengths), corner)
        text_top = top + 2 * TILE[1] + _TILE_GAP + 2
        draw.text((center, text_top), word, INK, FONT, anchor="ma")
        if word_labels:
            text_top += line_height(FONT)
            draw.text((center, text_top), word_labels[number], GRAY, SMALL_FONT, anchor="ma")
    return block


def _draw_matches(block: Image.Image, matches: Sequence[Match], frames: Sequence[drawing.Frame], rows: int) -> None:
    """Draw lines between the images, which are in `frames` of the block; an attention map has `rows` rows.

    Lines that start in one row of the map would cover each other, so they are bent, by less than a row.
    """
    width = max(frame.corner[0] + frame.size[0] for frame in frames) + GAP  # the rest of the block has no lines
    lines = Image.new("RGBA", (width * _SUPERSAMPLING, PICTURE[1] * _SUPERSAMPLING))
    draw = ImageDraw.Draw(lines)
    progress = np.linspace(0, 1, _LINE_POINTS)[:, None]
    for match in sorted(matches, key=lambda match: match.weight):
        start, end = (
            np.array([frame.corner[axis] + position[axis] * frame.size[axis] for axis in (0, 1)])
            for position, frame in zip((match.start, match.end), frames)
        )
        bend = (match.start[0] - 0.5) * frames[0].size[1] / rows
        path = (start + progress * (end - start) + np.sin(np.pi * progress) * (0, bend)) * _SUPERSAMPLING
        color: drawing.Color = _COMMON_SHIFT_COLOR if match.is_common else _OTHER_SHIFT_COLOR
        points = [tuple(point) for point in path.tolist()]
        opacity = round(255 * match.weight / matches[0].weight)
        draw.line(points, (*color, opacity), round(_LINE_WIDTH * _SUPERSAMPLING))
        radius = _DOT_RADIUS * _SUPERSAMPLING
        for x, y in (path[0], path[-1]):
            draw.ellipse([x - radius, y - radius, x + radius, y + radius], color, "white", _SUPERSAMPLING // 2)
    lines = lines.resize((width, PICTURE[1]), Image.Resampling.LANCZOS)
    block.paste(lines, (0, 0), lines)


def _draw_legend(has_alignment: bool) -> Image.Image:
    height = line_height(SMALL_FONT)
    legend = Image.new("RGB", (WIDTH, 3 * height + MARGIN), "white")
    draw = ImageDraw.Draw(legend)
    strengths = np.tile(np.linspace(0, 1, 120), (10, 1))
    bar = Image.fromarray(colormap(strengths).astype(np.uint8))
    legend.paste(bar, (MARGIN, 3))
    text = "attention of each word, low to high, in the images before (above) and after (below); no colour: uniform or less"
    draw.text((MARGIN + bar.width + GAP, 0), text, GRAY, SMALL_FONT)
    if has_alignment:
        x = MARGIN
        meanings = {
            _COMMON_SHIFT_COLOR: "matched position after the change, shifted like most",
            _OTHER_SHIFT_COLOR: "shifted differently",
        }
        for color, meaning in meanings.items():
            middle = height + height // 2
            draw.line([(x, middle), (x + 24, middle)], color, 2)
            draw.text((x + 32, height), meaning, GRAY, SMALL_FONT)
            x += 32 + round(SMALL_FONT.getlength(meaning)) + 3 * GAP
    return legend


def confidence_lines(caption: Caption) -> list[str]:
    """Return the probability of a change if the method predicts one, and the sentence's log-probability.

    The log-probability does not measure confidence: a correct caption has a low one if it has many words or many synonyms.
    """
    lines = []
    if caption.nothing_changed is not None:  # a probability
        lines.append(f"probability that something changed: {percent(1 - caption.nothing_changed)}")
    log_probability = f"{caption.log_probability:.3f} (sum over its words; not a confidence)"
    return [*lines, f"log-probability of the sentence: {log_probability}"]


def percent(probability: float) -> str:
    """Format a probability: "97 %", "0.3 %"."""
    value = 100 * min(1.0, probability)
    if value < 0.1:
        return "< 0.1 %"
    return f"{value:.0f} %" if value >= 10 else f"{value:.1f} %"
