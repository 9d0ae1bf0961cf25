"""Whatever people call a picture becomes RGB, or one sentence."""

import io
import resource
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps
from tests.odd_pictures import encoded, png, png_header, scene, tiff, write_all

from diffcap import pictures
from diffcap.errors import DiffcapError
from diffcap.pictures import read_picture


def refused(source, **options) -> str:
    with pytest.raises(DiffcapError) as error:
        read_picture(source, **options)
    said = str(error.value)
    assert "\n" not in said and said.endswith(".") and len(said) < 400
    return said


def test_two_hundred_odd_files(tmp_path: Path) -> None:
    good, bad, either = write_all(tmp_path)
    assert len(good) + len(bad) + len(either) >= 200
    for path in good:
        assert read_picture(path).image.mode == "RGB", path
    for path in bad:
        assert str(path) in refused(path)
    for path in either:
        try:
            read_picture(path)
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
        ("huge.png", "400,000,000 pixels are more than the 100,000,000"),
        ("nowhere.png", "no image there"),
        ("folder.png", "a folder"),
        (256 * "x" + ".png", "cannot be read (File name too long)"),
        ("cut0.5.jpg", "truncated"),
    ],
)
def test_a_sentence_says_what_it_is(tmp_path_factory: pytest.TempPathFactory, name: str, reason: str) -> None:
    folder = tmp_path_factory.getbasetemp() / "odd"
    if not folder.is_dir():
        folder.mkdir()
        write_all(folder)
    assert reason in refused(folder / name)


def test_a_picture_of_too_many_pixels_is_refused_before_it_takes_memory(tmp_path: Path) -> None:
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
    found = np.asarray(read_picture(encoded(image, "PNG")).image)[0].tolist()
    assert found == [[255, 255, 255], [200, 0, 0], [244, 204, 204]]
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    found = np.asarray(read_picture(encoded(palette, "PNG", transparency=1)).image)[0].tolist()
    assert found == [[10, 20, 30], [255, 255, 255]]


@pytest.mark.parametrize(
    ("depth", "kind", "pixels", "key", "expected"),
    [
        (1, 0, b"\x40", [1], [[0] * 3, [255] * 3]),
        (2, 0, b"\x60", [2], [[85] * 3, [255] * 3]),
        (4, 0, b"\x5a", [10], [[85] * 3, [255] * 3]),
        (4, 0, b"\xaa", [5], [[170] * 3, [170] * 3]),
        (16, 0, b"\x80\x00\x80\x01", [0x8001], [[128] * 3, [255] * 3]),
        (16, 2, b"\3\1\7\1\x0b\1\3\1\7\1\x0b\2", [0x301, 0x701, 0xB02], [[3, 7, 11], [255] * 3]),
    ],
)
def test_the_transparent_colour_of_a_png_of_any_depth_is_white(
    depth: int, kind: int, pixels: bytes, key: list[int], expected: list[list[int]]
) -> None:
    source = png(2, 1, b"\0" + pixels, depth, kind, b"".join(value.to_bytes(2, "big") for value in key))
    with Image.open(io.BytesIO(source)) as opened:
        noted = dict(opened.info)
        for one in (source, opened):
            assert np.asarray(read_picture(one).image)[0].tolist() == expected
        assert opened.info == noted  # the caller's stays as it is


def test_a_tiff_without_compression_may_be_in_ycbcr(tmp_path: Path) -> None:
    image = scene("YCbCr")
    (tmp_path / "raw.tif").write_bytes(encoded(image, "TIFF"))
    for source in (tmp_path / "raw.tif", encoded(image, "TIFF"), encoded(image, "TIFF", compression="tiff_lzw")):
        found = np.asarray(read_picture(source).image).astype(int)
        assert np.abs(found - np.asarray(image.convert("RGB"))).max() <= 2


def test_sixteen_bits_are_scaled() -> None:
    deep = np.array([[0, 257, 128 * 257, 65_535]], dtype=np.uint16)
    for source in (deep, encoded(Image.fromarray(deep), "PNG"), encoded(Image.fromarray(deep), "TIFF")):
        assert np.asarray(read_picture(source).image)[0, :, 0].tolist() == [0, 1, 128, 255]


def seen(source) -> list[int]:
    picture = np.asarray(read_picture(source).image)
    assert (picture == picture[..., :1]).all()
    return picture[0, :, 0].tolist()


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(
    ("kind", "values", "expected", "note"),
    [
        ("uint16", [0, 16 * 257, 40_000, 65_535], [0, 16, 156, 255], None),
        ("uint16", [0, 1000, 2048, 3900], [0, 62, 128, 243], "at most 3,900, were taken for 12 bits"),
        ("uint16", [0, 7, 200, 255], [0, 7, 200, 255], "at most 255, were taken for 8 bits"),
        ("int16", [-100, 0, 100, 300], [0, 64, 128, 255], "from -100 to 300, were stretched"),
        ("int32", [0, 7, 200, 255], [0, 7, 200, 255], "at most 255, were taken for 8 bits"),
        ("int32", [0, 257, 128 * 257, 65_535], [0, 1, 128, 255], None),
        ("int32", [-50_000, 0, 50_000, 150_000], [0, 64, 128, 255], "from -50,000 to 150,000, were stretched"),
        ("uint32", [0, 2**31, 3 * 2**30, 2**32 - 1], [0, 128, 191, 255], "from 0 to 4.29497e+09, were stretched"),
        ("float32", [0, 0.25, 0.5, 1], [0, 64, 128, 255], None),
        ("float32", [0, 0.1, 0.2, 0.32], [0, 26, 51, 82], None),
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
    if (kind, order) == ("uint32", ">"):  # which Pillow does not know
        assert "that this program cannot decode" in refused(tiff(row, order))
        return
    sources = [tiff(row, order)]
    if kind not in ("int16", "uint32"):
        sources.append(Image.fromarray(row))
    for source in sources:
        found = read_picture(source)
        assert seen(source) == expected and np.asarray(found.image)[-1, :, 1].tolist() == expected
        assert [note in one for one in found.notes] == ([] if note is None else [True])


def test_pixels_that_a_map_marks_as_without_a_value_are_black() -> None:
    row = np.array([[-9999, 10, 20, 30]], dtype=np.float32)
    assert seen(tiff(row, nodata="-9999")) == [0, 0, 128, 255]
    assert seen(tiff(row)) == [0, 254, 255, 255]
    assert "no pixel in it has a value" in refused(tiff(np.full((4, 4), -9999, np.float32), nodata="-9999"))
    for unread in (np.zeros((8, 8, 5), np.float32), np.zeros((8, 8))):  # many bands, floats of 64 bits
        assert "a kind of pixels or compression that this program cannot decode" in refused(tiff(unread))


@pytest.mark.parametrize("mode", ["I;16", "I", "F", "P", "1"])
def test_large_pictures_of_every_mode_are_averaged(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr(pictures, "LARGE", 1000)
    half = np.zeros((80, 160), dtype=np.uint8)
    half[:, 80:] = 255
    if mode in ("P", "1"):
        image = Image.fromarray(255 - half).convert(mode)
        if mode == "P":  # the white half has the lower number
            image = Image.fromarray((half > 0).astype(np.uint8))
            image.putpalette([255, 255, 255, 0, 0, 0])
            assert image.mode == "P"
        half = 255 - half
    else:
        kind = {"I;16": np.uint16, "I": np.int32, "F": np.float32}[mode]
        image = Image.fromarray(half.astype(kind) * kind(257) if mode != "F" else half.astype(kind) / kind(255))
    found = read_picture(encoded(image, "TIFF")).image
    assert found.width * found.height <= 1000 and found.width == 2 * found.height
    pixels = np.asarray(found)[..., 0]
    assert (pixels[:, : found.width // 2 - 1] == half[0, 0]).all() and (pixels[:, -5:] == half[0, -1]).all()


def test_deep_pictures_take_little_more_memory_than_they_hold() -> None:
    for size in ((3000, 3000), (9_000_000, 1)):  # 36 MB
        image = Image.new("F", size, 0.5)
        tracemalloc.start()
        found = read_picture(image).image
        assert found.getpixel((0, 0)) == found.getpixel((size[0] - 1, size[1] - 1)) == (128, 128, 128)
        assert tracemalloc.get_traced_memory()[1] < 60e6
        tracemalloc.stop()


@pytest.mark.parametrize("mode", ["RGB", "L", "I;16", "P"])
def test_pictures_are_turned_upright_once(mode: str) -> None:
    for turn in range(1, 10):
        notes = Image.Exif()
        notes[0x0112] = turn
        kind = "TIFF" if mode == "I;16" else "PNG"
        source = encoded(scene(mode, (6, 4)), kind, exif=notes)
        with Image.open(io.BytesIO(source)) as file:
            expected = np.asarray(ImageOps.exif_transpose(file))
        found = read_picture(source).image
        if mode == "RGB":
            assert np.array_equal(np.asarray(found), expected)
        assert found.size == expected.shape[1::-1]
        assert np.array_equal(np.asarray(read_picture(found).image), np.asarray(found))  # as the web page asks again


def test_arrays(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    assert np.array_equal(np.asarray(read_picture(noise).image), noise)
    assert np.array_equal(np.asarray(read_picture(noise / 255).image), noise)
    assert np.array_equal(np.asarray(read_picture(noise[..., :1]).image)[..., 2], noise[..., 0])
    assert np.asarray(read_picture(noise[..., 0] > 128).image).max() == 255
    assert np.array_equal(np.asarray(read_picture(Image.fromarray(noise)).image), noise)
    assert np.array_equal(np.asarray(read_picture(encoded(Image.fromarray(noise), "PNG")).image), noise)
    assert "of shape (3, 5, 4, 3)" in refused(np.zeros((3, 5, 4, 3)), name="the picture before")
    assert "from 0 to 1" in refused(np.full((2, 2), 7.0))
    assert "of shape (0, 4)" in refused(np.zeros((0, 4), dtype=np.uint8))
    assert "int64 that is not from 0 to 255" in refused(np.full((2, 2), -1))


def test_cmyk_and_the_first_of_several() -> None:
    red = Image.new("RGB", (8, 8), (255, 0, 0))
    pixel = np.asarray(read_picture(encoded(red.convert("CMYK"), "JPEG", quality=95)).image)[4, 4]
    assert pixel[0] > 240 and pixel[1] < 20
    frames = [red, Image.new("RGB", (8, 8), (0, 0, 255))]
    found = read_picture(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert found.image.getpixel((2, 2)) == (255, 0, 0)
    assert found.notes == ("holds several pictures, the first was taken",)


@pytest.mark.parametrize(("kind", "turned"), [("PNG", False), ("JPEG", False), ("JPEG", True)])
def test_large_pictures_are_shrunk_and_said_so(monkeypatch: pytest.MonkeyPatch, kind: str, turned: bool) -> None:
    monkeypatch.setattr(pictures, "LARGE", 1000)
    image, notes = Image.new("RGB", (160, 80), (0, 120, 0)), Image.Exif()
    image.paste((250, 250, 250), (0, 0, 80, 80))
    notes[0x0112] = 6 if turned else 1
    found = read_picture(encoded(image, kind, exif=notes))
    width, height = found.image.size
    assert width * height <= 1000 and (height == 2 * width if turned else width == 2 * height)
    assert found.notes == ("160 x 80 pixels, shrunk before anything else",)
    corner = found.image.getpixel((width - 2, 1) if turned else (1, 1))
    assert min(corner) > 240
    monkeypatch.setattr(pictures, "MOST_PIXELS", 2000)  # a JPEG that is shrunk as it is decoded may be larger
    if kind == "JPEG":
        assert read_picture(encoded(image, kind)).image.width == width or turned
        assert "more than the 2,000" in refused(encoded(image, kind, progressive=True))
    else:
        assert "160 x 80 pixels are more than the 2,000" in refused(encoded(image, kind))


def test_the_callers_picture_stays_as_it_is() -> None:
    image = scene("RGBA")
    copy = image.copy()
    read_picture(image)
    assert image.mode == "RGBA" and np.array_equal(np.asarray(image), np.asarray(copy))
    assert isinstance(read_picture(io.BytesIO(encoded(image, "PNG")).getvalue()).image, Image.Image)
