"""Extraction through a Lightning trainer, in this process: what reaches the store is what the backbone gives."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from PIL import Image
from tests.datasets.layouts import write_lines
from tests.scenes.rasters import write

from diffcap.commands.data import prepare
from diffcap.features.images import ImageData
from diffcap.features.store import FeatureStore
from diffcap.lit.extraction import Extraction, extract
from diffcap.records import ChangePair, read_dataset, write_dataset
from diffcap.utils.errors import DiffcapError
from diffcap.utils.image_io import read_pair

pytestmark = pytest.mark.slow  # Lightning runs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for name in "abcde":
        Image.fromarray(rng.integers(0, 256, (48, 64, 3), dtype=np.uint8)).save(tmp_path / f"{name}.png")
    names = ["a.png", "b.png", "c.png", "d.png", "e.png", "a.png"]
    pairs = [ChangePair(str(n), names[n], names[n + 1], ["x"], "train") for n in range(5)]
    write_dataset(tmp_path, "toy", tmp_path, pairs, {})
    return tmp_path


def run(
    folder: Path, pool: tuple[int, int] | None = None, batch_size: int = 2, shard: str | None = None, **options: Any
) -> Path:
    network = {"name": "small", "library": "torchvision", "network": "resnet18", "stage": "layer1", "weights": "random"}
    model = Extraction(**{**network, "pool": pool, **options})
    quiet = {"logger": False, "enable_checkpointing": False, "use_distributed_sampler": False, "accelerator": "cpu"}
    trainer = pl.Trainer(**quiet, enable_progress_bar=False, enable_model_summary=False)
    store, count, left = extract(trainer, model, ImageData(str(folder), batch_size, num_workers=0, shard=shard))
    print(f"{count} extracted, {left} left")
    return store


def test_the_store_holds_what_the_backbone_gives(folder: Path) -> None:
    store = FeatureStore.open(run(folder))
    assert store.folder == folder / "features" / "small" and len(store) == 5
    backbone = Extraction("x", "torchvision", "resnet18", "layer1", "random").backbone
    images = torch.stack([backbone.preprocess(Image.open(folder / f"{name}.png")) for name in "ca"])
    with torch.no_grad():
        expected = backbone(images)
    got = torch.from_numpy(store.read(store.rows(["c.png", "a.png"]))).float()
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    assert store.meta["network"] == "resnet18" and store.meta["precision"] == "32-true"


@pytest.mark.parametrize("name", ["desk", "blocks"])
def test_photographs_get_a_warning_of_the_network_for_rendered_scenes(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    write_dataset(folder, name, folder, read_dataset(folder).pairs, {})
    run(folder, library="blocks", network=None, stage=None, weights="default")
    warning = "warning: the features of desk are of blocks, a small network that was trained on rendered scenes; they are poor"
    advice, output = "without OFFLINE=yes and BACKBONE, the network of the method is used", capsys.readouterr().out
    assert (f"{warning} for other images" in output) == (advice in output) == (name == "desk")


def test_nothing_is_computed_twice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(folder)
    monkeypatch.setattr(Extraction, "predict_step", lambda *_: pytest.fail("an image was extracted again"))
    run(folder)


def test_shards_fill_one_store_as_one_job_does(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, store = run(folder, name="one"), run(folder, shard="1/2")  # batches (a, b), (c, d), (e): the second
    assert capsys.readouterr().out.splitlines() == ["5 extracted, 0 left", "2 extracted, 3 left"]
    with pytest.raises(DiffcapError, match=r"extraction is not complete \(2 of 5 images done\)"):
        FeatureStore.open(store)
    run(folder, shard="1/2")
    assert capsys.readouterr().out.splitlines() == [
        f"{store}: comparing the features of 2 images with their checksums",
        "0 extracted, 3 left",
    ]
    whole = (store / "features.f16").read_bytes()
    (store / "features.f16").write_bytes(bytes(len(whole)))
    run(folder, shard="0/2")
    assert capsys.readouterr().out == "3 extracted, 0 left\n"  # rows of others are not compared
    assert (store / "complete").is_file()
    run(folder, shard="1/2")
    assert "the features of 2 images are damaged" in capsys.readouterr().out
    for name in ("features.f16", "sums.u32", "done.u8", "index.json", "meta.json", "complete"):
        assert (store / name).read_bytes() == (one / name).read_bytes(), name


@pytest.mark.parametrize("shard", ["16/16", "a/b", "0/0", "1", "-1/2", ""])
def test_a_wrong_shard_is_refused(folder: Path, shard: str) -> None:
    with pytest.raises(DiffcapError, match=f"data.shard={shard} is not a part; give one of N parts as"):
        run(folder, shard=shard)


def test_the_same_name_for_something_else_is_refused(folder: Path) -> None:
    run(folder)
    with pytest.raises(DiffcapError, match=r"holds features of another kind \(pool there is null, now \[4, 6\]"):
        run(folder, pool=(4, 6))


def test_an_unreadable_image_is_named_and_the_others_are_kept(folder: Path) -> None:
    whole = (folder / "b.png").read_bytes()
    (folder / "b.png").write_bytes(whole[:50])
    with pytest.raises(DiffcapError, match=r"b\.png: truncated"):
        run(folder)
    assert sum((folder / "features" / "small" / "done.u8").read_bytes()) == 4
    (folder / "b.png").write_bytes(whole)
    assert len(FeatureStore.open(run(folder))) == 5


def test_a_manifest_of_captions_only_is_refused(tmp_path: Path) -> None:
    pairs = [ChangePair("1", "a.png", "b.png", ["x"], "train")]
    write_dataset(tmp_path, "toy", tmp_path, pairs, {"captions_only": True})
    with pytest.raises(DiffcapError, match="captions only; add the images and run `make data` again"):
        run(tmp_path)
    assert not (tmp_path / "features").exists()


def test_both_images_of_a_pair_have_one_range_of_values(tmp_path: Path) -> None:
    """From the data stage to both stores, as `diffcap caption` reads the pair; an image of 8 bits stays as it is."""
    source, home = tmp_path / "source", tmp_path / "data"
    source.mkdir()
    gray = np.linspace(0, 200, 48 * 64).reshape(48, 64)
    bright = np.where(gray > 199, 30_000, gray)
    colors = np.random.default_rng(0).random((3, 48, 64)) * 3000  # a GeoTIFF that Pillow does not read
    kinds = {"0": np.uint16, "1": np.float32}
    for id, kind in kinds.items():
        Image.fromarray(gray.astype(kind)).save(source / f"{id}_before.tif")
        Image.fromarray(bright.astype(kind)).save(source / f"{id}_after.tif")
    for side, values in (("before", colors), ("after", colors[::-1] * 2)):
        write(source / f"2_{side}.tif", values.astype(np.uint16), interleave="band")
        Image.fromarray(bright.astype(np.uint8)).save(source / f"3_{side}.tif")
    splits = dict(zip("0123", ("train", "val", "test", "train")))
    rows = [
        {"before": f"{id}_before.tif", "after": f"{id}_after.tif", "captions": ["x"], "split": splits[id]}
        for id in splits
    ]
    write_lines(source / "pairs.jsonl", rows)
    prepare("desk", str(source), str(home))
    pairs = read_dataset(home).pairs
    for pair in pairs:
        assert sorted(pair.ranges) == ([*pair.images[::-1]] if pair.id[0] != "3" else [])
    options = {"library": "pixels", "network": None, "stage": None, "weights": "default", "image_size": (48, 64)}
    folders = [run(home, name=name, from_files=name == "files", **options) for name in ("pixels", "files")]
    for pair in pairs:
        shown = read_pair(*(source / path for path in pair.images))
        expected = [np.moveaxis(np.asarray(side.image), -1, 0) for side in (shown.before, shown.after)]
        for store in map(FeatureStore.open, folders):
            np.testing.assert_array_equal(store.read(store.rows(pair.images)), expected)
    Image.fromarray(np.maximum(bright, 40_000).astype(np.uint16)).save(source / "0_after.tif")
    prepare("desk", str(source), str(home))  # another range of the pair: the features of both images are stale
    extracted = [run(home, name=name, from_files=name == "files", **options) for name in ("pixels", "files")]
    shown = read_pair(source / "0_before.tif", source / "0_after.tif")
    for store in map(FeatureStore.open, extracted):
        found = store.read(store.rows(["0_before.tif"]))[0]
        np.testing.assert_array_equal(np.moveaxis(found, 0, -1), np.asarray(shown.before.image))
