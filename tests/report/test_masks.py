"""Masks of the change: reading them, their outlines, and what is said of those that cannot be used."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from diffcap.records import ChangePair
from diffcap.report.drawing import BOX, LARGE, SMALL
from diffcap.report.masks import Masks, mask_counts, outline, outline_thumbnails, pair_pictures, read_mask
from diffcap.report.pictures import draw_pairs
from diffcap.utils.errors import DiffcapError

AREA = np.zeros((64, 64), bool)
AREA[20:30, 40:64] = True
GRAY = (90, 90, 90)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in "ba":
        Image.new("RGB", (64, 64), GRAY).save(tmp_path / f"{name}.png")
    Image.fromarray(AREA).save(tmp_path / "mask.png")
    Image.new("L", (64, 64)).save(tmp_path / "empty.png")
    Image.new("L", (64, 48), 255).save(tmp_path / "wide.png")
    (tmp_path / "broken.png").write_bytes((tmp_path / "mask.png").read_bytes()[:40])
    return tmp_path


def pair(mask: str | None, **extra: object) -> ChangePair:
    return ChangePair(
        str(mask), "b.png", "a.png", ["a house"], "test", extra={**({"mask": mask} if mask else {}), **extra}
    )


@pytest.mark.parametrize("value", [1, 128, 255])
def test_any_value_but_0_is_changed_in_any_form(root: Path, value: int) -> None:
    """LEVIR-MCI has three equal channels with 128 for roads and 255 for buildings; others are binary, with 1 or 255."""
    one = AREA.astype(np.uint8) * value
    for pixels in (one, np.stack([one] * 3, -1)):
        Image.fromarray(pixels).save(root / "mask.png")
        assert (read_mask(root / "mask.png", (64, 64)) == AREA).all()
    Image.fromarray(AREA).save(root / "mask.png")  # one bit per pixel
    assert (read_mask(root / "mask.png", (64, 64)) == AREA).all()


def test_a_mask_of_the_images_shape_may_have_another_size(root: Path) -> None:
    assert read_mask(root / "mask.png", (256, 256)).shape == (64, 64)
    assert read_mask(root / "wide.png", (133, 100)).shape == (48, 64)  # rounded
    with pytest.raises(DiffcapError, match=r"wide\.png: a mask of 64 x 48 pixels has another shape than the images"):
        read_mask(root / "wide.png", (64, 64))


def test_masks_that_cannot_be_used_are_told_and_counted(root: Path) -> None:
    masks, sizes = Masks(root), {"a.png": (64, 64)}
    names = ("mask.png", "empty.png", "wide.png", "broken.png", "none.png")
    counts = mask_counts(masks, [pair(name) for name in (*names, None)], sizes)
    share = AREA.mean()
    assert counts == {"pairs": 1, "empty": 1, "unreadable": 3, "share": pytest.approx(share)}
    assert list(masks.problems) == ["wide.png", "broken.png", "none.png"]
    assert all(text.startswith(str(root / path)) and text.endswith(".") for path, text in masks.problems.items())
    assert (
        "file not found" in masks.problems["none.png"] and "image that can be decoded" in masks.problems["broken.png"]
    )
    assert mask_counts(masks, [pair(None)], sizes) is None
    assert mask_counts(masks, [pair("empty.png")], sizes) == {"pairs": 0, "empty": 1, "unreadable": 0}
    outlines = outline_thumbnails(masks, [pair(name) for name in names], sizes, {"b.png": SMALL, "a.png": SMALL})
    assert list(outlines) == ["mask.png"]


def test_an_outline_is_around_the_area_and_closed_at_the_edge_of_the_image() -> None:
    line = np.asarray(outline(AREA, (64, 64))) > 0
    expected = np.zeros_like(AREA)
    for y in range(64):
        for x in range(64):
            near = AREA[max(0, y - 1) : y + 2, max(0, x - 1) : x + 2].any()
            expected[y, x] = near and (not AREA[y, x] or x == 63)
    assert (line == expected).all()
    assert not np.asarray(outline(np.zeros((4, 4), bool), (64, 64))).any()
    double = np.asarray(outline(AREA, (128, 128), 2)) > 0
    assert double.sum() == 4 * line.sum() and double[38:40, 90].all() and not double[40:60, 80:126].any()


def test_an_outline_for_the_page_is_transparent_beside_its_line(root: Path) -> None:
    for frame, size in ((SMALL, (64, 64)), (LARGE, (300, 300))):
        frames = {"b.png": frame, "a.png": frame}
        found = outline_thumbnails(Masks(root), [pair("mask.png")], {"b.png": size}, frames)["mask.png"]
        image = Image.open(io.BytesIO(base64.b64decode(found.data)))
        assert image.mode == "RGBA" and image.size == (size if frame == SMALL else (240, 240))
        pixels = np.asarray(image)
        line = np.asarray(outline(AREA, image.size, 1 if frame == SMALL else 2)) > 0
        assert ((pixels[..., 3] == 255) == line).all() and (pixels[line, :3] == BOX).all()


def test_both_images_show_the_outline_and_a_pair_without_a_usable_mask_its_boxes(root: Path) -> None:
    boxes = {"before": [10, 10, 20, 20], "after": None}

    def drawn(name: str | None) -> list[int]:
        images = pair_pictures(pair(name, boxes=boxes), Masks(root))
        return [int((np.asarray(image) == BOX).all(-1).sum()) for image in images]

    length = int((np.asarray(outline(AREA, (192, 192))) > 0).sum())
    assert drawn("mask.png") == [length, length] and drawn("empty.png") == [0, 0]
    framed = drawn(None)
    assert framed[0] > 0 and framed[1] == 0 and drawn("none.png") == drawn("wide.png") == framed
    sheet = draw_pairs([pair("mask.png")], root, {})
    assert (np.asarray(sheet) == BOX).all(-1).sum() == 2 * length
    assert sheet.height > draw_pairs([pair(None)], root, {}).height  # a line explains the outline
