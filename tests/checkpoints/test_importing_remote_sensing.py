"""Official files of RSICCformer and Chg2Cap: whole files become captioners that read pixels, unknown names are one sentence."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.parity.loading import FIXTURES, Fixture, fill, load, with_statistics
from torch import Tensor, nn
from torchvision import models
from torchvision.models.feature_extraction import create_feature_extractor

from diffcap.checkpoints.importing import ImportOptions, import_official, read_word_ids
from diffcap.checkpoints.loading import load as load_trained
from diffcap.checkpoints.reading import write_folder
from diffcap.methods.remote_sensing import chg2cap, rsiccformer
from diffcap.models.generation import greedy
from diffcap.utils.errors import DiffcapError

CLOSE: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}
SYSTEMS: dict[str, Any] = {"rsiccformer": rsiccformer, "chg2cap": chg2cap}
GROUPS = {
    "rsiccformer": ("encoder_image", "encoder_feat", "decoder"),
    "chg2cap": ("encoder_dict", "encoder_trans_dict", "decoder_dict"),
}
# Of the layers in the authors' files.
NUMBERS = {"conv1": 0, "bn1": 1, "layer1": 4, "layer2": 5, "layer3": 6, "layer4": 7}
SIZE = (256, 256)


def fixture_of(method: str) -> Fixture:
    return load(FIXTURES / f"{method}.json")


def resnet(seed: int = 0) -> models.ResNet:
    """A ResNet-18 whose batch norm has statistics of its own."""
    torch.manual_seed(seed)
    network = models.resnet18(weights=None)
    network.train()(torch.randn(4, 3, 64, 64))
    return network.eval()


def official_state(method: str) -> dict[str, Tensor]:
    """The parameters of the fixture, with wider first layers that take ResNet-18's channels, and the backbone's."""
    fixture, channels = fixture_of(method), {"rsiccformer": 256, "chg2cap": 512}[method]
    old, state = fixture.hyperparameters["feature_channels"], with_statistics(fixture)
    if method == "rsiccformer":
        name = "encoder_feat.projection.weight"
        state[name] = fill(name, [len(state[name]), channels, 1, 1])
    else:
        swap = {old: channels, 2 * old: 2 * channels, old // 2: channels // 2}
        for name, value in state.items():
            if name.startswith("encoder_trans_dict.") or name == "decoder_dict.Conv1.weight":
                state[name] = fill(name, [swap.get(size, size) for size in value.shape])
    network, layers = resnet(), [name for name in NUMBERS if method == "chg2cap" or name != "layer4"]
    prefix = "encoder_image.net" if method == "rsiccformer" else "encoder_dict.cnn"
    for name, value in network.state_dict().items():
        layer, _, rest = name.partition(".")
        if layer in layers:
            state[f"{prefix}.{NUMBERS[layer]}.{rest}"] = value
    pe = "decoder.position_encoding.pe" if method == "rsiccformer" else "decoder_dict.position_encoding.pe"
    width, length = state[f"{pe.partition('.')[0]}.wdc.weight"].shape[1], fixture.hyperparameters["max_length"]
    return {**state, pe: torch.zeros(length, 1, width)}


def module_of(state: dict[str, Tensor], root: nn.Module) -> nn.Module:
    """A module that has these parameters and statistics, made of torch's containers."""
    for name, value in state.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Sequential())
            module = module.get_submodule(part)
        if value.is_floating_point() and not last.startswith("running_") and last != "pe":
            module.register_parameter(last, nn.Parameter(value))
        else:
            module.register_buffer(last, value)
    return root


def official_file(folder: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The file and the vocabulary as the authors' programs write them."""
    state = official_state(method)
    groups = {
        group: {name.partition(".")[2]: value for name, value in state.items() if name.startswith(f"{group}.")}
        for group in GROUPS[method]
    }
    content: dict[str, Any] = {**groups}
    if method == "rsiccformer":
        names = ("CNN_Encoder", "MCCFormers_diff_as_Q", "DecoderTransformer")
        authors = ModuleType("authors_models")
        monkeypatch.setitem(sys.modules, "authors_models", authors)
        for group, name in zip(GROUPS[method], names):
            setattr(authors, name, type(name, (nn.Module,), {"__module__": "authors_models"}))
            content[group] = module_of(groups[group], getattr(authors, name)())
        layer = nn.MultiheadAttention(8, 2)
        optimizer = torch.optim.Adam(layer.parameters())
        with torch.enable_grad():
            layer.out_proj.weight.sum().backward()
        optimizer.step()
        content |= {"epoch": 3, "bleu-4": {"Bleu_4": 0.6}, "decoder_optimizer": optimizer}
    torch.save(content, folder / "official.pth")
    count = fixture_of(method).hyperparameters["vocabulary"]
    words = [f"w{number}" for number in range(count - 4)]
    order = ["<NULL>", "<UNK>", "<START>", "<END>", *words]
    if method == "rsiccformer":
        order = ["<pad>", *words, "<unk>", "<start>", "<end>"]
    (folder / "words.json").write_text(json.dumps({word: number for number, word in enumerate(order)}))
    return folder / "official.pth", folder / "words.json"


@torch.no_grad()
@pytest.mark.parametrize("method", SYSTEMS)
def test_a_file_becomes_a_captioner_of_pixels(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its features are those of torchvision's network, and its captions those of the same weights on these features."""
    file, words = official_file(tmp_path, method, monkeypatch)
    heads = fixture_of(method).hyperparameters["heads"]
    checkpoint = import_official(file, method, words, ImportOptions(heads=heads, dataset="levir_cc"))
    write_folder(tmp_path / "ours", checkpoint)
    trained = load_trained(tmp_path / "ours")
    model: Any = trained.captioner
    assert trained.features["shape"] == [3, *SIZE] and trained.features["dtype"] == "uint8"
    assert trained.max_length == fixture_of(method).hyperparameters["max_length"]
    assert [trained.vocabulary.bos, trained.vocabulary.eos] == [model.bos_id, model.eos_id]

    draws = torch.Generator().manual_seed(0)
    before, after = torch.randint(256, (2, 2, 3, *SIZE), dtype=torch.uint8, generator=draws)
    layer = "layer3" if method == "rsiccformer" else "layer4"
    extractor = create_feature_extractor(resnet(), {layer: "map"})
    if method == "rsiccformer":
        mean, std = torch.tensor([0.485, 0.456, 0.406]) * 255, torch.tensor([0.229, 0.224, 0.225]) * 255
    else:
        mean, std = torch.tensor([100.6790, 99.5023, 84.9932]), torch.tensor([50.9820, 48.4838, 44.7057])
    maps = [extractor((image - mean.view(3, 1, 1)) / std.view(3, 1, 1))["map"] for image in (before, after)]
    if method == "rsiccformer":
        maps = [F.adaptive_avg_pool2d(image, (14, 14)) for image in maps]
    for image, expected in zip((before, after), maps):
        torch.testing.assert_close(model.images(image), expected, **CLOSE)

    shared = ("vocabulary_size", "max_length", "width", "heads", "encoder_layers", "decoder_layers", "table")
    names = (*shared, "attention_width", "ffn")
    sizes = {name: model.hyperparameters[name] for name in names if name in model.hyperparameters}
    kind: Any = type(model)
    plain = kind(**sizes, feature_channels=maps[0].shape[1], grid=tuple(maps[0].shape[2:])).eval()
    backbone = GROUPS[method][0]
    state = {name: value for name, value in official_state(method).items() if not name.startswith(f"{backbone}.")}
    plain.load_state_dict(SYSTEMS[method].IMPORTER.rename(state, "finetune"))
    tokens = torch.tensor([[model.bos_id, 5, 6, model.eos_id]] * 2)
    expected = plain.teacher_forced_logits(tokens, plain.encode(*maps))
    torch.testing.assert_close(model.teacher_forced_logits(tokens, model.encode(before, after)), expected, **CLOSE)
    assert torch.equal(greedy(model, model.encode(before, after), 6), greedy(plain, plain.encode(*maps), 6))
    words_of = {number: word for word, number in json.loads(words.read_text()).items()}
    assert trained.vocabulary.decode(tokens[0]) == f"{words_of[5]} {words_of[6]}"


def test_a_dubai_cc_file_has_its_own_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, words = official_file(tmp_path, "chg2cap", monkeypatch)
    checkpoint = import_official(file, "chg2cap", words, ImportOptions(heads=4, dataset="dubai_cc"))
    metadata = checkpoint["diffcap"]
    assert metadata["features"]["shape"] == [3, 50, 50]
    assert metadata["hyperparameters"]["normalization"] == "dubai_cc"
    assert metadata["hyperparameters"]["resize"] == [256, 256]


def test_words_in_another_order_keep_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, words = official_file(tmp_path, "rsiccformer", monkeypatch)
    ids = json.loads(words.read_text())
    ids["<end>"], ids["w0"] = ids["w0"], ids["<end>"]
    words.write_text(json.dumps(ids))
    assert read_word_ids(words, "rsicc")[1][-1] == 1
    state = import_official(file, "rsiccformer", words, ImportOptions(heads=4))["state_dict"]
    table = official_state("rsiccformer")["decoder.wdc.weight"]
    torch.testing.assert_close(state["captioner.decoder.logit.weight"][-1], table[1])


@pytest.mark.parametrize("method", SYSTEMS)
def test_a_group_that_is_missing_is_named(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, words = official_file(tmp_path, method, monkeypatch)
    content = {group: {"x": torch.zeros(1)} for group in GROUPS[method][1:]}
    torch.save(content, file)
    with pytest.raises(DiffcapError, match=f"'{GROUPS[method][0]}' is missing"):
        import_official(file, method, words)
