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
    MARGIN,
    SMALL_FONT,
    WIDTH,
    Masks,
    TextLine,
    draw_sheet,
    fit,
    line_height,
    text_lines,
)

Array = npt.NDArray[np.floating[Any]]

# RGB at equal distances from strength 0 to 1; each colour is lighter than the one before, so that the order survives in gray.
COLORMAP = np.array([(60, 0, 90), (150, 20, 110), (225, 60, 60), (250, 140, 20), (255, 235, 90)], dtype=float)
MAX_OPACITY = 0.85
OPACITY_GAIN = 1.5  # opacity grows by this factor times the strength, up to `MAX_OPACITY`
_MIN_PEAK = 4  # a peak below this many times uniform attention is drawn as weak

COLUMNS = 7  # words in a row
TILE = ((WIDTH - 2 * MARGIN - (COLUMNS - 1) * GAP) // COLUMNS, 88)
_TILE_GAP = 2  # pixels between the two images of a word
_COMMON_SHIFT, _OTHER_SHIFT = (0, 160, 230), (240, 120, 0)
_MAX_MATCHES = 24
_SUPERSAMPLING = 4  # lines are drawn this many times larger and then shrunk, for smooth edges


class Match(NamedTuple):
    """A position in the before image and the position in the after image that it is aligned with."""

    start: tuple[float, float]  # (x, y) as fractions of the image's size
    end: tuple[float, float]
    weight: float  # of the alignment
    is_common: bool  # whether its shift equals the median shift of the pair's matches, up to one cell


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
    """Draw the overlay of a map (h, w) of strengths from 0 to 1 on an RGB image."""
    colors = overlay(image.size, strengths)
    alpha = colors[..., 3:] / 255
    pixels = (1 - alpha) * np.asarray(image, dtype=float) + alpha * colors[..., :3]
    return Image.fromarray(pixels.round().astype(np.uint8))


def matches(alignment: Array, grid: tuple[int, int], count: int = _MAX_MATCHES) -> list[Match]:
    """The strongest correspondences of an alignment (h w, h w), whose rows are positions of the before image.

    Returns:
        A match for each position whose highest weight is at least half the highest of the pair and twice a uniform weight,
        strongest first; empty for a uniform alignment.
    """
    weights, ends = alignment.max(1), alignment.argmax(1)
    threshold = max(weights.max() / 2, 2 / len(weights))
    strongest = [int(start) for start in np.argsort(-weights, kind="stable")[:count]]
    strongest = [start for start in strongest if weights[start] >= threshold]
    if not strongest:
        return []
    positions = np.arange(len(weights))
    cells = np.stack([positions % grid[1], positions // grid[1]], 1)  # (N, 2), x and y
    shifts = cells[ends[strongest]] - cells[strongest]
    is_common = (np.abs(shifts - np.median(shifts, axis=0)) <= 1).all(1)

    def center(cell: int) -> tuple[float, float]:
        x, y = cells[cell]
        return float((x + 0.5) / grid[1]), float((y + 0.5) / grid[0])

    return [
        Match(center(start), center(int(ends[start])), float(weights[start]), bool(common))
        for start, common in zip(strongest, is_common)
    ]


def draw_attention(
    maps: Mapping[str, Sequence[tuple[ChangePair, AttentionMaps]]],
    captions: drawing.Captions,
    masks: Masks,
) -> Image.Image:
    """Draw `attention.png`: the maps of each run and pair as in `draw_caption`; captions are by run and id."""
    entries = [(name, pair, of_pair) for name, of_run in maps.items() for pair, of_pair in of_run]
    has_object_labels = any("changed" in pair.extra for _, pair, _ in entries)
    blocks = []
    for name, pair, of_pair in entries:
        texts = drawing.caption_lines(pair, {name: captions[name][pair.id]}, has_object_labels)
        images = drawing.read_images(pair, masks.root)
        blocks.append(_draw_maps(images, drawing.with_region(pair, images, masks), texts, of_pair))
    return draw_sheet(blocks, _draw_legend(any(of_pair.alignment is not None for _, _, of_pair in entries)))


def draw_caption(
    before: Image.Image, after: Image.Image, caption: Caption, attention: AttentionMaps | None
) -> Image.Image:
    """Draw the sheet of a pair: both images with lines between matched positions, the caption, and a tile for each word."""
    texts = text_lines(caption.text)
    notes = confidence_lines(caption)
    if caption.alternatives:
        notes += ["", "or (log-probability):"]
        notes += [f"{one.log_probability:.3f}  {one.text}" for one in caption.alternatives]
    for note in notes:
        texts += text_lines(note, GRAY, SMALL_FONT) if note else [TextLine("", GRAY, SMALL_FONT)]
    images = [before, after]
    fitted = [fit(image) for image in images]
    if attention is None:
        return draw_sheet([drawing.draw_block(fitted, texts)[0]])
    probabilities = [percent(math.exp(word.log_probability)) for word in caption.words]
    block = _draw_maps(images, fitted, texts, attention, probabilities)
    return draw_sheet([block], _draw_legend(attention.alignment is not None))


def _draw_maps(
    images: Sequence[Image.Image],
    fitted: Sequence[Image.Image],
    texts: Sequence[TextLine],
    maps: AttentionMaps,
    notes: Sequence[str] = (),
) -> Image.Image:
    """Draw the fitted images with the matches and the text, and below them the images with the map of each word, and its note."""
    row_height = 2 * TILE[1] + _TILE_GAP + line_height(FONT) + bool(notes) * line_height(SMALL_FONT) + GAP
    tiles_height = -(-len(maps.words) // COLUMNS) * row_height
    block, frames = drawing.draw_block(fitted, texts, 2 * GAP + tiles_height)
    if maps.alignment is not None:
        grid = maps.before.shape[1], maps.before.shape[2]
        _draw_matches(block, matches(maps.alignment, grid), frames, grid[0])
    draw = ImageDraw.Draw(block)
    tiles = [fit(image, TILE) for image in images]
    for number, word in enumerate(maps.words):
        x = MARGIN + number % COLUMNS * (TILE[0] + GAP)
        center = x + TILE[0] // 2
        y = block.height - tiles_height + number // COLUMNS * row_height
        strengths = scale_attention(maps.before[number], maps.after[number])
        for side, (image, of_image) in enumerate(zip(tiles, strengths)):
            left = x + (TILE[0] - image.width) // 2
            block.paste(blend(image, of_image), (left, y + side * (TILE[1] + _TILE_GAP)))
        below = y + 2 * TILE[1] + _TILE_GAP + 2
        draw.text((center, below), word, drawing.INK, FONT, anchor="ma")
        if notes:
            below += line_height(FONT)
            draw.text((center, below), notes[number], GRAY, SMALL_FONT, anchor="ma")
    return block


def _draw_matches(
    block: Image.Image,
    found: Sequence[Match],
    frames: Sequence[tuple[tuple[int, int], tuple[int, int]]],
    rows: int,
) -> None:
    """Draw lines between the images, whose corners and sizes are `frames`; a map has `rows` rows.

    Lines that start in one row of the map would cover each other, so they are bent, by less than a row.
    """
    width = max(corner[0] + size[0] for corner, size in frames) + GAP  # the rest of the block has no lines
    lines = Image.new("RGBA", (width * _SUPERSAMPLING, drawing.PICTURE[1] * _SUPERSAMPLING))
    draw = ImageDraw.Draw(lines)
    progress = np.linspace(0, 1, 33)[:, None]
    for match in sorted(found, key=lambda match: match.weight):
        start, end = (
            np.array([corner[0] + position[0] * size[0], corner[1] + position[1] * size[1]])
            for position, (corner, size) in zip((match.start, match.end), frames)
        )
        bend = (match.start[0] - 0.5) * frames[0][1][1] / rows
        path = (start + progress * (end - start) + np.sin(np.pi * progress) * (0, bend)) * _SUPERSAMPLING
        color: drawing.Color = _COMMON_SHIFT if match.is_common else _OTHER_SHIFT
        points = [tuple(point) for point in path.tolist()]
        opacity = round(255 * match.weight / found[0].weight)
        draw.line(points, (*color, opacity), 6)
        for x, y in (path[0], path[-1]):
            size = 3.5 * _SUPERSAMPLING
            draw.ellipse([x - size, y - size, x + size, y + size], color, "white", _SUPERSAMPLING // 2)
    lines = lines.resize((width, drawing.PICTURE[1]), Image.Resampling.LANCZOS)
    block.paste(lines, (0, 0), lines)


def _draw_legend(has_alignment: bool) -> Image.Image:
    height = line_height(SMALL_FONT)
    legend = Image.new("RGB", (WIDTH, 3 * height + MARGIN), "white")
    draw = ImageDraw.Draw(legend)
    strengths = np.tile(np.linspace(0, 1, 120), (10, 1))
    bar = Image.fromarray(colormap(strengths).astype(np.uint8))
    legend.paste(bar, (MARGIN, 3))
    text = (
        "attention of each word to the images before (above) and after (below), low to high; no colour: at most uniform"
    )
    draw.text((MARGIN + 128, 0), text, GRAY, SMALL_FONT)
    if has_alignment:
        x = MARGIN
        meanings = {
            _COMMON_SHIFT: "matched position after the change, shifted like most",
            _OTHER_SHIFT: "shifted differently",
        }
        for color, meaning in meanings.items():
            middle = height + height // 2
            draw.line([(x, middle), (x + 24, middle)], color, 2)
            draw.text((x + 32, height), meaning, GRAY, SMALL_FONT)
            x += 32 + round(SMALL_FONT.getlength(meaning)) + 3 * GAP
    return legend


def confidence_lines(caption: Caption) -> list[str]:
    """How sure the captioner is: the probability of a change if the method predicts one, then the sentence's log-probability.

    The log-probability is no confidence: a correct caption of many words, or one that has synonyms, has a low one.
    """
    log_probability = (
        f"log-probability of the sentence: {caption.log_probability:.3f} (sum over its words; not a confidence)"
    )
    if caption.nothing_changed is None:
        return [log_probability]
    return [f"probability that something changed: {percent(1 - caption.nothing_changed)}", log_probability]


def percent(probability: float) -> str:
    """Format a probability: "97 %", "0.3 %"."""
    value = 100 * min(1.0, probability)
    return f"{value:.0f} %" if value >= 10 else f"{value:.1f} %" if value >= 0.1 else "< 0.1 %"
