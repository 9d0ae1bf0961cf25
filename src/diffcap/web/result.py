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

import jinja2
import numpy as np
from markupsafe import Markup
from PIL import Image

from diffcap.evaluation.localisation import Mask
from diffcap.pair_captioner import AttentionMaps, Caption
from diffcap.report.drawing import REGION_COLOR, colored_outline, fitted_size
from diffcap.report.heatmaps import Array, colormap, overlay, percent, scale_attention
from diffcap.report.page import resource
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
    rendered_images, *_ = render(triples.scenes(), _SIZE)
    images = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in rendered_images]
    count = len(triples)
    pairs = [
        Example(_TITLES[CHANGES[int(change)]], images[row], images[count + row], "blocks")
        for row, change in enumerate(triples.change[:-1])
    ]
    pairs.append(Example("only the camera", images[count - 1], images[-1], "blocks"))
    for number, title in _TILES.items():
        rendered = render_pair(number, _SEED)
        before, after = map(Image.fromarray, rendered.images)
        mask = rendered.mask > 0 if rendered.mask.any() else None
        pairs.append(Example(title, before, after, "tiles", mask))
    return pairs


def _mask_of(before: Image.Image, after: Image.Image) -> Mask | None:
    """The mask of the example that has exactly these images; None for any other pair, and for an example without a mask."""
    for example in render_examples():
        shown = ((before, example.before), (after, example.after))
        if all(np.array_equal(np.asarray(one), np.asarray(other)) for one, other in shown):
            return example.mask
    return None


def safe(text: object) -> Markup:
    """Escape text for HTML that is also a template of gradio: it can open neither a tag nor a placeholder."""
    if isinstance(text, Markup):
        return text
    escaped = html.escape(str(text))
    for letter in "{}$`":
        escaped = escaped.replace(letter, f"&#{ord(letter)};")
    return Markup(escaped)


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
    """The whole answer to two RGB images; those of an example with a mask show the outline of the change."""
    mask = _mask_of(*images)
    strengths: list[tuple[Array, Array]] = []  # of each word: before, after
    if attention is not None:
        strengths = [scale_attention(*maps) for maps in zip(attention.before, attention.after)]
    # The page first shows the map of the content word (of any word if there is none) with the highest attention.
    peaks = [max(float(before.max()), float(after.max())) for before, after in strengths]
    shown = caption.words[: len(peaks)]
    content = [number for number, word in enumerate(shown) if not _STOPWORDS.fullmatch(word.text)]
    figures = []
    for number, (side, image) in enumerate(zip(("before", "after"), images)):
        photo = image.copy()
        photo.thumbnail((MAX_IMAGE_SIDE, MAX_IMAGE_SIDE))
        size = fitted_size(image.size, (MAX_OVERLAY_SIDE, MAX_OVERLAY_SIDE))
        overlays = [overlay(size, maps[number]).round().astype(np.uint8) for maps in strengths]
        line = None
        if mask is not None:  # the page enlarges small images
            line = data_uri(colored_outline(mask, (2 * image.width, 2 * image.height), 3), "WEBP")
        layers = [data_uri(Image.fromarray(layer), "WEBP") for layer in overlays]
        figures.append((side, image.width / image.height, data_uri(photo, "JPEG"), layers, line))
    stops = [colormap(np.array(at)).round().astype(int).tolist() for at in np.linspace(0, 1, 9)]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=safe)
    lines = resource("result.html.j2", "diffcap.web").splitlines()
    return environment.from_string("".join(lines)).render(
        caption=caption,
        captioner=captioner,
        notes=Markup("").join(Markup(message(note, "note")) for note in notes),
        figures=figures,
        first_word=max(content or range(len(peaks)), key=peaks.__getitem__, default=-1),
        has_attention=attention is not None,
        has_mask=mask is not None,
        stops=", ".join(f"rgb({red}, {green}, {blue})" for red, green, blue in stops),
        box=", ".join(map(str, REGION_COLOR)),
        hypotheses=[caption, *caption.alternatives],
        percent=percent,
        certainty=lambda log_probability: math.exp(min(0.0, log_probability)),
    )


def data_uri(image: Image.Image, kind: str) -> str:
    """An image as the source of an HTML element."""
    file = io.BytesIO()
    image.save(file, kind, quality=90)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"
