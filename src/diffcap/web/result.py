"""A caption as HTML: its words, what is known of it, both images with one attention overlay per word, and the other sentences.

Images are embedded as data URIs, so the server keeps nothing of a visitor's for a later request. The example pairs are here, too.
"""

import base64
import html
import io
import math
import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from PIL import Image

from diffcap.evaluation.localisation import Mask
from diffcap.pair_captioner import Alternative, AttentionMaps, Caption
from diffcap.report.drawing import BOX, colored_outline, fitted_size
from diffcap.report.heatmaps import Array, colormap, overlay, percent, scale_attention
from diffcap.worlds.blocks.render import render
from diffcap.worlds.blocks.scenes import CHANGES, sample_triples
from diffcap.worlds.tiles.write import render_pair

MAX_IMAGE_SIDE = 720  # pixels
MAX_OVERLAY_SIDE = 96  # pixels; overlays are smooth, so the browser can enlarge them

_SEED, _FIRST = 2026, 5  # of the examples; in earlier scenes the changed object is partly hidden
_SIZE = (256, 192)  # twice the size of the dataset's images
_JITTER = 0.3  # as in the training data of the shipped captioner
_TITLES = {
    "color": "other colour",
    "material": "other material",
    "add": "something new",
    "drop": "something gone",
    "move": "something moved",
}
# Numbers of pairs of tiles with seed `_SEED`, and their titles.
_TILES = {16: "new houses", 4: "new road", 10: "new water", 13: "only the season"}
# Words of any sentence.
_STOPWORDS = re.compile("an?|the|is|are|was|were|be|been|has|have|had|there|its?|that|this|to|of|in|on|at|and|now|not?")


class Example(NamedTuple):
    """A pair of RGB images, a short title of the change, the shipped captioner for it, and the mask (H, W) of its change."""

    title: str
    before: Image.Image
    after: Image.Image
    captioner: str
    mask: Mask | None = None


@cache
def render_examples() -> list[Example]:
    """Scenes of `blocks` and `tiles` with several changes, and one of each without a change; the same in every call."""
    triples = sample_triples(range(_FIRST, _FIRST + len(CHANGES) + 1), _SEED, _JITTER)
    images = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in render(triples.scenes(), _SIZE)[0]]
    count = len(triples)
    pairs = [
        Example(_TITLES[CHANGES[int(change)]], images[row], images[count + row], "blocks")
        for row, change in enumerate(triples.change[:-1])
    ]
    pairs.append(Example("only the camera", images[count - 1], images[-1], "blocks"))
    for number, title in _TILES.items():
        rendered = render_pair(number, _SEED)
        before, after = map(Image.fromarray, rendered.images)
        pairs.append(Example(title, before, after, "tiles", rendered.mask > 0 if rendered.mask.any() else None))
    return pairs


def _mask_of(before: Image.Image, after: Image.Image) -> Mask | None:
    """The mask of the example that has exactly these images; None for any other pair, and for an example without a mask."""
    for example in render_examples():
        shown = ((before, example.before), (after, example.after))
        if all(np.array_equal(np.asarray(one), np.asarray(other)) for one, other in shown):
            return example.mask
    return None


def safe(text: str) -> str:
    """Escape text for HTML that is also a template of gradio: it can open neither a tag nor a placeholder."""
    escaped = html.escape(text)
    for letter in "{}$`":
        escaped = escaped.replace(letter, f"&#{ord(letter)};")
    return escaped


def message(text: str, kind: str = "error") -> str:
    """A message box with one sentence; its kind is "error" or "note"."""
    return f'<div class="dc-message dc-{kind}" role="{"alert" if kind == "error" else "status"}">{safe(text)}</div>'


def result(
    images: Sequence[Image.Image],
    caption: Caption,
    attention: AttentionMaps | None,
    captioner: str,
    notes: Sequence[str] = (),
) -> str:
    """The whole answer.

    Args:
        images: before and after, RGB; the outline of the change is drawn over both images of an example that has a mask.
        attention: None if the method has no attention maps.
        captioner: its label.
        notes: sentences.
    """
    mask = _mask_of(*images)
    strengths: list[tuple[Array, Array]] = []  # of each word: before, after
    if attention is not None:
        strengths = [scale_attention(*maps) for maps in zip(attention.before, attention.after)]
    figures = [
        _figure(image, side, [maps[number] for maps in strengths], mask)
        for number, (side, image) in enumerate(zip(("before", "after"), images))
    ]
    # The page first shows the map of the content word (of any word if there is none) with the highest attention.
    peaks = [max(float(before.max()), float(after.max())) for before, after in strengths]
    content = [number for number, word in enumerate(caption.words[: len(peaks)]) if not _STOPWORDS.fullmatch(word.text)]
    first_word = max(content or range(len(peaks)), key=peaks.__getitem__, default=-1)
    entries = {}
    if caption.nothing_changed is not None:
        entries["probability that something changed"] = percent(1 - caption.nothing_changed)
    entries["log-probability of the sentence"] = f"{caption.log_probability:.2f} (not a confidence)"
    entries["captioner"] = captioner
    listed = "".join(f"<div><dt>{name}</dt><dd>{safe(value)}</dd></div>" for name, value in entries.items())
    return (
        f'<section class="dc-result" data-best="{first_word}" aria-label="What changed">'
        f"{_sentence(caption)}"
        f'<dl class="dc-metadata">{listed}</dl>{"".join(message(note, "note") for note in notes)}'
        f'<div class="dc-pictures">{"".join(figures)}</div>'
        f"{_legend(attention is not None, mask is not None)}"
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
        certainty = math.exp(min(0.0, word.log_probability))
        probability, doubt = percent(certainty), 1 - certainty
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
    size = fitted_size(image.size, (MAX_OVERLAY_SIDE, MAX_OVERLAY_SIDE))
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
