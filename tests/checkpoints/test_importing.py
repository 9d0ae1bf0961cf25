"""Files of the authors' form: what is refused, what is missing, and each is one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.parity.loading import FIXTURES, Fixture, load

from diffcap.checkpoints.importing import ImportOptions, import_official, read_word_ids
from diffcap.checkpoints.loading import load as load_trained
from diffcap.checkpoints.reading import read_checkpoint, write_folder
from diffcap.cli import main
from diffcap.lit.training import init_from
from diffcap.methods.clip4idc.model import CLIP4IDC
from diffcap.methods.pcl.model import PCL
from diffcap.utils.errors import DiffcapError

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
    order = [*specials, *(f"w{n}" for n in range(count))][:count]
    path.write_text(json.dumps({word: n for n, word in enumerate(order)}))
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
    output = str(stop.value.code)
    assert output.startswith(f"error: {tmp_path / 'evil.pt'}: refused without running its code: it uses ")
    named = "pathlib.Path.touch" if where == "weights" or method in ("scorer", "dirl") else "AttrDict"
    assert (named in output or "getattr" in output) and "\n" not in output
    assert not (tmp_path / "ran").exists() and not list(tmp_path.glob("*-diffcap"))


RCC = ["<NULL>", "<UNK>", "<START>", "<END>"]


def test_vocabularies(tmp_path: Path) -> None:
    good = words(tmp_path / "good.json", 8, RCC)
    assert read_word_ids(good, "rcc") == (["w0", "w1", "w2", "w3"], list(range(8)))
    wrapped = tmp_path / "wrapped.json"
    wrapped.write_text(json.dumps({"word_to_idx": {"b": 0, "<UNK>": 1, "<START>": 2, "<END>": 3, "<NULL>": 4, "a": 5}}))
    assert read_word_ids(wrapped, "rcc") == (["b", "a"], [4, 1, 2, 3, 0, 5])
    for content, reason in (
        ([1], "not a vocabulary"),
        ({"a": 0, "b": 0}, "not a vocabulary"),
        ({"a": 1}, "not a vocabulary"),
        ({"a": "0"}, "not a vocabulary"),
        ({"a": 0}, "the special token <NULL> is missing"),
    ):
        wrapped.write_text(json.dumps(content))
        with pytest.raises(DiffcapError, match=reason):
            read_word_ids(wrapped, "rcc")


def test_the_vocabulary_must_be_there_and_fit(tmp_path: Path) -> None:
    torch.save(pcl().weights("finetune"), tmp_path / "x.pt")
    with pytest.raises(DiffcapError, match=r"give its dict\.json as --vocabulary FILE"):
        import_official(tmp_path / "x.pt", "pcl")
    with pytest.raises(DiffcapError, match=r"has 9 words, but .* was trained with 20"):
        import_official(tmp_path / "x.pt", "pcl", words(tmp_path / "v.json", 9, PCL_WORDS))
    with pytest.raises(DiffcapError, match="omit the option"):
        import_official(tmp_path / "x.pt", "clip4idc", tmp_path / "v.json")


def test_weights_that_lack_a_part_are_named(tmp_path: Path) -> None:
    state = pcl().weights("finetune")
    for gone, named in (
        ("word_embedding.weight", r"word_embedding\.weight"),
        ("encoder.layers.1.attn.q_linear.weight", r"query, key or value of 'trunk\.cross_encoder\.layers\.1\."),
        ("encoder.norm.a_2", r"Missing key.*trunk\.cross_encoder\.norm\.weight"),
    ):
        torch.save({name: value for name, value in state.items() if name != gone}, tmp_path / "x.pt")
        with pytest.raises(DiffcapError, match=named):
            import_official(tmp_path / "x.pt", "pcl", words(tmp_path / "v.json", 20, PCL_WORDS), ImportOptions(heads=4))
    with pytest.raises(DiffcapError, match="do not fit pcl"):
        torch.save(state, tmp_path / "x.pt")
        import_official(tmp_path / "x.pt", "pcl", words(tmp_path / "v.json", 20, PCL_WORDS), ImportOptions(heads=7))


def test_pre_training_checkpoints_are_what_captioning_begins_with(tmp_path: Path) -> None:
    torch.save({"module." + name: value for name, value in pcl().weights("pretrain").items()}, tmp_path / "x.pt")
    vocabulary = words(tmp_path / "v.json", 20, PCL_WORDS)
    state = import_official(tmp_path / "x.pt", "pcl", vocabulary, ImportOptions(heads=4))
    assert state["diffcap"]["stage"] == "pretrain"
    write_folder(tmp_path / "ours", state)
    with pytest.raises(DiffcapError, match="of the pretrain stage cannot caption"):
        load_trained(tmp_path / "ours")
    captioner = PCL(**{**state["diffcap"]["hyperparameters"], "distractor_judging": True})
    init_from(captioner, str(tmp_path / "ours"), state["diffcap"]["words"], PCL.allowed_missing, PCL.allowed_unexpected)
    expected = read_checkpoint(tmp_path / "ours")["state_dict"]["captioner.trunk.output_layer.weight"]
    assert torch.equal(captioner.trunk.output_layer.weight, expected)


def test_an_option_of_one_method(tmp_path: Path) -> None:
    torch.save(pcl().weights("finetune"), tmp_path / "x.pt")
    vocabulary = words(tmp_path / "v.json", 20, PCL_WORDS)
    options = "--vocabulary", str(vocabulary), "--heads=4", "--options.grid=[3, 5]"
    main(["import", "pcl", str(tmp_path / "x.pt"), "--out", str(tmp_path / "ours"), *options])
    assert read_checkpoint(tmp_path / "ours")["diffcap"]["features"]["shape"][1:] == [3, 5]


def test_the_adaptation_of_clip4idc(tmp_path: Path) -> None:
    official = load(FIXTURES / "clip4idc.json")
    torch.save({"state_dict": official.weights("retrieval")}, tmp_path / "x.pt")
    state = import_official(tmp_path / "x.pt", "clip4idc")
    assert state["diffcap"]["stage"] == "pretrain" and state["diffcap"]["vocabulary_layout"] == "clip_released"
    write_folder(tmp_path / "ours", state)
    sizes = state["diffcap"]["hyperparameters"]
    assert sizes["intra_layers"] == 3  # as a number, so that fine-tuning with the same number starts from it
    more = {"max_length": 13, "width": 64, "heads": 4, "ffn": 128, "encoder_layers": 2, "decoder_layers": 2}
    model = CLIP4IDC(**{**sizes, **more, "padding": "released"})
    init_from(model, str(tmp_path / "ours"), [], CLIP4IDC.allowed_missing, CLIP4IDC.allowed_unexpected)
    assert torch.equal(model.images.before_mark, official.weights("retrieval")["clip.visual.bef_embedding"])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("content", [b"", {}, {"a": 1}, {"a": torch.zeros(2)}, [1], {"change_detector_state": {}}])
def test_files_of_something_else(tmp_path: Path, method: Any, content: Any) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(b"") if isinstance(content, bytes) else torch.save(content, path)
    vocabulary = None if method == "clip4idc" else words(tmp_path / "v.json", 20, PCL_WORDS if method == "pcl" else RCC)
    assert refusal(path, method, vocabulary).startswith((f"{path}: ", "official "))


def refusal(path: Path, method: Any, vocabulary: Path | None, **options: Any) -> str:
    with pytest.raises(DiffcapError) as error:
        import_official(path, method, vocabulary, ImportOptions(**options))
    output = str(error.value)
    assert "\n" not in output and len(output) < 600 and output.endswith((".", "?")), output
    return output


@pytest.mark.parametrize("kind", ["pickle", "safetensors"])
def test_weights_that_are_not_finite_are_named(tmp_path: Path, kind: str) -> None:
    path, vocabulary = tmp_path / ("x.pt" if kind == "pickle" else "x.safetensors"), tmp_path / "v.json"
    words(vocabulary, 20, PCL_WORDS)
    for value in (float("nan"), float("inf"), -float("inf")):
        state = pcl().weights("finetune")
        state["img_project.0.weight"][1, 2] = value
        torch.save(state, path) if kind == "pickle" else save_file(state, path)
        output = refusal(path, "pcl", vocabulary, heads=4)
        assert "its weight 'img_project.0.weight' contains nan or inf; download the file again" in output


def test_odd_names_are_one_sentence(tmp_path: Path) -> None:
    path, vocabulary = tmp_path / "x.pt", words(tmp_path / "v.json", 20, PCL_WORDS)
    state = pcl().weights("finetune")
    torch.save({**state, "encoder.layers.999999999.attn.q_linear.weight": torch.zeros(2)}, path)
    assert "(there are 3 layers, but one has the number 999999999)" in refusal(path, "pcl", vocabulary, heads=4)
    rcc = words(tmp_path / "r.json", 20, RCC)
    torch.save({"change_detector_state": {1: torch.zeros(2)}, "speaker_state": {}}, path)
    for method in ("scorer", "dirl"):
        assert f"not a complete checkpoint of {method} (" in refusal(path, method, rcc)
    detector = {"img.0.weight": torch.zeros(4, 4, 1, 1), "h_embedding.weight": torch.tensor(1.0)}
    torch.save({"change_detector_state": detector, "speaker_state": {"core.embed.weight": torch.zeros(20, 4)}}, path)
    assert "not a complete checkpoint of scorer (" in refusal(path, "scorer", rcc)


@pytest.mark.parametrize(
    ("method", "options", "expectation"),
    [
        ("pcl", {"max_length": 1}, "max_length is 1; it must be from 2 to 200"),
        ("pcl", {"max_length": 1000}, "its max_length is 1000; it must be from 2 to 200"),
        ("pcl", {"heads": 7}, "width 64 is not a multiple of heads 7"),
        ("pcl", {"of_method": {"intra_layers": 4}}, "'intra_layers' is not accepted); its options are: grid."),
        ("pcl", {"of_method": {"grid": 14}}, "--options: not valid for pcl ("),
        ("clip4idc", {"max_length": 4000}, "max_length 4000 needs 3999 text positions"),
        ("clip4idc", {"of_method": {"intra_layers": 4}}, "intra_layers is 4; the network has 4 blocks: give 1 to 3"),
    ],
)
def test_odd_options_are_one_sentence(tmp_path: Path, method: str, options: dict[str, Any], expectation: str) -> None:
    official = pcl().weights("finetune") if method == "pcl" else load(FIXTURES / "clip4idc.json").weights("caption")
    torch.save(official, tmp_path / "x.pt")
    vocabulary = words(tmp_path / "v.json", 20, PCL_WORDS) if method == "pcl" else None
    assert expectation in refusal(tmp_path / "x.pt", method, vocabulary, **{"heads": 4, **options})
