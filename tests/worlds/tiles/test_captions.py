"""Every word of a caption that states something is compared with the scene."""

import random
import re
from functools import cache

import numpy as np
import pytest

from diffcap.text.tagging import tag_sentences
from diffcap.worlds.tiles.captions import LEXICON, NO_CHANGE, NUMERALS, write_captions
from diffcap.worlds.tiles.changes import sample_pair
from diffcap.worlds.tiles.geometry import distance_to_line, outline_points
from diffcap.worlds.tiles.render import change_mask
from diffcap.worlds.tiles.scenes import ROOF_COLORS

KINDS = {
    "houses_built": ("built|appear|constructed|now", "house|building"),
    "houses_removed": ("demolished|removed|disappear|torn down|gone", "house|building"),
    "road_built": ("built|appear|constructed|now", "road"),
    "trees_cleared": ("cleared|cut down|removed|gone|disappeared", "tree|forest|woodland"),
    "trees_grown": ("grown|planted|appear|now", "tree|forest|woodland"),
    "water_appeared": ("appear|formed|created|added|now", "pond|lake"),
    "water_gone": ("disappear|gone|vanished|no longer|dried|dry", "pond|lake"),
    "ground_bared": ("appear|exposed|removed|cleared|bare", "bare|vegetation|grass"),
}


@cache
def described():
    """(pair, caption) of 160 changed pairs, with 15 captions each."""
    pairs = [sample_pair(number, seed=1) for number in range(0, 320, 2)]
    return [
        (pair, caption)
        for index, pair in enumerate(pairs)
        for draw in range(3)
        for caption in write_captions(random.Random(f"{index} {draw}"), pair.change)
    ]


def subject_of(caption):
    """The words before the verb, without a place at the beginning."""
    return re.split(r" (?:has|have|is|are|was|were|appears?|disappears?) ", f"{caption} ")[0]


def test_form_verb_and_noun():
    assert write_captions(random.Random(0), None) == list(NO_CHANGE)
    for pair, caption in described():
        assert re.fullmatch(r"[a-z]+( [a-z]+)*", caption) and 3 <= len(caption.split()) <= 24
        assert set(caption.split()) <= LEXICON.keys()
        assert caption not in NO_CHANGE
        verbs, nouns = KINDS[pair.change.change_type]
        assert re.search(rf"\b(?:{verbs})", caption), (pair.change.change_type, caption)
        assert re.search(rf"\b(?:{nouns})", caption), (pair.change.change_type, caption)


def test_numbers_and_quantities_are_true():
    found = set()
    for pair, caption in described():
        change = pair.change
        count = len(change.present.houses) or len(change.present.trees)
        words = subject_of(caption.replace("on one side of the road ", "")).split()
        if change.noun in ("house", "building", "trees"):
            for word in words:
                if word in NUMERALS:
                    assert NUMERALS[count] == word, caption
                    found.add(word)
            assert "many" not in words or count >= 6
            assert "several" not in words or count >= 3
            assert "some" not in words or count >= 2
            assert not re.search(r"\b(a|the) (new )?(house|building)\b(?! with)", " ".join(words)) or count == 1
            assert "row" not in words or change.arrangement == "row"
            assert "rows" not in words or change.arrangement == "block"
        if re.search(r"\b(large|big) building", caption):
            assert change.present.houses[0].length > 35
        if "roof" in words:
            color = words[words.index("roof") - 1]
            assert color == ROOF_COLORS[change.present.houses[0].roof]
        if "dirt" in words or "paved" in words:
            assert ("paved" in words) == change.present.roads[0].is_paved
        if re.search("dried|dry", caption):
            assert change.absent.zones[0].surface == "mud"
        if caption.startswith("the ") and change.noun in ("pond", "lake"):
            assert len(pair.before.ponds) == 1
    assert len(found) > 6


def test_positions_are_true():
    told = set()
    for pair, caption in described():
        mask = change_mask(pair.change, pair.after) > 0
        y, x = (values.mean() / 256 for values in np.nonzero(mask))
        place = re.search(
            r"\b(?:in|on|at) the (middle|center|(?:(?:upper|lower|top|bottom)(?: left| right)?)|left|right)\b", caption
        )
        if place is None:
            continue
        assert pair.change.noun != "road"
        words = place[1].split()
        told.update(words)
        if words[0] in ("middle", "center"):
            assert 0.33 < x < 0.67 and 0.33 < y < 0.67, (caption, x, y)
        for word in words:
            if word in ("upper", "top"):
                assert y < 0.45, (caption, y)
            if word in ("lower", "bottom"):
                assert y > 0.55, (caption, y)
            if word == "left":
                assert x < 0.45, (caption, x)
            if word == "right":
                assert x > 0.55, (caption, x)
        if "corner" in caption:
            assert max(min(x, 1 - x), min(y, 1 - y)) < 0.33
    assert told == {"middle", "center", "upper", "lower", "top", "bottom", "left", "right"}


def test_relations_are_true():
    told = set()
    for pair, caption in described():
        change = pair.change
        if change.noun == "road":
            continue
        scene = pair.after if change.is_in_before else pair.before  # without the changed objects
        objects = [outline_points(polygon, 3) for polygon in change.polygons()]
        targets = {
            r"\b(?:road)\b": [(road.line, road.width) for road in scene.roads],
            r"\briver\b": [(river.line, river.width) for river in scene.rivers],
            r"(?:near the|next to the) pond|close to the water": [((*pond, pond[0]), 0) for pond in scene.ponds],
            r"(?:near|close to|next to) the houses": [((*h.footprint, h.footprint[0]), 0) for h in scene.houses],
            r"(?:next to|near|at the edge of) the (?:forest|trees)\b": [
                ((*zone.polygon, zone.polygon[0]), 0) for zone in scene.zones if zone.surface == "forest"
            ],
        }
        for words, lines in targets.items():
            if re.search(words, caption):
                told.add(words)
                for points in objects:
                    gaps = [distance_to_line(points, line).min() - width / 2 for line, width in lines]
                    assert min(gaps) < 25, caption
        if re.search("fields|farmland|cultivated", caption):
            told.add("fields")
            for points in objects:
                assert all(
                    any(_contains(zone, point) for zone in scene.zones if zone.surface == "field") for point in points
                )
        if re.search("on the grass(land)?", caption):
            told.add("grass")
            for points in objects:
                unchanged = [zone for zone in scene.zones if zone not in change.absent.zones]
                assert not any(_contains(zone, point) for zone in unchanged for point in points), caption
    assert len(told) == 7


def _contains(zone, point):
    """Whether a point is inside of a zone: the number of edges to its right is odd."""
    inside, (px, py) = False, point
    for (x0, y0), (x1, y1) in zip(zone.polygon, (*zone.polygon[1:], zone.polygon[0])):
        if (y0 > py) != (y1 > py) and px < x0 + (py - y0) / (y1 - y0) * (x1 - x0):
            inside = not inside
    return inside


@pytest.mark.slow
def test_the_tagger_that_ships_knows_them() -> None:
    sentences = sorted({caption for _, caption in described()})[::10]
    tags = tag_sentences(sentences, "tiles", workers=1)
    right = [found == LEXICON[word] for text in sentences for found, word in zip(tags[text], text.split(), strict=True)]
    assert len(right) > 300 and sum(right) / len(right) > 0.98
