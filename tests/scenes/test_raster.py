"""Reading two rasters: grids, bands, types, data masks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio.warp
from rasterio.transform import Affine, from_origin
from tests.scenes.rasters import UTM33, write

from diffcap.scenes.raster import open_scene
from diffcap.scenes.tiling import Tile
from diffcap.utils.errors import DiffcapError

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
    with open_scene(color, color) as scene:
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


def test_equal_grids_with_rounding_errors_are_equal(tmp_path: Path) -> None:
    after = write(tmp_path / "b.tif", image(), transform=UTM33 @ Affine.translation(1e-5, 0))
    with open_scene(write(tmp_path / "a.tif", image()), after) as scene:
        assert scene.width == 50


def test_align_moves_the_second_raster_to_the_first_grid(tmp_path: Path) -> None:
    first, second = image(), image(60, 70)
    before = write(tmp_path / "a.tif", first)
    after = write(tmp_path / "b.tif", second, transform=UTM33 @ Affine.translation(-7, 9))
    with open_scene(before, after, align=True) as scene:
        sample = scene.read(Tile(0, 0, 50, 40))
    assert np.array_equal(sample.before, first)
    assert np.array_equal(sample.after[:, 9:, :], second[:, :31, 7:57])
    assert not sample.after_valid[:9].any() and sample.after_valid[9:].all() and sample.before_valid.all()


def test_align_warps_between_coordinate_reference_systems(tmp_path: Path) -> None:
    """The second raster counts its columns; each pixel of the first grid has the column that PROJ gives for its position."""
    before = write(tmp_path / "a.tif", image(100, 100), transform=from_origin(719_900, 5_400_050, 1, 1))
    columns, rows = np.meshgrid(719_900.5 + np.arange(100), 5_400_049.5 - np.arange(100))
    east, north = map(np.array, rasterio.warp.transform("EPSG:32633", "EPSG:32634", columns.ravel(), rows.ravel()))
    left, top = east.min() - 20, north.max() + 20
    counts = np.broadcast_to(np.arange(200, dtype="uint8"), (3, 200, 200))
    after = write(tmp_path / "b.tif", counts, crs="EPSG:32634", transform=from_origin(left, top, 1, 1))
    with open_scene(before, after, align=True) as scene:
        sample = scene.read(Tile(0, 0, 100, 100))
    assert scene.crs == "EPSG:32633" and sample.after_valid.all()
    assert np.abs(sample.after[0].ravel() - (east - left - 0.5)).max() < 1


def test_files_without_georeference(tmp_path: Path) -> None:
    bare = {"crs": None, "transform": Affine.identity()}
    before, after = (write(tmp_path / f"{name}.tif", image(), **bare) for name in "ab")
    with open_scene(before, after) as scene:
        assert scene.crs is None
    larger = write(tmp_path / "c.tif", image(41), **bare)
    assert "export both from one grid; --align needs files with a CRS" in fault(before, larger)
    assert "a.tif: it has no CRS, which --align needs" in fault(before, larger, align=True)


def test_pixels_without_data(tmp_path: Path) -> None:
    pixels = image(dtype="float32")
    pixels[:, :4], pixels[0, 4], pixels[:, 5, :] = -9999, -9999, np.nan
    path = write(tmp_path / "a.tif", pixels, nodata=-9999)
    with open_scene(path, path) as scene:
        valid = scene.read(Tile(0, 0, 50, 40)).before_valid
    assert (
        not valid[:4].any() and valid[4].all() and not valid[5].any() and valid[6:].all()
    )  # row 4: only one band is nodata


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
    with open_scene(path, path) as scene:
        sample = scene.overview(longest)
    expected = pixels[:, ::step, ::step]
    assert np.array_equal(sample.before, expected) and sample.after_valid.shape == expected.shape[1:]
