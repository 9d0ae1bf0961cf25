"""A caption as HTML: its words, both images with a layer of heat a word, the other sentences, and what to know of it.

Pictures are part of the text as data, so nothing of a visitor's is kept on the server to be fetched later.
"""

import base64
import html
import io
import math
import re
from typing import NamedTuple

import numpy as np
from PIL import Image

from diffcap.captioner import Alternative, Caption, Look
from diffcap.report.attention import FADED, coat, heat, strengths_of
from diffcap.report.heatmap import percent

_SHOWN = 720  # most pixels along a side of a picture
_HEAT = 96  # and of a layer of heat, which is smooth

# Words of any sentence: the page rests at one that says more.
_SMALL = re.compile("an?|the|is|are|was|were|be|been|has|have|had|there|its?|that|this|to|of|in|on|at|and|now|not?")


class Answer(NamedTuple):
    """What there is to show.

    Attributes:
        before, after: RGB. look: None where the method cannot tell. captioner: its label. notes: sentences.
    """

    before: Image.Image
    after: Image.Image
    caption: Caption
    look: Look | None
    captioner: str
    notes: tuple[str, ...] = ()


def safe(text: str) -> str:
    """Text for HTML that is also a template: nothing in it opens a tag or a placeholder."""
    escaped = html.escape(text)
    for letter in "{}$`":
        escaped = escaped.replace(letter, f"&#{ord(letter)};")
    return escaped


def message(text: str, kind: str = "error") -> str:
    """A sentence on its own.

    Args:
        kind: "error" or "note".
    """
    return f'<div class="dc-message dc-{kind}" role="{"alert" if kind == "error" else "status"}">{safe(text)}</div>'


def result(answer: Answer) -> str:
    """The whole answer."""
    caption, look = answer.caption, answer.look
    strengths = []
    if look is not None:
        strengths = [strengths_of(*maps) for maps in zip(look.before, look.after)]
    highest = [max(float(side.max()) for side in sides) for sides in strengths]
    telling = [number for number, word in zip(range(len(highest)), caption.words) if not _SMALL.fullmatch(word.text)]
    best = max(telling or range(len(highest)), key=highest.__getitem__, default=-1)
    sides = [
        _picture(image, title, [pair[place] for pair in strengths])
        for place, (title, image) in enumerate((("before", answer.before), ("after", answer.after)))
    ]
    return (
        f'<section class="dc-result" data-best="{best}" aria-label="What changed">'
        f"{_sentence(caption)}"
        f'<div class="dc-pictures" style="--faded: {FADED}">{"".join(sides)}</div>'
        f"{_legend(look is not None)}"
        f"{_alternatives(caption)}"
        f"{_facts(answer)}"
        "</section>"
    )


def picture_pair(before: Image.Image, after: Image.Image) -> str:
    """Two small pictures side by side, as an example is shown."""
    return "".join(f'<img alt="" src="{_data(image, "JPEG")}">' for image in (before, after))


def _sentence(caption: Caption) -> str:
    if not caption.words:
        return '<p class="dc-sentence dc-silent">It said nothing.</p>'
    words = []
    for number, word in enumerate(caption.words):
        sure = percent(word.log_probability)
        doubt = 1 - math.exp(min(0.0, word.log_probability))
        words.append(
            f'<button type="button" class="dc-word" data-word="{number}" style="--doubt: {doubt:.3f}" '
            f'aria-label="{safe(word.text)}, {sure}">{safe(word.text)}<small aria-hidden="true">{sure}</small></button>'
        )
    play = '<button type="button" class="dc-play" aria-label="Word by word" title="Word by word">&#9654;</button>'
    return f'<div class="dc-sentence" role="group" aria-label="{safe(caption.text)}">{"".join(words)}{play}</div>'


def _picture(image: Image.Image, title: str, strengths: list[np.ndarray]) -> str:
    photo = image.copy()
    photo.thumbnail((_SHOWN, _SHOWN))
    scale = _HEAT / max(image.size)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    layers = "".join(
        f'<img class="dc-heat" data-word="{number}" alt="" src="{_data(_layer(size, strength), "WEBP")}">'
        for number, strength in enumerate(strengths)
    )
    return (
        f'<figure><figcaption>{title}</figcaption><div class="dc-frame" style="--ratio: {image.width / image.height:.4f}">'
        f'<img class="dc-photo" alt="the picture {title}" src="{_data(photo, "JPEG")}">{layers}</div></figure>'
    )


def _layer(size: tuple[int, int], strengths: np.ndarray) -> Image.Image:
    alpha, colors = coat(size, strengths)
    return Image.fromarray(np.concatenate([colors, 255 * alpha], -1).round().astype(np.uint8))


def _data(image: Image.Image, kind: str) -> str:
    file = io.BytesIO()
    image.save(file, kind, quality=90)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def _legend(looks: bool) -> str:
    sure = '<span><i class="dc-doubtful"></i>not sure of the word</span>'
    if not looks:
        return f'<div class="dc-legend">{sure}</div>'
    stops = ", ".join(
        f"rgb({', '.join(str(round(value)) for value in heat(np.array(at)))})" for at in np.linspace(0, 1, 9)
    )
    return (
        f'<div class="dc-legend"><span><i style="background: linear-gradient(90deg, {stops})"></i>'
        f"where it looked for the word</span>{sure}"
        '<span class="dc-hint">point at a word, or go to it with the arrow keys; press it to hold it</span></div>'
    )


def _alternatives(caption: Caption) -> str:
    if not caption.alternatives:
        return ""
    rows = []
    found: list[Caption | Alternative] = [caption, *caption.alternatives]
    for one in found:
        width = 100 * math.exp(min(0.0, one.log_probability - caption.log_probability))
        chosen = ' class="dc-chosen"' if one is caption else ""
        rows.append(
            f'<tr{chosen}><td>{safe(one.text) or "(nothing)"}</td><td class="dc-bar"><i style="width: {width:.1f}%"></i></td>'
            f"<td>{percent(one.log_probability)}</td><td>{one.log_probability:.2f}</td></tr>"
        )
    return (
        '<table class="dc-beams"><caption>What the search found</caption><thead><tr><th scope="col">sentence</th>'
        '<td class="dc-bar"></td><th scope="col">probability</th><th scope="col">its logarithm</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _facts(answer: Answer) -> str:
    caption = answer.caption
    facts = [("sentence", f"{percent(caption.log_probability)} (log-probability {caption.log_probability:.2f})")]
    if caption.nothing_changed is not None:
        facts.append(("nothing changed but the view", percent(math.log(max(caption.nothing_changed, 1e-30)))))
    facts.append(("captioner", answer.captioner))
    listed = "".join(f"<div><dt>{name}</dt><dd>{safe(value)}</dd></div>" for name, value in facts)
    notes = "".join(message(note, "note") for note in answer.notes)
    return f'<dl class="dc-facts">{listed}</dl>{notes}'
