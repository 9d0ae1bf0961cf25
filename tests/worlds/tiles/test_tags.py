"""The tags of the words of tiles captions, and the tagger that was trained on them."""

import random

import pytest

from diffcap.text.tagging import tag_sentences
from diffcap.utils.errors import DiffcapError
from diffcap.worlds.tiles.captions import NO_CHANGE, write_captions
from diffcap.worlds.tiles.changes import sample_pair
from diffcap.worlds.tiles.tags import LEXICON, tag


def captions(numbers: range) -> list[str]:
    changes = [sample_pair(number, seed=77).change for number in numbers]
    return [text for number, change in zip(numbers, changes) for text in write_captions(random.Random(number), change)]


def test_every_word_of_the_grammar_has_one_tag() -> None:
    for caption in [*captions(range(0, 128, 2)), *NO_CHANGE]:
        assert [word for word, _ in tag(caption)] == caption.split()
    assert LEXICON["houses"] == "NOUN" and LEXICON["bare"] == "ADJ" and LEXICON["built"] == "VERB"
    with pytest.raises(DiffcapError, match=r"'rubber' in 'a rubber house' is not a word of tiles captions"):
        tag("a rubber house")


@pytest.mark.slow
def test_the_tagger_that_ships_knows_them() -> None:
    sentences = sorted(set(captions(range(200, 232, 2))))
    tags = tag_sentences(sentences, "tiles", workers=1)
    right = [found == known for text in sentences for found, (_, known) in zip(tags[text], tag(text), strict=True)]
    assert len(right) > 300 and sum(right) / len(right) > 0.98
