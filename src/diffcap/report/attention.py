"""`attention.png`: attention maps of each word, and the positions that the captioner matched between the two images."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw

from diffcap.checkpoints.combining import as_ensemble, load_members
from diffcap.checkpoints.loading import Checkpoint, MissingBaseModel
from diffcap.features.store import FeatureStore
from diffcap.models.captioner import Captioner
from diffcap.records import ChangePair
from diffcap.report.drawing import (
    GAP,
    GRAY,
    INK,
    LINE,
    MARGIN,
    PICTURE,
    SUPERSAMPLING,
    WIDTH,
    Color,
    fonts,
    line_height,
    picture,
)
from diffcap.report.masks import Masks, pair_pictures
from diffcap.report.overlay import Array, blend, colormap, scale_attention
from diffcap.report.pictures import caption_lines, draw_lines, lines_height
from diffcap.word_attention import AttentionMaps, attention_of

COLUMNS = 7  # words in a row
TILE = ((WIDTH - 2 * MARGIN - (COLUMNS - 1) * GAP) // COLUMNS, 88)
_TILE_GAP = 2  # pixels between the two images of a word
_COMMON_SHIFT, _OTHER_SHIFT = (0, 160, 230), (240, 120, 0)
_MAX_MATCHES = 24
_PAIRS_PER_READ = 16


@dataclass(frozen=True)
class PairAttention(AttentionMaps):
    """Attention maps for the caption that a run wrote for a pair."""

    pair: ChangePair
    caption: str


def iter_attention(
    paths: Sequence[Path], folder: Path, pairs: Sequence[ChangePair], captions: Mapping[str, str]
) -> Iterator[PairAttention] | str:
    """Attention maps of a checkpoint, or of an ensemble, for the captions of pairs, one pair at a time.

    Args:
        paths: the checkpoints; several are an ensemble. folder: the dataset's, with its features. captions: id -> caption.

    Returns:
        The maps in the order of `pairs`, or a sentence why there are none.

    Raises:
        DiffcapError: the checkpoint or the features are damaged or do not fit, or an image is not in the feature store.
    """
    if not paths:
        return (
            "it has no checkpoint: a file with captions, or a vision-language model without training, whose maps `diffcap caption "
            "--heatmap` draws."
        )
    for path in paths:
        if not path.exists():
            return f"{path} is not there (any more)."
    try:
        members = load_members(paths)
    except MissingBaseModel as error:
        return str(error)
    for member in members:
        if type(member.captioner).attention is Captioner.attention:
            return f"{member.metadata['method']} has no attention maps."
    if len({tuple(member.features["shape"][1:]) for member in members}) > 1:
        return "the members of the ensemble have attention maps of different sizes."
    stores = [FeatureStore.open(folder / "features" / member.features["name"], member.features) for member in members]
    checkpoint = members[0] if len(members) == 1 else as_ensemble(members)
    return _iter_maps(checkpoint, stores, pairs, captions)


def list_attention(
    paths: Sequence[Path], folder: Path, pairs: Sequence[ChangePair], captions: Mapping[str, str]
) -> list[PairAttention] | str:
    """`iter_attention` as a list."""
    maps = iter_attention(paths, folder, pairs, captions)
    return maps if isinstance(maps, str) else list(maps)


def _iter_maps(
    checkpoint: Checkpoint, stores: Sequence[FeatureStore], pairs: Sequence[ChangePair], captions: Mapping[str, str]
) -> Iterator[PairAttention]:
    for start in range(0, len(pairs), _PAIRS_PER_READ):
        chunk = pairs[start : start + _PAIRS_PER_READ]
        images = [image for pair in chunk for image in pair.images]  # before, after, before, ...
        features = [torch.from_numpy(store.read(store.rows(images))).float().split(1) for store in stores]
        for number, pair in enumerate(chunk):
            before: Any = [maps[2 * number] for maps in features]
            after: Any = [maps[2 * number + 1] for maps in features]
            if len(stores) == 1:
                before, after = before[0], after[0]
            caption = captions[pair.id]
            words = caption.split(" ") if caption else []  # the vocabulary's own words; tokenisation could split them
            tokens = checkpoint.vocabulary.encode(words, checkpoint.max_length)
            maps = attention_of(checkpoint.captioner, checkpoint.vocabulary, before, after, tokens)
            yield PairAttention(maps.words, maps.before, maps.after, maps.alignment, pair, caption)


class Match(NamedTuple):
    """A position in the before image and the position in the after image that it is aligned with.

    Attributes:
        start, end: (x, y) as fractions of the image's size. weight: alignment weight.
        is_common: whether its shift equals the median shift of the pair's matches, up to one cell.
    """

    start: tuple[float, float]
    end: tuple[float, float]
    weight: float
    is_common: bool


def matches(alignment: Array, grid: tuple[int, int], count: int = _MAX_MATCHES) -> list[Match]:
    """The strongest correspondences of an alignment.

    Args:
        alignment: (h w, h w), rows are positions of the before image. grid: (h, w). count: most matches to return.

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
    cells = np.stack([np.arange(len(weights)) % grid[1], np.arange(len(weights)) // grid[1]], 1)  # (N, 2), x and y
    shifts = cells[ends[strongest]] - cells[strongest]
    is_common = (np.abs(shifts - np.median(shifts, axis=0)) <= 1).all(1)

    def center(cell: int) -> tuple[float, float]:
        x, y = cells[cell]
        return float((x + 0.5) / grid[1]), float((y + 0.5) / grid[0])

    return [
        Match(center(start), center(int(ends[start])), float(weights[start]), bool(common))
        for start, common in zip(strongest, is_common)
    ]


def draw_attention(maps: Mapping[str, Sequence[PairAttention]], root: Path, masks: Masks | None = None) -> Image.Image:
    """Draw the sheet: for each run and pair both images with lines between matched positions, and a tile for each word.

    Args:
        maps: run -> attention maps of each pair.
        root: folder that the image paths are relative to. masks: of that dataset, see `draw_pairs`.

    Raises:
        DiffcapError: an image is missing or broken.
    """
    masks = masks or Masks(root)
    every = [(name, one) for name, of_run in maps.items() for one in of_run]
    has_object_labels = any("changed" in one.pair.extra for _, one in every)
    parts = [_draw_pair(name, one, masks, has_object_labels) for name, one in every]
    legend = draw_legend(any(one.alignment is not None for _, one in every))
    _, small = fonts()
    y = MARGIN + line_height(small) + GAP
    sheet = Image.new("RGB", (WIDTH, y + sum(part.height for part in parts) + legend.height), "white")
    for x, title in ((MARGIN, "before"), (MARGIN + PICTURE[0] + GAP, "after")):
        ImageDraw.Draw(sheet).text((x, MARGIN), title, GRAY, small)
    for part in parts:
        sheet.paste(part, (0, y))
        y += part.height
        ImageDraw.Draw(sheet).line([(MARGIN, y - 2 * GAP), (WIDTH - MARGIN, y - 2 * GAP)], LINE)
    sheet.paste(legend, (0, y))
    return sheet


def _draw_pair(run: str, maps: PairAttention, masks: Masks, has_object_labels: bool) -> Image.Image:
    pair = maps.pair
    lines = caption_lines(pair, {run: {pair.id: maps.caption}}, has_object_labels)
    top = max(PICTURE[1], lines_height(lines)) + 2 * GAP
    block = Image.new("RGB", (WIDTH, top + rows_height(len(maps.words)) + 3 * GAP), "white")
    frames = []
    for number, image in enumerate(pair_pictures(pair, masks)):
        corner = MARGIN + number * (PICTURE[0] + GAP) + (PICTURE[0] - image.width) // 2, 0
        block.paste(image, corner)
        frames.append((corner, image.size))
    if maps.alignment is not None:
        grid = maps.before.shape[1], maps.before.shape[2]
        draw_matches(block, matches(maps.alignment, grid), frames, grid[0])
    draw = ImageDraw.Draw(block)
    draw_lines(draw, lines, 0)
    tiles = [picture(masks.root, path, frame=TILE, values=pair.ranges.get(path)) for path in pair.images]
    draw_words(block, tiles, maps.words, maps.before, maps.after, top)
    return block


def rows_height(words: int, notes: bool = False) -> int:
    """Height in pixels of the tiles of a number of words."""
    font, small = fonts()
    return -(-words // COLUMNS) * (2 * TILE[1] + _TILE_GAP + line_height(font) + notes * line_height(small) + GAP)


def draw_words(
    sheet: Image.Image,
    images: Sequence[Image.Image],
    words: Sequence[str],
    before: Array,
    after: Array,
    top: int,
    notes: Sequence[str] | None = None,
) -> None:
    """Draw a tile for each word from `top` on: both images with the word's attention maps, and the word below.

    Args:
        images: before and after, fitted into `TILE`. before, after: (T, h, w). notes: a few characters below each word.
    """
    font, small = fonts()
    draw = ImageDraw.Draw(sheet)
    row = rows_height(1, notes is not None)
    for number, word in enumerate(words):
        x = MARGIN + number % COLUMNS * (TILE[0] + GAP)
        y = top + number // COLUMNS * row
        for row_in_tile, (image, strengths) in enumerate(zip(images, scale_attention(before[number], after[number]))):
            left = x + (TILE[0] - image.width) // 2
            sheet.paste(blend(image, strengths), (left, y + row_in_tile * (TILE[1] + _TILE_GAP)))
        below = y + 2 * TILE[1] + _TILE_GAP + 2
        draw.text((x + TILE[0] // 2, below), word, INK, font, anchor="ma")
        if notes is not None:
            draw.text((x + TILE[0] // 2, below + line_height(font)), notes[number], GRAY, small, anchor="ma")


def draw_matches(
    block: Image.Image,
    found: Sequence[Match],
    frames: Sequence[tuple[tuple[int, int], tuple[int, int]]],
    rows: int,
) -> None:
    """Draw lines from the before image to the after image.

    Lines that start in one row of the map would cover each other, so they are bent, by less than a row.

    Args:
        frames: corner and size of both images on the block. rows: of the map.
    """
    width = max(corner[0] + size[0] for corner, size in frames) + GAP  # the rest of the block has no lines
    lines = Image.new("RGBA", (width * SUPERSAMPLING, PICTURE[1] * SUPERSAMPLING))
    draw = ImageDraw.Draw(lines)
    progress = np.linspace(0, 1, 33)[:, None]
    for match in sorted(found, key=lambda match: match.weight):
        start, end = (
            np.array([corner[0] + position[0] * size[0], corner[1] + position[1] * size[1]])
            for position, (corner, size) in zip((match.start, match.end), frames)
        )
        bend = (match.start[0] - 0.5) * frames[0][1][1] / rows
        path = (start + progress * (end - start) + np.sin(np.pi * progress) * (0, bend)) * SUPERSAMPLING
        color: Color = _COMMON_SHIFT if match.is_common else _OTHER_SHIFT
        draw.line([(x, y) for x, y in path.tolist()], (*color, round(255 * match.weight / found[0].weight)), 6)
        for x, y in (path[0], path[-1]):
            size = 3.5 * SUPERSAMPLING
            draw.ellipse([x - size, y - size, x + size, y + size], color, "white", SUPERSAMPLING // 2)
    lines = lines.resize((width, PICTURE[1]), Image.Resampling.LANCZOS)
    block.paste(lines, (0, 0), lines)


def draw_legend(has_alignment: bool) -> Image.Image:
    """Explain the colours."""
    _, small = fonts()
    line = line_height(small)
    legend = Image.new("RGB", (WIDTH, 3 * line + MARGIN), "white")
    draw = ImageDraw.Draw(legend)
    bar = Image.fromarray(colormap(np.tile(np.linspace(0, 1, 120), (10, 1))).astype(np.uint8))
    legend.paste(bar, (MARGIN, 3))
    text = (
        "attention of each word to the images before (above) and after (below), low to high; no colour: at most uniform"
    )
    draw.text((MARGIN + 128, 0), text, GRAY, small)
    if has_alignment:
        x = MARGIN
        for color, meaning in (
            (_COMMON_SHIFT, "matched position after the change, shifted like most"),
            (_OTHER_SHIFT, "shifted differently"),
        ):
            draw.line([(x, line + line // 2), (x + 24, line + line // 2)], color, 2)
            draw.text((x + 32, line), meaning, GRAY, small)
            x += 32 + round(small.getlength(meaning)) + 3 * GAP
    return legend
