import json
from pathlib import Path

import pytest
from tests.datasets.layouts import DC_CAPTIONS, refusal, write_clevr_dc, write_image

from diffcap.datasets import describe, read_pairs
from diffcap.datasets.clevr_dc import change_type, notes
from diffcap.records import ChangePair

SPLITS = {"train": [9, 0, 1, 2, 3], "val": [4], "test": [5, 47999]}


@pytest.mark.parametrize("renamed", [False, True])
def test_both_forms_give_the_same_pairs(tmp_path: Path, renamed: bool) -> None:
    folder = write_clevr_dc(tmp_path, SPLITS, renamed)
    pairs = read_pairs("clevr_dc", folder)
    assert [(pair.id, pair.split) for pair in pairs] == [
        ("000000.png", "train"), ("000001.png", "train"), ("000002.png", "train"), ("000003.png", "train"),
        ("000009.png", "train"), ("000004.png", "val"), ("000005.png", "test"), ("047999.png", "test"),
    ]  # fmt: skip
    assert [pair.change_type for pair in pairs] == ["color", "material", "add", "drop", "drop", "move", None, None]
    assert [pair.id for pair in pairs if pair.is_distractor] == ["000005.png", "047999.png"]
    assert all((folder / path).is_file() for pair in pairs for path in (pair.before, pair.after))
    assert pairs[0].before.split("/")[0] == ("images" if renamed else "bef")
    output = describe("clevr_dc", pairs, folder)
    assert "derived from the captions; the files do not have them" in output["notes"][0] and len(output["notes"]) == 1
    assert output["official"]["state"] == "part" and output["official"]["splits"]["train"] == [5, 40_800]


def test_split_json_beside_renamed_captions(tmp_path: Path) -> None:
    folder = write_clevr_dc(tmp_path, SPLITS, renamed=True)
    (folder / "splits.json").rename(folder / "split.json")
    assert len(read_pairs("clevr_dc", folder)) == 8


def test_images_are_found_by_their_number(tmp_path: Path) -> None:
    folder = write_clevr_dc(tmp_path, SPLITS)
    (folder / "bef/9.png").rename(folder / "bef/CLEVR_default_000009.png")
    assert {pair.id: pair.before for pair in read_pairs("clevr_dc", folder)}[
        "000009.png"
    ] == "bef/CLEVR_default_000009.png"
    write_image(folder / "bef/9.png")
    assert "has the same number" in refusal("clevr_dc", folder)


def test_types_are_voted_for() -> None:
    assert [change_type(sentences) for _, sentences in DC_CAPTIONS] == [kind or "none" for kind, _ in DC_CAPTIONS]
    assert change_type(["the cube moved", "the cube is gone"]) is None
    assert change_type(["the cube moved", "the cube is gone", "it shifted"]) == "move"
    assert change_type(["a cube"]) is None and change_type([]) is None


@pytest.mark.parametrize(
    ("kind", "sentences"),
    [
        (
            "move",
            "the red cube moved to a new position|the cube is no longer in its place|the cube is not in its old place any more|"
            "someone changed the location of the cube|the thing with the same size as the ball was moved|it is in another spot",
        ),
        (
            "color",
            "someone changed the color of the rubber cube|the color of the cube has changed|the cube has a different colour|"
            "the cube that is the same size as the metal ball turned blue|the cube changed its color to red",
        ),
        (
            "material",
            "someone changed the texture of the red cube|the cube with the same color as the ball became shiny",
        ),
        ("add", "there is a new cube|the cube of the same size as the ball has appeared|someone added a ball"),
        (
            "drop",
            "there is no longer a cube|there is no cube any more|the cube of the same material as the ball is gone",
        ),
        ("none", "it is the same scene as before|nothing was moved|there are no changes"),
    ],
)
def test_one_sentence_is_enough(kind: str, sentences: str) -> None:
    assert {sentence: change_type([sentence]) for sentence in sentences.split("|")} == dict.fromkeys(
        sentences.split("|"), kind
    )


def test_the_blocks_of_ids_check_the_types() -> None:
    """The released ids are in blocks of 8,000, one action each."""
    pairs = [
        ChangePair(f"{n:06d}.png", "a", "b", ["x"], "train", "add" if n % 8000 < 3 else "color")
        for block in (0, 8000)
        for n in range(block, block + 60)
    ]
    assert notes(pairs)[-1].startswith("114 of 120 pairs have the most frequent type of their block of 8,000 ids")
    assert len(notes(pairs[:70])) == 1  # too few of the second block


def test_a_pair_whose_type_cannot_be_told_is_counted(tmp_path: Path) -> None:
    folder = write_clevr_dc(tmp_path, SPLITS)
    captions = json.loads((folder / "captions.json").read_text())
    (folder / "captions.json").write_text(json.dumps({**captions, "3": ["two cubes"]}))
    pairs = read_pairs("clevr_dc", folder)
    assert describe("clevr_dc", pairs, folder)["notes"][1].startswith("1 pairs (first 000003.png)")


def test_one_sentence_for_each_fault(tmp_path: Path) -> None:
    assert "no captions.json there" in refusal("clevr_dc", tmp_path)
    folder = write_clevr_dc(tmp_path, SPLITS)
    good = (folder / "split.json").read_text()
    (folder / "split.json").write_text(json.dumps({**SPLITS, "val": [4, 5]}))
    assert "5 is duplicated (in val and test)" in refusal("clevr_dc", folder)
    (folder / "split.json").write_text(json.dumps({**SPLITS, "val": [77]}))
    assert "no captions for the id 77" in refusal("clevr_dc", folder)
    (folder / "split.json").write_text(good)
    (folder / "captions.json").write_text(json.dumps({"a": ["x"]}))
    assert 'the key "a" is not the number of a pair' in refusal("clevr_dc", folder)
    (folder / "captions.json").write_text(json.dumps({"1" * 5000: ["x"]}))
    assert "is not the number of a pair" in refusal("clevr_dc", folder)
    (folder / "change_captions.json").write_text("{}")
    assert "both captions.json and change_captions.json" in refusal("clevr_dc", folder)
