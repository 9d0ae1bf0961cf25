"""IDC-PCL's own hard negatives."""

import json
from pathlib import Path

import pytest

from diffcap.negatives.authors import authors_negatives
from diffcap.records import ChangePair
from diffcap.utils.errors import DiffcapError

SIX = ["The cube, moved.", "b", "c", "d", "e", "f"]
PAIRS = [
    ChangePair("000001.png", "images/CLEVR_default_000001.png", "sc_images/CLEVR_semantic_000001.png", ["A cube.", "b b"], "train"),
    ChangePair("000001.png_n", "images/CLEVR_default_000001.png", "nsc_images/CLEVR_nonsemantic_000001.png", ["nothing"], "train"),
    ChangePair("001.Gull/Gull_1", "images/001.Gull/Gull_1.jpg", None, ["a gull"], "train"),
]  # fmt: skip


def row(kind: str, number: int, *sentences: str) -> dict:
    names = {"img1": f"CLEVR_default_{number:06d}", "img2": f"CLEVR_{kind}_{number:06d}.png"}
    return {**names, "sentences": list(sentences), "neg_samples": SIX}


def write(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_caption_of_a_pair_gets_its_negatives(tmp_path: Path) -> None:
    bird = {"img": "Gull_1", "sentences": ["a gull"], "neg_samples": SIX}
    rows = row("semantic", 1, "a cube .", "other"), row("nonsemantic", 1, "nothing"), row("semantic", 7, "gone"), bird
    found = list(authors_negatives(write(tmp_path / "train_neg_tfidf6.json", *rows), PAIRS))
    assert [(each.id, each.caption) for each in found] == [
        ("000001.png", "A cube."),  # as it stands in the manifest
        ("000001.png_n", "nothing"),
        ("001.Gull/Gull_1", "a gull"),
    ]
    assert all([negative.text for negative in each.negatives] == ["the cube , moved .", *"bcdef"] for each in found)


def test_one_sentence_for_each_fault(tmp_path: Path) -> None:
    good = row("semantic", 1, "a cube .")
    for bad, output in (
        ({**good, "neg_samples": SIX[:5]}, "line 2: 5 negatives, but the first line has 6"),
        ({**good, "neg_samples": None}, 'line 2: "neg_samples" must be a list of sentences'),
        ({**good, "sentences": "a"}, 'line 2: "sentences" must be a list of sentences'),
        ({**good, "img2": None}, 'line 2: needs "img1" and "img2", or "img"'),
    ):
        with pytest.raises(DiffcapError, match="line 2") as caught:
            list(authors_negatives(write(tmp_path / "x.json", good, bad), PAIRS))
        assert output in str(caught.value)
    with pytest.raises(DiffcapError, match="none of its sentences is a caption of these pairs"):
        list(authors_negatives(write(tmp_path / "x.json", row("semantic", 9, "a cube .")), PAIRS))
