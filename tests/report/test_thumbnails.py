"""Thumbnails, and the cells of the page's tables."""

import base64
import io
from pathlib import Path

import numpy as np
from PIL import Image

from diffcap.report.cells import score_grids, type_grids
from diffcap.report.thumbnails import LARGE, SMALL, thumbnails


def test_pictures_are_shrunk_never_enlarged_and_broken_ones_told(tmp_path: Path) -> None:
    Image.new("RGB", (800, 400), (200, 30, 30)).save(tmp_path / "large.jpg")
    Image.new("RGBA", (40, 30), (30, 200, 30, 255)).save(tmp_path / "small.png")
    (tmp_path / "broken.png").write_bytes((tmp_path / "small.png").read_bytes()[:40])
    frames = {"large.jpg": LARGE, "small.png": SMALL, "broken.png": SMALL, "none.png": SMALL}
    made = thumbnails(tmp_path, frames)
    assert list(made) == list(frames) and made["broken.png"] is None and made["none.png"] is None
    for name, original, size, color in (("large.jpg", (800, 400), (320, 160), 0), ("small.png", (40, 30), (40, 30), 1)):
        one = made[name]
        assert one is not None and (one.width, one.height) == original
        with Image.open(io.BytesIO(base64.b64decode(one.data))) as image:
            assert image.format == "WEBP" and image.size == size
            pixel = image.convert("RGB").getpixel((10, 10))
        assert isinstance(pixel, tuple) and max(range(3), key=pixel.__getitem__) == color


def test_images_of_more_than_8_bits_are_scaled_by_the_range_of_their_pair(tmp_path: Path) -> None:
    Image.fromarray(np.full((30, 40), 1500, np.int32)).save(tmp_path / "deep.tif")
    (one,) = thumbnails(tmp_path, {"deep.tif": SMALL}, {"deep.tif": (0, 60_000)}).values()
    assert one is not None and (one.width, one.height) == (40, 30)
    with Image.open(io.BytesIO(base64.b64decode(one.data))) as image:
        assert image.convert("RGB").getpixel((10, 10)) == (6, 6, 6)


ROWS = {
    "base": {"total": {"CIDEr-D": 0.5}, "color": {"CIDEr-D": 0.0}, "distractor": {"CIDEr-D": 1.0}, "seconds": None},
    "ours": {
        "total": {"CIDEr-D": 1.0, "BLEU-4": 0.5},
        "color": {"CIDEr-D": 0.5},
        "distractor": {"CIDEr-D": 0.25},
        "seconds": 1234.0,
        "std": {"total": {"CIDEr-D": 0.0123}, "seconds": 10.0},
    },
}


def test_cells_hold_text_bar_and_who_is_best() -> None:
    overview = score_grids(ROWS)[0]
    assert overview.columns == ["BLEU-4", "CIDEr-D", "CIDEr-D distractor", "training seconds"]
    ours = dict(zip(overview.columns, overview.rows["ours"]))
    base = dict(zip(overview.columns, overview.rows["base"]))
    assert (ours["CIDEr-D"].text, ours["CIDEr-D"].std, ours["CIDEr-D"].fraction, ours["CIDEr-D"].best) == (
        "100.00",
        "1.23",
        1,
        True,
    )
    assert (base["CIDEr-D"].text, base["CIDEr-D"].fraction, base["CIDEr-D"].best) == ("50.00", 0.5, False)
    assert base["BLEU-4"].text == "" and base["CIDEr-D distractor"].best and ours["CIDEr-D distractor"].fraction == 0.25
    assert (ours["training seconds"].text, ours["training seconds"].best, ours["training seconds"].fraction) == (
        "1,234",
        False,
        0,
    )


def test_the_fraction_distinguishes_scores_that_differ_in_the_last_digit() -> None:
    rows = {name: {"total": {"CIDEr-D": score}} for name, score in (("one", 1.50004), ("two", 1.50011))}
    one, two = (score_grids(rows)[0].rows[name][0] for name in rows)
    assert (one.text, two.text) == ("150.00", "150.01") and one.fraction < two.fraction and two.best


def test_shades_are_per_column() -> None:
    (grid,) = type_grids(ROWS)
    assert grid.name == "CIDEr-D" and grid.columns == ["color", "distractor"]
    assert [cell.fraction for cell in grid.rows["base"]] == [0, 1]
    assert [cell.fraction for cell in grid.rows["ours"]] == [1, 0]
    assert [cell.best for cell in grid.rows["ours"]] == [True, False]
    assert type_grids({"ours": {"total": {"CIDEr-D": 1.0}}}) == []
