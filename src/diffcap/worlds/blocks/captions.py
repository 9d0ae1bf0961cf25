"""The captions of `blocks`: templates for each change, for no change and for single images, and the UPOS tag of every word.

A caption of a change names the changed object, sometimes with its position relative to another object, and then states the change in
words that no other change type uses. If a color or material changes, the name has the old value, and the last word is the new value.
"""

from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor

from diffcap.worlds.blocks.geometry import COLORS, MATERIALS, SHAPES, SIZES, Scenes, camera_axes, to_camera
from diffcap.worlds.blocks.scenes import ADD, CHANGES, COLOR, DROP, MATERIAL, Triples

ObjectWords = tuple[str, str, str, str]  # size, color, material and shape of an object

# Attribute value -> words for it. The first word is used with a probability of 0.5. A value without an entry is used as a word.
SYNONYMS = {
    "large": ("large", "big"),
    "small": ("small", "tiny"),
    "rubber": ("rubber", "matte"),
    "metal": ("metal", "metallic", "shiny"),
    "cube": ("cube", "block"),
    "sphere": ("sphere", "ball"),
    "cylinder": ("cylinder",),
}
RELATION_PHRASES = {
    "left": ("to the left of", "on the left side of"),
    "right": ("to the right of", "on the right side of"),
    "front": ("in front of",),
    "behind": ("behind",),
}

# Probability that a relative position ("that is behind ...") follows the object's name. The probability of each verb is 0.1 to 0.4.
# If "that" were as probable as a verb, greedy decoding would choose it for most objects, and CIDEr-D would measure this choice.
RELATION_PROBABILITY = 0.08

# {o}: the changed object with its position, without article; {v}: the new color or material.
_NEW_VALUE_TEMPLATES = (
    "the {o} became {v}",
    "the {o} turned {v}",
    "the {o} has turned {v}",
    "the {o} changed to {v}",
    "the {o} has changed to {v}",
    "the {o} was changed to {v}",
    "the {o} is now {v}",
)
TEMPLATES = {
    "color": (*_NEW_VALUE_TEMPLATES, "the {o} changed its color to {v}"),
    "material": (*_NEW_VALUE_TEMPLATES, "the {o} changed its material to {v}"),
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
NO_CHANGE = (  # a pair has 5 to 7 of them; in CLEVR-Change, a pair has 6 of nine sentences
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

# Universal part-of-speech tag (UPOS) -> words.
_WORDS_OF_TAG = {
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
# A word has the same tag in all captions of `blocks`.
LEXICON = {word: tag for tag, words in _WORDS_OF_TAG.items() for word in words.split()}


def write_captions(triples: Triples, seed: int = 0) -> tuple[list[list[str]], list[list[str]]]:
    """Sample 5 to 7 different captions for the pair (before, after) of each triple, and 5 to 7 for (before, distractor): no change."""
    has_relation, relation_names = true_relations(triples), list(RELATION_PHRASES)
    scenes = [(triples.after if change == ADD else triples.before) for change in triples.change.tolist()]
    change_captions, no_change_captions = [], []
    for row, index in enumerate(triples.indices.tolist()):
        rng = Random(f"blocks captions {seed} {index}")
        objects = words_of_slots(scenes[row], row)
        related_slots = has_relation[row].nonzero().tolist()
        related_objects = [(relation_names[relation], objects[slot]) for relation, slot in related_slots]
        change, changed = int(triples.change[row]), objects[int(triples.changed[row])]
        color_and_shape = [words[1::2] for words, is_valid in zip(objects, scenes[row].valid[row].tolist()) if is_valid]
        is_unique = color_and_shape.count(changed[1::2]) == 1  # no other object has its color and shape
        value = {COLOR: COLORS, MATERIAL: MATERIALS}.get(change, ("",))[max(int(triples.new_value[row]), 0)]
        captions = []
        for template in rng.sample(TEMPLATES[CHANGES[change]], rng.randint(5, 7)):
            draw = rng.random()
            if is_unique and draw < 0.17:  # only the color and the shape
                phrase = f"{changed[1]} {_choose_synonym(rng, changed[3])}"
            else:
                phrase = _object_phrase(rng, changed)
                if related_objects and draw > 1 - RELATION_PROBABILITY:
                    relation, other = rng.choice(related_objects)
                    phrase += f" that is {rng.choice(RELATION_PHRASES[relation])} the {_object_phrase(rng, other)}"
            captions.append(template.format(o=phrase, v=_choose_synonym(rng, value)))
        change_captions.append(captions)
        no_change_captions.append(rng.sample(NO_CHANGE, rng.randint(5, 7)))
    return change_captions, no_change_captions


def describe(scenes: Scenes, may_be_named: Tensor, indices: Sequence[int], seed: int = 0) -> list[str]:
    """Describe each of B images by one sentence that names up to four of its objects in random order.

    `may_be_named` (B, N) is True for the objects to choose from, at least one per image. `indices` and `seed` determine the choices.
    """
    sentences = []
    for row, index in enumerate(indices):
        rng = Random(f"blocks description {seed} {index}")
        objects = words_of_slots(scenes, row)
        candidates = [objects[slot] for slot in may_be_named[row].nonzero().flatten().tolist()]
        named = rng.sample(candidates, min(4, len(candidates)))
        sentences.append(" and ".join(f"a {_object_phrase(rng, words)}" for words in named))
    return sentences


def true_relations(triples: Triples) -> Tensor:
    """Return (T, 4, N) bool: the changed object has relation r of `RELATION_PHRASES` to object n in each image with the changed object."""
    before = _image_relations(triples.before, triples.changed)
    after = _image_relations(triples.after, triples.changed)
    change = triples.change[:, None, None]
    return torch.where(change == ADD, after, torch.where(change == DROP, before, before & after))


def _image_relations(scenes: Scenes, changed: Tensor) -> Tensor:
    """Return the relations (T, 4, N) in one image of each triple, from the view of its camera. An unclear relation is False."""
    row_numbers = torch.arange(len(scenes))
    forward, right, _ = camera_axes(scenes)
    away_axis = forward[:, :2] / (forward[:, :2] * forward[:, :2]).sum(1, keepdim=True).sqrt()  # horizontal unit vector
    dx, dy = (scenes.position[row_numbers, changed][:, None] - scenes.position).unbind(-1)  # (B, N) each, from slot n
    along_right = dx * right[:, None, 0] + dy * right[:, None, 1]
    along_away = dx * away_axis[:, None, 0] + dy * away_axis[:, None, 1]
    x, _, z = to_camera(scenes.object_centers, scenes)
    image_shift = (x / z)[row_numbers, changed][:, None] - x / z
    is_beside = (along_right.abs() > 0.5) & (along_right.abs() > 0.7 * along_away.abs())
    is_beside &= (image_shift * along_right > 0) & (image_shift.abs() > 0.03)
    has_other_depth = (along_away.abs() > 0.5) & (along_away.abs() > 0.7 * along_right.abs())
    left_right = [is_beside & (along_right < 0), is_beside & (along_right > 0)]
    relations = torch.stack([*left_right, has_other_depth & (along_away < 0), has_other_depth & (along_away > 0)], 1)
    is_other = scenes.valid & (torch.arange(scenes.valid.shape[1]) != changed[:, None])
    return relations & is_other[:, None]


def words_of_slots(scenes: Scenes, row: int) -> list[ObjectWords]:
    """Return the words of the object in each slot (place for an object) of a scene; an empty slot has words without meaning."""
    attributes = (scenes.size, scenes.color, scenes.material, scenes.shape)
    indices_of_slots = zip(*(attribute[row].tolist() for attribute in attributes))
    return [(SIZES[a], COLORS[b], MATERIALS[c], SHAPES[d]) for a, b, c, d in indices_of_slots]


def _object_phrase(rng: Random, words: ObjectWords) -> str:
    return " ".join(_choose_synonym(rng, word) for word in words)


def _choose_synonym(rng: Random, value: str) -> str:
    synonyms = SYNONYMS.get(value, (value,))
    return synonyms[0] if len(synonyms) == 1 or rng.random() < 0.5 else rng.choice(synonyms[1:])
