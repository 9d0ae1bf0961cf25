import random
from collections.abc import Callable
from typing import Any

import pytest

from diffcap.negatives import confuse as strategies
from diffcap.negatives.confuse import confuse
from diffcap.negatives.words import TaggedCaption, make_tagged_caption
from diffcap.text.tagging import split_sentences
from diffcap.worlds.blocks.captions import LEXICON, NO_CHANGE

_BIRDS = {
    "has": "VERB", "is": "AUX", "look": "VERB", "a": "DET", "an": "DET", "the": "DET", "than": "ADP", "and": "CCONJ",
    ".": "PUNCT", ",": "PUNCT", "animal1": "NOUN", "animal2": "NOUN", "beak": "NOUN", "wings": "NOUN", "head": "NOUN",
}  # fmt: skip


def scene(text: str) -> TaggedCaption:
    return make_tagged_caption(text, {text: [LEXICON[word] for word in text.split()]})


def bird(text: str) -> TaggedCaption:
    parts = split_sentences(text.split())
    return make_tagged_caption(text, {" ".join(part): [_BIRDS.get(word, "ADJ") for word in part] for part in parts})


def nouns(text: str) -> TaggedCaption:
    """A caption of another dataset; the strategies for changes do not read the tags."""
    return make_tagged_caption(text, {text: ["NOUN"] * len(text.split())})


def only(strategy: str, caption: TaggedCaption, seed: int = 0) -> Any:
    return getattr(strategies, strategy)(caption, random.Random(seed))


BIRDS = {
    "swap_animals": [
        ("animal1 has a black head . animal2 is larger .", "animal2 has a black head . animal1 is larger ."),
        ("animal1 and animal2 look the same .", None),
        ("animal1 , animal2 look alike . animal1 is larger .", "animal1 , animal2 look alike . animal2 is larger ."),
        ("both animal1 has animal2 .", None),
        ("the head is black .", None),
    ],
    "swap_animals_once": [("animal1 is larger than animal2 .", None)],
    "invert_comparison": [
        ("animal1 is larger than animal2", "animal1 is smaller than animal2"),
        ("animal1 has a different beak", "animal1 has the same beak"),
        ("animal1 and animal2 look the same", "animal1 and animal2 look different"),
        ("animal1 has the same beak", "animal1 has a different beak"),
        ("animal1 has the same wings", "animal1 has different wings"),
        ("animal1 is black", None),
    ],
    "swap_words": [
        ("animal1 has a black head and an orange beak", "animal1 has an orange head and a black beak"),
        ("animal1 is black and white", None),
        ("animal1 is black , animal2 is black", None),
        ("animal1 is black than speckled", None),  # a colour and something else
    ],
}
SCENES = {
    "swap_noun_phrases": [
        (
            "the red cube that is to the left of the tiny blue shiny ball was added",
            "the tiny blue shiny ball that is to the left of the red cube was added",
        ),
        (
            "the red cube that is on the right side of the gray block is in a different position",
            "the gray block that is on the right side of the red cube is in a different position",
        ),
        ("the big red cube that is behind the large red block moved", None),  # they mean the same
        ("the red cube is in a different position", None),
        ("the red cube became rubber", None),
        ("the two pictures are identical", None),
    ],
    "invert_change": [
        ("the red cube was added", "the red cube was removed"),
        ("the red cube disappeared", "the red cube appeared"),
        ("the red cube is gone", "the red cube is new"),
        ("there is a new red cube", "there is a missing red cube"),
        ("a new red cube appeared", "a new red cube disappeared"),
        ("the red cube was moved", "the red cube was removed"),
        ("the red cube moved elsewhere", "the red cube disappeared"),
        ("the red cube is in another position", "the red cube is in the same position"),
        ("the red cube has a different position", "the red cube has the same position"),
        ("the red cube became blue", "the blue cube became red"),
        ("the red metal cube changed its material to matte", "the red matte cube changed its material to metal"),
        ("the red cube became rubber", None),
        ("nothing is different", "something is different"),
        ("no object is different", "an object is different"),
        ("the scene stays the same", "the scene stays different"),
        ("everything is still in its place", "everything is no longer in its place"),
    ],
}
OTHERS = {
    "invert_change": [
        ("change it from red to blue", "change it from blue to red"),
        ("the car is no longer there", "the car is now there"),
        ("there are no visible differences", "there are some visible differences"),
        ("the scene is the same as before", "the scene is different from before"),
        ("no change was made", "a change was made"),
        ("nothing has moved", "something has moved"),
        ("both pictures show the same objects", "both pictures show different objects"),
        ("both pictures show the same scene", "both pictures show a different scene"),
        # The last word does not precede the first one.
        ("moved the red cube is", "disappeared the red cube is"),
        ("different places are there a", "the same places are there a"),
        ("same color as the", "different color as the"),
    ]
}


@pytest.mark.parametrize(
    ("strategy", "make", "text", "changed"),
    [
        (strategy, make, text, changed)
        for make, table in ((bird, BIRDS), (scene, SCENES), (nouns, OTHERS))
        for strategy, rows in table.items()
        for text, changed in rows
    ],
)
def test_a_strategy_changes_the_meaning_or_gives_nothing(
    strategy: str, make: Callable[[str], TaggedCaption], text: str, changed: str | None
) -> None:
    assert only(strategy, make(text)) == changed


def test_one_sentence_alone_is_exchanged() -> None:
    text = "animal1 is larger than animal2 . animal1 is darker than animal2 . the beak is black ."
    found = {only("swap_animals_once", bird(text), seed) for seed in range(20)}
    assert found == {
        "animal2 is larger than animal1 . animal1 is darker than animal2 . the beak is black .",
        "animal1 is larger than animal2 . animal2 is darker than animal1 . the beak is black .",
    }


@pytest.mark.parametrize("text", NO_CHANGE)
def test_every_sentence_of_no_change_has_a_reverse(text: str) -> None:
    inverted = only("invert_change", scene(text))
    assert inverted is not None and inverted not in NO_CHANGE


def test_the_ways_come_in_order_and_never_give_the_caption_back() -> None:
    text = "the red cube that is behind the tiny blue ball was added"
    found = list(confuse(scene(text), random.Random(0)))
    assert [name for name, _ in found][:2] == ["swap_noun_phrases", "reverse_change"]
    assert text not in [other for _, other in found]
    birds = "animal1 is larger than animal2 ."
    assert next(confuse(bird(birds), random.Random(0))) == ("swap_animals", "animal2 is larger than animal1 .")
