"""What is read out of captions of the blocks grammar, and the shares that follow."""

import pytest

from diffcap.evaluation.slots import ATTRIBUTES, Slots, parse_caption, slot_accuracy, word_kinds
from diffcap.methods.vlm.model import PROMPT
from diffcap.records import ChangePair
from diffcap.worlds.blocks.captions import write_captions
from diffcap.worlds.blocks.geometry import COLORS, MATERIALS, SHAPES, SIZES
from diffcap.worlds.blocks.scenes import CHANGES, sample_triples


@pytest.mark.parametrize(
    ("caption", "slots"),
    [
        ("the large gray metal cube became red", Slots("color", "large", "gray", "metal", "cube", "red")),
        ("the tiny green matte ball turned shiny", Slots("material", "small", "green", "rubber", "sphere", "metal")),
        ("a big cyan shiny block appeared", Slots("add", "large", "cyan", "metal", "cube")),
        ("The yellow cylinder is missing.", Slots("drop", color="yellow", shape="cylinder")),
        (
            "the small red rubber cube that is left of the large blue metal sphere changed its location",
            Slots(None, "small", "red", "rubber", "cube"),  # "changed" and "location" belong to different types
        ),
        ("the small red rubber cube behind the metal sphere shifted", Slots("move", "small", "red", "rubber", "cube")),
        ("nothing has moved", Slots(None)),
        ("nothing has changed", Slots("none")),
        ("No. Nothing has changed.", Slots("none")),
        ("no object changed its color", Slots("none")),
        ("no other cube changed to red", Slots(None, shape="cube")),
        ("nothing is new but the cube changed", Slots(None, shape="cube")),
        ("the same cube is now blue", Slots(None, shape="cube")),
        ("the two images are identical", Slots("none")),
        ("the purple became blue", Slots("color", color="purple", to="blue")),
        ("the cube changed", Slots(None, shape="cube")),
        ("", Slots()),
        (PROMPT.rpartition("say: ")[2], Slots("none")),
    ],
)
def test_parse_reads_type_first_noun_phrase_and_new_value(caption: str, slots: Slots) -> None:
    assert parse_caption(caption) == slots


CHANGED = {"size": "large", "color": "gray", "material": "metal", "shape": "cube"}


def pair(id: str, change_type: str | None, to: str | None = None) -> ChangePair:
    extra = {} if change_type is None else {"changed": {**CHANGED, **({"to": to} if to else {})}}
    return ChangePair(id, "b", "a", ["x"], "test", change_type, change_type is None, extra)


PAIRS = [pair("1", "color", "red"), pair("2", "material", "rubber"), pair("3", "move")]
PAIRS += [pair("4", None), pair("5", None)]
PREDICTIONS = {
    "1": "the large gray metal cube became red",  # all right
    "2": "the gray block turned blue",  # wrong type and new value, short form
    "3": "the small gray metal cube was moved",  # wrong size
    "4": "no change was made",
    "5": "the large gray metal cube disappeared",  # a change seen where there is none
}


def test_shares_are_over_the_right_pairs() -> None:
    scores = slot_accuracy(PREDICTIONS, PAIRS)
    assert scores == pytest.approx(
        {
            "type": 3 / 5,
            "object": 1 / 3,
            "object_said": 2 / 3,
            **{"size": 1 / 3, "color": 1, "material": 2 / 3, "shape": 1},
            **{"size_said": 2 / 3, "color_said": 1, "material_said": 2 / 3, "shape_said": 1},
            "to": 1 / 2,
        }
    )
    assert slot_accuracy({"4": "the scene is still"}, [pair("4", None)]) == {"type": 1}


def test_every_caption_of_the_blocks_grammar_is_read_right() -> None:
    triples = sample_triples(range(100), seed=5)
    changes, unchanged = write_captions(triples, seed=5)
    read = []
    for row, captions in enumerate(changes):
        kind = CHANGES[int(triples.change[row])]
        scenes, slot = (triples.after if kind == "add" else triples.before), (row, int(triples.changed[row]))
        names = {"size": SIZES, "color": COLORS, "material": MATERIALS, "shape": SHAPES}
        truth = {name: values[getattr(scenes, name)[slot]] for name, values in names.items()}
        for caption in captions:
            slots = parse_caption(caption)
            read.append(slots)
            assert slots.change_type == kind, caption
            assert {slots.size, slots.material} <= {None, truth["size"], truth["material"]}, caption
            assert (slots.color, slots.shape) == (truth["color"], truth["shape"]), caption
            new_values = {"color": COLORS, "material": MATERIALS}.get(kind)
            assert slots.to == (new_values and new_values[int(triples.new_value[row])]), caption
    assert {parse_caption(caption) for captions in unchanged for caption in captions} == {Slots("none")}
    with_both = [slots for slots in read if slots.size is not None and slots.material is not None]
    assert len(with_both) > 0.75 * len(read)


def test_every_word_has_a_kind_and_the_kinds_say_what_the_slots_say() -> None:
    caption = "the big cyan shiny block that is behind the small red ball turned matte ."
    assert word_kinds(caption.split()) == [
        *("other", "size", "color", "material", "shape", "other", "other", "other", "other"),
        *("other object", "other object", "other object", "change", "new value", "other"),
    ]
    assert word_kinds(["a", "new", "Cube", "appeared"]) == ["other", "change", "shape", "change"]
    assert word_kinds(["the", "scene", "is", "the", "same"]) == ["other"] * 4 + ["change"] and word_kinds([]) == []
    changes, unchanged = write_captions(sample_triples(range(60), seed=5), seed=5)
    for captions in [*changes, *unchanged]:
        for caption in captions:
            predictions, kinds = parse_caption(caption), word_kinds(caption.split())
            assert len(kinds) == len(caption.split())
            assert {name for name in ATTRIBUTES if getattr(predictions, name)} == {*kinds} & {*ATTRIBUTES}
            assert (predictions.to is not None) == ("new value" in kinds)
