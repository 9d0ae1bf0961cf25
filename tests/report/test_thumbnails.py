"""Thumbnails."""

import base64
import io
from pathlib import Path

import numpy as np
from PIL import Image

from diffcap.report.drawing import LARGE, SMALL, thumbnails


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
