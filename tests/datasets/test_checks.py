"""What holds of every reader's paths."""

import json
from pathlib import Path

import pytest
from tests.datasets.layouts import refusal, write_image_editing_request, write_lines, write_spot_the_diff

OUT = "leads out of the dataset's folder"


def test_a_url_is_no_path(tmp_path: Path) -> None:
    write_lines(tmp_path / "pairs.jsonl", [{"before": "http://example.org/a.png", "after": "b.png", "captions": ["x"]}])
    output = refusal("desk", tmp_path)
    assert "pairs.jsonl, line 1: http://example.org/a.png is a URL; download the image" in output


@pytest.mark.parametrize("name", ["../../etc/x", "a/../../../x", "/etc/x"])
def test_no_path_of_spot_the_diff_leads_out(tmp_path: Path, name: str) -> None:
    folder = write_spot_the_diff(tmp_path, images=False)
    (folder / "1_2.png").touch()  # the images lie beside the annotations
    (folder / "annotations/val.json").write_text(json.dumps([{"img_id": name, "sentences": ["x"]}]))
    output = refusal("spot_the_diff", folder)
    assert f"{folder}, the pair '{name}.png': the path '{name}.png' {OUT}" in output


def test_nor_one_of_image_editing_request(tmp_path: Path) -> None:
    folder = write_image_editing_request(tmp_path)
    row = {"uid": "u", "img0": "a.jpg", "img1": "../../etc/passwd", "sents": ["x"]}
    (folder / "test.json").write_text(json.dumps([row]))
    assert f"the pair 'u': the path 'images/../../etc/passwd' {OUT}" in refusal("image_editing_request", folder)


def test_nor_one_of_birds_to_words(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        write_lines(tmp_path / f"{split}.jsonl", [{"img1": split, "img2": "../../x", "description": ["a"]}])
    assert f"the path 'images/../../x.jpg' {OUT}" in refusal("birds2words", tmp_path)


def test_nor_one_of_nabirds(tmp_path: Path) -> None:
    lists = {"images": "1 ../../x.jpg", "image_class_labels": "1 5", "train_test_split": "1 1", "classes": "5 Gull"}
    for name, line in lists.items():
        (tmp_path / f"{name}.txt").write_text(line)
    assert f"the pair '1': the path 'images/../../x.jpg' {OUT}" in refusal("nabirds", tmp_path)


def test_nor_one_of_cub_whose_sentences_are_not_looked_for(tmp_path: Path) -> None:
    folder = tmp_path / "in/cub"
    (folder / "text_c10").mkdir(parents=True)
    (folder / "testclasses.txt").write_text("004.Ani\n")
    (tmp_path / "in/x.txt").write_text("another's words\n")
    (folder / "images.txt").write_text("1 ../../x.jpg\n")
    assert f"{folder / 'images.txt'}, line 1: the path '../../x.jpg' {OUT}" in refusal("cub", folder)
