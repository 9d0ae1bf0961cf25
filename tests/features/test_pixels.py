"""ResizeOnly as features: decoded once, resized as PIL does, stored as bytes; and the maps of an adapted CLIP4IDC."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.models.test_clip4idc import NETWORK
from tests.toy_checkpoints import write_checkpoint

from diffcap.features.backbones import build_backbone
from diffcap.features.store import FeatureStore
from diffcap.features.writer import StoreWriter
from diffcap.methods.clip4idc.model import CLIP4IDCAdaptation
from diffcap.utils.errors import DiffcapError


def picture(width: int, height: int) -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def test_pixels_are_pils_bicubic() -> None:
    backbone = build_backbone("pixels", image_size=(24, 32))
    assert backbone.shape() == (3, 24, 32) and backbone.describe()["dtype"] == "uint8"
    image = picture(50, 40)
    found = backbone.preprocess(image)
    expected = np.asarray(image.resize((32, 24), Image.Resampling.BICUBIC))
    assert np.array_equal(found.permute(1, 2, 0).numpy(), expected)
    same = picture(32, 24)
    assert np.array_equal(backbone.preprocess(same).permute(1, 2, 0).numpy(), np.asarray(same))
    assert build_backbone("pixels").shape() == (3, 224, 224)


def test_a_store_of_bytes(tmp_path: Path) -> None:
    backbone = build_backbone("pixels", image_size=(4, 6))
    writer = StoreWriter(tmp_path, ["a.png", "b.png"], backbone.shape(), backbone.describe())
    images = torch.stack([backbone.preprocess(picture(9, 7)), torch.zeros(3, 4, 6)])
    writer.write(np.array([0, 1]), images.numpy())
    writer.finish()
    assert (tmp_path / "features.u8").stat().st_size == 2 * 3 * 4 * 6
    store = FeatureStore.open(tmp_path)
    assert store.read(np.array([1, 0])).dtype == np.uint8
    assert np.array_equal(store.read(np.array([0]))[0], images[0].numpy())
    with pytest.raises(DiffcapError, match="its features have dtype"):
        FeatureStore.open(tmp_path, {**store.meta, "dtype": "float16"})


def test_options_of_other_libraries_are_refused() -> None:
    with pytest.raises(
        DiffcapError, match=r"image_size is only for pixels, torchvision, timm, not for blocks: remove it"
    ):
        build_backbone("blocks", image_size=(64, 64))
    with pytest.raises(DiffcapError, match="pixels have no network, stage, pool or weights: remove these options"):
        build_backbone("pixels", weights="clip.pt")


@torch.no_grad()
def test_an_adapted_clip_gives_maps(tmp_path: Path) -> None:
    model = CLIP4IDCAdaptation(NETWORK, (8, 12), 3, max_length=14).eval()
    sizes = {"network": NETWORK, "image_size": [8, 12], "intra_layers": 3}
    for name, metadata in (
        ("best", {}),
        ("other", {"method": "pcl"}),
        ("sizes", {"hyperparameters": {"network": NETWORK, "image_size": [8, "x"]}}),
    ):
        settings = {"method": "clip4idc", "hyperparameters": sizes, **metadata}
        write_checkpoint(tmp_path / f"{name}.ckpt", model, "pretrain", **settings)
    backbone = build_backbone("clip4idc", weights=str(tmp_path / "best.ckpt"))
    assert backbone.shape() == (16, 2, 3)
    image = picture(12, 8)
    found = backbone(backbone.preprocess(image)[None])
    tower = model.images
    tokens = tower.ln_mid(tower.encode_single(tower.normalize(backbone.preprocess(image)[None])))
    torch.testing.assert_close(found[0, :, 1, 2], tokens[0, 1 + 5])
    with pytest.raises(DiffcapError, match=r"sizes\.ckpt: its image tower cannot be built"):
        build_backbone("clip4idc", weights=str(tmp_path / "sizes.ckpt"))
    with pytest.raises(DiffcapError, match="not a checkpoint of CLIP4IDC"):
        build_backbone("clip4idc", weights=str(tmp_path / "other.ckpt"))
    with pytest.raises(DiffcapError, match="give the checkpoint of an adaptation"):
        build_backbone("clip4idc")
