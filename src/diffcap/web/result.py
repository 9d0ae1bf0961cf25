"""A caption as HTML: its words, what is known of it, both images with one attention overlay per word, and the other sentences.

Images are embedded as data URIs, so the server keeps nothing of a visitor's for a later request.
"""

import base64
import html
import io
import math
import re
from typing import NamedTuple

import numpy as np
from PIL import Image

from diffcap.evaluation.localisation import Mask
from diffcap.pair_captioner import Alternative, Caption
from diffcap.report.drawing import BOX
from diffcap.report.heatmaps import Array, colormap, log_of, overlay, percent, scale_attention
from diffcap.report.masks import colored_outline
from diffcap.word_attention import AttentionMaps

MAX_IMAGE_SIDE = 720  # pixels
MAX_OVERLAY_SIDE = 96  # pixels; overlays are smooth, so the browser can enlarge them

# Words of any sentence.
_STOPWORDS = re.compile("an?|the|is|are|was|were|be|been|has|have|had|there|its?|that|this|to|of|in|on|at|and|now|not?")


class Answer(NamedTuple):
    """What the page shows for a pair of RGB images."""

    before: Image.Image
    after: Image.Image
    caption: Caption
    attention: AttentionMaps | None  # None if the method has no attention maps
    captioner: str  # its label
    notes: tuple[str, ...] = ()  # sentences
    mask: Mask | None = None  # (H, W), of the change in an example; its outline is drawn over both images


def safe(text: str) -> str:
    """Escape text for HTML that is also a template of gradio: it can open neither a tag nor a placeholder."""
    escaped = html.escape(text)
    for letter in "{}$`":
        escaped = escaped.replace(letter, f"&#{ord(letter)};")
    return escaped


def message(text: str, kind: str = "error") -> str:
    """A message box with one sentence; its kind is "error" or "note"."""
    return f'<div class="dc-message dc-{kind}" role="{"alert" if kind == "error" else "status"}">{safe(text)}</div>'


def result(answer: Answer) -> str:
    """The whole answer."""
    caption, attention = answer.caption, answer.attention
    strengths: list[tuple[Array, Array]] = []  # of each word: before, after
    if attention is not None:
        strengths = [scale_attention(*maps) for maps in zip(attention.before, attention.after)]
    figures = [
        _figure(image, side, [maps[number] for maps in strengths], answer.mask)
        for number, (side, image) in enumerate((("before", answer.before), ("after", answer.after)))
    ]
    # The page first shows the map of the content word (of any word if there is none) with the highest attention.
    peaks = [max(float(before.max()), float(after.max())) for before, after in strengths]
    content = [number for number, word in enumerate(caption.words[: len(peaks)]) if not _STOPWORDS.fullmatch(word.text)]
    first_word = max(content or range(len(peaks)), key=peaks.__getitem__, default=-1)
    entries = [
        ("log-probability of the sentence", f"{caption.log_probability:.2f} (not a confidence)"),
        ("captioner", answer.captioner),
    ]
    if caption.nothing_changed is not None:
        entries.insert(0, ("probability that something changed", percent(log_of(1 - caption.nothing_changed))))
    listed = "".join(f"<div><dt>{name}</dt><dd>{safe(value)}</dd></div>" for name, value in entries)
    notes = "".join(message(note, "note") for note in answer.notes)
    return (
        f'<section class="dc-result" data-best="{first_word}" aria-label="What changed">'
        f"{_sentence(caption)}"
        f'<dl class="dc-metadata">{listed}</dl>{notes}'
        f'<div class="dc-pictures">{"".join(figures)}</div>'
        f"{_legend(attention is not None, answer.mask is not None)}"
        f"{_alternatives(caption)}"
        "</section>"
    )


def image_pair(before: Image.Image, after: Image.Image) -> str:
    """Two small images side by side, for the button of an example."""
    return "".join(f'<img alt="" src="{_data_uri(image, "JPEG")}">' for image in (before, after))


def _sentence(caption: Caption) -> str:
    if not caption.words:
        return '<p class="dc-sentence dc-silent">The caption is empty.</p>'
    words = []
    for number, word in enumerate(caption.words):
        probability = percent(word.log_probability)
        doubt = 1 - math.exp(min(0.0, word.log_probability))
        words.append(
            f'<button type="button" class="dc-word" data-word="{number}" style="--doubt: {doubt:.3f}" '
            f'aria-label="{safe(word.text)}, {probability}">{safe(word.text)}<small aria-hidden="true">{probability}</small>'
            "</button>"
        )
    play = '<button type="button" class="dc-play" aria-label="Word by word" title="Word by word">&#9654;</button>'
    return f'<div class="dc-sentence" role="group" aria-label="{safe(caption.text)}">{"".join(words)}{play}</div>'


def _figure(image: Image.Image, side: str, strengths: list[Array], mask: Mask | None) -> str:
    photo = image.copy()
    photo.thumbnail((MAX_IMAGE_SIDE, MAX_IMAGE_SIDE))
    scale = MAX_OVERLAY_SIDE / max(image.size)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    overlays = [Image.fromarray(overlay(size, one).round().astype(np.uint8)) for one in strengths]
    layers = "".join(
        f'<img class="dc-heat" data-word="{number}" alt="" src="{_data_uri(layer, "WEBP")}">'
        for number, layer in enumerate(overlays)
    )
    if mask is not None:
        line = colored_outline(mask, (2 * image.width, 2 * image.height), 3)  # the page enlarges small images
        layers += f'<img class="dc-outline" alt="" src="{_data_uri(line, "WEBP")}">'
    return (
        f'<figure><figcaption>{side}</figcaption><div class="dc-frame" style="--ratio: {image.width / image.height:.4f}">'
        f'<img class="dc-photo" alt="the image {side} the change" src="{_data_uri(photo, "JPEG")}">{layers}</div></figure>'
    )


def _data_uri(image: Image.Image, kind: str) -> str:
    file = io.BytesIO()
    image.save(file, kind, quality=90)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def _legend(has_attention: bool, has_mask: bool) -> str:
    doubt = '<span><i class="dc-doubtful"></i>low probability of the word</span>'
    if has_mask:
        red, green, blue = BOX
        doubt += (
            f'<span><i class="dc-area" style="border-color: rgb({red}, {green}, {blue})"></i>where the change is</span>'
        )
    if not has_attention:
        return f'<div class="dc-legend">{doubt}</div>'
    stops = ", ".join(
        f"rgb({', '.join(str(round(value)) for value in colormap(np.array(at)))})" for at in np.linspace(0, 1, 9)
    )
    return (
        f'<div class="dc-legend"><span><i style="background: linear-gradient(90deg, transparent, {stops})"></i>'
        f"attention of the word, low to high</span>{doubt}"
        '<span class="dc-hint">point at a word or select it with the arrow keys; click it to keep it selected</span></div>'
    )


def _alternatives(caption: Caption) -> str:
    if not caption.alternatives:
        return ""
    rows = []
    hypotheses: list[Caption | Alternative] = [caption, *caption.alternatives]
    for hypothesis in hypotheses:
        width = 100 * math.exp(min(0.0, hypothesis.log_probability - caption.log_probability))
        chosen = ' class="dc-chosen"' if hypothesis is caption else ""
        rows.append(
            f"<tr{chosen}><td>{safe(hypothesis.text) or '(nothing)'}</td>"
            f'<td class="dc-bar"><i style="width: {width:.1f}%"></i></td><td>{hypothesis.log_probability:.2f}</td></tr>'
        )
    return (
        '<table class="dc-beams"><caption>Sentences found by beam search and greedy decoding</caption>'
        '<thead><tr><th scope="col">sentence</th><td class="dc-bar"></td><th scope="col">log-probability</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )
