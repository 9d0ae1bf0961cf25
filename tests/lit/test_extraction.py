"""Extraction through a Lightning trainer, in this process: what reaches the store is what the backbone gives."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from PIL import Image

from diffcap.features.backbones import build_backbone
from diffcap.features.images import ImageData
from diffcap.features.store import FeatureStore, StoreWriter
from diffcap.lit.extraction import Extraction, extract
from diffcap.records import ChangePair, write_dataset
from diffcap.utils.errors import DiffcapError

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


def run(folder: Path, pool: tuple[int, int] | None = None, batch_size: int = 2, **options: Any) -> Path:
    model = Extraction("small", "torchvision", "resnet18", "layer1", "random", pool, **options)
    quiet = {"logger": False, "enable_checkpointing": False, "use_distributed_sampler": False, "accelerator": "cpu"}
    trainer = pl.Trainer(**quiet, enable_progress_bar=False, enable_model_summary=False)
    return extract(trainer, model, ImageData(str(folder), batch_size=batch_size, num_workers=0))[0]


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


def test_the_images_are_divided_by_the_given_std(folder: Path) -> None:
    std = (0.229, 0.224, 0.224)
    store = FeatureStore.open(run(folder, image_std=std))
    assert store.meta["preprocessing"]["std"] == list(std)
    backbone = build_backbone("torchvision", "resnet18", "layer1", "random", image_std=std)
    with torch.no_grad():
        expected = backbone(backbone.preprocess(Image.open(folder / "a.png"))[None])
    got = torch.from_numpy(store.read(store.rows(["a.png"]))).float()
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_nothing_is_computed_twice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(folder)
    monkeypatch.setattr(Extraction, "predict_step", lambda *_: pytest.fail("an image was extracted again"))
    run(folder)


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


def test_without_a_dataset_it_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(DiffcapError, match="make data"):
        run(tmp_path)


def test_bfloat16_without_instructions_for_it_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffcap.lit.precision.cpu_has_bfloat16", lambda: False)
    trainer = pl.Trainer(accelerator="cpu", precision="bf16-mixed", logger=False)
    with pytest.raises(
        DiffcapError, match=r"precision is bf16-mixed.*no instructions for bfloat16.*remove the option\.$"
    ):
        extract(trainer, Extraction("small", "torchvision", "resnet18", "layer1", "random"), ImageData(str(folder)))


def test_a_manifest_of_captions_only_is_refused(tmp_path: Path) -> None:
    pairs = [ChangePair("1", "a.png", "b.png", ["x"], "train")]
    write_dataset(tmp_path, "toy", tmp_path, pairs, {"captions_only": True})
    with pytest.raises(DiffcapError, match="captions only; add the images and run `make data` again"):
        run(tmp_path)
    assert not (tmp_path / "features").exists()


def flip(folder: Path, *rows: int) -> bytes:
    """Change the sign of all features of some of the five rows; gives the file as it was."""
    data = folder / "features/small/features.f16"
    before = data.read_bytes()
    values = np.memmap(data, np.float16, "r+").reshape(5, -1)
    values[list(rows)] *= -1
    values.flush()
    return before


def test_only_damaged_rows_are_written_again_and_bit_for_bit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = run(folder)
    sums = (store / "sums.u32").read_bytes()
    before = flip(folder, 1, 4)
    (folder / "a.png").rename(folder / "moved.png")  # row 0, which shares a batch with row 1 and is as it was
    written: list[int] = []
    write = StoreWriter.write
    monkeypatch.setattr(
        StoreWriter, "write", lambda self, rows, features: (written.extend(rows), write(self, rows, features))
    )
    run(folder)
    assert written == [1, 4]
    assert (store / "features.f16").read_bytes() == before and (store / "sums.u32").read_bytes() == sums


def test_a_damaged_row_whose_image_is_gone_is_named_and_the_others_are_repaired(folder: Path) -> None:
    store = run(folder)
    before = flip(folder, 0, 3)
    (folder / "d.png").rename(folder / "moved.png")
    for _ in range(2):
        with pytest.raises(DiffcapError) as caught:
            run(folder)
        assert str(caught.value).startswith(f"{folder / 'd.png'}: file not found; give the path")
        assert f"1 image of {store} could not be extracted, the others are stored" in str(caught.value)
    (folder / "moved.png").rename(folder / "d.png")
    run(folder)
    assert (store / "features.f16").read_bytes() == before
