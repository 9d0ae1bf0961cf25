"""The captions of `tiles`: sentences of a small grammar that state true facts of a change, in the style of LEVIR-CC.

A caption has a subject (what has changed, sometimes with its number or color), a verb phrase, and none to two phrases of place: where it is
relative to things that have not changed, and where it is in the image. Captions are lower-case and have no punctuation.
"""

from random import Random

from diffcap.datasets.no_change import LEVIR_CC
from diffcap.worlds.tiles.changes import Change, location_of
from diffcap.worlds.tiles.geometry import bounding_box
from diffcap.worlds.tiles.scenes import ROOF_COLORS, SIZE, House, Layer

NO_CHANGE = LEVIR_CC  # the sentences of every pair without change, in the order of LEVIR-CC's file
NUMERALS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")

# `Change.noun` (kind of the changed objects) -> subjects of a sentence, which begin with "s:" if they are singular, "p:" if plural.
_SUBJECTS = {
    "trees": ("p:some trees", "p:several trees", "s:a group of trees", "p:some trees"),
    "forest": (
        "s:a small forest",
        "s:a patch of forest",
        "p:many trees",
        "s:a group of trees",
        "s:a piece of woodland",
    ),
    "clearing": ("s:a part of the forest", "p:some trees of the forest", "s:a piece of the forest", "p:many trees"),
    "ground": ("s:a bare area", "s:an area of bare ground", "s:bare land", "s:bare ground", "s:a patch of bare soil"),
}
_BUILT_VERB_PHRASES = (
    "{has} been built",
    "{has} been built",  # twice, to choose it more often
    "{is} built",
    "{was} built",
    "{has} appeared",
    "{appear}",
    "{has} been constructed",
)
# Type of the change -> verb phrases; words in braces are replaced by forms from `_VERB_FORMS`.
_VERB_PHRASES = {
    "houses_built": (*_BUILT_VERB_PHRASES, "{is} constructed"),
    "houses_removed": (
        "{has} been demolished",
        "{has} been removed",
        "{was} demolished",
        "{is} removed",
        "{has} disappeared",
        "{disappear}",
        "{has} been torn down",
        "{is} gone",
    ),
    "road_built": _BUILT_VERB_PHRASES,
    "trees_cleared": (
        "{has} been cleared",
        "{has} been cut down",
        "{has} been removed",
        "{is} removed",
        "{was} cut down",
        "{is} gone",
        "{has} disappeared",
    ),
    "trees_grown": ("{has} grown", "{has} been planted", "{is} planted", "{has} appeared", "{appear}", "{was} planted"),
    "water_appeared": (
        "{has} appeared",
        "{appear}",
        "{has} formed",
        "{has} been created",
        "{has} been added",
        "{is} formed",
    ),
    "water_gone": ("{has} disappeared", "{is} gone", "{has} vanished", "{disappear}", "{is} no longer there"),
    "ground_bared": ("{has} appeared", "{appear}", "{has} been exposed"),
}
_DRIED_VERB_PHRASES = ("{has} dried up", "{has} dried out", "{is} dry now")
_VEGETATION_VERB_PHRASES = (
    "{has} been removed",
    "{is} removed",
    "{has} been cleared",
    "{has} been replaced by bare ground",
    "{has} turned into bare land",
)

_VERB_FORMS = {  # singular, plural
    "has": ("has", "have"),
    "is": ("is", "are"),
    "was": ("was", "were"),
    "appear": ("appears", "appear"),
    "disappear": ("disappears", "disappear"),
}

# Entry of `Change.relations` or `Change.details` -> phrases of place; below, those of a row of houses ("road"), and those of a road.
_RELATION_PHRASES = {
    "road": ("next to the road", "beside the road", "near the road", "by the road"),
    "river": ("near the river", "close to the river", "by the river"),
    "pond": ("near the pond", "close to the water", "next to the pond"),
    "forest": ("next to the forest", "near the forest", "at the edge of the forest", "near the trees"),
    "houses": ("near the houses", "close to the houses", "next to the houses"),
    "fields": ("in the fields", "on the farmland", "on the cultivated land"),
    "grass": ("on the grass", "on the grassland"),
    "forest inside": ("in the forest", "in the woods"),
}
_ROW_RELATION_PHRASES = ("along the road", "along the road", "on one side of the road", "next to the road")
_ROAD_RELATION_PHRASES = {
    "fields": ("through the fields", "across the farmland", "through the farmland"),
    "forest inside": ("through the forest", "through the woods"),
    "houses": ("near the houses", "close to the houses"),
    "joins": ("that joins the old road", "that meets the existing road"),
    "horizontal": ("from the left to the right", "from left to right"),
    "vertical": ("from the top to the bottom", "from top to bottom"),
}
_SCENE_PHRASES = ("of the scene", "of the image", "of the area")
_ADJECTIVES = {"top": "upper", "bottom": "lower"}

# Universal part-of-speech tag (UPOS) -> words.
_WORDS_OF_TAG = {
    "ADJ": "bare big blue brown cultivated dark dry existing gray identical large many new old paved red same several small white upper "
    "lower",
    "ADP": "across along as at before beside by from in into near of on through to with close next",
    "ADV": "almost down longer now out there up",
    "AUX": "are been has have is was were",
    "DET": "a an no some that the",
    "NOUN": "area block bottom building buildings center change corner difference dirt edge farmland fields forest grass grassland "
    "ground group house houses image lake land left middle part patch piece pond right river road roof row rows scene scenes side soil "
    "top trees vegetation water woodland woods",
    "NUM": "one two three four five six seven eight nine ten eleven twelve",
    "PRON": "nothing",
    "VERB": "appear appeared appears built changed cleared constructed created cut added demolished disappear disappeared disappears "
    "dried exposed formed gone grown joins meets occurred planted removed replaced seem torn turned vanished",
}
# A word has the same tag in all captions of `tiles`.
LEXICON = {word: tag for tag, words in _WORDS_OF_TAG.items() for word in words.split()}


def write_captions(rng: Random, change: Change | None) -> list[str]:
    """Write five captions of a pair, of which few are equal. If `change` is None (no change), return the sentences of `NO_CHANGE`."""
    if change is None:
        return list(NO_CHANGE)
    captions: list[str] = []
    for _ in range(5):
        for _ in range(3):  # tries, until the sentence is new
            sentence = _write_sentence(rng, change)
            if sentence not in captions:
                break
        captions.append(sentence)
    return captions


def describe(scene: Layer, number: int, seed: int = 0, max_things: int = 3) -> str:
    """Describe one image by a sentence that names up to `max_things` of its things in random order.

    Houses with the same location (`location_of`) are one thing: "two houses on the left". The number of the
    image (`number`) and `seed` determine the choices.
    """
    rng = Random(f"tiles description {seed} {number}")
    houses_by_location: dict[str, list[House]] = {}
    for house in scene.houses:
        if all(0 <= value < SIZE for value in house.center):
            houses_by_location.setdefault(location_of(bounding_box([house.footprint])), []).append(house)
    phrases = []
    for location, houses in houses_by_location.items():
        if len(houses) == 1:
            phrases.append(_with_position(rng, f"a house with a {ROOF_COLORS[houses[0].roof]} roof", location))
        else:
            count = NUMERALS[len(houses)] if len(houses) < len(NUMERALS) else "many"
            phrases.append(_with_position(rng, f"{count} houses", location))
    areas = [("a pond", pond) for pond in scene.ponds]
    area_names = {"forest": "a forest", "bare": "an area of bare ground"}
    areas += [(area_names[zone.surface], zone.polygon) for zone in scene.zones if zone.surface in area_names]
    for name, polygon in areas:
        x0, y0, x1, y1 = bounding_box([polygon])
        box = max(x0, 0), max(y0, 0), min(x1, SIZE), min(y1, SIZE)
        if min(box[2] - box[0], box[3] - box[1]) >= 24:  # pixels; smaller areas are not named
            phrases.append(_with_position(rng, name, location_of(box)))
    phrases += ["a river"] * bool(scene.rivers)
    phrases += sorted({"a paved road" if road.is_paved else "a dirt road" for road in scene.roads})
    phrases += ["fields"] * any(zone.surface == "field" for zone in scene.zones)
    return " and ".join(rng.sample(phrases, min(max_things, len(phrases)))) or "grassland"


def _with_position(rng: Random, thing: str, location: str) -> str:
    """Return a thing with its location, for example "a pond on the left side". If `location` is "", return the thing alone."""
    return f"{thing} {_choose_position(rng, location).partition(' of the ')[0]}" if location else thing


def _write_sentence(rng: Random, change: Change) -> str:
    subject, verbs = _choose_subject(rng, change)
    is_plural, subject = subject.startswith("p:"), subject[2:]
    phrases = _ROAD_RELATION_PHRASES if change.noun == "road" else _RELATION_PHRASES
    relations = [relation for relation in (*change.relations, *change.details) if relation in phrases]
    relations = [relation for relation in relations if not (change.noun == "clearing" and relation == "forest inside")]
    places = []  # none to two phrases: first the place relative to other things, then the place in the image
    if relations and rng.random() < 0.6:
        relation = rng.choice(relations)
        is_row_along_road = change.arrangement == "row" and relation == "road"
        places.append(rng.choice(_ROW_RELATION_PHRASES if is_row_along_road else phrases[relation]))
    if change.location and rng.random() < (0.4 if places else 0.75):
        places.append(_choose_position(rng, change.location))
    clause = next((place for place in places if place.startswith("that ")), None)
    if clause:
        places.remove(clause)
        subject = f"{subject} {clause}"
    draw = rng.random()
    has_appeared = change.change_type in ("houses_built", "road_built", "trees_grown", "water_appeared")
    if draw < 0.12 and has_appeared and not subject.startswith("the "):
        return " ".join([f"there {_VERB_FORMS['is'][is_plural]} now {subject}", *places])
    verb = rng.choice(verbs).format(**{name: forms[is_plural] for name, forms in _VERB_FORMS.items()})
    if draw < 0.24 and places and not places[0].startswith(("from", "through", "across")):
        return " ".join([places[0], subject, verb, *places[1:]])
    return " ".join([subject, verb, *places])


def _choose_subject(rng: Random, change: Change) -> tuple[str, tuple[str, ...]]:
    """Choose a subject, which begins with "s:" or "p:"; return it with the verb phrases that it may have."""
    verbs = _VERB_PHRASES[change.change_type]
    if change.noun in ("house", "building"):
        return _choose_house_subject(rng, change), verbs
    if change.noun == "road":
        surface = {"paved": "paved road", "dirt": "dirt road"}[change.details[0]]
        return rng.choice(("s:a road", "s:a road", "s:a new road", f"s:a {surface}", f"s:a new {surface}")), verbs
    if change.noun in ("pond", "lake"):
        nouns = ("lake", "large pond") if change.noun == "lake" else ("pond", "pond", "small lake")
        article = rng.choice(("the", "the", "a")) if "only" in change.details and change.is_in_before else "a"
        new = "new " if change.change_type == "water_appeared" and rng.random() < 0.2 else ""
        verbs += _DRIED_VERB_PHRASES * 2 if "mud" in change.details else ()  # twice, to choose them more often
        return f"s:{article} {new}{rng.choice(nouns)}", verbs
    if change.noun == "trees" and change.count < len(NUMERALS) and rng.random() < 0.15:
        return f"p:{NUMERALS[change.count]} trees", verbs
    if change.noun == "ground" and "grass" in change.relations and rng.random() < 0.35:
        return rng.choice(("s:the vegetation", "s:the grass")), _VEGETATION_VERB_PHRASES
    return rng.choice(_SUBJECTS[change.noun]), verbs


def _choose_house_subject(rng: Random, change: Change) -> str:
    count, is_new = change.count, change.change_type == "houses_built"
    new = "new " if is_new and rng.random() < 0.2 else ""
    if change.arrangement == "single":
        color = change.details[0]
        nouns = ("house", "house", "building") if change.noun == "house" else ("large building", "big building")
        noun = rng.choice(nouns)
        article = "the" if not is_new and rng.random() < 0.2 else "a"
        roof = f" with a {color} roof" if rng.random() < 0.2 else ""
        return f"s:{article} {new}{noun}{roof}"
    noun = rng.choice(("houses", "houses", "houses", "buildings"))
    number_words = [NUMERALS[count], NUMERALS[count], "some" if count < 6 else "many"]
    number_words += ["several"] if count > 2 else []
    if change.arrangement == "row" and rng.random() < 0.6:
        number = NUMERALS[count]
        subjects = (f"s:a row of {new}{noun}", f"s:a row of {number} {noun}", f"p:{number} {new}{noun} in a row")
        return rng.choice(subjects)
    if change.arrangement == "block" and rng.random() < 0.5:
        return rng.choice((f"s:a block of {new}{noun}", f"s:a group of {new}{noun}", f"p:rows of {new}{noun}"))
    return f"p:{rng.choice(number_words)} {new}{noun}"


def _choose_position(rng: Random, location: str) -> str:
    """Choose a phrase for a location such as "top left" or "top left corner"."""
    place = location.removesuffix(" corner")
    suffix = rng.choice(_SCENE_PHRASES)
    if place == "middle":
        return rng.choice(("in the middle", f"in the middle {suffix}", f"in the center {suffix}"))
    if place in ("left", "right"):
        side = f"on the {place}"
        return rng.choice((side, f"{side} side", f"{side} {suffix}", f"{side} side {suffix}"))
    if place in ("top", "bottom"):
        return rng.choice((f"at the {place}", f"at the {place} {suffix}", f"in the {_ADJECTIVES[place]} part {suffix}"))
    vertical, horizontal = place.split()
    part = f"in the {rng.choice((vertical, _ADJECTIVES[vertical]))} {horizontal}"
    if location.endswith(" corner") and rng.random() < 0.6:
        return rng.choice((f"{part} corner", f"{part} corner {suffix}"))
    return rng.choice((part, f"{part} part", f"{part} part {suffix}"))
