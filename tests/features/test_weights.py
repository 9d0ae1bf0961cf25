"""The preprocessing and the activation of every network's own weights, by the metadata of its library; no network is built."""

from types import SimpleNamespace

import numpy as np
import open_clip
import pytest
import timm
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from torchvision import models

from diffcap.features.backbones import find_preprocessing
from diffcap.features.weights import describe_clip, find_clip_weights

PIXEL = Image.fromarray(np.random.default_rng(0).integers(256, size=(1, 1, 3), dtype=np.uint8))


def statistics(transforms: object) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of the last step of a library's preprocessing."""
    normalize = transforms.transforms[-1]
    return tuple(map(float, normalize.mean)), tuple(map(float, normalize.std))


@pytest.mark.parametrize("network", models.list_models(module=models))
def test_torchvision(network: str) -> None:
    ours = find_preprocessing("torchvision", network)
    weights = models.get_model_weights(network)
    first = weights.__members__.get("IMAGENET1K_V1", next(iter(weights))).transforms()
    image = torch.from_numpy(np.array(PIXEL)).permute(2, 0, 1)[None]
    expected = (image / 255 - torch.tensor(first.mean).view(3, 1, 1)) / torch.tensor(first.std).view(3, 1, 1)
    network_class = {"googlenet": models.GoogLeNet, "inception_v3": models.Inception3}.get(network)
    if network_class is not None:  # torchvision's builders set transform_input together with its weights
        expected = network_class._transform_input(SimpleNamespace(transform_input=True), expected)
    torch.testing.assert_close(ours.normalize(image.float()), expected)
    assert ours.size == (224, 224)


@pytest.mark.parametrize("network", open_clip.list_pretrained(as_str=True))
def test_open_clip(network: str) -> None:
    name, tag = network.split(":")
    cfg = open_clip.get_pretrained_cfg(name, tag)
    known = {key: value for key, value in cfg.items() if key in PreprocessCfg.__dataclass_fields__}
    ours = find_preprocessing("open_clip", network)
    assert (ours.mean, ours.std) == statistics(image_transform_v2(PreprocessCfg(**known), is_train=False))
    is_quick = describe_clip(network).get("quick_gelu") or open_clip.get_model_config(name).get("quick_gelu")
    # open_clip builds roberta-ViT-B-32 with QuickGELU, although its tag does not name it
    assert bool(is_quick) == (cfg.get("quick_gelu") or name == "roberta-ViT-B-32")
    assert find_clip_weights(network, from_file=True) == (name, tag, cfg)


def test_timm() -> None:
    names = timm.list_models(pretrained=True)
    assert len(names) > 1000
    for name in names:
        cfg = timm.get_pretrained_cfg(name)
        ours = find_preprocessing("timm", name)
        transforms = timm.data.create_transform(**timm.data.resolve_data_config(pretrained_cfg=cfg.to_dict()))
        expected = (torch.tensor(values) for values in statistics(transforms))
        torch.testing.assert_close((torch.tensor(ours.mean), torch.tensor(ours.std)), tuple(expected))
        assert ours.size == cfg.input_size[1:]


def test_without_a_tag_the_weights_are_openai_s_or_the_first_ones() -> None:
    assert describe_clip("ViT-B-32") == {"network": "ViT-B-32", "quick_gelu": True}
    assert describe_clip("ViT-B-32-quickgelu") == {"network": "ViT-B-32-quickgelu"}
    assert describe_clip("ViT-B-32:datacomp_xl_s13b_b90k") == {"network": "ViT-B-32", "tag": "datacomp_xl_s13b_b90k"}
    assert find_clip_weights("ViT-B-16-SigLIP", from_file=True)[1] == "webli"
    assert find_clip_weights("ViT-S-32") == ("ViT-S-32", "", {})
