"""Drawings of the attention maps of each word."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from diffcap.records import ChangePair
from diffcap.report.drawing import GAP, MARGIN, PICTURE, WIDTH
from diffcap.report.heatmaps import (
    COLUMNS,
    TILE,
    PairAttention,
    blend,
    color_table,
    colormap,
    draw_attention,
    matches,
    overlay,
    scale_attention,
)
from diffcap.utils.errors import DiffcapError

BLUE, ORANGE = (0, 160, 230), (240, 120, 0)
GRAY = (128, 128, 128)


def one_hot(shape: tuple[int, int], row: int, column: int) -> np.ndarray:
    cells = np.zeros(shape)
    cells[row, column] = 1
    return cells


def test_the_place_of_the_mass_takes_the_colour() -> None:
    image = Image.new("RGB", (120, 80), GRAY)
    painted = np.asarray(blend(image, one_hot((4, 6), 1, 4))).astype(int)
    change = np.abs(painted - 128).sum(-1)
    row, column = np.unravel_index(change.argmax(), change.shape)
    assert 20 <= row < 40 and 80 <= column < 100  # cell (1, 4) of 20 x 20 pixels
    middle = painted[30, 90]
    assert middle[0] > 200 and middle[2] < 150  # the hot end of the scale
    far = np.ones_like(change, dtype=bool)
    far[:70, 50:] = False
    assert not change[far].any()
    assert np.asarray(blend(image, np.zeros((4, 6)))).reshape(-1, 3).tolist() == [list(GRAY)] * 9600


def test_an_image_keeps_its_colours_where_attention_is_low() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (80, 120, 3), dtype=np.uint8))
    colors = overlay(image.size, one_hot((4, 6), 1, 4))
    blended, transparent = np.asarray(blend(image, one_hot((4, 6), 1, 4))), colors[..., 3] == 0
    assert transparent.mean() > 0.7 and colors[30, 90, 3] > 200
    assert (blended[transparent] == np.asarray(image)[transparent]).all()
    assert (blended[30, 90] != np.asarray(image)[30, 90]).any()


def test_colours_grow_lighter_with_the_strength() -> None:
    light = colormap(np.linspace(0, 1, 50)) @ [0.299, 0.587, 0.114]
    assert (np.diff(light) > 0).all()


def test_the_table_of_the_report_has_the_colours_of_the_renderer() -> None:
    table = color_table()
    for strength in (0, 1, 100, 200, 255):
        assert (overlay((2, 2), np.full((2, 2), strength / 255)).round() == table[strength]).all()
    assert table[0, 3] == 0 and table[255].tolist() == [255, 235, 90, 217]


def test_strengths_are_of_both_images_and_an_even_look_has_none() -> None:
    even = np.full((4, 6), 1 / 24)
    first, second = scale_attention(even, even)
    assert not first.any() and not second.any()
    half = (one_hot((4, 6), 0, 0) + one_hot((4, 6), 3, 5)) / 2
    first, second = scale_attention(half, one_hot((4, 6), 2, 2))
    assert second[2, 2] == 1 and first[0, 0] == pytest.approx((1 / 2 - 1 / 24) / (1 - 1 / 24)) and first[1, 1] == 0
    mild = even + (one_hot((4, 6), 0, 0) - one_hot((4, 6), 1, 0)) / 24  # twice the uniform weight: pale
    assert scale_attention(mild, even)[0].max() == pytest.approx(1 / 3)


def test_matches_are_the_sure_places_and_strays_are_told() -> None:
    height, width = 3, 4
    alignment = np.full((12, 12), 1 / 12)
    for start, end, weight in ((0, 1, 1.0), (4, 5, 0.9), (5, 6, 0.8), (6, 8, 0.7), (9, 10, 0.4)):
        alignment[start] = (1 - weight) / 11
        alignment[start, end] = weight
    found = matches(alignment, (height, width))
    assert [match.weight for match in found] == [1.0, 0.9, 0.8, 0.7]  # 0.4 is less than half the highest
    assert [match.is_common for match in found] == [True, True, True, False]  # the last goes to the next row's begin
    assert found[0].start == (0.125, pytest.approx(1 / 6)) and found[0].end == (0.375, pytest.approx(1 / 6))
    assert found[3].start == (0.625, 0.5) and found[3].end == (0.125, pytest.approx(5 / 6))
    assert len(matches(alignment, (height, width), count=2)) == 2
    assert matches(np.full((12, 12), 1 / 12), (height, width)) == []


def count(sheet: Image.Image, color: tuple[int, int, int]) -> int:
    return int((np.abs(np.asarray(sheet).astype(int) - color).sum(-1) < 12).sum())


def test_a_sheet_has_a_tile_for_each_word_and_lines_where_there_is_an_alignment(tmp_path: Path) -> None:
    Image.new("RGB", (128, 96), GRAY).save(tmp_path / "1.png")
    pair = ChangePair("1", "1.png", "1.png", ["a reference"], "test")
    words = [f"w{number}" for number in range(COLUMNS + 1)]
    before = np.stack([one_hot((4, 6), 0, 0)] * len(words))
    after = np.stack([one_hot((4, 6), 3, 5)] * len(words))
    alignment = np.eye(24)
    alignment[9] = np.eye(24)[18]
    sheet = draw_attention({"a": [PairAttention(words, before, after, alignment, pair, "w0 w1")]}, tmp_path)
    assert sheet.width == WIDTH and count(sheet, BLUE) > 22 * 20 and count(sheet, ORANGE) > 20
    pixels = np.asarray(sheet).astype(int)
    top = int(np.argwhere((pixels == GRAY).all(-1))[0][0]) + PICTURE[1] + 2 * GAP
    for number in (0, COLUMNS - 1):
        left = MARGIN + number * (TILE[0] + GAP)
        tile = pixels[top : top + 2 * TILE[1] + 2, left : left + TILE[0]]
        hot = tile[..., 0] - tile[..., 2] > 90
        rows, columns = np.nonzero(hot)
        above = rows < TILE[1]
        assert above.any() and rows[above].max() < 44 and columns[above].max() < 40  # before: its first corner
        assert rows[~above].min() > TILE[1] + 44 and columns[~above].min() > 78  # after: its last corner
    plain = draw_attention({"a": [PairAttention(words[:1], before[:1], after[:1], None, pair, "w0")]}, tmp_path)
    assert not count(plain, BLUE) and plain.height < sheet.height - 200
    with pytest.raises(DiffcapError, match=r"2\.png: file not found.*--attention 0"):
        other = ChangePair("2", "2.png", "2.png", [], "test")
        draw_attention({"a": [PairAttention([], before, after, None, other, "")]}, tmp_path)
