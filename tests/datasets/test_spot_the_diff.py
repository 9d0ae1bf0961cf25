import json
from pathlib import Path

import pytest
from tests.datasets.layouts import refusal, write_spot_the_diff

from diffcap.datasets import describe, read_pairs
from diffcap.records import take_changes, with_words
from diffcap.text.vocabulary import build_vocabulary


def test_rows_of_one_pair_are_merged(tmp_path: Path) -> None:
    folder = write_spot_the_diff(tmp_path)
    pairs = {pair.id: pair for pair in read_pairs("spot_the_diff", folder)}
    first = pairs["7.png"]
    assert first.captions == ["the red car has moved", "a man is gone", "the car left"]
    assert (first.before, first.after, first.split) == ("resized_images/7.png", "resized_images/7_2.png", "train")
    assert first.extra == {"annotators": [2, 1]}
    assert [pair.id for pair in pairs.values() if pair.split == "test"] == ["5.png", "6.png"]
    assert all((folder / path).is_file() for pair in pairs.values() for path in (pair.before, pair.after))
    assert pairs["6.png"].captions == [""]  # kept: the released files score this pair
    output = describe("spot_the_diff", list(pairs.values()), folder)
    assert output["notes"] == ["annotators' rows, merged by pair: train 9, val 2, test 2"]
    assert output["changes"] == "single" and output["repetitions"]["blank_captions"] == 1


@pytest.mark.parametrize("place", ["annotations", "data/annotations", ""])
def test_annotations_and_images_may_lie_in_other_places(tmp_path: Path, place: str) -> None:
    folder = write_spot_the_diff(tmp_path)
    (folder / place).mkdir(parents=True, exist_ok=True)
    for path in list((folder / "annotations").iterdir()):
        path.rename(folder / place / path.name)
    (folder / "resized_images").rename(folder / "images")
    assert read_pairs("spot_the_diff", folder)[0].after == "images/7_2.png"
    for path in list((folder / "images").iterdir()):
        path.rename(folder / path.name)
    assert read_pairs("spot_the_diff", folder)[0].after == "7_2.png"


def test_one_protocol_takes_sentences_and_the_other_pairs(tmp_path: Path) -> None:
    pairs = read_pairs("spot_the_diff", write_spot_the_diff(tmp_path, images=False))
    assert take_changes(pairs, "single") == take_changes(pairs, None) == pairs
    joined = {pair.id: pair.captions for pair in take_changes(pairs, "multi")}
    assert joined["7.png"] == ["the red car has moved. a man is gone. the car left"]
    assert joined["6.png"] == [""]
    assert pairs[0].captions == ["the red car has moved", "a man is gone", "the car left"]
    train = [caption for pair in pairs if pair.split == "train" for caption in pair.captions]
    assert (
        build_vocabulary(train, 1, "rcc").words
        == build_vocabulary([". ".join(pair.captions) for pair in pairs if pair.split == "train"], 1, "rcc").words
    )  # full stops go


def test_all_changes_of_a_pair_end_behind_the_sixtieth_word(tmp_path: Path) -> None:
    pairs = read_pairs("spot_the_diff", write_spot_the_diff(tmp_path, images=False))[:1]
    pairs[0].captions[:] = [" ".join(f"a{n}" for n in range(40)), " ".join(f"b{n}" for n in range(40))]
    words = take_changes(pairs, "multi")[0].captions[0].split(" ")
    assert len(words) == 60 and words[39:41] == ["a39.", "b0"] and words[-1] == "b19"


def test_pairs_without_a_word_are_left_out_of_what_needs_words(tmp_path: Path) -> None:
    pairs = read_pairs("spot_the_diff", write_spot_the_diff(tmp_path, images=False))
    assert "6.png" not in {pair.id for pair in with_words(pairs)}
    assert len(with_words(pairs)) == len(pairs) - 1


def test_one_sentence_for_each_fault(tmp_path: Path) -> None:
    folder = write_spot_the_diff(tmp_path, images=False)
    path = folder / "annotations/test.json"
    path.write_text(json.dumps([{"img_id": "7", "sentences": ["x"]}]))
    assert "7.png is in test here and in train before" in refusal("spot_the_diff", folder)
    for row in (
        {"img_id": 7, "sentences": ["x"]},
        {"img_id": "8", "sentences": [3]},
        4,
    ):
        path.write_text(json.dumps([{"img_id": "9", "sentences": ["x"]}, row]))
        assert f"{path}, entry 2: " in refusal("spot_the_diff", folder)
    path.unlink()
    assert "no annotations there; put train.json" in refusal("spot_the_diff", folder)
