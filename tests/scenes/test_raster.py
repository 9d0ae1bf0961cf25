"""Reading two rasters: grids, bands, types, data masks; tiles; pixels as RGB images."""

from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from rasterio.transform import Affine, from_origin
from tests.scenes.rasters import UTM33, write

from diffcap.scenes.raster import PERCENTILES, TILES_RANGE, Sample, Tile, Tiling, fit_stretch, open_scene, to_rgb
from diffcap.utils.errors import DiffcapError
from diffcap.worlds.tiles.write import render_pair

RANDOM = np.random.default_rng(0)


def image(height: int = 40, width: int = 50, bands: int = 3, dtype: str = "uint8") -> Any:
    return RANDOM.integers(1, 250, (bands, height, width)).astype(dtype)


def fault(before: str, after: str, bands: list[int] | None = None, align: bool = False) -> str:
    with pytest.raises(DiffcapError) as caught, open_scene(before, after, bands, align):
        pass
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message
    return message


def test_windows_of_chosen_bands(tmp_path: Path) -> None:
    first, second = image(bands=4, dtype="uint16"), image(bands=4, dtype="uint16")
    with open_scene(write(tmp_path / "a.tif", first), write(tmp_path / "b.tif", second), [4, 3, 2]) as scene:
        sample = scene.read(Tile(10, 5, 20, 8))
    assert np.array_equal(sample.before, first[[3, 2, 1], 5:13, 10:30])
    assert np.array_equal(sample.after, second[[3, 2, 1], 5:13, 10:30])
    assert sample.before_valid.all() and sample.after_valid.shape == (8, 20)


def test_default_bands_and_missing_ones(tmp_path: Path) -> None:
    gray, color = write(tmp_path / "gray.tif", image(bands=2)), write(tmp_path / "color.tif", image())
    with open_scene(gray, gray) as scene:
        assert scene.bands == [1] and scene.crs == "EPSG:32633"
    moved = write(tmp_path / "moved.tif", image(), transform=UTM33 @ Affine.translation(1e-5, 0))  # rounding errors
    with open_scene(color, moved) as scene:
        assert scene.bands == [1, 2, 3]
    assert "gray.tif: it has no band 3; choose from 1 to 2 with --bands" in fault(gray, color, [1, 2, 3])


@pytest.mark.parametrize(
    "options, shape, clause",
    [
        ({"crs": "EPSG:32634"}, (40, 50), "their coordinate reference systems differ (EPSG:32633 and EPSG:32634)"),
        ({"crs": None}, (40, 50), "their coordinate reference systems differ (EPSG:32633 and none)"),
        ({}, (41, 50), "their sizes differ (50 x 40 and 50 x 41 pixels)"),
        ({"transform": UTM33 @ Affine.translation(3, 0)}, (40, 50), "origin 500001.5, 5400000, pixel 0.5 x -0.5"),
        ({"transform": from_origin(500_000, 5_400_000, 0.6, 0.5)}, (40, 50), "pixel 0.6 x -0.5"),
    ],
)
def test_different_grids_are_named_with_the_remedy(
    tmp_path: Path, options: Any, shape: tuple[int, int], clause: str
) -> None:
    message = fault(write(tmp_path / "a.tif", image()), write(tmp_path / "b.tif", image(*shape), **options))
    assert clause in message and "--align" in message


def test_align_moves_the_second_raster_to_the_first_grid(tmp_path: Path) -> None:
    first, second = image(), image(60, 70)
    before = write(tmp_path / "a.tif", first)
    after = write(tmp_path / "b.tif", second, transform=UTM33 @ Affine.translation(-7, 9))
    with open_scene(before, after, align=True) as scene:
        sample = scene.read(Tile(0, 0, 50, 40))
    assert np.array_equal(sample.before, first)
    assert np.array_equal(sample.after[:, 9:, :], second[:, :31, 7:57])
    assert not sample.after_valid[:9].any() and sample.after_valid[9:].all() and sample.before_valid.all()


def test_files_without_georeference(tmp_path: Path) -> None:
    bare = {"crs": None, "transform": Affine.identity()}
    before, after = (write(tmp_path / f"{name}.tif", image(), **bare) for name in "ab")
    with open_scene(before, after) as scene:
        assert scene.crs is None
    larger = write(tmp_path / "c.tif", image(41), **bare)
    for align in (False, True):
        assert "export both from one grid; --align needs a CRS in both" in fault(before, larger, align=align)


def test_pixels_without_data(tmp_path: Path) -> None:
    pixels = image(dtype="float32")
    pixels[:, :4], pixels[0, 4], pixels[:, 5, :] = -9999, -9999, np.nan
    path = write(tmp_path / "a.tif", pixels, nodata=-9999)
    with open_scene(path, path) as scene:
        valid = scene.read(Tile(0, 0, 50, 40)).before_valid
    assert not valid[:4].any() and not valid[5].any() and valid[6:].all()
    assert valid[4].all()  # only one band is nodata


def test_types_that_cannot_be_compared(tmp_path: Path) -> None:
    deep = write(tmp_path / "deep.tif", image(dtype="uint16"))
    assert "their pixels are uint16 and uint8" in fault(deep, write(tmp_path / "flat.tif", image()))
    odd = write(tmp_path / "odd.tif", image(dtype="complex64"))
    assert "odd.tif: its pixels are complex64" in fault(odd, odd)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    good = write(tmp_path / "good.tif", RANDOM.integers(0, 255, (3, 300, 300)).astype("uint8"))
    assert "gone.tif: file not found" in fault(good, str(tmp_path / "gone.tif"))
    (tmp_path / "text.tif").write_text("not a raster")
    assert "text.tif: not a raster that GDAL can read" in fault(good, str(tmp_path / "text.tif"))
    content = Path(good).read_bytes()
    (tmp_path / "cut.tif").write_bytes(content[: len(content) // 2])
    with (
        open_scene(good, str(tmp_path / "cut.tif")) as scene,
        pytest.raises(DiffcapError, match=r"cut\.tif: cannot read .* row 200"),
    ):
        scene.read(Tile(0, 200, 100, 100))


@pytest.mark.parametrize("longest", [7, 50, 2048])
def test_the_overview_is_every_nth_pixel(tmp_path: Path, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffcap.scenes.raster.MAX_WINDOW", 16)
    pixels = image()
    path = write(tmp_path / "a.tif", pixels)
    step = max(1, -(-50 // longest))
    with open_scene(path, path) as scene, monkeypatch.context() as patch:
        read = Mock(wraps=scene.read)
        patch.setattr(scene, "read", read)
        sample = scene.overview(longest)
    assert all(max(call.args[0][2:]) <= 16 for call in read.call_args_list)  # the scene need not fit into memory
    expected = pixels[:, ::step, ::step]
    assert np.array_equal(sample.before, expected) and sample.after_valid.shape == expected.shape[1:]


@pytest.mark.parametrize(
    "width, height, size, overlap", [(600, 500, 256, 64), (256, 257, 256, 0), (100, 700, 128, 127), (90, 70, 100, 10)]
)
def test_tiles_cover_every_pixel_and_stay_inside(width: int, height: int, size: int, overlap: int) -> None:
    tiling = Tiling(width, height, size, overlap)
    seen = np.zeros((height, width), int)
    for number in range(len(tiling)):
        x, y, tile_width, tile_height = tiling[number]
        assert (tile_width, tile_height) == (min(size, width), min(size, height))
        assert x + tile_width <= width and y + tile_height <= height
        seen[y : y + tile_height, x : x + tile_width] += 1
    assert seen.all()
    columns = sorted({tiling[number].x for number in range(len(tiling))})
    assert all(second - first <= size - overlap for first, second in pairwise(columns))


def sample(dtype: str = "uint16", bands: int = 3) -> Sample:
    before, after = (RANDOM.integers(0, 60_000, (bands, 30, 40)).astype(dtype) for _ in range(2))
    return Sample(before, after, RANDOM.random((30, 40)) < 0.9, RANDOM.random((30, 40)) < 0.7)


@pytest.mark.parametrize("given, used", [(None, (2, 98)), ((5, 50), (5, 50))])
def test_percentiles_are_those_of_both_dates(given: tuple[float, float] | None, used: tuple[float, float]) -> None:
    scene = sample()
    stretch = fit_stretch(scene, given)
    assert stretch is not None
    for band in range(3):
        values = [*scene.before[band][scene.before_valid], *scene.after[band][scene.after_valid]]
        low, high = np.percentile(values, used[0]), np.percentile(values, used[1])
        assert (stretch.low[band], stretch.high[band]) == pytest.approx((low, high))
        image = to_rgb(scene.before, scene.before_valid, stretch)
        expected = np.rint(np.clip((scene.before[band] - low) / (high - low), 0, 1) * 255)
        assert np.abs(image[..., band] - np.where(scene.before_valid, expected, 0)).max() <= 1  # float32
        assert not image[~scene.before_valid].any()


def test_pixels_of_8_bits_are_stretched_only_on_request() -> None:
    scene = sample("uint8")
    assert fit_stretch(scene, None) is None and fit_stretch(scene, (2, 98)) is not None
    shown = np.ones((30, 40), bool)
    assert np.array_equal(to_rgb(scene.before, shown, None), scene.before.transpose(1, 2, 0))


def test_percentiles_become_given_levels() -> None:
    scene, shown = sample(), np.ones((30, 40), bool)
    means = tuple((np.mean(color),) for color in TILES_RANGE)
    for chosen, color_range in ((scene, TILES_RANGE), (sample(bands=1), means)):
        stretch = fit_stretch(chosen, None, TILES_RANGE)
        full = fit_stretch(chosen, None)
        assert stretch is not None and full is not None
        for band, (dark, bright) in enumerate(zip(*color_range)):
            values = np.array([full.low[band], full.high[band]])
            found = (values - stretch.low[band]) / (stretch.high[band] - stretch.low[band]) * 255
            assert found == pytest.approx([dark, bright])
            image = to_rgb(chosen.before, shown, stretch)[..., band]
            assert abs(float(np.percentile(image, 2)) - dark) < 6 and abs(float(np.percentile(image, 98)) - bright) < 6
    assert fit_stretch(sample("uint8"), None, TILES_RANGE) is None


def test_the_levels_of_tiles_are_those_of_its_images() -> None:
    pixels = np.concatenate([image.reshape(-1, 3) for number in range(60) for image in render_pair(number, 3).images])
    # 60 pairs; TILES_RANGE was computed from 800.
    assert np.abs(np.percentile(pixels, PERCENTILES, axis=0) - TILES_RANGE).max() < 15


def test_single_and_constant_bands_and_pixels_without_data() -> None:
    gray = sample(bands=1)
    image = to_rgb(gray.after, gray.after_valid, fit_stretch(gray, None))
    assert image.shape == (30, 40, 3) and (image[..., :1] == image).all()
    flat = gray._replace(before=np.full((1, 30, 40), 7, "uint16"), after=np.full((1, 30, 40), 7, "uint16"))
    assert not to_rgb(flat.before, flat.before_valid, fit_stretch(flat, None)).any()
    pixels = np.full((1, 2, 2), np.nan, np.float32)
    pixels[0, 0, 0] = 3
    valid = np.isfinite(pixels)[0]
    stretch = fit_stretch(Sample(pixels, pixels, valid, valid), (0, 100))
    assert not to_rgb(pixels, valid, stretch)[~valid].any()
