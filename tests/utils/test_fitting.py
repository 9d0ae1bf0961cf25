"""Fitting the two images of a pair to each other."""

import sys
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


def picture(seed: int, num_shapes: int = 150) -> Image.Image:
    """Rectangles and circles at random places."""
    rng = np.random.default_rng(seed)
    pixels = np.full((SIZE[1], SIZE[0], 3), 90, np.uint8)
    for _ in range(num_shapes):
        (x, y), (width, height), color = rng.integers(0, SIZE), rng.integers(8, 60, 2), rng.integers(0, 256, 3).tolist()
        if rng.random() < 0.5:
            cv2.rectangle(pixels, (x, y), (x + width, y + height), color, -1)
        else:
            cv2.circle(pixels, (x, y), width // 2, color, -1)
    return Image.fromarray(cv2.GaussianBlur(pixels, (0, 0), 1.0))


def move(image: Image.Image, movement: Any, size: tuple[int, int] = SIZE) -> Image.Image:
    return Image.fromarray(cv2.warpPerspective(np.asarray(image), movement, size, borderValue=(0, 255, 0)))


@pytest.mark.parametrize("name", MOVEMENTS)
@pytest.mark.parametrize("scale", [1, 2])
def test_a_movement_of_the_camera_is_undone(name: str, scale: int) -> None:
    """Each cell of the fitted images shows the same place: their own movement is below a pixel."""
    enlarge = np.diag([scale, scale, 1.0])
    before = picture(1).resize((scale * SIZE[0], scale * SIZE[1]), Image.Resampling.BICUBIC)
    after = move(before, enlarge @ MOVEMENTS[name] @ np.linalg.inv(enlarge), before.size)
    fitted = fit_pair(before, after, "register")
    assert fitted.note.startswith("registered by SIFT: moved by ") and fitted.before.size == fitted.after.size
    x, y = fitted.origin
    assert fitted.after == after.crop((x, y, x + fitted.after.width, y + fitted.after.height))
    images = [np.asarray(image.convert("L"), np.float32) for image in (fitted.before, fitted.after)]
    (shift_x, shift_y), _ = cv2.phaseCorrelate(*images)
    assert abs(shift_x) < 0.5 and abs(shift_y) < 0.5
    quarters = [[part for half in np.array_split(image, 2) for part in np.array_split(half, 2, 1)] for image in images]
    for first, second in zip(*quarters, strict=True):
        (shift_x, shift_y), _ = cv2.phaseCorrelate(first, second)
        assert abs(shift_x) < 1 and abs(shift_y) < 1
        assert np.corrcoef(first.ravel(), second.ravel())[0, 1] > 0.98  # no border of the moved image
    assert (fitted.measured or {})["movement"] > 10 * scale and (fitted.measured or {})["correlation"] > 0.9


def test_an_image_with_few_corners_is_registered_by_its_brightness() -> None:
    before = Image.fromarray(cv2.GaussianBlur(np.asarray(picture(2, 6)), (0, 0), 8))
    fitted = fit_pair(before, move(before, MOVEMENTS["shifted"]), "register")
    assert fitted.note.startswith("registered by ECC: moved by ") and (fitted.measured or {})["inliers"] < 25
    assert (fitted.measured or {})["movement"] == pytest.approx(np.hypot(17, 9), abs=1)


@pytest.mark.parametrize("size", [SIZE, (300, 400)])
def test_unrelated_images_are_left_alone_or_refused(size: tuple[int, int]) -> None:
    before, after = picture(3), picture(4).resize(size)
    fitted = fit_pair(before, after, "register")
    assert (fitted.before, fitted.after) == (before, after)
    assert fitted.note.startswith("not registered, ") and fitted.note.endswith("; they are used as they are")
    with pytest.raises(DiffcapError, match=r"the images cannot be registered: .*; give another image, or leave out"):
        fit_pair(before, after, "register", strict=True)
    with pytest.raises(DiffcapError, match=r"the image before and the image after: the images cannot be registered"):
        read_pair(before, after, fit="register", strict=True)


def test_images_that_fit_are_not_touched() -> None:
    before = picture(5)
    after = before.copy()
    after.paste((255, 0, 0), (40, 40, 110, 90))  # the change
    fitted = fit_pair(before, after, "register", strict=True)
    assert (fitted.before, fitted.after, fitted.note) == (before, after, "") and (fitted.measured or {})[
        "movement"
    ] < 0.5


def test_pad_and_crop_change_different_sizes_only() -> None:
    before, after = picture(6), picture(7).resize((400, 361))
    for fit, size in (("pad", (480, 361)), ("crop", (400, 320))):
        pair = read_pair(before, after, fit=fit)  # type: ignore[arg-type]
        assert pair.before.image.size == pair.after.image.size == size and (pair.fit or {})["size"] == list(size)
        (note,) = pair.notes
        assert f"sizes differ (480 x 320 and 400 x 361 pixels); both are {fit}{fit[-1]}ed to" in note
        assert fit_pair(before, before, fit) == (before, before, "", None, (0, 0))  # type: ignore[arg-type]
    padded, cropped = fit_pair(before, after, "pad"), fit_pair(before, after, "crop")
    assert padded.after.crop((0, 0, 400, 361)) == after and padded.after.getpixel((479, 0)) == GRAY
    assert padded.before.getpixel((0, 360)) == GRAY and padded.origin == (0, 0)
    assert cropped.before == before.crop((40, 0, 440, 320)) and cropped.origin == (0, 20)
    assert cropped.after == after.crop((0, 20, 400, 340))
    stretched = read_pair(before, after)
    assert stretched.fit is None and "so both are stretched" in stretched.notes[0]


def test_without_opencv_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(DiffcapError, match=r"--fit register needs opencv; run: pip install 'diffcap\[register\]'"):
        fit_pair(picture(8), picture(8), "register")
