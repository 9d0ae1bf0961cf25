"""Pairs to try the page with: scenes of `blocks`, one of each kind of change and one where nothing changed but the view."""

from typing import NamedTuple

from PIL import Image

from diffcap.datasets.blocks.render import render
from diffcap.datasets.blocks.scenes import CHANGES, sample_triples

_SEED, _FIRST = 2026, 5  # in the ones before, the changed object of a pair is half hidden
_SIZE = (256, 192)  # twice that of the dataset's, to look at
_JITTER = 0.3  # what the shipped captioner was trained on
_TITLES = {
    "color": "other colour",
    "material": "other material",
    "add": "something new",
    "drop": "something gone",
    "move": "something moved",
}


class Example(NamedTuple):
    """A pair of RGB pictures, and what happened between them in a word or two."""

    title: str
    before: Image.Image
    after: Image.Image


def render_examples() -> list[Example]:
    """The pairs; always the same."""
    triples = sample_triples(range(_FIRST, _FIRST + len(CHANGES) + 1), _SEED, _JITTER)
    images = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in render(triples.scenes(), _SIZE)[0]]
    count = len(triples)
    pairs = [
        Example(_TITLES[CHANGES[int(change)]], images[row], images[count + row])
        for row, change in enumerate(triples.change[:-1])
    ]
    return [*pairs, Example("only the camera", images[count - 1], images[-1])]
