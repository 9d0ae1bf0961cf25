import random
from collections import Counter

import pytest

from diffcap.datasets.blocks.captions import NO_CHANGE, tag
from diffcap.negatives import Builder, CaptionNegatives, Recipe
from diffcap.negatives.build import CANDIDATES
from diffcap.negatives.corpus import sentence_texts, tokenised
from diffcap.negatives.words import meaning
from diffcap.records import ChangePair
from diffcap.utils.errors import DiffcapError

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
    texts = sentence_texts({tokenised(caption) for pair in pairs for caption in pair.captions})
    return {
        text: [upos for word in text.split() for _, upos in ([(word, "PUNCT")] if word == "." else tag(word))]
        for text in texts
    }


def build(pairs: list[ChangePair], **settings: object) -> tuple[list[CaptionNegatives], Builder]:
    builder = Builder(pairs, gold_tags(pairs), Recipe(**settings))  # type: ignore[arg-type]
    return [row for pair in pairs for row in builder.of_pair(pair)], builder


PAIRS = scenes(60)
ROWS, BUILDER = build(PAIRS)
BY_ID = {pair.id: pair for pair in PAIRS}


def test_every_caption_has_its_six_in_order() -> None:
    assert [(row.id, row.caption) for row in ROWS] == [(pair.id, each) for pair in PAIRS for each in pair.captions]
    for row in ROWS:
        assert [negative.kind for negative in row.negatives] == ["retrieve"] * 2 + ["replace"] * 2 + ["confuse"] * 2
    assert sum(BUILDER.used.values()) == 6 * len(ROWS)


def test_no_negative_is_a_reference_or_stands_twice() -> None:
    for row in ROWS:
        texts = [negative.text for negative in row.negatives]
        assert len(set(texts)) == 6
        assert all(text == tokenised(text) for text in texts)
        assert not set(texts) & {tokenised(caption) for caption in BY_ID[row.id].captions}


def test_distractors_get_no_sentence_of_no_change() -> None:
    for row in ROWS:
        if BY_ID[row.id].is_distractor:
            assert not {negative.text for negative in row.negatives} & set(NO_CHANGE)


def test_retrieved_captions_are_of_other_change_pairs_and_say_something_else() -> None:
    changes = {tokenised(caption) for pair in PAIRS if not pair.is_distractor for caption in pair.captions}
    for row in ROWS:
        output = {meaning(word) for caption in BY_ID[row.id].captions for word in tokenised(caption).split()}
        for negative in row.negatives[:2]:
            assert negative.text in changes
            assert not set(map(meaning, negative.text.split())) <= output


def test_retrieved_captions_are_more_alike_than_others() -> None:
    def shared(row: CaptionNegatives, text: str) -> int:
        return len(set(map(meaning, tokenised(row.caption).split())) & set(map(meaning, text.split())))

    rng = random.Random(0)
    rows = [row for row in ROWS if not BY_ID[row.id].is_distractor]
    alike = sum(shared(row, negative.text) for row in rows for negative in row.negatives[:2])
    other = sum(shared(row, tokenised(rng.choice(rows).caption)) for row in rows for _ in range(2))
    assert alike > 1.3 * other


def test_captions_of_no_change_are_wrong_somewhere() -> None:
    """Were they right wherever they stand, distractors could be told without a look at the images."""
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
    again, _ = build(PAIRS)
    other, _ = build(PAIRS, seed=1)
    assert again == ROWS != other
    backwards = [row for pair in PAIRS[::-1] for row in BUILDER.of_pair(pair)]
    assert sorted(backwards, key=lambda row: (row.id, row.caption)) == sorted(
        ROWS, key=lambda row: (row.id, row.caption)
    )


def test_scope_pair_gives_all_captions_of_a_pair_the_same() -> None:
    rows, _ = build(PAIRS, scope="pair")
    for pair in PAIRS:
        own = [row.negatives for row in rows if row.id == pair.id]
        assert len(own) == 3 and own[0] == own[1] == own[2] and len(own[0]) == 6


def test_other_numbers_of_each_kind() -> None:
    rows, _ = build(PAIRS[:20], retrieve=0, replace=1, confuse=3)
    assert {tuple(negative.kind for negative in row.negatives) for row in rows} == {("replace", *["confuse"] * 3)}


def test_the_smallest_datasets_are_topped_up_or_refused() -> None:
    lonely = [ChangePair("1", "a", "b", ["the red cube moved"], "train")]
    rows, builder = build(lonely)
    assert len(rows[0].negatives) == 6 and builder.used["retrieve", "words shuffled"] == 2
    with pytest.raises(DiffcapError, match="pair '1': there are too few other captions"):
        build([ChangePair("1", "a", "b", ["moved"], "train")])


def test_wrong_recipes_are_refused() -> None:
    with pytest.raises(DiffcapError, match="not all 0"):
        Recipe(0, 0, 0)
    with pytest.raises(DiffcapError, match="0 or more"):
        Recipe(retrieve=-1)
    with pytest.raises(DiffcapError, match="scope"):
        Recipe(scope="image")


def test_statements_of_sameness_are_not_offered_for_each_other() -> None:
    """Without a distractor mark (Birds-to-Words), "they look identical" must not be wrong for "no difference"."""
    rng = random.Random(1)
    words = [
        f"{rng.choice(('red', 'blue', 'gray'))} {rng.choice(('cube', 'ball', 'cylinder'))}"
        for _ in range(2 * CANDIDATES)
    ]
    same = ["the two pictures are identical", "no difference can be seen", "the two scenes look identical"]
    pairs = [ChangePair(f"s{number}", "a", "b", [text], "train") for number, text in enumerate(same)]
    pairs += [
        ChangePair(str(number), "a", "b", [f"the {each} has a different position"], "train")
        for number, each in enumerate(words)
    ]
    rows, _ = build(pairs)
    for row in rows[:3]:
        assert not {negative.text for negative in row.negatives} & set(same)
