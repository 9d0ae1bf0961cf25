"""Images of a dataset: each once, in batches that do not depend on what was done before, broken ones as sentences."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from diffcap.features.images import ImageData, load_image, unique_images
from diffcap.features.preprocessing import ResizeNormalize
from diffcap.records import ChangePair
from diffcap.utils.errors import DiffcapError


def test_every_image_once_in_order_of_appearance() -> None:
    pairs = [ChangePair("0", "b", "a", ["x"], "train"), ChangePair("1", "b", "c", ["x"], "test")]
    assert unique_images(pairs) == ["b", "a", "c"]


def test_other_modes_become_rgb(tmp_path: Path) -> None:
    Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4)).save(tmp_path / "gray.png")
    assert load_image(tmp_path / "gray.png").mode == "RGB"
    deep = np.array([[0, 257, 128 * 257, 65_535]], dtype=np.uint16)
    for kind, name in ((np.uint16, "deep.png"), (np.float32, "long.tiff"), (np.int32, "long.tiff")):
        Image.fromarray(deep.astype(kind)).save(tmp_path / name)
        loaded = load_image(tmp_path / name, value_range=(kind(0).item(), kind(65_535).item()))
        assert np.asarray(loaded)[0].tolist() == [[n] * 3 for n in (0, 1, 128, 255)]
        with pytest.raises(DiffcapError, match=rf"{name}: has more than 8 bits, and the manifest has no range"):
            load_image(tmp_path / name)


def batches_of(folder: Path, rows: list[int], workers: int = 0) -> ImageData:
    data = ImageData(str(folder), batch_size=3, num_workers=workers)
    data.assign(np.array(rows), [folder / f"{row}.png" for row in range(max(rows) + 1)], ResizeNormalize((24, 32)))
    return data


def test_batches_are_cut_at_the_same_rows_whatever_is_done_already(tmp_path: Path) -> None:
    every, wanted = (batches_of(tmp_path, rows).row_batches() for rows in (list(range(10)), [2, 3, 4, 9]))
    assert [batch.tolist() for batch in every] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert [batch.tolist() for batch in wanted] == [[0, 1, 2], [3, 4, 5], [9]]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_image_is_a_sentence_and_the_others_pass(tmp_path: Path, workers: int) -> None:
    for row in range(5):
        noise = np.random.default_rng(row).integers(0, 256, (24, 32, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / f"{row}.png")
    (tmp_path / "1.png").write_bytes((tmp_path / "1.png").read_bytes()[:60])
    first, second = batches_of(tmp_path, list(range(5)), workers).predict_dataloader()
    assert first.rows.tolist() == [0, 2] and len(first.images) == 2
    assert len(first.problems) == 1 and str(tmp_path / "1.png") in first.problems[0] and not second.problems
    expected = ResizeNormalize((24, 32))(Image.open(tmp_path / "4.png"))
    assert torch.equal(second.images[1], expected)
    (alone,) = batches_of(tmp_path, [2], workers).predict_dataloader()  # 1.png is not asked for
    assert alone.rows.tolist() == [0, 2] and not alone.problems


def test_images_are_decoded_by_several_processes_unless_there_is_one_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cores, workers in ((1, 0), (2, 2), (64, 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert ImageData(str(tmp_path)).num_workers == workers
