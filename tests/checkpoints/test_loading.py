"""A checkpoint alone can caption; what is not one of ours, or no longer whole, is one sentence."""

import re
import resource
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints.test_importing import Hostile
from tests.models.tiny import captioner, maps, pretraining
from tests.toy_checkpoints import WORDS, write_checkpoint

from diffcap.checkpoints.combining import average
from diffcap.checkpoints.hub import export, push
from diffcap.checkpoints.loading import load
from diffcap.checkpoints.reading import read_checkpoint, write_folder
from diffcap.cli import main
from diffcap.lit.callbacks import AtomicCheckpointIO
from diffcap.lit.training import init_from
from diffcap.models.generation import greedy
from diffcap.utils.errors import DiffcapError


def model():
    return captioner(vocabulary_size=6 + len(WORDS), text_cls=True)


def sentence(path: Path, use=read_checkpoint) -> str:
    with pytest.raises(DiffcapError) as error:
        use(path)
    output = str(error.value)
    assert output.startswith(f"{path}: ") and "\n" not in output and len(output) < 450 and output.endswith(".")
    return output


def test_the_loaded_captioner_writes_what_the_saved_one_writes(tmp_path: Path) -> None:
    saved = model()
    trained = load(write_checkpoint(tmp_path / "best.ckpt", saved, "finetune"))
    before, after = maps(3)
    tokens = [greedy(model, model.encode(before, after), 12) for model in (trained.captioner, saved)]
    assert torch.equal(*tokens)
    assert not trained.captioner.training and trained.max_length == 12
    assert trained.vocabulary.words == WORDS and trained.features["shape"] == [5, 2, 3]
    assert trained.metadata.items() >= {"method": "pcl", "step": 7, "tokenizer": "raw"}.items()


@pytest.mark.parametrize("kind", ["text", "zeros", "cut", "zip", "archive", "newer"])
def test_foreign_files(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "foreign.ckpt"
    path.write_bytes({"text": b"hello\nworld\n", "cut": b"\x80\x02X\x01"}.get(kind, bytes(5000)))
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("readme.txt", "hello")
    elif kind in ("archive", "newer"):
        torch.save({"mark": Hostile(tmp_path / "ran")}, path, pickle_protocol=4 if kind == "newer" else 2)
    output = sentence(path)
    assert "not a readable checkpoint" in output and "torch.load" not in output  # torch's advice to read it unsafely
    assert ("it uses " in output) == (kind == "archive")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [{"state_dict": {}}, [1, 2], {"diffcap": "yes"}, {"diffcap": {"version": "1"}}])
def test_files_of_other_programs(tmp_path: Path, content) -> None:
    torch.save(content, tmp_path / "other.ckpt")
    output = sentence(tmp_path / "other.ckpt")
    assert "not a checkpoint of diffcap;" in output and "with `diffcap import METHOD FILE`" in output


def test_what_cannot_caption_is_one_sentence(tmp_path: Path) -> None:
    assert "no checkpoint there; train one with `make pretrain finetune`" in sentence(tmp_path / "best.ckpt")
    path = write_checkpoint(tmp_path / "last.ckpt", pretraining(), "pretrain")
    assert "of the pretrain stage cannot caption; fine-tune from it first" in sentence(path, load)
    state = read_checkpoint(write_checkpoint(path, model(), "finetune"))
    del state["diffcap"]["words"]
    torch.save(state, path)
    assert "'words' is missing" in sentence(path)


FEATURES = {"name": "toy", "shape": [5, 2, 3], "dtype": "float16"}


@pytest.mark.parametrize(
    ("meta_values", "expectation"),
    [
        ({"format": 0, "version": "0.0.7"}, "its format is 0, but this diffcap reads format 1; use diffcap 0.0.7"),
        ({"method": "duda"}, "its method 'duda' is unknown; known methods: pcl"),
        (
            {"method": "scorer", "version": "9.0.0"},
            "build its captioner.*; use diffcap 9.0.0, which wrote it, or train it",
        ),
        (
            {"hyperparameters": {**model().hyperparameters, "ffn": 16}},
            "size mismatch for .*encoder.layers.0.ffn.0.weight",
        ),
        ({"words": WORDS[:3]}, "it has 9 words, special tokens included, but vocabulary_size is 10"),
        ({"vocabulary_layout": "x"}, "cannot build its captioner"),
        ({"vocabulary_layout": "rcc"}, "its vocabulary_layout is rcc, not pcl|it has 8 words"),
        ({"hyperparameters": [1]}, "cannot build its captioner"),
        ({"hyperparameters": {**model().hyperparameters, "heads": 7}}, "cannot build its captioner"),
        ({"hyperparameters": {**model().hyperparameters, "unknown": 1}}, "cannot build its captioner"),
        ({"max_length": 1}, "its max_length is 1; it must be from 2 to 40"),
        ({"max_length": 1000}, "its max_length is 1000; it must be from 2 to 40"),
        ({"seed": torch.zeros(3)}, "its metadata are damaged"),
        ({"features": {}}, "'shape' is missing"),
        ({"features": {**FEATURES, "shape": [6, 2, 3]}}, r"shape \[6, 2, 3\], but the captioner reads \[5, 2, 3\]"),
    ],
)
def test_odd_facts_are_one_sentence(tmp_path: Path, meta_values: dict[str, Any], expectation: str) -> None:
    path = write_checkpoint(tmp_path / "best.ckpt", model(), "finetune", **meta_values)
    assert re.search(expectation, sentence(path, load))


def test_odd_weights_are_one_sentence(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "best.ckpt", model(), "finetune")
    state = torch.load(path, weights_only=True)
    name = "captioner.trunk.image_projection.weight"
    torch.save({**state, "state_dict": {**state["state_dict"], name: "x"}}, path)
    assert f"its weight {name!r} is not a tensor" in sentence(path, load)
    torch.save({**state, "global_step": None}, path)
    assert "its metadata are damaged" in sentence(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    broken = model()
    with torch.no_grad():
        broken.trunk.image_projection.weight[3, 2] = value
    path = write_checkpoint(tmp_path / "best.ckpt", broken, "finetune")
    expectation = "its weight 'captioner.trunk.image_projection.weight' contains nan or inf"
    for use in (
        read_checkpoint,
        load,
        lambda path: average([path, path], tmp_path / "mean.ckpt"),
        lambda path: export(path, tmp_path / "exported"),
        lambda path: push(path, "a/b"),
        lambda path: init_from(model(), str(path), WORDS, (), ()),
    ):
        output = sentence(path, use)
        assert expectation in output and "lower learning rate, such as `make finetune ARGS=--model.lr=1e-5`" in output
    assert not (tmp_path / "mean.ckpt").exists() and not (tmp_path / "exported").exists()
    good = read_checkpoint(write_checkpoint(tmp_path / "good.ckpt", model(), "finetune"))
    good["state_dict"]["captioner.trunk.image_projection.weight"][3, 2] = value
    write_folder(tmp_path / "ours", good)
    assert expectation in sentence(tmp_path / "ours", load)


def written(path: Path, kind: str) -> Path:
    """A checkpoint as each part of the program writes it; the file whose bytes are its weights."""
    plain = write_checkpoint(path / "best.ckpt", model(), "finetune")
    if kind == "lightning":
        AtomicCheckpointIO().save_checkpoint(torch.load(plain, weights_only=True), path / "best.ckpt")
    elif kind == "average":
        average([plain, plain], path / "best.ckpt")
    elif kind == "export":
        export(plain, path / "ours")
        return path / "ours" / "model.safetensors"
    return plain


@pytest.mark.parametrize("kind", ["torch", "lightning", "average", "export"])
def test_flipped_bytes_are_refused_or_change_nothing(tmp_path: Path, kind: str) -> None:
    """Anywhere in the file: headers of the archive, its directory and its padding, too."""
    path = written(tmp_path, kind)
    good, expected = path.read_bytes(), load(path).captioner.state_dict()
    for first, count in [(len(good) // 2, 4096), *((place, 1) for place in range(5, len(good), 997))]:
        flipped = bytes(255 - byte for byte in good[first : first + count])
        path.write_bytes(good[:first] + flipped + good[first + count :])
        try:
            found = load(path).captioner.state_dict()
        except DiffcapError as error:
            assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
        else:
            assert count == 1 and kind != "export"
            assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_a_damaged_file_says_how_to_get_it_again(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "desk" / "pcl"
    for folder, expectation in (
        (run / "finetune", f"move {run / 'finetune'} away and train it again with the same `make finetune` command."),
        (run / "pretrain-cub", f"or move {run / 'pretrain-cub'} away and train it again with the same command."),
        (run / "averaged", "copy or download it again, or write it again with the same command."),
    ):
        folder.mkdir(parents=True)
        if folder.name != "averaged":
            (folder / "running.json").write_text("{}")
        for name in ("best.ckpt", "last.ckpt"):
            (folder / name).write_bytes(write_checkpoint(tmp_path / "x.ckpt", model(), "finetune").read_bytes()[:-500])
            assert sentence(folder / name).endswith(expectation)


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """No file may grow beyond this size, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_another_programs_model_is_not_overwritten(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "x.ckpt", model(), "finetune")
    (tmp_path / "other").mkdir()
    for name, text in (("model.safetensors", "weights"), ("config.json", '{"model_type": "qwen2_5_vl"}')):
        (tmp_path / "other" / name).write_text(text)
    with pytest.raises(SystemExit, match=r"contains files of another program \(config.json\); give a new folder"):
        main(["export", str(checkpoint), "--out", str(tmp_path / "other")])
    assert (tmp_path / "other/model.safetensors").read_text() == "weights"
    for _ in range(2):  # its own folder is written again
        main(["export", str(checkpoint), "--out", str(tmp_path / "own")])


def test_export_on_a_full_disk_is_one_sentence_and_costs_nothing(tmp_path: Path) -> None:
    path, folder = write_checkpoint(tmp_path / "x.ckpt", model(), "finetune"), tmp_path / "ours"
    with small_files(10_000), pytest.raises(DiffcapError) as error:
        export(path, folder)
    assert re.fullmatch(rf"{folder}/model\.safetensors: cannot be written \(.*\); check the free .*", str(error.value))
    assert list(folder.iterdir()) == []
    export(path, folder)
    different = captioner(1, vocabulary_size=6 + len(WORDS), text_cls=True)
    other = write_checkpoint(tmp_path / "y.ckpt", different, "finetune")
    with small_files(10_000), pytest.raises(DiffcapError):
        export(other, folder)
    ours, earlier = load(folder).captioner.state_dict(), load(path).captioner.state_dict()
    assert all(torch.equal(value, ours[name]) for name, value in earlier.items())
    (folder / "config.json").unlink()  # interrupted before its last file
    main(["export", str(other), "--out", str(folder)])
    load(folder)
