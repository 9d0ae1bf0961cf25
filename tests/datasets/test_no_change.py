"""Sentences that say that nothing has changed."""

import pytest
from tests.datasets.layouts import NO_CHANGE_FIVE

from diffcap.datasets.no_change import CLEVR_CHANGE, DUBAI_CC, SECOND_CC, describes_similarity, is_no_change
from diffcap.worlds.blocks.captions import NO_CHANGE


@pytest.mark.parametrize(
    "caption",
    [
        *NO_CHANGE_FIVE, *NO_CHANGE, *SECOND_CC, *DUBAI_CC, *CLEVR_CHANGE,
        "Nothing was added or removed.", "No objects were added, moved or removed.", "nothing different", "no visible changes were found",
        "There are no differences between animals 1 and 2.", "animal1 and animal2 have no visible differences .",
        "I don't see any differences between the two photos.", "there aren't any changes here", "i cannot spot a difference",
        "i can ' t find any differences", "Both images are identical", "the birds look exactly the same .", "they are the exact same photo",
        "I think they're the same. There are no obvious differences.", "these are the same animal , without visible differences .",
        "the scene is unchanged and nothing has moved", "there have been no changes", "no changes detected", "no change was detected",
        "I honestly do not see any differences in the given photos.", "no different",
        "i can not locate any differences in these images", "i see no differences between the left and right image", "images identical",
        "there are no obvious differences to the pictures", "there are no changes in the right photo from the left",
        "nothing in the second picture seems to have moved", "nothing seems to have changed", "both photos show the same scene",
        "animal a and b appear to be the same bird", "both animals , going by the two white bars , are the same bird .",
    ],
)  # fmt: skip
def test_other_words_for_no_change(caption: str) -> None:
    assert is_no_change(caption) and describes_similarity(caption)


@pytest.mark.parametrize(
    "caption",
    [
        "no changes in the houses but a road is built", "nothing has changed except for a road", "no changes to the houses",
        "the two scenes seem identical but for the lake", "the animals look the same , but animal2 has a longer tail .",
        "animal1 is darker . other than that , they are nearly identical .", "they are of the same species , animal2 is larger",
        "the animals look the same they only sit on other twigs", "animal1 and animal2 are in fact the same bird , seen in winter",
        "animal1 and animal2 look the same the light is warmer", "they appear the same jus from another side",
        "the same bird is shown in two poses", "animal2 has a longer bill and might be the same species",
        "the birds in both photos look alike , animal2 is wet", "animal2 is just about identical . its tail is wet .",
        "two shots of the same bird from different angles", "it is the same kind of bird with a red head",
    ],
)  # fmt: skip
def test_a_statement_of_similarity_beside_others(caption: str) -> None:
    assert describes_similarity(caption) and not is_no_change(caption)


@pytest.mark.parametrize(
    "caption",
    [
        "the road is no longer there", "a house appears in the same place", "the scene has changed", "", "a change of the light",
        "the same size but a longer beak", "both animals are about the same size , animal2 is brown", "they have the same colors",
        "the birds are identical in shape , animal2 is darker", "the heads are the same type of yellow", "no other differences",
        "animal1 and animal2 are not the same", "the pictures are not identical", "there are apparent differences", "nothing else changed",
        "it is not different from a raven", "no head is visible", "there are a few visual differences", "nothing is on the table now",
        "the parking area looks the same", "the trucks all seem to be identical in both pictures", "the wings of both birds look alike",
        "the people in the two images are the same", "they may not be the same species",
        "they are not of the same species", "the other qualities are the same",
    ],
)  # fmt: skip
def test_other_captions_state_no_similarity(caption: str) -> None:
    assert not describes_similarity(caption) and not is_no_change(caption)
