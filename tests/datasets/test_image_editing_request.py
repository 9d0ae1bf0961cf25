import json
from pathlib import Path

from tests.datasets.layouts import refusal, write_image_editing_request

from diffcap.datasets import describe, read_pairs
from diffcap.evaluation.coco import read_references, write_references
from diffcap.text.vocabulary import build_vocabulary


def test_pairs_are_known_by_uid_and_images_may_be_shared(tmp_path: Path) -> None:
    folder = write_image_editing_request(tmp_path)
    pairs = {pair.id: pair for pair in read_pairs("image_editing_request", folder)}
    assert list(pairs)[:2] == ["Z_1", "Z_2"] and pairs["R_1"].split == "val"
    assert (pairs["Z_1"].before, pairs["Z_1"].after) == (pairs["Z_2"].before, pairs["Z_2"].after)
    assert pairs["Z_1"].captions == ["Making dark color "]  # as it was typed
    assert all((folder / path).is_file() for pair in pairs.values() for path in (pair.before, pair.after))
    output = describe("image_editing_request", list(pairs.values()), folder)
    assert output["repetitions"]["image_pairs"]["train"] == 7  # of 8 uids
    assert output["repetitions"]["image_pairs_in_two_splits"] == 1
    references = {id: pair.captions for id, pair in pairs.items() if pair.split == "test"}
    write_references(tmp_path / "references.json", references)
    assert read_references(tmp_path / "references.json") == references  # uids pass through COCO's form


def test_words_keep_their_case_in_the_authors_vocabulary_only(tmp_path: Path) -> None:
    captions = ["Making dark color ", "Brighten the sky, please.  Thanks"]
    assert build_vocabulary(captions, 1, "rcc").words == [
        "", ",", "Brighten", "Making", "Thanks", "color", "dark", "please", "sky", "the",
    ]  # fmt: skip
    assert build_vocabulary(captions, 1).words == [
        ",", ".", "brighten", "color", "dark", "making", "please", "sky", "thanks", "the",
    ]  # fmt: skip


def test_val_json_and_images_beside_the_annotations(tmp_path: Path) -> None:
    folder = write_image_editing_request(tmp_path)
    (folder / "valid.json").rename(folder / "val.json")
    for path in list((folder / "images").iterdir()):
        path.rename(folder / path.name)
    (folder / "images").rmdir()
    assert read_pairs("image_editing_request", folder)[0].before == "0.jpg"


def test_one_sentence_for_each_fault(tmp_path: Path) -> None:
    folder = write_image_editing_request(tmp_path)
    path = folder / "test.json"
    good = {"img0": "a.jpg", "img1": "b.jpg", "sents": ["x"], "uid": "R_9"}
    path.write_text(json.dumps([good, {**good, "uid": "Z_1"}]))
    output = refusal("image_editing_request", folder)
    assert "entry 2: the uid 'Z_1' is already used in" in output and "train.json, entry 1" in output
    for wrong in ({"uid": ""}, {"img1": None}, {"sents": "x"}):
        path.write_text(json.dumps([{**good, **wrong}]))
        assert f"{path}, entry 1: " in refusal("image_editing_request", folder)
    path.write_text("{}")
    assert "expected a list of annotations, found dict" in refusal("image_editing_request", folder)
