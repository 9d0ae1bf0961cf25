"""Write the answer to a visitor's pair of images as HTML: caption, images with an attention overlay per word, other hypotheses.

Images are embedded as data URIs, so that the server does not keep the images of visitors. This module also renders the example pairs.
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

from diffcap.change import AttentionMaps, Caption, change_probability
from diffcap.evaluation.localisation import Mask
from diffcap.report.drawing import REGION_COLOR, colored_outline, fitted_size
from diffcap.report.heatmaps import Array, colormap, overlay, percent, scale_attention
from diffcap.report.page import read_resource
from diffcap.worlds.blocks.render import render
from diffcap.worlds.blocks.scenes import CHANGES, sample_triples
from diffcap.worlds.tiles.write import render_pair

MAX_IMAGE_SIDE = 720  # longer side in pixels of an image in the answer
MAX_OVERLAY_SIDE = 96  # longer side of an attention overlay; overlays are smooth, so the browser can enlarge them

# The examples of the dataset blocks begin with its scene 5, because in earlier scenes the changed object is partly hidden.
_SEED, _FIRST_SCENE = 2026, 5
_BLOCKS_SIZE = (256, 192)  # twice the size of the dataset's images
_JITTER = 0.3  # strength of the changes of camera and light, as in the training data of the shipped captioner
_BLOCKS_TITLES = {
    "color": "other colour",
    "material": "other material",
    "add": "something new",
    "drop": "something gone",
    "move": "something moved",
}
# Examples of the dataset tiles, with the same seed: number of the pair -> title.
_TILES_TITLES = {16: "new houses", 4: "new road", 10: "new water", 13: "only the season"}
# Words that do not describe the change.
_STOPWORDS = re.compile("an?|the|is|are|was|were|be|been|has|have|had|there|its?|that|this|to|of|in|on|at|and|now|not?")


class Example(NamedTuple):
    """A short title, a pair of RGB images, the name of the shipped captioner for them, and the mask (H, W) of the change if known."""

    title: str
    before: Image.Image
    after: Image.Image
    captioner: str
    mask: Mask | None = None


@cache
def render_examples() -> list[Example]:
    """Return the same example pairs in every call: from blocks and tiles, pairs with different changes and one without change."""
    triples = sample_triples(range(_FIRST_SCENE, _FIRST_SCENE + len(CHANGES) + 1), _SEED, _JITTER)
    rendered_images, *_ = render(triples.scenes(), _BLOCKS_SIZE)  # images before, after, before from another camera
    images = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in rendered_images]
    num_scenes = len(triples)
    examples = [
        Example(_BLOCKS_TITLES[CHANGES[int(change)]], images[row], images[num_scenes + row], "blocks")
        for row, change in enumerate(triples.change[:-1])
    ]
    examples.append(Example("only the camera", images[num_scenes - 1], images[-1], "blocks"))
    for number, title in _TILES_TITLES.items():
        pair = render_pair(number, _SEED)
        before, after = map(Image.fromarray, pair.images)
        examples.append(Example(title, before, after, "tiles", pair.mask > 0 if pair.mask.any() else None))
    return examples


def escape(text: object) -> Markup:
    """Escape text for HTML that is also a template of gradio, so that it cannot open a tag or a placeholder."""
    if isinstance(text, Markup):
        return text
    return Markup(html.escape(str(text)).translate({ord(letter): f"&#{ord(letter)};" for letter in "{}$`"}))


def render_message(text: str, kind: str = "error") -> str:
    """Return a message box with one sentence; its kind is "error" or "note"."""
    return f'<div class="dc-message dc-{kind}" role="{"alert" if kind == "error" else "status"}">{escape(text)}</div>'


def render_result(
    images: Sequence[Image.Image],
    caption: Caption,
    attention: AttentionMaps | None,
    captioner: str,
    notes: Sequence[str] = (),
) -> str:
    """Return the answer to two RGB images. `captioner` is a label.

    If the images are those of an example with a mask, the outline of the mask is drawn over them. The image after has the caption's box.
    """
    pixels = [image.tobytes() for image in images]
    examples = (one for one in render_examples() if [one.before.tobytes(), one.after.tobytes()] == pixels)
    mask = next((example.mask for example in examples), None)
    word_maps: list[tuple[Array, Array]] = []  # of each word: strengths from 0 to 1 in both images
    if attention is not None:
        word_maps = [scale_attention(*maps) for maps in zip(attention.before, attention.after)]
    # The page first shows the overlay of the content word (of any word if there is none) with the highest attention.
    peaks = [max(float(before_map.max()), float(after_map.max())) for before_map, after_map in word_maps]
    words = caption.words[: len(peaks)]
    content_words = [index for index, word in enumerate(words) if not _STOPWORDS.fullmatch(word.text)]
    figures = []
    for side_index, (side, image) in enumerate(zip(("before", "after"), images)):
        photo = image.copy()
        photo.thumbnail((MAX_IMAGE_SIDE, MAX_IMAGE_SIDE))
        size = fitted_size(image.size, (MAX_OVERLAY_SIDE, MAX_OVERLAY_SIDE))
        overlays = [overlay(size, maps[side_index]).round().astype(np.uint8) for maps in word_maps]
        outline = None
        if mask is not None:  # twice as large, because the page enlarges small images
            outline = data_uri(colored_outline(mask, (2 * image.width, 2 * image.height), 3), "WEBP")
        overlay_uris = [data_uri(Image.fromarray(pixels), "WEBP") for pixels in overlays]
        figures.append((side, image.width / image.height, data_uri(photo, "JPEG"), overlay_uris, outline))
    legend_colors = colormap(np.linspace(0, 1, 9)).round().astype(int).tolist()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=escape)
    lines = read_resource("result.html.j2", "diffcap.web").splitlines()
    return environment.from_string("".join(lines)).render(
        caption=caption,
        captioner=captioner,
        notes=Markup("").join(Markup(render_message(note, "note")) for note in notes),
        figures=figures,
        first_word=max(content_words or range(len(peaks)), key=peaks.__getitem__, default=-1),
        has_attention=attention is not None,
        has_mask=mask is not None,
        legend_colors=", ".join(f"rgb({red}, {green}, {blue})" for red, green, blue in legend_colors),
        outline_color=", ".join(map(str, REGION_COLOR)),
        hypotheses=[caption, *caption.alternatives],
        changed=change_probability(caption) if caption.nothing_changed is not None or caption.scored else None,
        box_percent=[100 * edge / images[1].size[axis % 2] for axis, edge in enumerate(caption.box or ())],
        percent=percent,
        probability_of=lambda log_probability: math.exp(min(0.0, log_probability)),
    )


def data_uri(image: Image.Image, image_format: str) -> str:
    """Return an image as the source of an HTML element; `image_format` is a name of Pillow, such as "JPEG"."""
    file = io.BytesIO()
    image.save(file, image_format, quality=90)
    return f"data:image/{image_format.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"
