"""Files of the authors' form: what is refused, what is missing, and each is one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity.loading import FIXTURES, Fixture, load

from diffcap.checkpoints.loading import load as load_trained
from diffcap.checkpoints.reading import read_checkpoint, write_folder
from diffcap.cli import main
from diffcap.errors import DiffcapError
from diffcap.interop.official import Unseen, import_official, read_words
from diffcap.lit.training import init_from
from diffcap.models.clip4idc import CLIP4IDC
from diffcap.models.pcl import PCL

METHODS = ("scorer", "dirl", "pcl", "clip4idc")
PCL_WORDS = ["<PAD>", "<BOS>", "<EOS>", "<UNK>", "<CLS>", "<MASK>"]


class Hostile:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


class AttrDict(dict):
    pass


def words(path: Path, count: int, specials: list[str]) -> Path:
    path.write_text(
        json.dumps({word: n for n, word in enumerate([*specials, *(f"w{n}" for n in range(count))][:count])})
    )
    return path


def pcl() -> Fixture:
    return load(FIXTURES / "pcl.json")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("where", ["weights", "config"])
def test_a_hostile_pickle_runs_nothing_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str, where: str
) -> None:
    evil = Hostile(tmp_path / "ran")
    content = {"change_detector_state": {}, "speaker_state": {}, "model_cfg": AttrDict(x=evil)}
    torch.save(content if where == "config" else {"w": torch.zeros(2), "evil": evil}, tmp_path / "evil.pt")
    with pytest.raises(SystemExit) as stop:
        main(["import", method, str(tmp_path / "evil.pt"), "--vocabulary", str(tmp_path / "none.json")])
    said = str(stop.value.code)
    assert said.startswith(f"error: {tmp_path / 'evil.pt'}: refused, nothing of it was run: it asks for ")
    named = "pathlib.Path.touch" if where == "weights" or method in ("scorer", "dirl") else "AttrDict"
    assert (named in said or "getattr" in said) and "\n" not in said
    assert not (tmp_path / "ran").exists() and not list(tmp_path.glob("*-diffcap"))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "content", [b"", b"hello", {}, {"a": 1}, {"a": torch.zeros(2)}, [1], {"change_detector_state": {}}]
)
def test_files_of_something_else(tmp_path: Path, method: Any, content: Any) -> None:
    path = tmp_path / "x.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    vocabulary = None if method == "clip4idc" else words(tmp_path / "v.json", 20, PCL_WORDS if method == "pcl" else RCC)
    with pytest.raises(DiffcapError) as error:
        import_official(path, method, vocabulary)
    said = str(error.value)
    assert str(path) in said and "\n" not in said and said.endswith(".")


RCC = ["<NULL>", "<UNK>", "<START>", "<END>"]


def test_vocabularies(tmp_path: Path) -> None:
    good = words(tmp_path / "good.json", 8, RCC)
    assert read_words(good, "rcc") == (["w0", "w1", "w2", "w3"], list(range(8)))
    wrapped = tmp_path / "wrapped.json"
    wrapped.write_text(json.dumps({"word_to_idx": {"b": 0, "<UNK>": 1, "<START>": 2, "<END>": 3, "<NULL>": 4, "a": 5}}))
    assert read_words(wrapped, "rcc") == (["b", "a"], [4, 1, 2, 3, 0, 5])
    for content, reason in (
        ([1], "not a vocabulary"),
        ({"a": 0, "b": 0}, "not a vocabulary"),
        ({"a": 1}, "not a vocabulary"),
        ({"a": "0"}, "not a vocabulary"),
        ({"a": 0}, "lack <NULL>"),
    ):
        wrapped.write_text(json.dumps(content))
        with pytest.raises(DiffcapError, match=reason):
            read_words(wrapped, "rcc")


def test_the_vocabulary_must_be_there_and_fit(tmp_path: Path) -> None:
    torch.save(pcl().weights("finetune"), tmp_path / "x.pt")
    with pytest.raises(DiffcapError, match=r"give its dict\.json as --vocabulary FILE"):
        import_official(tmp_path / "x.pt", "pcl")
    with pytest.raises(DiffcapError, match=r"9 words, .* was trained with 20"):
        import_official(tmp_path / "x.pt", "pcl", words(tmp_path / "v.json", 9, PCL_WORDS))
    with pytest.raises(DiffcapError, match="leave it out"):
        import_official(tmp_path / "x.pt", "clip4idc", tmp_path / "v.json")


def test_weights_that_lack_a_part_are_named(tmp_path: Path) -> None:
    state = pcl().weights("finetune")
    for gone in ("word_embedding.weight", "encoder.layers.1.attn.q_linear.weight"):
        torch.save({name: value for name, value in state.items() if name != gone}, tmp_path / "x.pt")
        with pytest.raises(DiffcapError, match=gone.replace(".", r"\.")):
            import_official(tmp_path / "x.pt", "pcl", words(tmp_path / "v.json", 20, PCL_WORDS), Unseen(heads=4))
    with pytest.raises(DiffcapError, match="do not make a whole pcl"):
        torch.save(state, tmp_path / "x.pt")
        import_official(tmp_path / "x.pt", "pcl", words(tmp_path / "v.json", 20, PCL_WORDS), Unseen(heads=7))


def test_pre_training_checkpoints_are_what_captioning_begins_with(tmp_path: Path) -> None:
    torch.save({"module." + name: value for name, value in pcl().weights("pretrain").items()}, tmp_path / "x.pt")
    vocabulary = words(tmp_path / "v.json", 20, PCL_WORDS)
    state = import_official(tmp_path / "x.pt", "pcl", vocabulary, Unseen(heads=4))
    assert state["diffcap"]["stage"] == "pretrain"
    write_folder(tmp_path / "ours", state)
    with pytest.raises(DiffcapError, match="of the pretrain stage cannot caption"):
        load_trained(tmp_path / "ours")
    captioner = PCL(**{**state["diffcap"]["hyperparameters"], "distractor_judging": True})
    init_from(captioner, str(tmp_path / "ours"), state["diffcap"]["words"], PCL.fresh_parts, PCL.earlier_parts)
    expected = read_checkpoint(tmp_path / "ours")["state_dict"]["captioner.trunk.output_layer.weight"]
    assert torch.equal(captioner.trunk.output_layer.weight, expected)


def test_the_adaptation_of_clip4idc(tmp_path: Path) -> None:
    official = load(FIXTURES / "clip4idc.json")
    torch.save({"state_dict": official.weights("retrieval")}, tmp_path / "x.pt")
    state = import_official(tmp_path / "x.pt", "clip4idc", unseen=Unseen(vision_heads=2))
    assert state["diffcap"]["stage"] == "pretrain" and state["diffcap"]["vocabulary_layout"] == "clip_released"
    write_folder(tmp_path / "ours", state)
    sizes = state["diffcap"]["hyperparameters"]
    model = CLIP4IDC(
        **{**sizes, "max_length": 13},
        width=64,
        heads=4,
        ffn=128,
        encoder_layers=2,
        decoder_layers=2,
        padding="released",
    )
    init_from(model, str(tmp_path / "ours"), [], CLIP4IDC.fresh_parts, CLIP4IDC.earlier_parts)
    assert torch.equal(model.images.before_mark, official.weights("retrieval")["clip.visual.bef_embedding"])
