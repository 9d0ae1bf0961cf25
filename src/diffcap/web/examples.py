"""Example pairs of the page: scenes of `blocks`, one for each type of change and one where only the viewpoint changed."""

from typing import NamedTuple

from PIL import Image

from diffcap.datasets.blocks.render import render
from diffcap.datasets.blocks.scenes import CHANGES, sample_triples

_SEED, _FIRST = 2026, 5  # in earlier scenes the changed object is partly hidden
_SIZE = (256, 192)  # twice the size of the dataset's images
_JITTER = 0.3  # as in the training data of the shipped captioner
_TITLES = {
    "color": "other colour",
    "material": "other material",
    "add": "something new",
    "drop": "something gone",
    "move": "something moved",
}


class Example(NamedTuple):
    """A pair of RGB images and a short title of the change."""

    title: str
    before: Image.Image
    after: Image.Image


def render_examples() -> list[Example]:
    """Render the pairs, which are the same in every call."""
    triples = sample_triples(range(_FIRST, _FIRST + len(CHANGES) + 1), _SEED, _JITTER)
    images = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in render(triples.scenes(), _SIZE)[0]]
    count = len(triples)
    pairs = [
        Example(_TITLES[CHANGES[int(change)]], images[row], images[count + row])
        for row, change in enumerate(triples.change[:-1])
    ]
    return [*pairs, Example("only the camera", images[count - 1], images[-1])]
