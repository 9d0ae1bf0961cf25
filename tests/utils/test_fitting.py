"""Fitting the two images of a pair to each other."""

from typing import Any

import numpy as np
import pytest
from PIL import Image

from diffcap.utils.errors import DiffcapError
from diffcap.utils.fitting import GRAY, fit_pair
from diffcap.utils.image_io import read_pair

cv2 = pytest.importorskip("cv2")
SIZE = 480, 320
MOVEMENTS = {
    "shifted": np.array([[1, 0, 17], [0, 1, -9], [0, 0, 1]], float),
    "turned": np.vstack([cv2.getRotationMatrix2D((240, 160), 5, 1), [0, 0, 1]]),
    "nearer": np.vstack([cv2.getRotationMatrix2D((200, 160), 0, 1.2), [0, 0, 1]]),
    "seen from the side": np.array([[1.02, 0.05, 3], [0.01, 0.97, 5], [1e-4, 5e-5, 1]]),
}


def picture(seed: int, num_shapes: int = 150, blur: float = 1) -> Image.Image:
    """Rectangles at random places."""
    rng = np.random.default_rng(seed)
    pixels = np.full((SIZE[1], SIZE[0], 3), 90, np.uint8)
    for _ in range(num_shapes):
        (x, y), (width, height), color = rng.integers(0, SIZE), rng.integers(8, 60, 2), rng.integers(0, 256, 3)
        pixels[y : y + height, x : x + width] = color
    return Image.fromarray(cv2.GaussianBlur(pixels, (0, 0), blur))


def move(image: Image.Image, movement: Any) -> Image.Image:
    return Image.fromarray(cv2.warpPerspective(np.asarray(image), movement, image.size, borderValue=(0, 255, 0)))


@pytest.mark.parametrize("name", MOVEMENTS)
@pytest.mark.parametrize("scale", [1, 2])  # images of twice the size are reduced, to find the movement
def test_a_movement_of_the_camera_is_undone(name: str, scale: int) -> None:
    """The quarters of the fitted images show the same to less than a pixel, without the border of the moved image."""
    enlarge = np.diag([scale, scale, 1.0])
    before = picture(1).resize((scale * SIZE[0], scale * SIZE[1]), Image.Resampling.BICUBIC)
    after = move(before, enlarge @ MOVEMENTS[name] @ np.linalg.inv(enlarge))
    fitted = fit_pair(before, after, "register")
    assert fitted.note.startswith("registered by SIFT: moved by ") and fitted.measured
    (x, y), (width, height) = fitted.origin, fitted.before.size
    assert fitted.after == after.crop((x, y, x + width, y + height))
    images = [np.asarray(image.convert("L"), np.float32) for image in (fitted.before, fitted.after)]
    quarters = [[part for half in np.array_split(image, 2) for part in np.array_split(half, 2, 1)] for image in images]
    for first, second in zip(*quarters, strict=True):
        assert np.abs(cv2.phaseCorrelate(first, second)[0]).max() < 1
        assert np.corrcoef(first.ravel(), second.ravel())[0, 1] > 0.98
    assert fitted.measured["movement"] > 10 * scale and fitted.measured["correlation"] > 0.9


def test_an_image_with_few_corners_is_registered_by_its_brightness() -> None:
    before = picture(2, 6, blur=8)
    fitted = fit_pair(before, move(before, MOVEMENTS["shifted"]), "register")
    assert fitted.note.startswith("registered by ECC: moved by ") and fitted.measured
    assert fitted.measured["movement"] == pytest.approx(np.hypot(17, 9), abs=1) and fitted.measured["inliers"] < 25


def test_a_thing_that_moved_is_not_taken_for_the_camera() -> None:
    images = [picture(1, 40, blur=8) for _ in range(2)]
    for x, image in zip((60, 100), images):
        image.paste(picture(9, 400).crop((0, 0, 140, 120)), (x, 40))
    assert fit_pair(*images, "register").note.startswith("not registered, they agree better as they are")
    with pytest.raises(DiffcapError, match="cannot be registered: they agree better as they are; give another image"):
        fit_pair(*images, "register", strict=True)


@pytest.mark.parametrize("size", [SIZE, (300, 400)])
def test_unrelated_images_are_left_alone_or_refused(size: tuple[int, int]) -> None:
    before, after = picture(3), picture(4).resize(size)
    fitted = fit_pair(before, after, "register")
    assert fitted[:2] == (before, after) and fitted.note.startswith("not registered, ")
    with pytest.raises(DiffcapError, match=r"before and the image after: the images cannot be registered: .*; give an"):
        read_pair(before, after, fit="register", strict=True)


def test_images_that_fit_are_not_touched() -> None:
    before, blank = picture(5), Image.new("RGB", SIZE)
    after = before.copy()
    after.paste((255, 0, 0), (40, 40, 110, 90))  # the change
    for images in ((before, after), (blank, blank)):
        assert fit_pair(*images, "register", strict=True)[:3] == (*images, "")
    assert fit_pair(before, before.resize((960, 640)), "register").measured["movement"] < 1  # type: ignore[index]


def test_pad_and_crop_change_different_sizes_only() -> None:
    before, after = picture(6), picture(7).resize((400, 361))
    padded, cropped = (read_pair(before, after, fit=fit) for fit in ("pad", "crop"))  # type: ignore[arg-type]
    assert "sizes differ (480 x 320 and 400 x 361 pixels); both are padded to 480 x 361 pixels" in padded.notes[0]
    assert padded.after.image.crop((0, 0, 400, 361)) == after and padded.after.image.getpixel((479, 0)) == GRAY
    assert padded.before.image.size == padded.after.image.size and padded.before.image.getpixel((0, 360)) == GRAY
    assert cropped.before.image == before.crop((40, 0, 440, 320))
    assert cropped.after.image == after.crop((0, 20, 400, 340)) and cropped.fit and cropped.fit["size"] == [400, 320]
    assert fit_pair(before, before, "pad")[:3] == fit_pair(before, before, "crop")[:3] == (before, before, "")
    stretched = read_pair(before, after)
    assert stretched.fit is None and "so both are stretched" in stretched.notes[0]
