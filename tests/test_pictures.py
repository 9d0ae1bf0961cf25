"""Whatever people call a picture becomes RGB, or one sentence."""

import io
import resource
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.odd_pictures import encoded, png_header, scene, write_all

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
    seen = np.asarray(read_picture(encoded(image, "PNG")).image)[0].tolist()
    assert seen == [[255, 255, 255], [200, 0, 0], [244, 204, 204]]
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    seen = np.asarray(read_picture(encoded(palette, "PNG", transparency=1)).image)[0].tolist()
    assert seen == [[10, 20, 30], [255, 255, 255]]


def test_sixteen_bits_are_scaled() -> None:
    deep = np.array([[0, 257, 128 * 257, 65_535]], dtype=np.uint16)
    for source in (deep, encoded(Image.fromarray(deep), "PNG"), encoded(Image.fromarray(deep), "TIFF")):
        assert np.asarray(read_picture(source).image)[0, :, 0].tolist() == [0, 1, 128, 255]


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
    seen = np.asarray(read_picture(encoded(red.convert("CMYK"), "JPEG", quality=95)).image)[4, 4]
    assert seen[0] > 240 and seen[1] < 20
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
