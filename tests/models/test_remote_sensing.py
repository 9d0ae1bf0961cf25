"""RSICCformer, Chg2Cap and their ResNet: the beginning, the losses, the cache, the maps, which layers learn, and batch norm."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.losses.ranks import on_two_ranks
from tests.models import tiny
from torch import Tensor, nn
from torchvision import models

from diffcap.losses.gather import rank
from diffcap.methods.remote_sensing.chg2cap import Chg2Cap
from diffcap.methods.remote_sensing.resnet import GlobalBatchNorm2d, ResNetEncoder
from diffcap.methods.remote_sensing.rsiccformer import RSICCformer
from diffcap.models.captioner import Captioner
from diffcap.models.layers import Attention
from diffcap.utils.errors import DiffcapError

WORDS, LENGTH, CHANNELS, GRID = 17, 10, 6, (2, 3)
SIZES: dict[str, dict[str, Any]] = {
    "rsiccformer": {"width": 8, "heads": 2},
    "chg2cap": {"attention_width": 8, "ffn": 12, "width": 16, "heads": 2, "table": (4, 5), "encoder_layers": 2},
}
CLOSE: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}
BOTH = pytest.mark.parametrize("name", SIZES)


def build(name: str, seed: int = 0, **options: Any) -> Any:
    """A small captioner in evaluation mode, with large weights, so that words differ."""
    torch.manual_seed(seed)
    sizes = {"feature_channels": CHANNELS, "grid": GRID, "max_length": LENGTH, **SIZES[name], **options}
    model: Any = (RSICCformer if name == "rsiccformer" else Chg2Cap)(WORDS, **sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
        model.decoder.logit.weight.mul_(8)
    return model.eval()


def maps(pairs: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    return tiny.maps(pairs, GRID, CHANNELS, seed)


def captions(model: Captioner, lengths: list[int]) -> Tensor:
    return tiny.captions(lengths, LENGTH, ids=(model.bos_id, model.eos_id, 0), words=range(4, WORDS - 2))


def is_xavier(weight: Tensor) -> bool:
    """Fills the interval of Xavier's uniform, and no more."""
    field = math.prod(weight.shape[2:])
    bound = (6 / (sum(weight.shape[:2]) * field)) ** 0.5
    return 0.95 * bound < weight.abs().max().item() <= bound * (1 + 1e-6)


def is_torchs(weight: Tensor) -> bool:
    """Fills the interval of torch's linear layers and convolutions."""
    bound = math.prod(weight.shape[1:]) ** -0.5
    return 0.95 * bound < weight.abs().max().item() <= bound * (1 + 1e-6)


# The beginning


@BOTH
def test_how_it_begins(name: str) -> None:
    """Encoder: Xavier, of every table, packed matrix and convolution. Decoder: torch's own, words between -0.1 and 0.1."""
    torch.manual_seed(0)
    model: Any
    if name == "rsiccformer":
        model = RSICCformer(300, 60, width=40, heads=4, decoder_layers=2)
        encoder = [model.embedding.projection, model.embedding.rows, model.embedding.columns]
        for layer, merge in zip(model.encoder, model.merge):
            encoder += [layer.attention.qkv, layer.attention.out, layer.ffn[0], layer.ffn[3]]
            encoder += [merge.residual.branch[index] for index in (0, 3, 6)]
        of_torch = []
        assert model.embedding.projection.bias.abs().max() > 0.05
    else:
        model = Chg2Cap(300, 60, attention_width=40, ffn=50, width=80, heads=4, decoder_layers=2)
        encoder = [model.rows, model.columns]
        for layer in model.encoder:
            for block in (layer.single, layer.pair):
                encoder += [block.attention.query, block.attention.key, block.attention.out, block.ffn[0], block.ffn[3]]
                assert block.attention.query.bias is None and block.attention.key.bias is None
                assert block.attention.out.bias.abs().max() > 0.05
        of_torch = [model.fusion, *(model.residual.branch[index] for index in (0, 3, 6))]
    assert all(is_xavier(layer.weight) for layer in encoder)
    first, second = model.decoder.blocks
    of_torch += [first.ffn[0], first.ffn[3], first.cross.out, first.self_attention.out]
    assert all(is_torchs(layer.weight) for layer in of_torch)
    for attention in (module for module in model.modules() if isinstance(module, Attention)):
        assert is_xavier(attention.qkv.weight)
        assert (attention.qkv.bias == 0).all() and (attention.out.bias == 0).all()
    for weight in (model.decoder.embedding.weight, model.decoder.logit.weight):
        assert 0.099 < weight.abs().max() <= 0.1 and weight.std().item() == pytest.approx(0.2 / 12**0.5, rel=0.02)
        assert weight[0].abs().max() > 0.05  # padding's row, too
    assert (model.decoder.logit.bias == 0).all()
    for one, other in zip(first.parameters(), second.parameters()):
        assert torch.equal(one, other) and one is not other  # the layers are copies
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d | nn.LayerNorm)):
        assert (norm.weight == 1).all() and (norm.bias == 0).all() and norm.eps == 1e-5


@BOTH
def test_the_defaults_are_the_released_sizes(name: str) -> None:
    """Numbers of used parameters, counted on the authors' modules, without the backbone."""
    used = {"rsiccformer": 20_237_312 + 17_755_604, "chg2cap": 132_267_008 + 91_234_805}[name]
    with torch.device("meta"):
        model = RSICCformer(468) if name == "rsiccformer" else Chg2Cap(501)
    assert sum(parameter.numel() for parameter in model.parameters()) == used


# Words


@torch.no_grad()
def test_no_word_attends_to_padding_that_chg2cap_has_generated() -> None:
    """The authors' program hides it, and the caption goes on; in RSICCformer it is a word as any other."""
    for name, hides in (("chg2cap", True), ("rsiccformer", False)):
        model = build(name)
        memory, logits = model.encode(*maps(1)), {}
        for second in (0, 7):
            cache: Any = None
            row = model.decoder.embedding.weight[0].clone()
            for scale in (1, 3):  # another vector of padding
                model.decoder.embedding.weight[0] = row * scale
                cache = None
                for token in (model.bos_id, second, 5):
                    scores, cache = model.step(torch.tensor([token]), memory, cache)
                logits[second, scale] = scores
            model.decoder.embedding.weight[0] = row
        assert torch.equal(logits[7, 1], logits[7, 3])
        assert torch.allclose(logits[0, 1], logits[0, 3], atol=1e-5) == hides


# Attention maps


@torch.no_grad()
@BOTH
def test_attention_maps_are_the_last_cross_attention_in_the_images_frame(name: str) -> None:
    """A token is one position of both images: the maps are equal, and follow the position of a visual token."""
    model = build(name)
    (before, after), tokens = maps(2), captions(model, [3, 5])
    place = (1, 2)  # a memory with one token apart from the others
    visual = torch.zeros(2, 6, 16)
    index = place[1] * GRID[0] + place[0] if name == "chg2cap" else place[0] * GRID[1] + place[1]
    visual[:, index] = 20 * torch.randn(16, generator=torch.Generator().manual_seed(0))
    model.encode_tokens = lambda *_: visual
    spot, of_after, _ = model.attention(before, after, tokens)
    assert torch.equal(spot, of_after)
    others = spot.clone()
    others[:, :, place[0], place[1]] = others[:, :, 0, 0]
    torch.testing.assert_close(others, spot[:, :, :1, :1].expand_as(spot))  # all others have the same weight
    assert (spot[:, :, place[0], place[1]] - spot[:, :, 0, 0]).abs().max() > 0.05


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("rsiccformer", {"heads": 3}, "not a multiple of heads 3"),
        ("chg2cap", {"table": (4, 2)}, r"table is \(4, 2\), smaller than the grid \(2, 3\)"),
        ("chg2cap", {"table": (1, 1), "feature_channels": 3}, "the features hold pixels, so set backbone"),
        ("chg2cap", {"attention_width": 9}, "attention_width 9 is not a multiple of heads 2"),
        ("rsiccformer", {"backbone": "resnet18", "trained_layers": ("layer4",)}, "has 'layer4'; choose from layer1,"),
        ("rsiccformer", {"backbone": "vgg11"}, "vgg11 is not a ResNet"),
    ],
)
def test_sizes_that_do_not_fit_are_one_sentence(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, **options)


# The ResNet


def pixels(pairs: int, size: tuple[int, int] = (64, 64), seed: int = 3) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    before, after = torch.randint(256, (2, pairs, 3, *size), dtype=torch.uint8, generator=draws)
    return before, after


def with_backbone(name: str, **options: Any) -> Any:
    sizes = {"pool": (3, 3)} if name == "rsiccformer" else {}
    return build(name, backbone="resnet18", feature_channels=3, grid=(64, 64), **{**sizes, **options})


def trained_by(name: str, **options: Any) -> set[str]:
    """Parts of the network that get a gradient from a training step."""
    model = with_backbone(name, **options).train()
    before, after = pixels(3)
    model.loss({"before": before, "after": after, "tokens": captions(model, [2, 8, 5])})["loss"].backward()
    learned = {key for key, value in model.images.network.named_parameters() if value.grad is not None}
    moving = [key for key in learned if model.images.network.get_parameter(key).grad.abs().max() > 0]
    parts = {key.partition(".")[0] for key in moving}
    assert len(moving) == sum(key.partition(".")[0] in parts for key, _ in model.images.network.named_parameters())
    return parts


def test_gradients_reach_the_trained_layers_only() -> None:
    assert trained_by("chg2cap") == {"layer2", "layer3", "layer4"}
    assert trained_by("chg2cap", trained_layers=("layer4",)) == {"layer4"}
    assert trained_by("rsiccformer") == set()
    assert trained_by("rsiccformer", trained_layers=("layer2", "layer3")) == {"layer2", "layer3"}


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("name", SIZES)
def test_frozen_statistics_drift_in_the_released_mode_only(name: str, mode: Any) -> None:
    """In training mode, two passes: batch norm sees the before images, then the after images."""
    model = with_backbone(name, batch_norm=mode).train()
    before, after = pixels(3)
    start = {key: value.clone() for key, value in model.images.state_dict().items()}
    model.loss({"before": before, "after": after, "tokens": captions(model, [2, 8, 5])})
    trained = ("layer2", "layer3", "layer4") if name == "chg2cap" else ()
    for key, value in model.images.state_dict().items():
        if "running_" in key:
            moves = mode == "train" or key.split(".")[1] in trained
            assert torch.equal(value, start[key]) != moves, key
    norm = model.images.network.bn1
    if mode == "train":
        mean = torch.zeros(64)
        for images in (before, after):
            normalised = (images - model.images.mean) / model.images.std
            mean = 0.9 * mean + 0.1 * model.images.network.conv1(normalised).mean((0, 2, 3))
        torch.testing.assert_close(norm.running_mean, mean, atol=1e-5, rtol=1e-4)
    model.eval()
    start = {key: value.clone() for key, value in model.images.state_dict().items()}
    model.encode(before, after)
    assert all(torch.equal(value, start[key]) for key, value in model.images.state_dict().items())
    assert not any(part.training for part in model.images.modules())


@torch.no_grad()
@pytest.mark.parametrize(
    ("normalization", "mean", "std"),
    [
        ("imagenet", (0.485 * 255, 0.456 * 255, 0.406 * 255), (0.229 * 255, 0.224 * 255, 0.225 * 255)),
        ("levir_cc", (100.6790, 99.5023, 84.9932), (50.9820, 48.4838, 44.7057)),
        ("dubai_cc", (156.0681, 115.0891, 92.0745), (76.5139, 52.0616, 44.4209)),
    ],
)
def test_small_images_are_normalised_and_then_enlarged(normalization: Any, mean: tuple, std: tuple) -> None:
    """Bilinear with aligned corners: the corners keep their values."""
    encoder = ResNetEncoder("resnet18", "layer4", (5, 4), normalization, resize=(64, 32)).eval()
    assert encoder.grid == (2, 1)
    seen: list[Tensor] = []
    encoder.network.conv1.register_forward_pre_hook(lambda _, values: seen.append(values[0]))
    image = pixels(1, (5, 4))[0]
    encoder(image)
    mean, std = (torch.tensor(values)[:, None, None] for values in (mean, std))
    normalised = (image - mean) / std
    enlarged = F.interpolate(normalised, (64, 32), mode="bilinear", align_corners=True)
    torch.testing.assert_close(seen[0], enlarged, **CLOSE)
    torch.testing.assert_close(seen[0][..., ::63, ::31], normalised[..., ::4, ::3], **CLOSE)


@torch.no_grad()
def test_weights_come_from_a_file_of_the_whole_classifier(tmp_path: Any) -> None:
    torch.manual_seed(0)
    official = models.resnet18(weights=None).eval()
    torch.save(official.state_dict(), tmp_path / "resnet18.pth")
    encoder = ResNetEncoder("resnet18", "layer4", (64, 64)).eval()
    before = {key: value.clone() for key, value in encoder.state_dict().items()}
    encoder.load("random")
    assert all(torch.equal(value, before[key]) for key, value in encoder.state_dict().items())
    encoder.load(str(tmp_path / "resnet18.pth"))
    image = pixels(2)[0]
    x = (image - encoder.mean) / encoder.std
    x = official.maxpool(official.relu(official.bn1(official.conv1(x))))
    expected = official.layer4(official.layer3(official.layer2(official.layer1(x))))
    torch.testing.assert_close(encoder(image), expected)
    deeper = ResNetEncoder("resnet34", "layer4", (64, 64))
    with pytest.raises(DiffcapError, match="not the weights of this network"):
        deeper.load(str(tmp_path / "resnet18.pth"))


def share(data: dict[str, Any]) -> dict[str, Any]:
    """Two training steps of a batch norm on the images of a rank: the first has three, the second two."""
    layer, mine = GlobalBatchNorm2d(3), slice(0, 3) if rank() == 0 else slice(3, None)
    layer.load_state_dict(data["state"])
    outputs = []
    for images, weights in data["steps"]:
        images, weights = images[mine].requires_grad_(), weights[mine]
        output = layer(images)
        (output * weights).sum().backward()
        outputs.append((output.detach(), images.grad))
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    alone = layer.eval()(data["steps"][0][0]).detach()
    return {"outputs": outputs, "gradients": gradients, "state": layer.state_dict(), "eval": alone}


@pytest.mark.slow  # two processes
def test_two_ranks_have_the_statistics_of_all_images(tmp_path: Path) -> None:
    """The mean is a hundred standard deviations from 0."""
    draws = torch.Generator().manual_seed(0)
    theirs = nn.BatchNorm2d(3)
    with torch.no_grad():
        theirs.weight.copy_(torch.randn(3, generator=draws))
        theirs.bias.copy_(torch.randn(3, generator=draws))
        theirs.running_mean.fill_(99.0)
    steps = [tuple(torch.randn(5, 3, 2, 4, generator=draws) for _ in range(2)) for _ in range(2)]
    steps = [(images + 100, weights) for images, weights in steps]
    first, second = on_two_ranks(share, {"state": theirs.state_dict(), "steps": steps}, tmp_path)
    for number, (images, weights) in enumerate(steps):
        images = images.clone().requires_grad_()
        output = theirs(images)
        (output * weights).sum().backward()
        for index, expected in enumerate((output.detach(), images.grad)):
            found = torch.cat([part["outputs"][number][index] for part in (first, second)])
            torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    for name, parameter in theirs.named_parameters():
        total = first["gradients"][name] + second["gradients"][name]
        torch.testing.assert_close(total, parameter.grad, atol=1e-3, rtol=1e-3)
    for part in (first, second):
        for name, value in theirs.state_dict().items():
            torch.testing.assert_close(part["state"][name], value)
        torch.testing.assert_close(part["eval"], theirs.eval()(steps[0][0]).detach(), atol=1e-4, rtol=1e-4)
