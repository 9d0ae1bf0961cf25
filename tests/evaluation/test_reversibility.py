"""Whether a caption of (after, before) is the inverse of that of (before, after)."""

import random

import pytest

from diffcap.datasets.no_change import CLEVR_CHANGE
from diffcap.evaluation.slots import check_reversible, reversibility
from diffcap.records import ChangePair
from diffcap.utils.errors import DiffcapError
from diffcap.worlds.blocks.captions import NO_CHANGE
from diffcap.worlds.blocks.captions import write_captions as write_blocks_captions
from diffcap.worlds.blocks.scenes import CHANGES, sample_triples
from diffcap.worlds.tiles.captions import write_captions
from diffcap.worlds.tiles.changes import sample_pair


def is_inverse(first: str, second: str) -> bool:
    one, other = ({"1": text} for text in (first, second))
    return reversibility(one, other, {"total": ["1"]})["total"]["inverse"] == 1


@pytest.mark.parametrize(
    ("first", "second", "inverse"),
    [
        ("the small red metal cube was added", "the tiny red shiny block is missing", True),
        ("the red cube was added", "the cube is missing", True),  # says less, nothing else
        ("the red cube was added", "the blue cube is missing", False),
        ("the red cube was added", "the red cube was added", False),
        ("the red cube turned blue", "the blue cube became red", True),
        ("the red cube turned blue", "the red cube became blue", False),
        ("the rubber ball is now shiny", "the metal ball has turned matte", True),
        ("the red cube moved", "the red cube is in another position", True),
        ("nothing is different", "the scene is the same as before", True),
        ("the cube", "the cube", False),  # of an unknown change
        ("two houses have been built next to the road", "some houses have been torn down", True),
        ("some trees have been cut down", "there are now many trees", True),
        ("the pond is no longer there", "a pond has formed", True),
        ("the red cube has been taken away", "the red cube has been newly placed", True),
        ("the tiny ball changed its location", "the tiny ball was moved from its original location", True),
    ],
)
def test_an_inverse_exchanges_what_the_order_of_the_images_exchanges(first: str, second: str, inverse: bool) -> None:
    assert is_inverse(first, second) is inverse and is_inverse(second, first) is inverse


def test_references_of_the_rendered_scenes_have_known_inverses() -> None:
    triples = sample_triples(range(60), seed=5)
    changes, unchanged = write_blocks_captions(triples, seed=5)
    for row, captions in enumerate(changes):
        kind = CHANGES[int(triples.change[row])]
        for caption in captions:
            assert is_inverse(caption, "it vanished") is (kind == "add"), caption
            assert is_inverse(caption, "it appeared") is (kind == "drop"), caption
            assert not is_inverse(caption, unchanged[row][0]), caption
    assert all(is_inverse(one, other) for one in NO_CHANGE for other in CLEVR_CHANGE)
    removals = ("houses_removed", "trees_cleared", "water_gone")
    for number in range(0, 96, 2):
        change = sample_pair(number, 3).change
        assert change
        for caption in write_captions(random.Random(number), change):
            if change.change_type != "ground_bared":  # "the grass has been removed" is its inverse, too
                second = "it has appeared" if change.change_type in removals else "it has disappeared"
                assert is_inverse(caption, second), caption


def test_captions_of_another_form_are_refused() -> None:
    captions = ["a cube was added"] * 9 + ["two men chat"] * 3
    pairs = [ChangePair(str(number), "a", "b", [caption], "test") for number, caption in enumerate(captions)]
    check_reversible(pairs[:10], "toy")
    for part, message in (
        (pairs, r"toy: the change type of only 9 of its 12 references.*EVAL=swap"),
        ([], "0 of its 0"),
    ):
        with pytest.raises(DiffcapError, match=message):
            check_reversible(part, "toy")
