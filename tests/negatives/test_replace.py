import random
from collections import Counter

from diffcap.negatives.replace import WordPool, most_informative_words, replace_words
from diffcap.negatives.retrieve import inverse_document_frequencies
from diffcap.negatives.words import TaggedCaption, attribute_of, is_replaceable, make_tagged_caption, synonym_key
from diffcap.worlds.blocks.captions import LEXICON


def scene(text: str) -> TaggedCaption:
    return make_tagged_caption(text, {text: [LEXICON[word] for word in text.split()]})


def tagged(*pairs: str) -> TaggedCaption:
    words, tags = zip(*(pair.split("/") for pair in pairs))
    return make_tagged_caption(" ".join(words), {" ".join(words): list(tags)})


SCENES = [
    scene(f"the {size} {color} {material} {shape} was added")
    for size in ("large", "tiny")
    for color in ("red", "blue", "green", "cyan", "gray")
    for material in ("rubber", "shiny")
    for shape in ("cube", "ball", "cylinder")
]
POOL, IDF = WordPool(SCENES), inverse_document_frequencies(SCENES)


def test_the_top_half_by_tfidf_is_chosen() -> None:
    idf = {"rare": 3.0, "usual": 2.0, "common": 1.0, "twice": 1.6, "swims": 9.0}
    words = ["rare/ADJ", "usual/NOUN", "swims/VERB", "common/NOUN", "twice/ADJ", "twice/ADJ"]
    assert most_informative_words(tagged(*words), idf) == ["twice", "rare"]  # 2 x 1.6 and 3; verbs are no candidates
    assert most_informative_words(tagged("rare/ADJ", "usual/NOUN", "common/NOUN"), idf) == ["rare", "usual"]
    assert most_informative_words(tagged("the/DET", "scene/NOUN", "animal1/NOUN"), idf) == []


def test_replaced_words_keep_their_tag_and_say_something_new() -> None:
    source = scene("the large red rubber cube was added")
    output = frozenset(source.content)
    texts = {replace_words(source, IDF, POOL, output, random.Random(seed)) for seed in range(50)}
    assert len(texts) > 5
    for text in texts:
        assert text is not None
        words = text.split()
        changed = [(old, new) for old, new in zip(source.words, words) if old != new]
        assert 1 <= len(changed) <= 2 and words[-2:] == ["was", "added"]
        for old, new in changed:
            assert old in most_informative_words(source, IDF)
            assert LEXICON[new] == LEXICON[old]
            assert attribute_of(new) == attribute_of(old) and synonym_key(new) != synonym_key(old)
        assert not set(map(synonym_key, words)) <= output | {"the", "was"}


def test_synonyms_are_never_drawn() -> None:
    source, idf = scene("the large red rubber cube was added"), inverse_document_frequencies(SCENES)
    pool = WordPool([scene("the big red matte block was added")] * 9)
    assert replace_words(source, idf, pool, frozenset(source.content), random.Random(0)) is None


def test_words_are_drawn_as_often_as_captions_use_them() -> None:
    pool = WordPool([scene(f"the {color} cube moved") for color in (*["red"] * 6, *["green"] * 3, "blue")])
    rng = random.Random(0)
    drawn = Counter(pool.sample_matched("gray", "ADJ", frozenset(), rng) for _ in range(2000))
    assert abs(drawn["red"] - 1200) < 120 and abs(drawn["green"] - 600) < 100 and abs(drawn["blue"] - 200) < 70


def test_uniform_words_are_other_words_of_the_tag_all_equally_likely() -> None:
    """Neither frequency nor kind nor meaning counts; "the", "scene" and "new" are never drawn."""
    others = [scene("the large shiny block in the scene moved"), scene("a new tiny ball appeared")]
    pool = WordPool([scene("the red cube moved")] * 90 + others)
    rng, count = random.Random(0), 20_000
    drawn = Counter(pool.sample_uniform("large", "ADJ", rng) for _ in range(count))
    assert set(drawn) == {"red", "shiny", "tiny"}
    assert sum((each - count / 3) ** 2 / (count / 3) for each in drawn.values()) < 13.8  # chi-square, p = 0.001
    assert {pool.sample_uniform("cube", "NOUN", rng) for _ in range(200)} == {"block", "ball"}
    assert pool.sample_uniform("moved", "VERB", rng) is None


def test_uniform_replacement_has_only_the_tag_in_common() -> None:
    source = scene("the large red rubber cube was added")
    texts = {replace_words(source, IDF, POOL, None, random.Random(seed)) for seed in range(300)}
    places: dict[int, set[str]] = {}
    for text in texts:
        assert text is not None
        for index, (old, new) in enumerate(zip(source.words, text.split(), strict=True)):
            if old != new:
                places.setdefault(index, set()).add(new)
    adjectives = {"large", "tiny", "red", "blue", "green", "cyan", "gray", "shiny"}
    nouns = {"rubber", "cube", "ball", "cylinder"}
    expected = {source.words.index(word): (adjectives if word == "red" else nouns) - {word}
                for word in most_informative_words(source, IDF)}  # fmt: skip
    assert places == expected
    pool = WordPool([scene("the red cube was added")])
    assert replace_words(scene("the red cube was added"), IDF, pool, None, random.Random(0)) is None


BIRDS = [
    *[tagged("birds/NOUN", "have/VERB", "an/DET", "orange/ADJ", "wing/NOUN")] * 40,
    *[tagged("a/DET", "larger/ADJ", "beak/NOUN", "than/ADP", "feathers/NOUN")] * 40,
    *[tagged("a/DET", "longer/ADJ", "tail/NOUN", "than/ADP", "legs/NOUN")] * 40,
    tagged("a/DET", "white/ADJ", "wnig/NOUN"),
]


def test_inflections_and_articles_are_kept() -> None:
    pool, rng = WordPool(BIRDS), random.Random(0)
    assert {pool.sample_matched("feathers", "NOUN", frozenset({"feathers"}), rng) for _ in range(20)} == {"legs"}
    assert {pool.sample_matched("larger", "ADJ", frozenset({"larger"}), rng) for _ in range(20)} == {"longer"}
    text = replace_words(tagged("an/DET", "orange/ADJ", "eye/NOUN"), {"color:orange": 2.0}, pool, frozenset(), rng)
    assert text == "a white eye"


def test_rare_words_are_not_drawn_from_a_big_corpus() -> None:
    avoid, rng = frozenset({"beak", "tail", "wing"}), random.Random(0)
    assert WordPool(BIRDS).sample_matched("beak", "NOUN", avoid, rng) == "wnig"  # one in 121 captions
    assert WordPool(BIRDS + BIRDS[:120] * 9).sample_matched("beak", "NOUN", avoid, rng) is None  # one in 1,201
    pool = WordPool(BIRDS * 5 + BIRDS[:120] * 99)
    assert pool.sample_matched("beak", "NOUN", avoid, rng) == "wnig"  # five are enough


def test_words_that_are_mostly_something_else_are_not_drawn() -> None:
    verbs = [tagged("birds/NOUN", "perch/VERB")] * 3 + [tagged("a/DET", "perch/NOUN")] * 2
    for captions, avoid, expected in ((verbs, (), "beak"), (verbs[2:], ("beak",), "perch")):
        pool, others = WordPool([*BIRDS, *captions]), frozenset({"tail", "wing", "wnig", *avoid})
        assert pool.sample_matched("beak", "NOUN", others, random.Random(0)) == expected


def test_frame_words_animals_and_words_of_change_stay() -> None:
    for word in ("scene", "animal1", "animal2s", "1animal2", "same", "missing", "new", "position", "of"):
        assert not is_replaceable(word, "NOUN")
    assert is_replaceable("cube", "NOUN") and is_replaceable("red", "ADJ") and not is_replaceable("red", "VERB")
