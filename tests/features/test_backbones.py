"""Backbones of every library: the map that the library's own layers give, and clear errors."""

import json
import re
import urllib.error
from pathlib import Path

import numpy as np
import open_clip
import pytest
import safetensors.torch
import timm
import torch
import torchvision
from PIL import Image

from diffcap.features.backbones import build_backbone, rebuild_backbone
from diffcap.features.preprocessing import IMAGENET_MEAN, RCC_STD
from diffcap.features.weights import read_state_dict
from diffcap.utils.errors import DiffcapError

pytestmark = pytest.mark.slow  # large networks


@pytest.fixture(scope="module")
def resnet18() -> torchvision.models.ResNet:
    torch.manual_seed(5)
    return torchvision.models.resnet18(weights=None).eval()


def test_torchvision_stage_from_a_local_file(resnet18, tmp_path: Path) -> None:
    torch.save(resnet18.state_dict(), tmp_path / "w.pth")
    wrapped = {f"module.{name}": value for name, value in resnet18.state_dict().items()}
    torch.save({"state_dict": wrapped, "epoch": 3}, tmp_path / "wrapped.pth")
    safetensors.torch.save_file(resnet18.state_dict(), tmp_path / "w.safetensors")
    images = torch.randn(2, 3, 64, 64)
    x = resnet18.maxpool(resnet18.relu(resnet18.bn1(resnet18.conv1(images))))
    expected = resnet18.layer3(resnet18.layer2(resnet18.layer1(x)))
    hashes = set()
    for name in ("w.pth", "wrapped.pth", "w.safetensors"):
        backbone = build_backbone("torchvision", "resnet18", "layer3", str(tmp_path / name))
        torch.testing.assert_close(backbone(images), expected)
        hashes.add(backbone.describe()["weights_sha256"])
    assert len(hashes) == 1  # the same weights are the same, whatever file they came in
    assert build_backbone("torchvision", "resnet18", "layer3", "random").describe()["weights_sha256"] not in hashes


def test_pooling_averages_the_map(resnet18, tmp_path: Path) -> None:
    torch.save(resnet18.state_dict(), tmp_path / "w.pth")
    whole = build_backbone("torchvision", "resnet18", "layer2", str(tmp_path / "w.pth"))
    pooled = build_backbone("torchvision", "resnet18", "layer2", str(tmp_path / "w.pth"), pool_size=(4, 7))
    images = torch.randn(1, 3, 224, 224)
    expected = whole(images).reshape(1, 128, 4, 7, 7, 4).mean((3, 5))  # 28 x 28 in blocks of 7 x 4
    torch.testing.assert_close(pooled(images), expected)
    assert pooled.shape() == (128, 4, 7) and pooled.describe() != whole.describe()


def test_open_clip_gives_the_grid_of_tokens_without_the_class(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = open_clip.create_model("ViT-S-32", pretrained=None, load_weights=False).eval()
    torch.save(model.state_dict(), tmp_path / "clip.pt")
    backbone = build_backbone("open_clip", "ViT-S-32", weights=str(tmp_path / "clip.pt"))
    images = torch.randn(2, 3, 224, 224)
    visual = model.visual
    tokens = visual.ln_post(visual.transformer(visual._embeds(images)))[:, 1:]  # (B, 49, 384)
    got = backbone(images)
    torch.testing.assert_close(got[1, :, 2, 5], tokens[1, 2 * 7 + 5])
    assert backbone.shape() == (384, 7, 7)
    white = backbone.preprocess(Image.fromarray(np.full((40, 90, 3), 255, dtype=np.uint8)))
    torch.testing.assert_close(white[:, 0, 0], (1 - torch.tensor(visual.image_mean)) / torch.tensor(visual.image_std))


@pytest.mark.parametrize(
    ("network", "layer"),
    [("densenet121", "features.denseblock1"), ("googlenet", "inception3a"), ("inception_v3", "Mixed_5b")],
)
def test_torchvision_s_own_file_gives_the_features_of_its_own_loading(
    network: str, layer: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    state = torchvision.models.get_model(network, weights=None).state_dict()
    # The released files are older than `num_batches_tracked`, and DenseNet's have other names.
    released = {name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}
    state = {re.sub(r"(denselayer\d+\.(?:norm|conv))([12])", r"\1.\2", name): value for name, value in released.items()}
    torch.save(state, file := tmp_path / "weights.pth")
    choice = torchvision.models.get_model_weights(network).IMAGENET1K_V1
    monkeypatch.setattr(type(choice), "get_state_dict", lambda *_, **__: dict(state))  # instead of a download
    own = torchvision.models.get_model(network, weights=choice).eval()
    maps = []
    own.get_submodule(layer).register_forward_hook(lambda module, images, result: maps.append(result))
    image = Image.fromarray(np.random.default_rng(0).integers(256, size=(224, 224, 3), dtype=np.uint8))
    transforms = choice.transforms(crop_size=224, resize_size=224)
    with torch.no_grad():
        own(transforms(image)[None])
    backbones = [build_backbone("torchvision", network, layer, weights) for weights in ("default", str(file))]
    for backbone in backbones:
        found = backbone(backbone.preprocess(image)[None])
        torch.testing.assert_close(found, maps[0], rtol=1e-3, atol=1e-3)
    assert backbones[0].describe() == backbones[1].describe()


def test_clip_s_weights_bring_their_activation_and_a_file_of_two_kinds_needs_a_tag(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """ViT-B-32 is built with GELU by its name, but OpenAI's weights were trained with QuickGELU."""
    for name in ("ViT-B-32", "ViT-B-32-quickgelu"):  # the settings of both, with small sizes
        config = open_clip.get_model_config(name)
        config["vision_cfg"] |= {"image_size": 64, "layers": 1, "width": 64}
        config["text_cfg"] |= {"vocab_size": 9, "layers": 1, "width": 8, "heads": 1}
        monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, name, config)
    torch.manual_seed(0)
    file = str(tmp_path / "clip.pt")
    torch.save(open_clip.create_model("ViT-B-32", pretrained=None, load_weights=False).state_dict(), file)
    monkeypatch.setattr("open_clip.factory.download_pretrained", lambda cfg, **_: file)
    images = torch.randn(1, 3, 64, 64)
    quick = build_backbone("open_clip", "ViT-B-32-quickgelu", 0, file)
    default = build_backbone("open_clip", "ViT-B-32", 0)
    gelu = build_backbone("open_clip", "ViT-B-32:laion2b_s34b_b79k", 0, file)
    torch.testing.assert_close(default(images), quick(images), rtol=0, atol=0)
    assert not torch.equal(gelu(images), quick(images))
    with pytest.raises(DiffcapError, match=r"^ViT-B-32 has weights .*--model\.network=ViT-B-32:TAG"):
        build_backbone("open_clip", "ViT-B-32", 0, file)
    # A captioner gets the features that it was trained on, also those of a store without a tag.
    meta = json.loads(json.dumps(gelu.describe()))
    assert meta.pop("tag") == "laion2b_s34b_b79k" and "quick_gelu" not in meta and default.describe()["quick_gelu"]
    torch.testing.assert_close(rebuild_backbone(meta, file)(images), gelu(images), rtol=0, atol=0)
    with pytest.raises(DiffcapError, match=r"captioner was trained on features of ViT-B-32 with another activation"):
        rebuild_backbone(meta)


def test_the_released_std_of_scorer_is_used_described_and_kept(resnet18, tmp_path: Path) -> None:
    torch.save(resnet18.state_dict(), tmp_path / "weights.pth")
    white = Image.fromarray(np.full((40, 90, 3), 255, dtype=np.uint8))
    backbone = build_backbone("torchvision", "resnet18", "layer1", "random", image_std=RCC_STD)
    mean, std = torch.tensor(IMAGENET_MEAN), torch.tensor([0.229, 0.224, 0.224])
    torch.testing.assert_close(backbone.preprocess(white)[:, 0, 0], (1 - mean) / std)
    usual = build_backbone("torchvision", "resnet18", "layer1", "random")
    assert usual.describe()["preprocessing"]["std"] == (0.229, 0.224, 0.225)
    assert {**backbone.describe(), "preprocessing": 0} == {**usual.describe(), "preprocessing": 0}
    # A captioner trained on either gets its own again.
    for each in (backbone, usual):
        meta = {**json.loads(json.dumps(each.describe())), "weights_sha256": None, "shape": [64, 56, 56]}
        again = rebuild_backbone(meta, str(tmp_path / "weights.pth"))
        torch.testing.assert_close(again.preprocess(white), each.preprocess(white), rtol=0, atol=0)
    with pytest.raises(DiffcapError, match=r"--model\.image_std is only for torchvision"):
        build_backbone("pixels", image_std=RCC_STD)


def test_timm_stages() -> None:
    backbone = build_backbone("timm", "test_convnext.r160_in1k", layer=1, weights="random")
    torch.manual_seed(0)
    model = timm.create_model("test_convnext.r160_in1k", pretrained=False, num_classes=0).eval()
    images = torch.randn(2, 3, 160, 160)
    torch.testing.assert_close(backbone(images), model.stages[1](model.stages[0](model.stem(images))))
    assert build_backbone("timm", "test_vit.r160_in1k", weights="random").shape() == (64, 10, 10)
    with pytest.raises(DiffcapError, match=r"^timm has no weights 'of_nobody' of test_vit; choose one of r160_in1k\.$"):
        build_backbone("timm", "test_vit.of_nobody", weights="random")
    with pytest.raises(DiffcapError, match=r"--model\.stage=99: feature index 99 is out of range .*; give"):
        build_backbone("timm", "test_convnext.r160_in1k", layer=99, weights="random").shape()


def test_a_timm_file_of_another_image_size_is_refused(tmp_path: Path) -> None:
    images, file = torch.randn(2, 3, 160, 160), str(tmp_path / "vit.pt")
    for size in (160, 224):
        torch.manual_seed(1)
        model = timm.create_model("test_vit.r160_in1k", pretrained=False, img_size=size).eval()
        state = model.state_dict()
        if size == 160:  # the oldest files have a linear layer for the patches
            state["patch_embed.proj.weight"] = state["patch_embed.proj.weight"].flatten(1)
            own = model.forward_intermediates(images, indices=1, intermediates_only=True)[0]
            torch.save(state, file)
            assert torch.equal(build_backbone("timm", "test_vit.r160_in1k", weights=file)(images), own)
    torch.save(state, file)
    with pytest.raises(DiffcapError, match=r"shape \(1, 197, 64\), this network needs \(1, 101, 64\); give the file"):
        build_backbone("timm", "test_vit.r160_in1k", weights=file)


def test_wrong_files_and_names_are_one_sentence(resnet18, tmp_path: Path) -> None:
    state = resnet18.state_dict()
    del state["layer1.0.conv1.weight"], state["bn1.bias"]
    torch.save(state, tmp_path / "less.pth")
    with pytest.raises(DiffcapError, match=r"2 of 90 keys are missing .*bn1\.bias.*layer1\.0\.conv1\.weight"):
        build_backbone("torchvision", "resnet18", "layer3", str(tmp_path / "less.pth"))
    torch.save({**resnet18.state_dict(), "conv1.weight": torch.zeros(64, 1, 7, 7)}, tmp_path / "gray.pth")
    with pytest.raises(DiffcapError, match=r"weight has shape \(64, 1, 7, 7\), this network needs \(64, 3, 7, 7\)"):
        build_backbone("torchvision", "resnet18", "layer3", str(tmp_path / "gray.pth"))
    with pytest.raises(DiffcapError, match="no weights file there"):
        build_backbone("torchvision", "resnet18", "layer3", str(tmp_path / "nope.pth"))
    for name in ("page.pth", "page.safetensors"):
        (tmp_path / name).write_text("<html>")
        with pytest.raises(DiffcapError, match=f"{name}: cannot be read"):
            read_state_dict(tmp_path / name)
    for text in (b"a,b\n", b"t hello", b"hello", b"\x80\x02X\x01", b"\x80\x02\x86."):  # each fails in another way
        (tmp_path / "text.pth").write_bytes(text)
        with pytest.raises(DiffcapError, match=r"text\.pth: cannot be read as .* \(\S.*\); fetch it again"):
            read_state_dict(tmp_path / "text.pth")
    with pytest.raises(DiffcapError, match=r"--model\.stage is missing: give the name of a node of resnet18"):
        build_backbone("torchvision", "resnet18", None, "random")
    with pytest.raises(DiffcapError, match=r"--model\.stage=last is not a block of timm"):
        build_backbone("timm", "test_vit.r160_in1k", "last", "random")
    with pytest.raises(DiffcapError, match="no node 'layer9'"):
        build_backbone("torchvision", "resnet18", "layer9", "random")
    with pytest.raises(DiffcapError, match=r"gives \(1, 1000\), not a map"):
        build_backbone("torchvision", "resnet18", "fc", "random").shape()
    for library in ("torchvision", "open_clip", "timm"):
        with pytest.raises(DiffcapError, match="resnet_of_nobody"):
            build_backbone(library, "resnet_of_nobody", "1", "random")


def test_offline_without_weights_names_the_file_to_fetch_and_the_option(monkeypatch, tmp_path: Path) -> None:
    def no_network(*args: object, **kwargs: object) -> None:
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("torch.hub.download_url_to_file", no_network)
    with pytest.raises(DiffcapError, match=r"https://.*/resnet18-f37072fd\.pth .*WEIGHTS=PATH, or use OFFLINE=yes"):
        build_backbone("torchvision", "resnet18", "layer4")
    meta = {"library": "torchvision", "network": "resnet18", "stage": "layer4", "preprocessing": {}, "pool": None}
    with pytest.raises(DiffcapError, match=r"cannot be downloaded.*--backbone-weights=PATH\."):  # for a captioner
        rebuild_backbone(meta)
