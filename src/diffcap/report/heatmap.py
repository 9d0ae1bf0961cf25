"""`--heatmap` of `diffcap caption`: both images, the caption, its probabilities, and the attention maps of each word."""

import math

from PIL import Image, ImageDraw

from diffcap.pair_captioner import Caption
from diffcap.report.attention import TILE, draw_legend, draw_matches, draw_words, matches, rows_height
from diffcap.report.drawing import GAP, GRAY, INK, MARGIN, PICTURE, WIDTH, fit, fonts, line_height, wrap
from diffcap.report.pictures import TEXT
from diffcap.word_attention import AttentionMaps


def draw_caption(
    before: Image.Image, after: Image.Image, caption: Caption, attention: AttentionMaps | None
) -> Image.Image:
    """Draw the sheet.

    Args:
        before, after: RGB, of any size.
        attention: attention maps of its words; None for a method without attention maps: the drawing has no maps.
    """
    font, small = fonts()
    lines = [(line, INK, font) for line in wrap(caption.text, font, WIDTH - TEXT - MARGIN)]
    confidence = confidence_lines(caption)
    if caption.alternatives:
        confidence += ["", "or (log-probability):"]
        confidence += [f"{one.log_probability:.3f}  {one.text}" for one in caption.alternatives]
    lines += [
        (line, GRAY, small)
        for text in confidence
        for line in (wrap(text, small, WIDTH - TEXT - MARGIN) if text else [""])
    ]
    start = MARGIN + line_height(small)
    top = start + max(PICTURE[1], sum(line_height(used) for _, _, used in lines)) + 2 * GAP
    legend = draw_legend(attention.alignment is not None) if attention is not None else None
    tiles = rows_height(len(attention.words), notes=True) + GAP if attention is not None else 0
    sheet = Image.new("RGB", (WIDTH, top + tiles + (legend.height if legend else 0)), "white")
    draw = ImageDraw.Draw(sheet)
    corners = []
    for number, (image, title) in enumerate(((before, "before"), (after, "after"))):
        shown = fit(image)
        x = MARGIN + number * (PICTURE[0] + GAP)
        draw.text((x, MARGIN - GAP), title, GRAY, small)
        corner = x + (PICTURE[0] - shown.width) // 2, 0
        sheet.paste(shown, (corner[0], start))
        corners.append((corner, shown.size))
    y = start
    for text, color, used in lines:
        draw.text((TEXT, y), text, color, used)
        y += line_height(used)
    if attention is not None and legend is not None:
        if attention.alignment is not None:
            band = sheet.crop((0, start, WIDTH, start + PICTURE[1]))
            draw_matches(
                band, matches(attention.alignment, attention.before.shape[1:]), corners, attention.before.shape[1]
            )
            sheet.paste(band, (0, start))
        probabilities = [percent(word.log_probability) for word in caption.words]
        draw_words(
            sheet,
            [fit(image, TILE) for image in (before, after)],
            attention.words,
            attention.before,
            attention.after,
            top,
            probabilities,
        )
        sheet.paste(legend, (0, top + tiles))
    return sheet


def confidence_lines(caption: Caption) -> list[str]:
    """How sure the captioner is: the probability of a change if the method predicts one, then the sentence's log-probability.

    The log-probability is no confidence: a correct caption of many words, or one that has synonyms, has a low one.
    """
    lines = []
    if caption.nothing_changed is not None:
        lines.append(f"probability that something changed: {percent(log_of(1 - caption.nothing_changed))}")
    return [
        *lines,
        f"log-probability of the sentence: {caption.log_probability:.3f} (sum over its words; not a confidence)",
    ]


def log_of(probability: float) -> float:
    """Natural logarithm of a probability, finite for 0."""
    return math.log(max(probability, 1e-30))


def percent(log_probability: float) -> str:
    """Format a probability, given as its logarithm: "97 %", "0.3 %"."""
    value = 100 * math.exp(min(0.0, log_probability))
    return f"{value:.0f} %" if value >= 10 else f"{value:.1f} %" if value >= 0.1 else "< 0.1 %"
