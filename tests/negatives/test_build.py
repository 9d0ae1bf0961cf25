import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from diffcap.negatives.build import Builder, Recipe
from diffcap.negatives.file import CaptionNegatives, write_negatives
from diffcap.negatives.words import normalize_caption, sentence_texts, synonym_key
from diffcap.records import ChangePair, read_manifest
from diffcap.utils.errors import DiffcapError
from diffcap.worlds.blocks.captions import LEXICON, NO_CHANGE

FIXTURES = Path(__file__).with_name("fixtures")
ENDS = ("was added", "appeared", "was removed", "is gone", "moved", "was relocated", "became cyan", "is now matte")


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
    return {text: ["PUNCT" if word == "." else LEXICON[word] for word in text.split()] for text in texts}


def build(pairs: list[ChangePair], **settings: object) -> tuple[list[CaptionNegatives], Builder]:
    builder = Builder(pairs, gold_tags(pairs), Recipe(**settings))  # type: ignore[arg-type]
    return [row for pair in pairs for row in builder.build(pair)], builder


PAIRS = scenes(60)
OURS = {"scope": "caption", "replacement": "matched"}
ROWS, BUILDER = build(PAIRS, **OURS)
SHARED_ROWS, SHARED_BUILDER = build(PAIRS)
BY_ID = {pair.id: pair for pair in PAIRS}
both = pytest.mark.parametrize("rows", [SHARED_ROWS, ROWS], ids=["default", "caption_matched"])


@both
def test_every_caption_has_its_six_in_order(rows: list[CaptionNegatives]) -> None:
    assert [(row.id, row.caption) for row in rows] == [(pair.id, each) for pair in PAIRS for each in pair.captions]
    changes = {normalize_caption(caption) for pair in PAIRS if not pair.is_distractor for caption in pair.captions}
    for row in rows:
        assert [negative.kind for negative in row.negatives] == ["retrieve"] * 2 + ["replace"] * 2 + ["confuse"] * 2
        texts, own = [negative.text for negative in row.negatives], set(map(normalize_caption, BY_ID[row.id].captions))
        assert len(set(texts)) == 6 and texts == list(map(normalize_caption, texts)) and not own & set(texts)
        assert not (BY_ID[row.id].is_distractor and set(texts) & set(NO_CHANGE))
        said = {synonym_key(word) for text in own for word in text.split()}
        for text in texts[:2]:
            assert text in changes and not set(map(synonym_key, text.split())) <= said


def test_by_default_the_captions_of_a_pair_share_six() -> None:
    assert sum(SHARED_BUILDER.counts.values()) == 6 * len(PAIRS) and sum(BUILDER.counts.values()) == 6 * len(ROWS)
    assert BUILDER.counts["confuse", "reverse_change"] > len(ROWS) / 2
    assert ("retrieve", "words shuffled") not in BUILDER.counts
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
    write_negatives(tmp_path / "ours.jsonl", (row for pair in pairs for row in builder.build(pair)))
    assert (tmp_path / "ours.jsonl").read_bytes() == (FIXTURES / f"matched_{scope}.jsonl").read_bytes()


def test_only_matched_negatives_say_that_nothing_changed() -> None:
    """They are wrong somewhere: else, distractors could be told without a look at the images."""
    assert not {negative.text for row in SHARED_ROWS for negative in row.negatives} & set(NO_CHANGE)
    rows = [row for row in ROWS if not BY_ID[row.id].is_distractor]
    denied = [row for row in rows if {negative.text for negative in row.negatives} & set(NO_CHANGE)]
    assert len(rows) / 3 < len(denied) < len(rows)
    assert all(each.kind == "confuse" for row in denied for each in row.negatives if each.text in NO_CHANGE)


def test_the_seed_decides_and_the_order_of_the_pairs_does_not() -> None:
    again, _ = build(PAIRS, **OURS)
    other, _ = build(PAIRS, seed=1, **OURS)
    assert again == ROWS != other
    backwards = [row for pair in PAIRS[::-1] for row in BUILDER.build(pair)]
    assert {(row.id, row.caption): row for row in backwards} == {(row.id, row.caption): row for row in ROWS}


def test_the_smallest_datasets_are_topped_up_or_refused() -> None:
    lonely = [ChangePair("1", "a", "b", ["the red cube moved"], "train")]
    rows, builder = build(lonely)
    assert len(rows[0].negatives) == 6 and builder.counts["retrieve", "words shuffled"] == 2
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
    triples = itertools.product(parts, colors, colors)
    differences = [f"animal1 has a {one} {part} and animal2 has a {two} {part} ." for part, one, two in triples]
    references = [[text, difference] for text, difference in zip(same, differences)]
    references += [[text] for text in (*same, *differences)]
    pairs = [ChangePair(str(number), "a", "b", texts, "train") for number, texts in enumerate(references)]
    pairs.append(ChangePair("distractor", "a", "c", ["nothing has changed"], "train", None, True))
    adjectives, verbs = ("visible", *colors), ("are", "has", "is", "look")
    tags = {".": "PUNCT", **dict.fromkeys(adjectives, "ADJ"), **dict.fromkeys(verbs, "VERB")}
    tagged = {
        text: [tags.get(word, "NOUN") for word in text.split()]
        for text in sentence_texts({normalize_caption(caption) for pair in pairs for caption in pair.captions})
    }
    builder = Builder(pairs, tagged, Recipe(**settings))  # type: ignore[arg-type]
    for pair in pairs[: 2 * len(same)]:
        for row in builder.build(pair):
            words = {word for negative in row.negatives for word in negative.text.split()}
            assert not words & {"same", "identical", "alike", "no", "nothing"}
