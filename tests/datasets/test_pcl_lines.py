import json
from pathlib import Path

import pytest
from tests.datasets.layouts import refusal, write_clevr_change, write_lines, write_pcl_lines

from diffcap.datasets import read_pairs


def test_the_authors_lines_name_the_pairs_of_the_official_layout(tmp_path: Path) -> None:
    lines = read_pairs("clevr_change", write_pcl_lines(tmp_path / "pcl", [3, 12], [5], [1]))
    official = read_pairs("clevr_change", write_clevr_change(tmp_path / "official", [3, 12], [5], [1]))
    key = [(pair.id, pair.before, pair.after, pair.split, pair.is_distractor) for pair in lines]
    assert key == [(pair.id, pair.before, pair.after, pair.split, pair.is_distractor) for pair in official]
    assert lines[0].captions == ["the cube 3 turned red"] and lines[1].captions == ["nothing changed"]
    assert {pair.change_type for pair in lines} == {None}
    (tmp_path / "pcl/type_mapping.json").write_text(json.dumps({"add": ["000003.png"]}))
    assert [pair.change_type for pair in read_pairs("clevr_change", tmp_path / "pcl")][:2] == ["add", None]


def test_a_dictionary_of_other_words_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_pcl_lines(tmp_path, [3], [5], [1])
    words = ["<PAD>", "<BOS>", "<EOS>", "the", "cube", "3", "turned", "red", "nothing", "changed"]
    (folder / "dict.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    read_pairs("clevr_change", folder)
    assert not capsys.readouterr().out
    (folder / "dict.json").write_text(json.dumps({"ball": 6, "cube": 7}))
    read_pairs("clevr_change", folder)
    assert "has 2 words, the training captions 7 (not in both: 3, ball, changed)" in capsys.readouterr().out


def test_one_sentence_for_each_fault(tmp_path: Path) -> None:
    folder = write_pcl_lines(tmp_path, [3], [5], [1])
    good = {"img1": "CLEVR_default_000001.png", "img2": "CLEVR_semantic_000001.png", "sentences": ["a"]}
    for wrong in (
        {"img2": "CLEVR_semantic_000002"},
        {"img2": "CLEVR_default_000001"},
        {"img1": None},
        {"img1": f"CLEVR_default_{'1' * 5000}", "img2": f"CLEVR_semantic_{'1' * 5000}"},
        {"sentences": "a"},
    ):
        write_lines(folder / "test.json", [good, {**good, **wrong}])
        assert f"{folder / 'test.json'}, line 2: " in refusal("clevr_change", folder)
    write_lines(folder / "test.json", [good, good])
    assert "the pair '000001.png' is already used in" in refusal("clevr_change", folder)
    (folder / "val.json").unlink()
    assert "put IDC-PCL's three files here" in refusal("clevr_change", folder)
