"""A checkpoint alone can caption; what is not one of ours, or no longer whole, is one sentence."""

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.models.tiny import captioner, maps, pretraining
from tests.toy_checkpoints import WORDS, write_checkpoint

from diffcap.checkpoints.loading import load
from diffcap.checkpoints.reading import read_checkpoint, write_folder
from diffcap.errors import DiffcapError
from diffcap.models.generation import greedy
from diffcap.models.scorer import SCORER


def model():
    return captioner(vocabulary_size=6 + len(WORDS), text_cls=True)


def sentence(path: Path, use=read_checkpoint) -> str:
    with pytest.raises(DiffcapError) as error:
        use(path)
    said = str(error.value)
    assert said.startswith(f"{path}: ") and "\n" not in said and len(said) < 400 and said.endswith(".")
    return said


def test_the_loaded_captioner_writes_what_the_saved_one_writes(tmp_path: Path) -> None:
    saved = model()
    trained = load(write_checkpoint(tmp_path / "best.ckpt", saved, "finetune"))
    before, after = maps(3)
    assert torch.equal(greedy(trained.captioner, before, after, 12), greedy(saved, before, after, 12))
    assert not trained.captioner.training and trained.max_length == 12
    assert trained.vocabulary.words == WORDS and trained.features["shape"] == [5, 2, 3]
    assert trained.facts["method"] == "pcl" and trained.facts["step"] == 7 and trained.facts["tokenizer"] == "raw"


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    assert "no checkpoint there; train one with `make pretrain finetune`" in sentence(tmp_path / "best.ckpt")


def test_another_format_names_the_version_that_wrote_it(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "old.ckpt", model(), "finetune", format=0, version="0.0.7")
    assert "checkpoint format 0, this diffcap reads 1; use diffcap 0.0.7" in sentence(path)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_file(tmp_path: Path, share: float) -> None:
    path = write_checkpoint(tmp_path / "best.ckpt", model(), "finetune")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    assert "not a readable checkpoint" in sentence(path)


class Unsafe:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.mark.parametrize(
    "kind", ["text", "json", "zip", "safetensors", "noise", "zeros", "numbers", "picture", "cut", "archive", "newer"]
)
def test_foreign_files(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "foreign.ckpt"
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("readme.txt", "hello")
    elif kind == "safetensors":
        save_file({"weight": torch.zeros(3)}, path)
    elif kind in ("archive", "newer"):
        torch.save({"mark": Unsafe(tmp_path / "ran")}, path, pickle_protocol=4 if kind == "newer" else 2)
    else:
        contents = {"text": b"hello\nworld\n", "json": json.dumps({"a": 1}).encode(), "noise": bytes(range(256)) * 9}
        contents |= {"zeros": bytes(5000), "numbers": b"1\n2\n", "picture": b"\x89PNG\r\n\x1a\n" + bytes(60)}
        contents |= {"cut": b"\x80\x02X\x01"}
        path.write_bytes(contents[kind])
    said = sentence(path)
    assert "not a readable checkpoint" in said and "torch.load" not in said  # torch's advice to read it unsafely
    assert ("it asks for " in said) == (kind in ("archive", "newer"))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [{"state_dict": {}}, [1, 2], {"diffcap": "yes"}, {"diffcap": {"version": "1"}}])
def test_files_of_other_programs(tmp_path: Path, content) -> None:
    torch.save(content, tmp_path / "other.ckpt")
    said = sentence(tmp_path / "other.ckpt")
    assert "not a checkpoint of diffcap;" in said and "comes in through `diffcap import METHOD FILE`" in said


def test_a_pre_training_checkpoint_cannot_caption(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "last.ckpt", pretraining(), "pretrain")
    assert "of the pretrain stage cannot caption; fine-tune from it first" in sentence(path, load)
    read_checkpoint(path)


def test_an_unknown_method_or_other_weights_are_one_sentence(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "best.ckpt", model(), "finetune", method="duda")
    assert "'duda'" in sentence(path, load)
    path = write_checkpoint(tmp_path / "best.ckpt", model(), "finetune", method="scorer")
    assert "settings are of another diffcap" in sentence(path, load)
    path = write_checkpoint(
        tmp_path / "best.ckpt", model(), "finetune", hyperparameters={**model().hyperparameters, "ffn": 16}
    )
    assert "weights do not fit" in sentence(path, load)


@pytest.mark.parametrize("gone", ["stage", "method", "words", "features", "max_length", "hyperparameters"])
def test_an_entry_that_is_missing_is_one_sentence(tmp_path: Path, gone: str) -> None:
    path = write_checkpoint(tmp_path / "best.ckpt", model(), "finetune")
    state = torch.load(path, weights_only=True)
    del state["diffcap"][gone]
    torch.save(state, path)
    sentence(path, load)


FEATURES = {"name": "toy", "shape": [5, 2, 3], "dtype": "float16"}


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"method": [1]}, r"its method is \[1\], this diffcap knows pcl"),
        ({"words": "abcd"}, "its words are no list of texts"),
        ({"words": [1, 2, 3, 4]}, "its words are no list of texts"),
        ({"words": WORDS[:3]}, "it has 9 words, special ones included, for a vocabulary_size of 10"),
        ({"vocabulary_layout": "x"}, "settings are of another diffcap, or damaged"),
        ({"vocabulary_layout": ["pcl"]}, "settings are of another diffcap, or damaged"),
        ({"hyperparameters": [1]}, "settings are of another diffcap, or damaged"),
        ({"max_length": 1}, "its captions have 1 positions, of 2 to 40"),
        ({"max_length": 1000}, "its captions have 1000 positions, of 2 to 40"),
        ({"max_length": None}, "settings are of another diffcap, or damaged"),
        ({"features": [1]}, "settings are of another diffcap, or damaged"),
        ({"features": {}}, "'shape' is missing"),
        ({"features": {**FEATURES, "shape": None}}, "the shape of its features is None"),
        ({"features": {**FEATURES, "shape": [5, 2, -3]}}, r"the shape of its features is \[5, 2, -3\]"),
        (
            {"features": {**FEATURES, "shape": [6, 2, 3]}},
            r"it reads features of shape \[5, 2, 3\], and says \[6, 2, 3\]",
        ),
        ({"features": {**FEATURES, "pool": [1]}}, r"its features are pooled to \[1\]"),
        ({"features": {**FEATURES, "library": "pixels", "preprocessing": {}}}, "'size' is missing"),
        ({"features": {**FEATURES, "library": "pixels", "preprocessing": {"size": 3}}}, "does not say of which size"),
    ],
)
def test_odd_facts_are_one_sentence(tmp_path: Path, facts: dict[str, Any], told: str) -> None:
    assert re.search(told, sentence(write_checkpoint(tmp_path / "best.ckpt", model(), "finetune", **facts), load))


@pytest.mark.parametrize(
    "odd",
    [
        {"heads": 0},
        {"heads": 7},
        {"width": -4},
        {"width": "16"},
        {"vocabulary_size": 10**12},
        {"ffn": 10**12},
        {"positions": 10**12},
        {"cross_layers": 10**9},
        {"grid": [3]},
    ],
    ids=str,
)
def test_odd_sizes_in_a_folder_are_one_sentence(tmp_path: Path, odd: dict[str, Any]) -> None:
    """As somebody's config.json may have them; sizes beyond the weights' are refused before any memory is asked for."""
    if "grid" in odd:
        scorer = SCORER(4 + len(WORDS), 5, (2, 3), 12, width=16, heads=2, word_width=8)
        path = write_checkpoint(tmp_path / "x.ckpt", scorer, "finetune", method="scorer", vocabulary_layout="rcc")
    else:
        path = write_checkpoint(tmp_path / "x.ckpt", model(), "finetune")
    write_folder(tmp_path / "ours", read_checkpoint(path))
    load(tmp_path / "ours")
    config = tmp_path / "ours" / "config.json"
    facts = json.loads(config.read_text())
    facts["hyperparameters"] |= odd
    config.write_text(json.dumps(facts))
    assert "settings are of another diffcap, or damaged" in sentence(tmp_path / "ours", load)
