"""Pixels that differ: those of the program pixelmatch, for images of areas, smoothed edges and noise."""

from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont
from pixelmatch import pixelmatch

from diffcap.utils.pixels import differing_pixels, relative_box


def page(text: str = "Save", moved: float = 0.0, scale: int = 4) -> Image.Image:
    """Draw a page with smoothed text, which can be moved by parts of a pixel."""
    large = Image.new("RGB", (160 * scale, 90 * scale), "white")
    draw = ImageDraw.Draw(large)
    font = ImageFont.load_default(14 * scale)
    for row in range(3):
        draw.text(((6 + moved) * scale, (5 + 20 * row) * scale), "The quick brown fox", (30, 30, 30), font)
    draw.rectangle((100 * scale, 64 * scale, 156 * scale, 86 * scale), (30, 90, 220))
    draw.text((110 * scale, 66 * scale), text, "white", font)
    return large.resize((160, 90), Image.Resampling.LANCZOS)


def noise(seed: int) -> Image.Image:
    """Draw few colors at random, so that equal neighbors are frequent."""
    values = np.random.default_rng(seed).choice([0, 60, 200, 255], (150, 40, 1))
    return Image.fromarray(np.repeat(values, 3, axis=2).astype(np.uint8))


PAIRS = {
    "text": (page(), page("Send")),
    "moved": (page(), page(moved=0.25)),
    "noise": (noise(1), noise(2)),
    "inverted": (page(), Image.fromarray(255 - np.asarray(page()))),
    "strip": (noise(3).crop((0, 0, 40, 2)), noise(4).crop((0, 0, 40, 2))),
}


@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("name", PAIRS)
def test_pixels_are_those_of_pixelmatch(name: str, threshold: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffcap.utils.pixels._MAX_PIXELS", 1000)  # so the images are compared in several parts
    before, after = PAIRS[name]
    drawn: Any = bytearray(4 * before.width * before.height)
    expected = pixelmatch(
        before.convert("RGBA").tobytes(),
        after.convert("RGBA").tobytes(),
        *before.size,
        drawn,
        threshold,
        diff_mask=True,
    )
    mask = differing_pixels(np.asarray(before), np.asarray(after), threshold)
    red = np.frombuffer(drawn, np.uint8).reshape(*mask.shape, 4)  # red: differs; yellow: antialiasing
    assert mask.sum() == expected
    assert np.array_equal(mask, (red[..., 3] > 0) & (red[..., 1] == 0))


def test_ignored_pixels_do_not_differ_and_the_box_is_tight() -> None:
    before = np.zeros((20, 30, 3), np.uint8)
    after = before.copy()
    after[4:7, 10:15] = after[18, 29] = 255
    ignored = np.zeros((20, 30), bool)
    assert relative_box(differing_pixels(before, after)) == (10 / 30, 4 / 20, 1, 19 / 20)
    ignored[18:, 28:] = True
    assert relative_box(differing_pixels(before, after, 0.1, ignored)) == (10 / 30, 4 / 20, 15 / 30, 7 / 20)
    assert relative_box(differing_pixels(before, before)) is None
