"""A checkpoint alone can caption; what is not one of ours, or no longer whole, is one sentence."""

import json
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.models.tiny import captioner, maps, pretraining
from tests.toy_checkpoints import WORDS, write_checkpoint

from diffcap.checkpoints.loading import load
from diffcap.checkpoints.reading import read_checkpoint
from diffcap.errors import DiffcapError
from diffcap.models.generation import greedy


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
    "kind", ["text", "json", "zip", "safetensors", "noise", "zeros", "numbers", "picture", "archive"]
)
def test_foreign_files(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "foreign.ckpt"
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("readme.txt", "hello")
    elif kind == "safetensors":
        save_file({"weight": torch.zeros(3)}, path)
    elif kind == "archive":
        torch.save({"mark": Unsafe(tmp_path / "ran")}, path)
    else:
        contents = {"text": b"hello\nworld\n", "json": json.dumps({"a": 1}).encode(), "noise": bytes(range(256)) * 9}
        contents |= {"zeros": bytes(5000), "numbers": b"1\n2\n", "picture": b"\x89PNG\r\n\x1a\n" + bytes(60)}
        path.write_bytes(contents[kind])
    assert "not a readable checkpoint" in sentence(path)
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
    path = write_checkpoint(tmp_path / "best.ckpt", model(), "finetune", hyperparameters=captioner().hyperparameters)
    assert "weights do not fit" in sentence(path, load)


@pytest.mark.parametrize("gone", ["stage", "method", "words", "features", "max_length", "hyperparameters"])
def test_an_entry_that_is_missing_is_one_sentence(tmp_path: Path, gone: str) -> None:
    path = write_checkpoint(tmp_path / "best.ckpt", model(), "finetune")
    state = torch.load(path, weights_only=True)
    del state["diffcap"][gone]
    torch.save(state, path)
    sentence(path, load)
