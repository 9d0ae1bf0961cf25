import json
from pathlib import Path

import pytest

from diffcap.text.vocabulary import LayoutName, Vocabulary, build_vocabulary, tokenize, tokenize_rcc, write_vocabulary

VOCABULARY = Vocabulary(["a", "ball", "red", "the"])


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Animal 1 has a RED beak.", "animal1 has a red beak ."),
        ("animal1's wing-tips; animal\n2 is larger", "animal1 ' s wing - tips ; animal2 is larger"),
        ("animals 1 and 2, animal 12", "animals 1 and 2 , animal 12"),
        ("a `` puffy `` bird (grey/white)", "a `` puffy `` bird ( grey / white )"),
        ("  ", ""),
        ("snake_case", "snake _ case"),
        ("Animal1and animal  2s", "animal1and animal 2s"),
    ],
)
def test_tokenize_and_again(text: str, tokens: str) -> None:
    assert " ".join(tokenize(text)) == tokens
    assert " ".join(tokenize(tokens)) == tokens


def test_specials_have_the_ids_of_the_released_models() -> None:
    ids = [VOCABULARY.pad, VOCABULARY.bos, VOCABULARY.eos, VOCABULARY.unk, VOCABULARY.mask]
    assert ids == [0, 1, 2, 3, 5] and len(VOCABULARY) == 10


def test_encode_frames_and_marks_unknown_words() -> None:
    assert VOCABULARY.encode("The RED cube", 40) == [1, 9, 8, 3, 2]
    assert VOCABULARY.encode(["The", "red"], 40) == [1, 3, 8, 2]  # tokens are taken as they are
    assert VOCABULARY.encode("", 40) == [1, 2]


def test_encode_cuts_words_to_max_length_minus_three() -> None:
    assert VOCABULARY.encode("a a a a a a a", 7) == [1, 6, 6, 6, 6, 2]
    assert VOCABULARY.encode("a a a a", 7) == [1, 6, 6, 6, 6, 2]
    with pytest.raises(ValueError, match="max_length"):
        VOCABULARY.encode("a", 3)


def test_decode_stops_at_the_first_end_and_skips_specials() -> None:
    assert VOCABULARY.decode([1, 9, 0, 8, 3, 5, 7, 2, 6, 6, 2]) == "the red <UNK> ball"
    assert VOCABULARY.decode([9, 8]) == "the red"
    assert VOCABULARY.decode(VOCABULARY.encode("the red ball", 40)) == "the red ball"
    for wrong in (10, -1):
        with pytest.raises(ValueError, match="outside"):
            VOCABULARY.decode([1, wrong, 2])


def test_build_is_sorted_counts_and_does_not_depend_on_order() -> None:
    captions = ["the red ball .", "The ball", ["the", "Cube"]]
    assert build_vocabulary(captions).words == [".", "Cube", "ball", "red", "the"]
    assert build_vocabulary(captions, min_count=2).words == ["ball", "the"]
    assert build_vocabulary(reversed(captions)).words == build_vocabulary(captions).words


def test_repeated_word_is_refused() -> None:
    with pytest.raises(ValueError, match="'a'"):
        Vocabulary(["a", "b", "a"])
    with pytest.raises(ValueError, match="<MASK>"):
        Vocabulary(["<MASK>"])


def test_the_file_has_special_tokens_and_words(tmp_path: Path) -> None:
    write_vocabulary(tmp_path / "vocabulary.json", VOCABULARY)
    content = json.loads((tmp_path / "vocabulary.json").read_text())
    assert content == {"specials": ["<PAD>", "<BOS>", "<EOS>", "<UNK>", "<CLS>", "<MASK>"], "words": VOCABULARY.words}


def test_the_other_layout_is_that_of_scorer_and_dirl() -> None:
    """Ids, cutting and room as in the RobustChangeCaptioning code base: case stays, two blanks give an empty word."""
    assert tokenize_rcc("Add a hat, please.  Now; why?") == ["Add", "a", "hat", ",", "please", "", "Now", ";", "why"]
    vocabulary = build_vocabulary(["the  Cube moved.", "the cube moved"], min_count=1, layout="rcc")
    assert vocabulary.words == ["", "Cube", "cube", "moved", "the"]
    assert [vocabulary.pad, vocabulary.unk, vocabulary.bos, vocabulary.eos, vocabulary.mask] == [0, 1, 2, 3, None]
    ids = vocabulary.encode("the ball moved", max_length=5)
    assert ids == [2, 8, 1, 7, 3]  # it fills all five positions
    assert vocabulary.encode("the ball moved", max_length=4) == [2, 8, 1, 3]
    assert vocabulary.decode([*ids, 0, 0]) == "the <UNK> moved"
    assert vocabulary.decode([2, 8, 0, 7, 3]) == "the"  # padding ends a caption, too (authors' code)


@pytest.mark.parametrize("layout", ["pcl", "rcc", "rcc_tokens"])
def test_captions_of_tokens_come_back_whole(layout: LayoutName) -> None:
    """Birds-to-Words' captions are tokens joined with blanks; the layout that cuts sentences loses full stops."""
    captions = ["animal1 is gray , animal2 brown .", "they look the same ."]
    vocabulary = build_vocabulary(captions, layout=layout)
    back = [vocabulary.decode(vocabulary.encode(caption, 20)) for caption in captions]
    assert (back == captions) == (layout != "rcc")
    for output in back:
        assert vocabulary.decode(vocabulary.encode(output.split(" "), 20)) == output


def test_rsiccformers_layout_has_three_special_tokens_after_the_words() -> None:
    """Words are counted over the tokens of the dataset's file and numbered in order of their first appearance."""
    vocabulary = build_vocabulary(
        ["the road 's <unk>", "a road the", "road the t-junction"], min_count=2, layout="rsicc"
    )
    assert vocabulary.words == ["the", "road"]
    assert vocabulary.tokens == ["<pad>", "the", "road", "<unk>", "<start>", "<end>"]
    assert [vocabulary.pad, vocabulary.unk, vocabulary.bos, vocabulary.eos, vocabulary.mask] == [0, 3, 4, 5, None]
    ids = vocabulary.encode("a road the", max_length=5)
    assert ids == [4, 3, 2, 1, 5]  # it fills all five positions
    assert vocabulary.encode("a road the", max_length=4) == [4, 3, 2, 5]
    assert vocabulary.decode([*ids, 0, 1]) == "<unk> road the"
    assert vocabulary.decode([4, 2, 0, 4, 1, 5]) == "road the"  # padding and start do not end a caption
    with pytest.raises(ValueError, match="outside"):
        vocabulary.decode([6])
    with pytest.raises(ValueError, match="<end>"):
        Vocabulary(["road", "<end>"], "rsicc")


def test_chg2caps_layout() -> None:
    """The special tokens of the RobustChangeCaptioning code base; empty tokens are left out, and padding ends nothing."""
    vocabulary = build_vocabulary([" some  houses, are built ."], layout="chg2cap")
    assert vocabulary.tokens == ["<NULL>", "<UNK>", "<START>", "<END>", ",", "are", "built", "houses", "some"]
    assert [vocabulary.pad, vocabulary.unk, vocabulary.bos, vocabulary.eos, vocabulary.mask] == [0, 1, 2, 3, None]
    assert vocabulary.encode(" a  house is built .", max_length=41) == [2, 1, 1, 1, 6, 3]
    assert vocabulary.decode([2, 8, 0, 7, 3, 5]) == "some houses"
