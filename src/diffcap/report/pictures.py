"""`pairs.png`: a sheet of pairs, before and after side by side, and what each system said of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from PIL import Image, ImageDraw, ImageFont

from diffcap.errors import DiffcapError
from diffcap.evaluation.protocols import TYPE_ORDER
from diffcap.evaluation.slots import ATTRIBUTES, parse_caption
from diffcap.records import ChangePair

Captions = Mapping[str, Mapping[str, str]]
Color = tuple[int, int, int]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

WIDTH, MARGIN, GAP = 900, 16, 8  # as wide as a README is shown
PICTURE = (256, 192)  # twice the size of the embedded dataset's images
_TEXT = MARGIN + 2 * PICTURE[0] + GAP + 2 * GAP  # where the words begin
_INK, _GRAY, _LINE = (30, 30, 30), (120, 120, 120), (225, 225, 225)
_RIGHT, _WRONG, _BOX = (20, 125, 55), (190, 40, 40), (255, 0, 200)


def choose_pairs(pairs: Sequence[ChangePair], count: int, seed: int = 0) -> list[ChangePair]:
    """Draw pairs so that every change type, and distractors, come in turn; without types, simply by chance.

    Returns:
        `count` pairs, or all if there are fewer; change types in the papers' order, distractors last.
    """
    random = Random(seed)
    groups: dict[str, list[ChangePair]] = {}
    for pair in pairs:
        groups.setdefault("distractor" if pair.is_distractor else pair.change_type or "", []).append(pair)
    order = [*TYPE_ORDER, *sorted(set(groups) - {*TYPE_ORDER, "distractor"}), "distractor"]
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


def is_right(caption: str, pair: ChangePair) -> bool | None:
    """Whether a caption tells the type of change, names the object with nothing false, and says the right new value.

    Milder than slot accuracy, which wants all four attributes said: references, too, leave some out.

    Returns:
        None where the dataset does not know its changed objects.
    """
    said = parse_caption(caption)
    if pair.is_distractor:
        return said.change_type == "none"
    truth = pair.extra.get("changed")
    if truth is None:
        return None
    told = {name: value for name in ATTRIBUTES if (value := getattr(said, name)) is not None}
    same_object = "shape" in told and all(truth[name] == value for name, value in told.items())
    return said.change_type == pair.change_type and same_object and said.to == truth.get("to")


@dataclass(frozen=True)
class _Line:
    text: str
    color: Color
    font: Font
    space: int = 0  # pixels above it


def _fonts() -> tuple[Font, Font]:
    return ImageFont.load_default(15), ImageFont.load_default(12)


def _wrap(text: str, font: Font, width: int) -> list[str]:
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines or ["(nothing)"]


def _words(pair: ChangePair, captions: Captions, knows_objects: bool) -> list[_Line]:
    """What stands beside a pair, line by line."""
    font, small = _fonts()
    width = WIDTH - MARGIN - _TEXT
    kind = "distractor: nothing changed" if pair.is_distractor else pair.change_type
    lines = [_Line(kind, _GRAY, small)] if kind else []
    said = [("reference", pair.captions[0], None)] if pair.captions else []
    told = {name: of[pair.id] for name, of in captions.items()}
    for name, text, right in [
        *said,
        *((name, text, is_right(text, pair) if knows_objects else None) for name, text in told.items()),
    ]:
        color = _INK if right is None else _RIGHT if right else _WRONG
        mark = "" if right is None else ": right" if right else ": wrong"
        lines.append(_Line(f"{name}{mark}", _GRAY if right is None else color, small, space=7))
        lines += [_Line(part, color, font) for part in _wrap(text, font, width)]
    return lines


def _picture(root: Path, path: str, box: Sequence[float] | None) -> Image.Image:
    """An image in its frame, with the changed object's box."""
    try:
        with Image.open(root / path) as file:
            image = file.convert("RGB")
    except OSError as error:
        raise DiffcapError(
            f"{root / path}: cannot be read ({error}); fetch the image, or report with --pictures 0."
        ) from None
    scale = min(PICTURE[0] / image.width, PICTURE[1] / image.height)
    size = round(image.width * scale), round(image.height * scale)
    image = image.resize(size, Image.Resampling.BICUBIC)
    if box:
        corners = [round(value * scale) for value in box]
        ImageDraw.Draw(image).rectangle(
            [
                max(0, corners[0] - 2),
                max(0, corners[1] - 2),
                min(size[0] - 1, corners[2] + 1),
                min(size[1] - 1, corners[3] + 1),
            ],
            outline=_BOX,
        )
    return image


def _height(lines: Sequence[_Line]) -> int:
    return sum(line.space + _leading(line.font) for line in lines)


def _leading(font: Font) -> int:
    return round(1.3 * getattr(font, "size", 11))


def draw_pairs(pairs: Sequence[ChangePair], root: Path, captions: Captions) -> Image.Image:
    """Draw the sheet.

    Args:
        pairs: a row each.
        root: folder that their image paths are relative to.
        captions: system -> id -> caption; green where right, red where wrong, black where nobody can tell.

    Raises:
        DiffcapError: an image is missing or broken.
    """
    knows_objects = any("changed" in pair.extra for pair in pairs)
    _, small = _fonts()
    words = [_words(pair, captions, knows_objects) for pair in pairs]
    heights = [max(PICTURE[1], _height(lines)) for lines in words]
    top = MARGIN + _leading(small) + GAP
    row_gap = 2 * GAP
    foot = _leading(small) + GAP if knows_objects else 0
    sheet = Image.new("RGB", (WIDTH, top + sum(heights) + row_gap * len(pairs) + foot), "white")
    draw = ImageDraw.Draw(sheet)
    for x, title in ((MARGIN, "before"), (MARGIN + PICTURE[0] + GAP, "after")):
        draw.text((x, MARGIN), title, _GRAY, small)
    y = top
    for pair, lines, height in zip(pairs, words, heights):
        boxes = pair.extra.get("boxes") or {}
        for number, side in enumerate(("before", "after")):
            picture = _picture(root, getattr(pair, side), boxes.get(side))
            x = MARGIN + number * (PICTURE[0] + GAP)
            sheet.paste(picture, (x + (PICTURE[0] - picture.width) // 2, y))
        at = y
        for line in lines:
            at += line.space
            draw.text((_TEXT, at), line.text, line.color, line.font)
            at += _leading(line.font)
        y += height + row_gap
        if pair is not pairs[-1]:
            draw.line([(MARGIN, y - row_gap // 2), (WIDTH - MARGIN, y - row_gap // 2)], _LINE)
    if knows_objects:
        text = "right: the type of change and the words for the changed object (in the box); where it stands is not checked"
        draw.text((MARGIN, y), text, _GRAY, small)
    return sheet


def write_pairs(path: str | Path, sheet: Image.Image) -> None:
    """Write the sheet as PNG, whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    sheet.save(temporary, format="PNG", optimize=True)
    temporary.replace(path)
