"""`pairs.png`: a sheet of pairs, before and after side by side, with the caption of each system."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from PIL import Image, ImageDraw

from diffcap.evaluation.protocols import TYPE_ORDER
from diffcap.evaluation.slots import ATTRIBUTES, parse_caption
from diffcap.records import NO_CHANGE_GROUPS, ChangePair
from diffcap.report.drawing import (
    GAP,
    GRAY,
    INK,
    MARGIN,
    PICTURE,
    RIGHT,
    RULE,
    WIDTH,
    WRONG,
    Color,
    Font,
    fonts,
    line_height,
    wrap,
)
from diffcap.report.masks import Masks, pair_pictures

Captions = Mapping[str, Mapping[str, str]]

_RIGHT_NOTE = "right: the type of change and the words for the changed object (in the box); its position is not checked"
_MASK_NOTE = "outline: the mask of the change"

TEXT_X = MARGIN + 2 * PICTURE[0] + GAP + 2 * GAP  # x coordinate of the text beside a pair


def choose_pairs(pairs: Sequence[ChangePair], count: int, seed: int = 0) -> list[ChangePair]:
    """Sample pairs equally from the change types and the distractors; without types, uniformly.

    Returns:
        `count` pairs, or all if there are fewer; change types in the papers' order, distractors last.
    """
    random = Random(seed)
    groups: dict[str, list[ChangePair]] = {}
    for pair in pairs:
        groups.setdefault(pair.group if pair.is_distractor else pair.change_type or "", []).append(pair)
    order = [*TYPE_ORDER, *sorted(set(groups) - {*TYPE_ORDER, *NO_CHANGE_GROUPS}), *NO_CHANGE_GROUPS]
    kinds = [kind for kind in order if kind in groups]
    for kind in kinds:
        random.shuffle(groups[kind])
    chosen: dict[str, list[ChangePair]] = {kind: [] for kind in kinds}
    waiting, turn = list(kinds), 0
    while waiting and sum(map(len, chosen.values())) < count:
        kind = waiting[turn % len(waiting)]
        chosen[kind].append(groups[kind].pop())
        if groups[kind]:
            turn += 1
        else:
            waiting.remove(kind)
    return [pair for kind in kinds for pair in chosen[kind]]


def is_correct(caption: str, pair: ChangePair) -> bool | None:
    """Whether a caption has the correct type of change, no wrong attribute of the object, and the correct new value.

    Slot accuracy also requires all four attributes; here some may be left out, as in the references.

    Returns:
        None if the dataset does not have the attributes of its changed objects.
    """
    parsed = parse_caption(caption)
    if pair.is_distractor:
        return parsed.change_type == "none"
    truth = pair.extra.get("changed")
    if truth is None:
        return None
    named_attributes = {name: value for name in ATTRIBUTES if (value := getattr(parsed, name)) is not None}
    same_object = "shape" in named_attributes and all(truth[name] == value for name, value in named_attributes.items())
    return parsed.change_type == pair.change_type and same_object and parsed.to == truth.get("to")


@dataclass(frozen=True)
class TextLine:
    """A line of the text beside a pair."""

    text: str
    color: Color
    font: Font
    space: int = 0  # pixels above it


def caption_lines(pair: ChangePair, captions: Captions, has_object_labels: bool) -> list[TextLine]:
    """The text beside a pair: change type, reference, and the caption of each system."""
    font, small = fonts()
    kind = f"{pair.group.replace('_', ' ')}: nothing changed" if pair.is_distractor else pair.change_type
    lines = [TextLine(kind, GRAY, small)] if kind else []
    rows: list[tuple[str, str, bool | None]] = []
    if pair.captions:
        rows.append(("reference", pair.captions[0], None))
    for name, of_system in captions.items():
        text = of_system[pair.id]
        rows.append((name, text, is_correct(text, pair) if has_object_labels else None))
    for name, text, right in rows:
        color = INK if right is None else RIGHT if right else WRONG
        mark = "" if right is None else ": right" if right else ": wrong"
        lines.append(TextLine(f"{name}{mark}", GRAY if right is None else color, small, space=7))
        lines += [TextLine(part, color, font) for part in wrap(text, font, WIDTH - MARGIN - TEXT_X)]
    return lines


def draw_block(
    images: Sequence[Image.Image], texts: Sequence[TextLine], below: int = 0
) -> tuple[Image.Image, list[tuple[tuple[int, int], tuple[int, int]]]]:
    """Draw a pair and its text side by side.

    Args:
        images: before and after, fitted into `PICTURE`. below: height of the room below them.

    Returns:
        The drawing, and the corner and the size of both images on it.
    """
    height = max(PICTURE[1], sum(line.space + line_height(line.font) for line in texts))
    block = Image.new("RGB", (WIDTH, height + below), "white")
    frames = []
    for number, image in enumerate(images):
        corner = MARGIN + number * (PICTURE[0] + GAP) + (PICTURE[0] - image.width) // 2, 0
        block.paste(image, corner)
        frames.append((corner, image.size))
    draw, y = ImageDraw.Draw(block), 0
    for line in texts:
        y += line.space
        draw.text((TEXT_X, y), line.text, line.color, line.font)
        y += line_height(line.font)
    return block, frames


def draw_sheet(blocks: Sequence[Image.Image], footer: Image.Image | None = None) -> Image.Image:
    """Put the blocks of pairs below each other, with headings above the images."""
    _, small = fonts()
    top = y = MARGIN + line_height(small) + GAP
    height = top + sum(block.height + 2 * GAP for block in blocks)
    sheet = Image.new("RGB", (WIDTH, height + (footer.height if footer else 0)), "white")
    draw = ImageDraw.Draw(sheet)
    for x, title in ((MARGIN, "before"), (MARGIN + PICTURE[0] + GAP, "after")):
        draw.text((x, MARGIN), title, GRAY, small)
    for block in blocks:
        if y > top:
            draw.line([(MARGIN, y - GAP), (WIDTH - MARGIN, y - GAP)], RULE)
        sheet.paste(block, (0, y))
        y += block.height + 2 * GAP
    if footer:
        sheet.paste(footer, (0, y))
    return sheet


def draw_pairs(pairs: Sequence[ChangePair], root: Path, captions: Captions, masks: Masks | None = None) -> Image.Image:
    """Draw the sheet.

    Args:
        pairs: a block each. root: folder that their image paths are relative to.
        captions: system -> id -> caption; green if correct, red if wrong, black if unknown.
        masks: of the dataset in `root`; collects what is wrong with them.
    """
    has_object_labels = any("changed" in pair.extra for pair in pairs)
    masks = masks or Masks(root)
    blocks = [
        draw_block(pair_pictures(pair, masks), caption_lines(pair, captions, has_object_labels))[0] for pair in pairs
    ]
    notes = [_RIGHT_NOTE] if has_object_labels else []
    notes += [_MASK_NOTE] if any("mask" in pair.extra for pair in pairs) else []
    if not notes:
        return draw_sheet(blocks)
    _, small = fonts()
    footer = Image.new("RGB", (WIDTH, len(notes) * line_height(small) + GAP), "white")
    for number, note in enumerate(notes):
        ImageDraw.Draw(footer).text((MARGIN, number * line_height(small)), note, GRAY, small)
    return draw_sheet(blocks, footer)
