"""Example pairs of the page: scenes of `blocks` and `tiles` with several changes, and one of each without a change."""

from functools import cache
from typing import NamedTuple

import numpy as np
from PIL import Image

from diffcap.evaluation.localisation import Mask
from diffcap.worlds.blocks.render import render
from diffcap.worlds.blocks.scenes import CHANGES, sample_triples
from diffcap.worlds.tiles.write import render_pair

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
# Numbers of pairs of tiles with seed `_SEED`, and their titles.
_TILES = {16: "new houses", 4: "new road", 10: "new water", 13: "only the season"}


class Example(NamedTuple):
    """A pair of RGB images, a short title of the change, the shipped captioner for it, and the mask (H, W) of its change."""

    title: str
    before: Image.Image
    after: Image.Image
    captioner: str
    mask: Mask | None = None


@cache
def render_examples() -> list[Example]:
    """Render the pairs, which are the same in every call."""
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


def mask_of(before: Image.Image, after: Image.Image) -> Mask | None:
    """The mask of the example that has exactly these images; None for any other pair, and for an example without a mask."""
    for example in render_examples():
        shown = ((before, example.before), (after, example.after))
        if all(np.array_equal(np.asarray(one), np.asarray(other)) for one, other in shown):
            return example.mask
    return None
