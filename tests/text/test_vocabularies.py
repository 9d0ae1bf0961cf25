"""CLIP's byte-pair encoding as a vocabulary: there and back, padding that is no word, tables cut down."""

import pytest
from open_clip.tokenizer import SimpleTokenizer

from diffcap.text.vocabularies import ClipVocabulary, build_any_vocabulary, build_clip_vocabulary, restore_vocabulary

CAPTIONS = ["The shiny cube moved!", "a tiny sphere has vanished", "the tiny cube is gone"]


def test_clips_own_ids() -> None:
    vocabulary, clip = ClipVocabulary(), SimpleTokenizer()
    assert len(vocabulary) == 49408 and (vocabulary.bos, vocabulary.eos, vocabulary.pad) == (49406, 49407, 49408)
    for caption in CAPTIONS:
        row = clip(caption, 32)[0].tolist()
        assert vocabulary.encode(caption, 32) == row[: row.index(49407) + 1]
    assert vocabulary.encode("The cube", 32) == vocabulary.encode(["the", "cube"], 32)


@pytest.mark.parametrize("layout", ["clip", "clip_used", "clip_released"])
def test_there_and_back(layout) -> None:
    vocabulary = build_any_vocabulary(CAPTIONS, 1, layout)
    for caption in CAPTIONS[1:]:
        ids = vocabulary.encode(caption, 20)
        assert ids[0] == vocabulary.bos == len(vocabulary) - 2 and ids[-1] == vocabulary.eos == len(vocabulary) - 1
        assert vocabulary.decode([*ids, vocabulary.pad, 5]) == caption
        assert vocabulary.decode([*ids[1:-1], vocabulary.pad, 5]) == caption
    again = restore_vocabulary(vocabulary.words, layout)
    assert again.encode(CAPTIONS[0], 20) == vocabulary.encode(CAPTIONS[0], 20)


def test_an_exclamation_mark_ends_the_caption_in_the_released_form_only() -> None:
    for layout, output in (("clip", "the shiny cube moved !"), ("clip_released", "the shiny cube moved")):
        vocabulary = ClipVocabulary((), layout)
        assert vocabulary.encode(CAPTIONS[0], 20)[-2] != 0  # "moved!": the mark that ends a word is another token
        ids = [*vocabulary.encode("the shiny cube moved", 20)[:-1], 0, vocabulary.eos]
        assert vocabulary.decode(ids).replace("!", " !").replace("  ", " ") == output
    assert ClipVocabulary((), "clip_released").pad == 0


def test_long_captions_are_cut() -> None:
    vocabulary = ClipVocabulary()
    ids = vocabulary.encode("cube " * 50, 33)
    assert len(ids) == 33 and ids[-1] == vocabulary.eos
    with pytest.raises(ValueError, match="max_length must be at least 3"):
        vocabulary.encode("cube", 2)


def test_a_table_of_the_tokens_that_occur() -> None:
    vocabulary = build_clip_vocabulary(CAPTIONS, "clip_used")
    assert "cube</w>" in vocabulary.words and len(set(vocabulary.words)) == len(vocabulary.words) < 20
    assert vocabulary.decode(vocabulary.encode("the big cube", 20)) == "the cube"  # "big" has no id
    with pytest.raises(ValueError, match="id 40 is outside the vocabulary"):
        vocabulary.decode([0, 40])


def test_words_that_make_no_vocabulary() -> None:
    with pytest.raises(ValueError, match="'nonsense' is not a token of CLIP"):
        ClipVocabulary(["cube</w>", "nonsense"], "clip_used")
    with pytest.raises(ValueError, match="a token is duplicated"):
        ClipVocabulary(["cube</w>", "cube</w>"], "clip_used")
    with pytest.raises(ValueError, match="layout clip takes no words"):
        ClipVocabulary(["cube</w>"])
