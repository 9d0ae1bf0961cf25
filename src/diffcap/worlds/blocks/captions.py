"""The captions of `blocks`: templates for each change, for no change and for single images, and the UPOS tag of every word.

A caption begins with the changed object, sometimes with its position relative to another object. Then follow words that no other
change type uses. For a change of color or material, the object is as before the change, and the new value is the last word.
"""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from diffcap.worlds.blocks.geometry import COLORS, MATERIALS, SHAPES, SIZES, Scenes, camera_axes, to_camera
from diffcap.worlds.blocks.scenes import ADD, CHANGES, COLOR, DROP, MATERIAL, Triples

Words = tuple[str, str, str, str]  # size, color, material and shape of an object

# The words for each value; the first word is used with a probability of 0.5.
WORDS: dict[str, tuple[str, ...]] = {
    "large": ("large", "big"),
    "small": ("small", "tiny"),
    "rubber": ("rubber", "matte"),
    "metal": ("metal", "metallic", "shiny"),
    "cube": ("cube", "block"),
    "sphere": ("sphere", "ball"),
    "cylinder": ("cylinder",),
}
RELATIONS: dict[str, tuple[str, ...]] = {
    "left": ("to the left of", "on the left side of"),
    "right": ("to the right of", "on the right side of"),
    "front": ("in front of",),
    "behind": ("behind",),
}

# Probability that a relative position follows the object. After the object, each verb has a probability of 10 to 40 %. If "that"
# were as probable, greedy decoding would choose it for most objects, and CIDEr-D would measure this choice, not the content.
RELATION_PROBABILITY = 0.08

# {o}: the changed object with its position, without article; {v}: the new color or material.
_NEW_VALUE = (
    "the {o} became {v}",
    "the {o} turned {v}",
    "the {o} has turned {v}",
    "the {o} changed to {v}",
    "the {o} has changed to {v}",
    "the {o} was changed to {v}",
    "the {o} is now {v}",
)
TEMPLATES: dict[str, tuple[str, ...]] = {
    "color": (*_NEW_VALUE, "the {o} changed its color to {v}"),
    "material": (*_NEW_VALUE, "the {o} changed its material to {v}"),
    "add": (
        "the {o} was added",
        "the {o} has been added",
        "the {o} appeared",
        "the {o} has appeared",
        "the {o} is new",
        "a {o} was added",
        "a {o} was introduced",
        "a new {o} appeared",
        "there is a new {o}",
    ),
    "drop": (
        "the {o} was removed",
        "the {o} has been removed",
        "the {o} disappeared",
        "the {o} has disappeared",
        "the {o} is missing",
        "the {o} is gone",
        "the {o} vanished",
        "the {o} has vanished",
    ),
    "move": (
        "the {o} moved",
        "the {o} was moved",
        "the {o} has been moved",
        "the {o} moved elsewhere",
        "the {o} shifted",
        "the {o} was relocated",
        "the {o} is in another position",
        "the {o} has a different position",
        "the {o} is in a different location",
    ),
}
NO_CHANGE = (  # nine sentences, 5 to 7 per pair (CLEVR-Change: nine sentences, 6 per pair)
    "nothing is different",
    "no object is different",
    "no difference can be seen",
    "the scene stays the same",
    "everything is the same",
    "the scene is unchanged",
    "the two pictures are identical",
    "the two scenes look identical",
    "everything is still in its place",
)

_TAGS = {
    "ADJ": "large big small tiny gray red blue green brown purple cyan yellow matte metallic shiny new different same "
    "identical unchanged",
    "ADP": "to on of in behind",
    "ADV": "now elsewhere still",
    "AUX": "is are was has been be can",
    "CCONJ": "and",
    "DET": "the a another no",
    "NOUN": "rubber metal cube block sphere ball cylinder left right side front color material position location "
    "object difference scene scenes pictures place",
    "NUM": "two",
    "PRON": "that there its nothing everything",
    "VERB": "became turned changed added appeared introduced removed disappeared missing gone vanished moved shifted "
    "relocated seen stays look",
}
LEXICON: dict[str, str] = {word: tag for tag, words in _TAGS.items() for word in words.split()}


def tag(caption: str) -> list[tuple[str, str]]:
    """Return (word, UPOS tag) of each word; a word has the same tag in all captions of `blocks`."""
    return [(word, LEXICON[word]) for word in caption.split()]


def write_captions(triples: Triples, seed: int = 0) -> tuple[list[list[str]], list[list[str]]]:
    """Draw 5 to 7 different sentences for each of the T change pairs and T distractor pairs, by seed and index of the triple."""
    relations, names = true_relations(triples), list(RELATIONS)
    scenes = [(triples.after if change == ADD else triples.before) for change in triples.change.tolist()]
    change_captions, no_change_captions = [], []
    for row, index in enumerate(triples.indices.tolist()):
        rng = random.Random(f"blocks captions {seed} {index}")
        objects = _objects(scenes[row], row)
        related = [(names[relation], objects[slot]) for relation, slot in relations[row].nonzero().tolist()]
        change, changed = int(triples.change[row]), objects[int(triples.changed[row])]
        there = [values for values, is_there in zip(objects, scenes[row].valid[row].tolist()) if is_there]
        is_unique = sum(other[1::2] == changed[1::2] for other in there) == 1  # by color and shape
        value = {COLOR: COLORS, MATERIAL: MATERIALS}.get(change, ("",))[max(int(triples.new_value[row]), 0)]
        captions = []
        for template in rng.sample(TEMPLATES[CHANGES[change]], rng.randint(5, 7)):
            form = rng.random()
            if is_unique and form < 0.17:
                phrase = f"{changed[1]} {_word(rng, changed[3])}"
            else:
                phrase = _phrase(rng, changed)
                if related and form > 1 - RELATION_PROBABILITY:
                    relation, other = rng.choice(related)
                    phrase += f" that is {rng.choice(RELATIONS[relation])} the {_phrase(rng, other)}"
            captions.append(template.format(o=phrase, v=_word(rng, value)))
        change_captions.append(captions)
        no_change_captions.append(rng.sample(NO_CHANGE, rng.randint(5, 7)))
    return change_captions, no_change_captions


def describe(scenes: Scenes, seen: Tensor, indices: Sequence[int], seed: int = 0) -> list[str]:
    """Describe each of B images by one sentence that names up to four of its objects in random order.

    Args:
        seen: (B, N) bool, the objects that may be named; at least one per image.
        indices: numbers of the images; the sentences depend on them and on `seed` only.
    """
    sentences = []
    for row, index in enumerate(indices):
        rng = random.Random(f"blocks description {seed} {index}")
        objects = _objects(scenes, row)
        candidates = [objects[slot] for slot in seen[row].nonzero().flatten().tolist()]
        named = rng.sample(candidates, min(4, len(candidates)))
        sentences.append(" and ".join(f"a {_phrase(rng, values)}" for values in named))
    return sentences


def true_relations(triples: Triples) -> Tensor:
    """Return which relations (of `RELATIONS`) the changed object has to each other one in all images that show it: (T, 4, N) bool."""
    before = _relations(triples.before, triples.changed)
    after = _relations(triples.after, triples.changed)
    change = triples.change[:, None, None]
    return torch.where(change == ADD, after, torch.where(change == DROP, before, before & after))


def _relations(scenes: Scenes, changed: Tensor) -> Tensor:
    """(B, 4, N) relations from the camera's viewpoint; the direction must be clear on the ground and in the image."""
    rows = torch.arange(len(scenes))
    forward, right, _ = camera_axes(scenes)
    level = (forward[:, :2] * forward[:, :2]).sum(1, keepdim=True).sqrt()
    ahead = forward[:, :2] / level
    offset = scenes.position[rows, changed][:, None] - scenes.position  # (B, N, 2), from each object to the changed one
    across = offset[..., 0] * right[:, None, 0] + offset[..., 1] * right[:, None, 1]
    along = offset[..., 0] * ahead[:, None, 0] + offset[..., 1] * ahead[:, None, 1]
    x, _, z = to_camera(scenes.centers, scenes)
    aside = (x / z)[rows, changed][:, None] - x / z
    sideways = (across.abs() > 0.5) & (across.abs() > 0.7 * along.abs()) & (aside * across > 0) & (aside.abs() > 0.03)
    deep = (along.abs() > 0.5) & (along.abs() > 0.7 * across.abs())
    holds = torch.stack([sideways & (across < 0), sideways & (across > 0), deep & (along < 0), deep & (along > 0)], 1)
    other = scenes.valid & (torch.arange(scenes.valid.shape[1]) != changed[:, None])
    return holds & other[:, None]


def _objects(scenes: Scenes, row: int) -> list[Words]:
    """The words of each slot; those of an empty one have no meaning."""
    columns = (scenes.size, scenes.color, scenes.material, scenes.shape)
    values = zip(*(column[row].tolist() for column in columns))
    return [(SIZES[a], COLORS[b], MATERIALS[c], SHAPES[d]) for a, b, c, d in values]


def _phrase(rng: random.Random, values: Words) -> str:
    return " ".join(_word(rng, value) for value in values)


def _word(rng: random.Random, value: str) -> str:
    words = WORDS.get(value, (value,))
    return words[0] if len(words) == 1 or rng.random() < 0.5 else rng.choice(words[1:])
