"""`attention.png`: where a captioner looked as it wrote each word, and which places of the two images it took for the same."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw

from diffcap.captioner import AttentionMaps, attention_of
from diffcap.checkpoints.combining import load_together, together
from diffcap.checkpoints.loading import Checkpoint
from diffcap.features.store import FeatureStore
from diffcap.models.captioner import Captioner
from diffcap.records import ChangePair
from diffcap.report.drawing import GAP, GRAY, INK, LINE, MARGIN, PICTURE, WIDTH, Color, fonts, line_height, picture
from diffcap.report.overlay import Array, blend, colormap, scale_attention
from diffcap.report.pictures import caption_lines, draw_lines, lines_height

COLUMNS = 7  # words in a row
TILE = ((WIDTH - 2 * MARGIN - (COLUMNS - 1) * GAP) // COLUMNS, 88)
_SEAM = 2  # pixels between a word's two images
_ALIKE, _OTHER = (0, 160, 230), (240, 120, 0)
_MOST_LINES = 24
_FINE = 4  # lines are drawn so many times larger and shrunk, for smooth edges


@dataclass(frozen=True)
class PairAttention(AttentionMaps):
    """Where a captioner looked as it wrote what a run said of a pair."""

    pair: ChangePair
    caption: str


def look(checkpoint: Checkpoint, stores: Sequence[FeatureStore], pair: ChangePair, caption: str) -> PairAttention:
    """Ask a captioner where it looked for each word of a caption.

    Args:
        stores: of its features; of an ensemble one for each member.

    Raises:
        NotImplementedError: its method has no such maps.
        DiffcapError: an image is not in the store.
    """
    vocabulary = checkpoint.vocabulary
    words = caption.split(" ") if caption else []  # the model's own, not cut as a sentence would be
    tokens = vocabulary.encode(words, checkpoint.max_length)
    read = [torch.from_numpy(store.read(store.rows(pair.images))).float().split(1) for store in stores]
    before: Any
    after: Any
    before, after = read[0] if len(read) == 1 else zip(*read)
    one = attention_of(checkpoint.captioner, vocabulary, before, after, tokens)
    return PairAttention(one.words, one.before, one.after, one.alignment, pair, caption)


def iter_attention(
    paths: Sequence[Path], folder: Path, pairs: Sequence[ChangePair], captions: Mapping[str, str]
) -> Iterator[PairAttention] | str:
    """Looks of a run's checkpoint, or of an ensemble's, at pairs, one at a time; or, where nothing is to see, a sentence why.

    Args:
        paths: the checkpoints, read once. folder: the dataset's, with its features. captions: what the run said, by id.

    Raises:
        DiffcapError: the checkpoint or the features are damaged or do not fit.
    """
    for path in paths:
        if not path.exists():
            return f"{path} is not there (any more)."
    members = load_together(paths)
    for member in members:
        if type(member.captioner).attention is Captioner.attention:
            return f"{member.facts['method']} has no attention maps."
    if len({tuple(member.features["shape"][1:]) for member in members}) > 1:
        return "the members of the ensemble look at grids of different sizes."
    stores = [FeatureStore.open(folder / "features" / one.features["name"], one.features) for one in members]
    checkpoint = members[0] if len(members) == 1 else together(members)
    return (look(checkpoint, stores, pair, captions[pair.id]) for pair in pairs)


def list_attention(
    paths: Sequence[Path], folder: Path, pairs: Sequence[ChangePair], captions: Mapping[str, str]
) -> list[PairAttention] | str:
    """`iter_attention`, all at once."""
    found = iter_attention(paths, folder, pairs, captions)
    return found if isinstance(found, str) else list(found)


class Match(NamedTuple):
    """A place before, (x, y) in parts of the image's size, the place it looks at after, and how much of its look goes there.

    `alike`: it moved as most did, by a place more or less.
    """

    start: tuple[float, float]
    end: tuple[float, float]
    weight: float
    alike: bool


def matches(alignment: Array, grid: tuple[int, int], most: int = _MOST_LINES) -> list[Match]:
    """Read correspondences off an alignment.

    Args:
        alignment: (h w, h w), rows are places before. grid: (h, w).
        most: how many matches to keep, the surest.

    Returns:
        A match for each place whose highest weight is at least half the pair's highest and twice an even look,
        surest first; none where all is even.
    """
    weights, ends = alignment.max(1), alignment.argmax(1)
    sure = [int(start) for start in np.argsort(-weights, kind="stable")[:most]]
    sure = [start for start in sure if weights[start] >= max(weights.max() / 2, 2 / len(weights))]
    if not sure:
        return []
    places = np.stack([np.arange(len(weights)) % grid[1], np.arange(len(weights)) // grid[1]], 1)  # (N, 2), x and y
    shifts = places[ends[sure]] - places[sure]
    alike = (np.abs(shifts - np.median(shifts, axis=0)) <= 1).all(1)

    def at(place: int) -> tuple[float, float]:
        x, y = places[place]
        return float((x + 0.5) / grid[1]), float((y + 0.5) / grid[0])

    return [
        Match(at(start), at(int(ends[start])), float(weights[start]), bool(same)) for start, same in zip(sure, alike)
    ]


def draw_attention(looks: Mapping[str, Sequence[PairAttention]], root: Path) -> Image.Image:
    """Draw the sheet: for each run and pair the two images, lines between the places that it aligned, and a tile a word.

    Args:
        looks: run -> a look for each pair.
        root: folder that the image paths are relative to.

    Raises:
        DiffcapError: an image is missing or broken.
    """
    knows_objects = any("changed" in one.pair.extra for of in looks.values() for one in of)
    parts = [_block(name, one, root, knows_objects) for name, of in looks.items() for one in of]
    legend = draw_legend(any(one.alignment is not None for of in looks.values() for one in of))
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


def _block(name: str, one: PairAttention, root: Path, knows_objects: bool) -> Image.Image:
    lines = caption_lines(one.pair, {name: {one.pair.id: one.caption}}, knows_objects)
    top = max(PICTURE[1], lines_height(lines)) + 2 * GAP
    block = Image.new("RGB", (WIDTH, top + rows_height(len(one.words)) + 3 * GAP), "white")
    boxes = one.pair.extra.get("boxes") or {}
    corners = []
    for number, side in enumerate(("before", "after")):
        image = picture(root, getattr(one.pair, side), boxes.get(side))
        corner = MARGIN + number * (PICTURE[0] + GAP) + (PICTURE[0] - image.width) // 2, 0
        block.paste(image, corner)
        corners.append((corner, image.size))
    if one.alignment is not None:
        grid = one.before.shape[1], one.before.shape[2]
        draw_matches(block, matches(one.alignment, grid), corners, grid[0])
    draw = ImageDraw.Draw(block)
    draw_lines(draw, lines, 0)
    small = [picture(root, getattr(one.pair, side), frame=TILE) for side in ("before", "after")]
    draw_words(block, small, one.words, one.before, one.after, top)
    return block


def rows_height(words: int, notes: bool = False) -> int:
    """Pixels that the tiles of so many words take."""
    font, small = fonts()
    return -(-words // COLUMNS) * (2 * TILE[1] + _SEAM + line_height(font) + notes * line_height(small) + GAP)


def draw_words(
    sheet: Image.Image,
    images: Sequence[Image.Image],
    words: Sequence[str],
    before: Array,
    after: Array,
    top: int,
    notes: Sequence[str] | None = None,
) -> None:
    """A tile for each word from `top` on: both images, with where the word looked, and the word below.

    Args:
        images: before and after, fitted into `TILE`. before, after: (T, h, w). notes: a few characters below each word.
    """
    font, small = fonts()
    draw = ImageDraw.Draw(sheet)
    row = rows_height(1, notes is not None)
    for number, word in enumerate(words):
        x = MARGIN + number % COLUMNS * (TILE[0] + GAP)
        y = top + number // COLUMNS * row
        for place, (image, strengths) in enumerate(zip(images, scale_attention(before[number], after[number]))):
            left = x + (TILE[0] - image.width) // 2
            sheet.paste(blend(image, strengths), (left, y + place * (TILE[1] + _SEAM)))
        below = y + 2 * TILE[1] + _SEAM + 2
        draw.text((x + TILE[0] // 2, below), word, INK, font, anchor="ma")
        if notes is not None:
            draw.text((x + TILE[0] // 2, below + line_height(font)), notes[number], GRAY, small, anchor="ma")


def draw_matches(
    block: Image.Image,
    found: Sequence[Match],
    corners: Sequence[tuple[tuple[int, int], tuple[int, int]]],
    rows: int,
) -> None:
    """Lines from the before image to the after image, each given as its corner and size on the block.

    Lines of one row of the map would cover each other: they bend, by less than a row, the more the further out they begin.
    """
    width = (
        max(corner[0] + size[0] for corner, size in corners) + GAP
    )  # the images and half a dot's width; the rest is empty
    lines = Image.new("RGBA", (width * _FINE, PICTURE[1] * _FINE))
    draw = ImageDraw.Draw(lines)
    along = np.linspace(0, 1, 33)[:, None]
    for match in sorted(found, key=lambda match: match.weight):
        start, end = (
            np.array([corner[0] + at[0] * size[0], corner[1] + at[1] * size[1]])
            for at, (corner, size) in zip((match.start, match.end), corners)
        )
        bend = (match.start[0] - 0.5) * corners[0][1][1] / rows
        path = (start + along * (end - start) + np.sin(np.pi * along) * (0, bend)) * _FINE
        color: Color = _ALIKE if match.alike else _OTHER
        draw.line([(x, y) for x, y in path.tolist()], (*color, round(255 * match.weight / found[0].weight)), 6)
        for x, y in (path[0], path[-1]):
            size = 3.5 * _FINE
            draw.ellipse([x - size, y - size, x + size, y + size], color, "white", _FINE // 2)
    lines = lines.resize((width, PICTURE[1]), Image.Resampling.LANCZOS)
    block.paste(lines, (0, 0), lines)


def draw_legend(aligned: bool) -> Image.Image:
    """What the colours mean."""
    _, small = fonts()
    line = line_height(small)
    legend = Image.new("RGB", (WIDTH, 3 * line + MARGIN), "white")
    draw = ImageDraw.Draw(legend)
    bar = Image.fromarray(colormap(np.tile(np.linspace(0, 1, 120), (10, 1))).astype(np.uint8))
    legend.paste(bar, (MARGIN, 3))
    text = (
        "where each word looked, before (above) and after (below), little to most; no colour: no more than at any place"
    )
    draw.text((MARGIN + 128, 0), text, GRAY, small)
    if aligned:
        x = MARGIN
        for color, said in ((_ALIKE, "place seen again after, shifted as most are"), (_OTHER, "shifted otherwise")):
            draw.line([(x, line + line // 2), (x + 24, line + line // 2)], color, 2)
            draw.text((x + 32, line), said, GRAY, small)
            x += 32 + round(small.getlength(said)) + 3 * GAP
    return legend
