"""Every image is read as RGB, and every other file is refused with one sentence."""

import io
import resource
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pillow_heif
import pytest
import torch
from PIL import Image, ImageOps
from tests.odd_images import encoded, png_header, scene, tiff, write_all
from tests.scenes.rasters import write

from diffcap.commands.pairs import find_pairs
from diffcap.datasets.images import image_problem
from diffcap.utils import image_io
from diffcap.utils.errors import DiffcapError
from diffcap.utils.image_io import read_image, read_pair


def refused(source, **options) -> str:
    with pytest.raises(DiffcapError) as error:
        read_image(source, **options)
    output = str(error.value)
    assert "\n" not in output and output.endswith(".") and len(output) < 400
    return output


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[Path], list[Path]]:
    """Images, other files, and files that may be refused, in one folder."""
    return write_all(tmp_path_factory.mktemp("odd"))


def test_two_hundred_unusual_files(files: tuple[list[Path], list[Path], list[Path]]) -> None:
    good, bad, either = files
    assert len(good) + len(bad) + len(either) >= 200
    for path in good:
        assert read_image(path).image.mode == "RGB", path
    for path in bad:
        assert str(path) in refused(path)
    for path in either:
        try:
            read_image(path)
        except DiffcapError as error:
            assert str(path) in str(error)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("empty.png", "empty file"),
        ("drawing.svg", "SVG"),
        ("notes.png", "text file"),
        ("figure.eps", "PostScript"),
        ("photo.heic", "HEIC"),
        ("paper.pdf", "PDF"),
        ("archive.png", "an archive, not an image; extract it"),
        ("nowhere.png", "file not found"),
        ("folder.png", "a folder"),
        (256 * "x" + ".png", "cannot be read (File name too long)"),
        ("cut0.5.jpg", "truncated"),
    ],
)
def test_the_message_says_what_the_file_is(files: tuple[list[Path], ...], name: str, reason: str) -> None:
    assert reason in refused(files[1][0].with_name(name))


def test_a_photo_in_heic_is_read_with_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8).repeat(16, 0).repeat(16, 1)
    pillow_heif.from_pillow(Image.fromarray(pixels)).save(tmp_path / "a.heic", quality=95)
    monkeypatch.delitem(Image.OPEN, "HEIF", raising=False)  # as in a new process
    monkeypatch.setattr(Image, "ID", [kind for kind in Image.ID if kind != "HEIF"])
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "pillow_heif", None)
        assert "a HEIC photo, which cannot be decoded; run: pip install 'diffcap[heic]', or" in refused(
            tmp_path / "a.heic"
        )
    for _ in range(2):
        read = np.asarray(read_image(tmp_path / "a.heic").image)
        Image.ID.remove("HEIF")  # as in a thread that has listed the formats before another one adds this one
    assert np.abs(read.astype(int) - pixels).mean() < 8 and image_problem(tmp_path / "a.heic") == ""
    (tmp_path / "b.heic").write_bytes((tmp_path / "a.heic").read_bytes()[:600])
    assert "b.heic" in refused(tmp_path / "b.heic")
    (tmp_path / "b.heic").rename(tmp_path / "x_before.heic")
    (tmp_path / "a.heic").rename(tmp_path / "x_after.HEIC")
    assert [pair.id for pair in find_pairs(str(tmp_path))[0]] == ["x"]


def test_an_image_of_too_many_pixels_is_refused_before_it_takes_memory(tmp_path: Path) -> None:
    (tmp_path / "huge.png").write_bytes(png_header(20_000, 20_000))
    (tmp_path / "large.png").write_bytes(png_header(12_000, 12_000))  # fewer than Pillow's own limit
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    assert "400,000,000" in refused(tmp_path / "huge.png") and "12,000 x 12,000" in refused(tmp_path / "large.png")
    assert tracemalloc.get_traced_memory()[1] < 5e6
    tracemalloc.stop()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


def test_transparent_parts_are_white() -> None:
    image = Image.new("RGBA", (3, 1), (200, 0, 0, 0))
    image.putpixel((1, 0), (200, 0, 0, 255))
    image.putpixel((2, 0), (200, 0, 0, 51))
    found = np.asarray(read_image(encoded(image, "PNG")).image)[0].tolist()
    assert found == [[255, 255, 255], [200, 0, 0], [244, 204, 204]]
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    found = np.asarray(read_image(encoded(palette, "PNG", transparency=1)).image)[0].tolist()
    assert found == [[10, 20, 30], [255, 255, 255]]


def seen(source) -> list[int]:
    pixels = np.asarray(read_image(source).image)
    assert (pixels == pixels[..., :1]).all()
    return pixels[0, :, 0].tolist()


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(
    ("kind", "values", "expected", "note"),
    [
        ("uint16", [0, 16 * 257, 40_000, 65_535], [0, 16, 156, 255], None),
        ("uint16", [0, 1000, 2048, 3900], [0, 62, 128, 243], "at most 3,900, were taken for 12 bits"),
        ("int16", [-100, 0, 100, 300], [0, 64, 128, 255], "from -100 to 300, were stretched"),
        ("int32", [0, 7, 200, 255], [0, 7, 200, 255], "at most 255, were taken for 8 bits"),
        ("int32", [-50_000, 0, 50_000, 150_000], [0, 64, 128, 255], "from -50,000 to 150,000, were stretched"),
        ("uint32", [0, 1 << 30, 1 << 31, (1 << 32) - 1], [0, 64, 128, 255], "from 0 to 4.29497e+09, were stretched"),
        ("float32", [0, 0.25, 0.5, 1], [0, 64, 128, 255], None),
        ("float32", [0.2, 0.7, 1.2, 2.2], [0, 64, 128, 255], "from 0.2 to 2.2, were stretched"),
        ("float32", [np.nan, 250, 300, np.inf], [0, 0, 255, 0], "from 250 to 300, were stretched"),
        ("float32", [-3.4e38, 0.5, 1, 1], [0, 128, 255, 255], None),
        ("int32", [70_000] * 4, [0] * 4, "from 70,000 to 70,000, were stretched"),
    ],
)
def test_pixels_of_instruments_are_scaled_by_their_range(
    kind: str, values: list, expected: list[int], note: str | None, order: str
) -> None:
    row = np.array([values] * 700).astype(kind)
    sources = [tiff(row, order)]
    if kind not in ("int16", "uint32"):  # PIL images of these types do not exist
        sources.append(Image.fromarray(row))
    for source in sources:
        found = read_image(source)
        assert seen(source) == expected and np.asarray(found.image)[-1, :, 1].tolist() == expected
        assert [note in one for one in found.notes] == ([] if note is None else [True])


BANDS, DOUBLE = np.zeros((8, 8, 5), np.float32), np.array([[10.0, 20.0, 30.0]])  # which Pillow cannot decode


def test_a_tiff_that_pillow_cannot_decode_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rasterio.io", None)
    for pixels in (BANDS, DOUBLE):
        assert "pip install 'diffcap[tiff]', or save it as PNG or JPEG" in refused(tiff(pixels))


def test_a_tiff_that_pillow_cannot_decode_is_read_by_rasterio(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen(tiff(DOUBLE)) == [0, 128, 255]
    assert "from 10 to 30, were stretched" in read_image(tiff(DOUBLE)).notes[0]
    assert "a TIFF with 5 bands; choose three with `diffcap caption BEFORE AFTER --out" in refused(tiff(BANDS))
    monkeypatch.setattr(image_io, "MAX_PIXELS", 50)
    assert "8 x 8 pixels are more than the limit of 50" in refused(tiff(BANDS))


@pytest.mark.parametrize(("bands", "interleave"), [(1, "pixel"), (2, "band"), (3, "pixel"), (4, "band")])
@pytest.mark.parametrize(
    ("kind", "largest", "white"),
    [("uint8", 199, 255), ("uint16", 3000, 4095), ("int16", 3000, 4095), ("float32", 1, 1)],
)
def test_geotiff_files_of_every_layout(
    tmp_path: Path, kind: str, largest: int, white: int, bands: int, interleave: str
) -> None:
    pixels = (np.random.default_rng(0).random((bands, 20, 30)) * largest).astype(kind)
    found = read_image(write(tmp_path / "a.tif", pixels, interleave=interleave))
    colors = pixels[[0, 1, 2] if bands > 2 else [0, 0, 0]].astype(float) * 255 / white
    assert np.abs(np.moveaxis(colors, 0, -1) - np.asarray(found.image)).max() < 0.51
    assert any("last band was left out" in note for note in found.notes) == (bands in (2, 4))


def test_near_infrared_is_not_transparency() -> None:
    rng = np.random.default_rng(0)
    colors = rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)
    near_infrared = rng.integers(0, 256, (20, 30, 1), dtype=np.uint8)
    mask = np.where(near_infrared > 99, 255, near_infrared % 2).astype(np.uint8) // 255 * 255
    for alpha, kind, is_band in ((near_infrared, "TIFF", True), (near_infrared, "PNG", False), (mask, "TIFF", False)):
        image = Image.fromarray(np.concatenate([colors, alpha], -1))
        found = read_image(encoded(image, kind))
        white = Image.new("RGBA", image.size, "white")
        expected = colors if is_band else np.asarray(Image.alpha_composite(white, image).convert("RGB"))
        assert np.array_equal(np.asarray(found.image), expected)
        note = "last band was left out, since its values are not" if is_band else "transparent parts were made white"
        assert len(found.notes) == 1 and note in found.notes[0]
    opaque = Image.fromarray(np.concatenate([colors, np.full_like(mask, 255)], -1))
    assert not read_image(encoded(opaque, "PNG")).notes and not read_image(encoded(opaque, "TIFF")).notes


@pytest.mark.parametrize(("kind", "bands"), [("int16", 1), ("uint16", 3), ("float32", 3)])
def test_the_nodata_value_of_a_geotiff_does_not_count(tmp_path: Path, kind: str, bands: int) -> None:
    nodata = 65_535 if kind == "uint16" else -9999
    pixels = np.linspace(0, 3000, 100 * bands).reshape(bands, 10, 10).astype(kind)
    pixels[:, :3] = nodata
    pixels[0, 3, 3] = nodata  # in one band only
    pixels[:, 9, 9] = 3000
    found = read_image(write(tmp_path / "a.tif", pixels, nodata=nodata))
    assert found.value_range is not None and found.value_range[0] >= 0 and found.value_range[1] == 3000
    assert not np.asarray(found.image)[:3].any() and np.asarray(found.image)[5].all()


def shown(*sources: Any) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Pixels of both images of a pair, and the notes without the names."""
    found = read_pair(*sources)
    notes = [note.removeprefix("the image before and the image after: ") for note in found.notes]
    return np.asarray(found.before.image), np.asarray(found.after.image), notes


@pytest.mark.parametrize(
    ("kind", "low", "high", "bright", "note"),
    [
        (np.uint16, 0, 3000, 60_000, None),
        (np.uint16, 0, 200, 3000, "their values, at most 3,000, were taken for 12 bits"),
        (np.int32, -20, 3000, 60_000, "their values, from -20 to 60,000, were stretched from black to white"),
        (np.float32, 0, 0.5, 1, None),
        (np.float32, -28, 100, 3000, "their values, from -28 to 3,000, were stretched from black to white"),
    ],
)
def test_both_images_of_a_pair_have_one_range(
    kind: type, low: float, high: float, bright: float, note: str | None
) -> None:
    one = np.linspace(low, high, 600).reshape(20, 30).astype(kind)
    two = one.copy()
    two[3, 4] = bright
    for sources in (
        [Image.fromarray(one), Image.fromarray(two)],
        [encoded(Image.fromarray(x), "TIFF") for x in (one, two)],
    ):
        before, after, notes = shown(*sources)
        assert [tuple(place) for place in np.argwhere((before != after).any(-1))] == [(3, 4)]
        assert notes == ([] if note is None else [note])
        swapped = shown(*sources[::-1])
        assert np.array_equal(swapped[0], after) and np.array_equal(swapped[1], before)


DEEP, FLOATS = np.full((8, 9), 999, np.uint16), np.full((8, 9), 0.5, np.float32)
LARGE = Image.new("RGB", (80, 60))


@pytest.mark.parametrize(
    ("before", "after", "note"),
    [
        (LARGE, Image.new("RGB", (40, 30)), "their sizes differ (80 x 60 and 40 x 30 pixels), so both are resized"),
        (Image.new("RGB", (80, 60)), Image.new("RGB", (81, 60)), "their sizes differ (80 x 60 and 81 x 60 pixels)"),
        (LARGE, Image.new("RGB", (80, 66)), "their aspect ratios differ (80 x 60 and 80 x 66 pixels), so both are"),
        (scene("RGB"), scene("L"), "the first is in color and the second in gray"),
        (scene("L").convert("RGB"), scene("RGB"), "the first is in gray and the second in color"),
        (DEEP, scene("L", (9, 8)), "their pixels are integers of more than 8 bits and 8-bit integers, so each"),
        (Image.fromarray(FLOATS), DEEP, "their pixels are floats and integers of more than 8 bits"),
        (scene("L"), scene("L", seed=1), None),
        (scene("RGB"), scene("RGB", seed=1), None),
    ],
)
def test_notes_on_a_pair(before: Any, after: Any, note: str | None) -> None:
    notes = [text for text in shown(before, after)[2] if "were taken for" not in text]
    assert len(notes) == (note is not None) and (note is None or notes[0].startswith(note))


@pytest.mark.parametrize("source", [torch.zeros(4, 4, 3), io.BytesIO(b"x"), None])
def test_other_types_name_the_accepted_ones(source: Any) -> None:
    output = refused(source, name="the image before")
    assert f"an object of type {type(source).__name__}; give a path, the bytes of a file, a PIL image" in output
    assert "(H, W, 3)" in output


@pytest.mark.parametrize("url", ["http://example.org/a.png", "https://example.org/b/a.png?x=1", "s3://bucket/a.png"])
def test_a_url_is_named_with_both_slashes(url: str, tmp_path: Path) -> None:
    for source in (url, Path(url), tmp_path / url):
        assert refused(source) == f"{url}: a URL, not a file; download the image and give its path."


@pytest.mark.parametrize("mode", ["RGB", "I;16"])
def test_images_are_turned_upright_once(mode: str) -> None:
    for turn in range(1, 10):
        notes = Image.Exif()
        notes[0x0112] = turn
        kind = "TIFF" if mode == "I;16" else "PNG"
        source = encoded(scene(mode, (6, 4)), kind, exif=notes)
        with Image.open(io.BytesIO(source)) as file:
            expected = np.asarray(ImageOps.exif_transpose(file))
        found = read_image(source).image
        if mode == "RGB":
            assert np.array_equal(np.asarray(found), expected)
        assert found.size == expected.shape[1::-1]
        assert np.array_equal(np.asarray(read_image(found).image), np.asarray(found))  # as the web page asks again


def test_arrays() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    for source in (noise, noise / 255, image, encoded(image, "PNG")):
        assert np.array_equal(np.asarray(read_image(source).image), noise)
    assert np.array_equal(np.asarray(read_image(noise[..., :1]).image)[..., 2], noise[..., 0])
    assert np.asarray(read_image(noise[..., 0] > 128).image).max() == 255
    assert "of shape (3, 5, 4, 3)" in refused(np.zeros((3, 5, 4, 3)), name="the image before")
    assert "from 0 to 1" in refused(np.full((2, 2), 7.0))
    assert "of shape (0, 4)" in refused(np.zeros((0, 4), dtype=np.uint8))
    assert "int64 is not from 0 to 255" in refused(np.full((2, 2), -1))
    assert "no pixel has a value" in refused(tiff(np.full((4, 4), np.nan, np.float32)))


def test_cmyk_and_the_first_of_several() -> None:
    red, blue = (Image.new("RGB", (8, 8), color) for color in ("red", "blue"))
    pixel = np.asarray(read_image(encoded(red.convert("CMYK"), "JPEG", quality=95)).image)[4, 4]
    assert pixel[0] > 240 and pixel[1] < 20
    found = read_image(encoded(red, "GIF", save_all=True, append_images=[blue]))
    assert found.image.getpixel((2, 2)) == (255, 0, 0)
    assert found.notes == ("has several frames, the first was used",)


@pytest.mark.parametrize(("kind", "turned"), [("PNG", False), ("JPEG", False), ("JPEG", True)])
def test_large_images_are_shrunk_with_a_note(monkeypatch: pytest.MonkeyPatch, kind: str, turned: bool) -> None:
    monkeypatch.setattr(image_io, "SHRINK_ABOVE", 1000)
    image, notes = Image.new("RGB", (160, 80), (0, 120, 0)), Image.Exif()
    image.paste((250, 250, 250), (0, 0, 80, 80))
    notes[0x0112] = 6 if turned else 1
    found = read_image(encoded(image, kind, exif=notes))
    width, height = found.image.size
    assert width * height <= 1000 and (height == 2 * width if turned else width == 2 * height)
    assert found.notes == ("160 x 80 pixels, shrunk before anything else",)
    corner = found.image.getpixel((width - 2, 1) if turned else (1, 1))
    assert min(corner) > 240
    monkeypatch.setattr(image_io, "MAX_PIXELS", 2000)
    assert "160 x 80 pixels are more than the limit of 2,000" in refused(encoded(image, kind))
