import math
import re

import pytest

from diffcap.worlds.blocks import captions as grammar
from diffcap.worlds.blocks.captions import LEXICON, RELATION_PHRASES, RELATION_PROBABILITY, SYNONYMS, write_captions
from diffcap.worlds.blocks.geometry import COLORS, MATERIALS, SHAPES, SIZES
from diffcap.worlds.blocks.scenes import CHANGES, sample_triples

# What tells the kinds of change apart; color and material share theirs, and differ by the last word.
KEYS = {
    "add": {"added", "appeared", "new", "introduced"},
    "drop": {"removed", "disappeared", "missing", "gone", "vanished"},
    "move": {"moved", "shifted", "relocated", "position", "location", "elsewhere"},
    "none": {"no", "nothing", "same", "identical", "unchanged", "still"},
    "turn": {"became", "turned", "changed", "now"},
}
VALUE = {word: value for value, words in SYNONYMS.items() for word in words} | {color: color for color in COLORS}
OBJECT = re.compile(
    r"(?:(large|big|small|tiny) )?(gray|red|blue|green|brown|purple|cyan|yellow) "
    r"(?:(rubber|matte|metal|metallic|shiny) )?(cube|block|sphere|ball|cylinder)"
)


@pytest.fixture(scope="module")
def triples():
    return sample_triples(range(400), seed=2)


@pytest.fixture(scope="module")
def output(triples):
    return write_captions(triples, seed=2)


def test_every_word_has_one_tag_and_every_entry_is_used(output):
    written = [word for words in grammar._WORDS_OF_TAG.values() for word in words.split()]
    assert len(written) == len(set(written)) == len(LEXICON)
    used = set()
    scenes = sample_triples(range(20)).before
    described = grammar.describe(scenes, scenes.valid, range(20))
    for caption in [*(caption for captions in output[0] + output[1] for caption in captions), *described]:
        assert re.fullmatch(r"[a-z]+( [a-z]+)*", caption)
        used |= set(caption.split())
    assert used == set(LEXICON)
    tags = [LEXICON[word] for word in "the big red ball moved".split()]  # noqa: SIM905
    assert tags == ["DET", "ADJ", "ADJ", "NOUN", "VERB"]


def test_key_words_tell_the_kind_of_change(triples, output):
    for row, (change, none) in enumerate(zip(*output)):
        kind = CHANGES[triples.change[row]]
        for caption in change + none:
            expected = "none" if caption in none else "turn" if kind in ("color", "material") else kind
            assert [name for name, keys in KEYS.items() if keys & set(caption.split())] == [expected], caption


def test_the_first_noun_phrase_is_the_changed_object_before_the_change(triples, output):
    short = total = 0
    for row, captions in enumerate(output[0]):
        kind = CHANGES[triples.change[row]]
        scenes = triples.after if kind == "add" else triples.before
        objects = _objects(scenes, row)
        changed = objects[int(triples.changed[row])]
        for caption in captions:
            phrase = OBJECT.search(caption)
            assert re.match(r"(the|a|a new|there is a new) $", caption[: phrase.start()])
            values = [VALUE.get(word) for word in phrase.groups()]
            assert all(value in (None, true) for value, true in zip(values, changed)), (caption, changed)
            fits = [other for other in objects.values() if all(v in (None, o) for v, o in zip(values, other))]
            assert fits == [changed], caption  # no other object answers to it
            assert values[1] and values[3] and (values[0] is None) == (values[2] is None)
            short, total = short + (values[0] is None), total + 1
            if kind in ("color", "material"):
                names = COLORS if kind == "color" else MATERIALS
                assert VALUE[caption.split()[-1]] == names[triples.new_value[row]]
                assert VALUE[caption.split()[-1]] != changed[1 if kind == "color" else 2]
    assert 0.12 < short / total < 0.2


def test_relations_hold_in_every_picture_where_the_object_stands(triples, output):
    names = {words: name for name, forms in RELATION_PHRASES.items() for words in forms}
    clause = re.compile(f"that is ({'|'.join(names)}) the ({OBJECT.pattern})")
    seen = dict.fromkeys(RELATION_PHRASES, 0)
    total = 0
    for row, captions in enumerate(output[0]):
        slot = int(triples.changed[row])
        stands = [scenes for scenes in (triples.before, triples.after) if scenes.valid[row, slot]]
        for caption in captions:
            total += 1
            found = clause.search(caption)
            assert (found is None) == (" that " not in caption)
            if found is None:
                continue
            other = tuple(VALUE[word] for word in found.groups()[2:])
            for scenes in stands:
                slots = [k for k, values in _objects(scenes, row).items() if values == other and k != slot]
                assert len(slots) == 1, caption  # it names exactly one other object
                right, away = _from(scenes, row, slots[0], slot)
                distance = {"left": -right, "right": right, "front": -away, "behind": away}[names[found[1]]]
                assert distance > 0.45 and distance > 0.57 * math.hypot(right, away), caption
            seen[names[found[1]]] += 1
    assert min(seen.values()) > 25
    assert 0.6 * RELATION_PROBABILITY < sum(seen.values()) / total < 1.2 * RELATION_PROBABILITY


def _objects(scenes, row):
    columns = (scenes.size, scenes.color, scenes.material, scenes.shape)
    return {
        slot: tuple(names[column[row, slot]] for names, column in zip((SIZES, COLORS, MATERIALS, SHAPES), columns))
        for slot in scenes.valid[row].nonzero().flatten().tolist()
    }


def _from(scenes, row, other, slot):
    """How far `slot` stands to the right of `other` and behind it, on the ground, as the camera looks."""
    ex, ey, _ = scenes.eye[row].tolist()
    tx, ty, _ = scenes.target[row].tolist()
    bearing = math.atan2(ty - ey, tx - ex)
    (x, y), (ox, oy) = scenes.position[row, slot].tolist(), scenes.position[row, other].tolist()
    dx, dy = x - ox, y - oy
    return dx * math.sin(bearing) - dy * math.cos(bearing), dx * math.cos(bearing) + dy * math.sin(bearing)
