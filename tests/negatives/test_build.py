import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from diffcap.negatives.build import Builder, Recipe
from diffcap.negatives.file import CaptionNegatives, write_negatives
from diffcap.negatives.words import attribute_of, normalize_caption, sentence_texts, synonym_key
from diffcap.records import ChangePair, read_manifest
from diffcap.utils.errors import DiffcapError
from diffcap.worlds.blocks.captions import NO_CHANGE, tag

FIXTURES = Path(__file__).with_name("fixtures")
ENDS = (
    "was added",
    "appeared",
    "was removed",
    "is gone",
    "moved",
    "has a different position",
    "became cyan",
    "is now matte",
)


def scenes(count: int, seed: int = 0) -> list[ChangePair]:
    """Pairs like those of blocks: references in words of their own, and a distractor for every change."""
    rng = random.Random(seed)
    pairs = []
    for number in range(count):
        size, color = rng.choice(("large", "small")), rng.choice(("red", "blue", "green", "gray"))
        shape, end = rng.choice((("cube", "block"), ("sphere", "ball"))), rng.randrange(4)
        references = [
            f"The {size} {color} metal {shape[0]} {ENDS[2 * end]}.",
            f"the {color} {shape[1]} {ENDS[2 * end + 1]}",
            f"the {size} {color} shiny {shape[1]} that is behind the tiny purple rubber cylinder {ENDS[2 * end]}",
        ]
        pairs.append(ChangePair(f"{number}.png", f"{number}", f"{number}b", references, "train", "x"))
        unchanged = rng.sample(NO_CHANGE, 3)
        pairs.append(ChangePair(f"{number}.png_n", f"{number}", f"{number}c", unchanged, "train", None, True))
    return pairs


def gold_tags(pairs: list[ChangePair]) -> dict[str, list[str]]:
    texts = sentence_texts({normalize_caption(caption) for pair in pairs for caption in pair.captions})
    return {
        text: [upos for word in text.split() for _, upos in ([(word, "PUNCT")] if word == "." else tag(word))]
        for text in texts
    }


def build(pairs: list[ChangePair], **settings: object) -> tuple[list[CaptionNegatives], Builder]:
    builder = Builder(pairs, gold_tags(pairs), Recipe(**settings))  # type: ignore[arg-type]
    return [row for pair in pairs for row in builder.of_pair(pair)], builder


PAIRS = scenes(60)
OURS = {"scope": "caption", "replacement": "matched"}
ROWS, BUILDER = build(PAIRS, **OURS)
SHARED_ROWS, SHARED_BUILDER = build(PAIRS)
BY_ID = {pair.id: pair for pair in PAIRS}
both = pytest.mark.parametrize("rows", [SHARED_ROWS, ROWS], ids=["default", "caption_matched"])


@both
def test_every_caption_has_its_six_in_order(rows: list[CaptionNegatives]) -> None:
    assert [(row.id, row.caption) for row in rows] == [(pair.id, each) for pair in PAIRS for each in pair.captions]
    for row in rows:
        assert [negative.kind for negative in row.negatives] == ["retrieve"] * 2 + ["replace"] * 2 + ["confuse"] * 2


def test_by_default_the_captions_of_a_pair_share_six() -> None:
    assert sum(SHARED_BUILDER.used.values()) == 6 * len(PAIRS) and sum(BUILDER.used.values()) == 6 * len(ROWS)
    for pair in PAIRS:
        own = [row.negatives for row in SHARED_ROWS if row.id == pair.id]
        assert len(own) == 3 and own[0] == own[1] == own[2]


@pytest.mark.parametrize("scope", ["caption", "pair"])
def test_matched_words_give_the_files_of_earlier_versions(scope: Any, tmp_path: Path) -> None:
    """The files were written by the version before `replacement`, where matched words were the only way, with seed 3.

    Since then, "bird2", with the reference "The two animals look the same.", gets no caption which says that.
    """
    pairs, tags = read_manifest(FIXTURES / "manifest.jsonl"), json.loads((FIXTURES / "tags.json").read_text())
    builder = Builder(pairs, tags, Recipe(scope=scope, replacement="matched", seed=3))
    write_negatives(tmp_path / "ours.jsonl", (row for pair in pairs for row in builder.of_pair(pair)))
    assert (tmp_path / "ours.jsonl").read_bytes() == (FIXTURES / f"matched_{scope}.jsonl").read_bytes()


def test_uniform_words_keep_the_part_of_speech_and_nothing_else() -> None:
    """A replaced caption is one of the pair's own with other adjectives and nouns, also of another kind or with a true meaning."""
    mixed = synonyms = 0
    for row in SHARED_ROWS:
        own = [normalize_caption(caption).removesuffix(" .") for caption in BY_ID[row.id].captions]
        for negative in row.negatives[2:4] if not BY_ID[row.id].is_distractor else ():
            new = tag(negative.text.removesuffix(" ."))
            sources = [tag(text) for text in own if [tags for _, tags in tag(text)] == [tags for _, tags in new]]
            assert sources, f"{negative.text!r} has other parts of speech than {own}"
            changes = [[(one, two) for one, two in zip(source, new) if one != two] for source in sources]
            changed = min(changes, key=len)
            assert changed and {tags for pair in changed for _, tags in pair} <= {"ADJ", "NOUN"}
            mixed += any(attribute_of(one) != attribute_of(two) for (one, _), (two, _) in changed)
            synonyms += any(synonym_key(one) == synonym_key(two) for (one, _), (two, _) in changed)
    assert mixed > 0 and synonyms > 0


@both
def test_no_negative_is_a_reference_or_stands_twice(rows: list[CaptionNegatives]) -> None:
    for row in rows:
        texts = [negative.text for negative in row.negatives]
        assert len(set(texts)) == 6
        assert all(text == normalize_caption(text) for text in texts)
        assert not set(texts) & {normalize_caption(caption) for caption in BY_ID[row.id].captions}


@both
def test_distractors_get_no_sentence_of_no_change(rows: list[CaptionNegatives]) -> None:
    for row in rows:
        if BY_ID[row.id].is_distractor:
            assert not {negative.text for negative in row.negatives} & set(NO_CHANGE)


@both
def test_retrieved_captions_are_of_other_change_pairs_and_say_something_else(rows: list[CaptionNegatives]) -> None:
    changes = {normalize_caption(caption) for pair in PAIRS if not pair.is_distractor for caption in pair.captions}
    for row in rows:
        output = {
            synonym_key(word) for caption in BY_ID[row.id].captions for word in normalize_caption(caption).split()
        }
        for negative in row.negatives[:2]:
            assert negative.text in changes
            assert not set(map(synonym_key, negative.text.split())) <= output


def test_only_matched_negatives_say_that_nothing_changed() -> None:
    """They are wrong somewhere: else, distractors could be told without a look at the images."""
    assert not {negative.text for row in SHARED_ROWS for negative in row.negatives} & set(NO_CHANGE)
    rows = [row for row in ROWS if not BY_ID[row.id].is_distractor]
    denied = [row for row in rows if {negative.text for negative in row.negatives} & set(NO_CHANGE)]
    assert len(rows) / 3 < len(denied) < len(rows)
    assert all(each.kind == "confuse" for row in denied for each in row.negatives if each.text in NO_CHANGE)


def test_the_ways_are_counted() -> None:
    used: Counter[str] = Counter()
    for (kind, _), count in BUILDER.used.items():
        used[kind] += count
    assert used == dict.fromkeys(("retrieve", "replace", "confuse"), 2 * len(ROWS))
    assert BUILDER.used["confuse", "reverse_change"] > len(ROWS) / 2
    assert BUILDER.used["confuse", "no change"] > 0 and BUILDER.used["confuse", "the change that did not happen"] > 0
    assert ("retrieve", "words shuffled") not in BUILDER.used


def test_the_seed_decides_and_the_order_of_the_pairs_does_not() -> None:
    again, _ = build(PAIRS, **OURS)
    other, _ = build(PAIRS, seed=1, **OURS)
    assert again == ROWS != other
    backwards = [row for pair in PAIRS[::-1] for row in BUILDER.of_pair(pair)]
    assert {(row.id, row.caption): row for row in backwards} == {(row.id, row.caption): row for row in ROWS}


def test_the_smallest_datasets_are_topped_up_or_refused() -> None:
    lonely = [ChangePair("1", "a", "b", ["the red cube moved"], "train")]
    rows, builder = build(lonely)
    assert len(rows[0].negatives) == 6 and builder.used["retrieve", "words shuffled"] == 2
    with pytest.raises(DiffcapError, match="pair '1': there are too few other captions"):
        build([ChangePair("1", "a", "b", ["moved"], "train")])
    with pytest.raises(DiffcapError, match="not all 0"):
        Recipe(0, 0, 0)


@pytest.mark.parametrize("settings", [{}, OURS], ids=["default", "caption_matched"])
def test_no_negative_says_the_same_where_a_reference_does(settings: dict[str, str]) -> None:
    """Without a distractor mark (Birds-to-Words), "they look identical" must not be wrong for "no difference"."""
    colors, parts = ("red", "blue", "grey", "white"), ("head", "tail", "belly", "crown", "throat")
    same = (
        "there are no differences between animals 1 and 2 .", "there are no visible differences and these look alike .",
        "animal1 and animal2 are the same .", "no visible differences were seen .", "i don ' t see any differences in the birds .",
        "there are no visible differences between the two pictures and they appear to be the same animal .",
        "animal1 and animal2 look the same the light is warmer", "the same animal is shown in two photos",
        "animals a and b are the same bird",
        "these appear to be the same species but animal2 is darker .", "the birds are identical , animal2 has a longer beak .",
    )  # fmt: skip
    differences = [
        f"animal1 has a {one} {part} and animal2 has a {two} {part} ."
        for part in parts
        for one in colors
        for two in colors
    ]
    references = [[text, difference] for text, difference in zip(same, differences)]
    references += [[text] for text in (*same, *differences)]
    pairs = [ChangePair(str(number), "a", "b", texts, "train") for number, texts in enumerate(references)]
    pairs.append(ChangePair("distractor", "a", "c", ["nothing has changed"], "train", None, True))
    tags = {
        **dict.fromkeys(("visible", *colors), "ADJ"),
        **dict.fromkeys(("are", "has", "is", "look"), "VERB"),
        ".": "PUNCT",
    }
    tagged = {
        text: [tags.get(word, "NOUN") for word in text.split()]
        for text in sentence_texts({normalize_caption(caption) for pair in pairs for caption in pair.captions})
    }
    builder = Builder(pairs, tagged, Recipe(**settings))  # type: ignore[arg-type]
    for pair in pairs[: 2 * len(same)]:
        for row in builder.of_pair(pair):
            words = {word for negative in row.negatives for word in negative.text.split()}
            assert not words & {"same", "identical", "alike", "no", "nothing"}
