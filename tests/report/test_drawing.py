"""Sheets of pairs, attention maps of words, thumbnails and outlines of masks."""

import base64
import io
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from diffcap.change import AttentionMaps
from diffcap.records import ChangePair
from diffcap.report.drawing import (
    GAP,
    LARGE_FRAME,
    MARGIN,
    REGION_COLOR,
    SHEET_FRAME,
    SHEET_WIDTH,
    SMALL_FRAME,
    Masks,
    Thumbnail,
    choose_pairs,
    draw_outline,
    draw_pairs,
    draw_region,
    fit_image,
    is_correct,
    mask_counts,
    outline_thumbnails,
    read_images,
    thumbnails,
    write_png,
)
from diffcap.report.heatmaps import (
    NUM_COLUMNS,
    WORD_FRAME,
    blend,
    color_table,
    draw_attention,
    overlay,
    scale_attention,
    strongest_matches,
)
from diffcap.utils.errors import DiffcapError

CHANGED = {"size": "large", "color": "gray", "material": "metal", "shape": "cube", "to": None}
BLUE, ORANGE, GRAY = (0, 160, 230), (240, 120, 0), (128, 128, 128)
AREA = np.zeros((64, 64), bool)
AREA[20:30, 40:64] = True


def pair(id: str, kind: str | None = None, **extra: object) -> ChangePair:
    return ChangePair(id, f"{id}.png", f"{id}.png", ["the reference"], "test", kind, kind is None, extra)


def test_the_choice_covers_every_kind_and_depends_on_the_seed() -> None:
    pairs = [pair(f"{kind}{n}", kind) for n in range(9) for kind in ("move", "color", "zoom", None)]
    pairs.append(pair("add", "add"))
    chosen = choose_pairs(pairs, 8, seed=1)
    kinds = ["distractor" if pair.is_distractor else pair.change_type for pair in chosen]
    assert kinds == ["color", "color", "add", "move", "move", "zoom", "zoom", "distractor"]
    assert chosen == choose_pairs(pairs, 8, seed=1) != choose_pairs(pairs, 8, seed=2)
    assert Counter(pair.id for pair in choose_pairs(pairs, 99)) == Counter(pair.id for pair in pairs)
    plain = [ChangePair(str(n), "b", "a", [], "test") for n in range(5)]
    assert len(set(pair.id for pair in choose_pairs(plain, 3))) == 3
    flags = [replace(pair(str(n), changeflag=n % 2), is_distractor=n % 2 == 0) for n in range(8)]
    assert [pair.is_distractor for pair in choose_pairs(flags, 4)] == [False, False, True, True]


@pytest.mark.parametrize(
    ("caption", "kind", "changed", "right"),
    [
        ("the large gray metal cube was moved", "move", CHANGED, True),
        ("the gray cube was moved", "move", CHANGED, True),  # less, but nothing false
        ("the small gray cube was moved", "move", CHANGED, False),
        ("the gray cube vanished", "move", CHANGED, False),
        ("something was moved", "move", CHANGED, False),
        ("the gray cube turned red", "color", {**CHANGED, "to": "red"}, True),
        ("the gray cube turned blue", "color", {**CHANGED, "to": "red"}, False),
        ("no change was made", None, CHANGED, True),
        ("the gray cube vanished", None, CHANGED, False),
    ],
)
def test_right_is_type_object_and_new_value(caption: str, kind: str | None, changed: object, right: bool) -> None:
    assert is_correct(caption, pair("1", kind, changed=changed)) is right
    assert kind is None or is_correct(caption, pair("1", kind)) is None


def count(sheet: Image.Image, color: tuple[int, int, int]) -> int:
    return int((np.abs(np.asarray(sheet).astype(int) - color).sum(-1) < 12).sum())


def test_a_sheet_shows_images_boxes_and_coloured_captions(tmp_path: Path) -> None:
    Image.new("RGB", (128, 96), (10, 20, 200)).save(tmp_path / "1.png")
    boxes = {"before": [40, 30, 60, 50], "after": None}
    pairs = [pair("1", "drop", boxes=boxes, changed=CHANGED)]
    sheet = draw_pairs(pairs, {"a": {"1": "the gray cube vanished"}, "b": {"1": "no change"}}, Masks(tmp_path))
    assert sheet.width == SHEET_WIDTH and sheet.height < 300
    pixels = np.asarray(sheet)
    before = pixels[:, MARGIN : MARGIN + SHEET_FRAME[0]]
    after = pixels[:, MARGIN + SHEET_FRAME[0] + GAP : MARGIN + 2 * SHEET_FRAME[0] + GAP]
    blue = (after == (10, 20, 200)).all(-1)
    assert blue.sum() == SHEET_FRAME[0] * SHEET_FRAME[1]
    framed = np.argwhere((before == REGION_COLOR).all(-1)) - np.argwhere(blue).min(0)
    # twice the box's corners, two pixels further out
    assert framed.min(0).tolist() == [2 * 30 - 2, 2 * 40 - 2] and framed.max(0).tolist() == [2 * 50 + 1, 2 * 60 + 1]
    assert all(count(sheet, color) for color in ((20, 125, 55), (190, 40, 40), (30, 30, 30)))


def test_other_datasets_get_a_plain_sheet(tmp_path: Path) -> None:
    Image.new("L", (300, 600), 90).save(tmp_path / "1.png")
    plain, masks = ChangePair("1", "1.png", "1.png", [], "test"), Masks(tmp_path)
    sheet = draw_pairs([plain, plain], {"a": {"1": " ".join(["word"] * 200)}, "b": {"1": ""}}, masks)
    assert sheet.height > 2 * SHEET_FRAME[1] + 200  # rows grow with their words
    assert not any(count(sheet, color) for color in ((20, 125, 55), (190, 40, 40), REGION_COLOR))
    assert (np.asarray(sheet)[:, : MARGIN + SHEET_FRAME[0]] == 90).all(-1).sum() == 2 * 96 * 192  # not stretched
    write_png(tmp_path / "out/pairs.png", sheet.save)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["pairs.png"]
    with pytest.raises(DiffcapError, match=r"2\.png: file not found.*--attention 0"):
        draw_pairs([pair("2", "move")], {}, masks)


def decoded(thumbnail: Thumbnail | None) -> Image.Image:
    assert thumbnail is not None
    return Image.open(io.BytesIO(base64.b64decode(thumbnail.data)))


def test_thumbnails_are_shrunk_never_enlarged_and_none_for_broken_images(tmp_path: Path) -> None:
    Image.new("RGB", (800, 400), (200, 30, 30)).save(tmp_path / "large.jpg")
    Image.new("RGBA", (40, 30), (30, 200, 30, 255)).save(tmp_path / "small.png")
    (tmp_path / "broken.png").write_bytes((tmp_path / "small.png").read_bytes()[:40])
    Image.fromarray(np.full((30, 40), 1500, np.int32)).save(tmp_path / "deep.tif")  # more than 8 bits
    frames = dict.fromkeys(("large.jpg", "small.png", "broken.png", "none.png", "deep.tif"), SMALL_FRAME)
    frames["large.jpg"] = LARGE_FRAME
    made = thumbnails(tmp_path, frames, {"deep.tif": (0, 60_000)})
    assert list(made) == list(frames) and made["broken.png"] is None and made["none.png"] is None
    for name, original, size in (("large.jpg", (800, 400), (320, 160)), ("small.png", (40, 30), (40, 30))):
        one, image = made[name], decoded(made[name])
        assert one and (one.width, one.height) == original and (image.format, image.size) == ("WEBP", size)
        color = np.asarray(image.convert("RGB"))[10, 10]
        assert color.argmax() == ("large.jpg", "small.png").index(name)
    assert decoded(made["deep.tif"]).convert("RGB").getpixel((10, 10)) == (6, 6, 6)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in "ba":
        Image.new("RGB", (64, 64), (90, 90, 90)).save(tmp_path / f"{name}.png")
    Image.fromarray(AREA).save(tmp_path / "mask.png")
    Image.new("L", (64, 64)).save(tmp_path / "empty.png")
    Image.new("L", (64, 48), 255).save(tmp_path / "wide.png")
    (tmp_path / "broken.png").write_bytes((tmp_path / "mask.png").read_bytes()[:40])
    return tmp_path


def masked(mask: str | None, **extra: object) -> ChangePair:
    extra |= {"mask": mask} if mask else {}
    return ChangePair(str(mask), "b.png", "a.png", ["a house"], "test", extra=extra)


def mask_of(root: Path, name: str, size: tuple[int, int]) -> np.ndarray:
    mask = Masks(root).read(masked(name), {"a.png": size})
    assert mask is not None
    return mask


@pytest.mark.parametrize("value", [1, 128, 255])
def test_any_value_but_0_is_changed_in_any_form(root: Path, value: int) -> None:
    """LEVIR-MCI has three equal channels with 128 for roads and 255 for buildings; others are binary, with 1 or 255."""
    one = AREA.astype(np.uint8) * value
    for pixels in (one, np.stack([one] * 3, -1), AREA):  # the last: one bit per pixel
        Image.fromarray(pixels).save(root / "mask.png")
        assert (mask_of(root, "mask.png", (64, 64)) == AREA).all()


def test_masks_that_cannot_be_used_are_counted(root: Path) -> None:
    assert mask_of(root, "mask.png", (256, 256)).shape == (64, 64)
    assert mask_of(root, "wide.png", (133, 100)).shape == (48, 64)  # rounded
    masks, sizes = Masks(root), {"a.png": (64, 64)}
    names = ("mask.png", "empty.png", "wide.png", "broken.png", "none.png")
    counts = mask_counts(masks, [masked(name) for name in (*names, None)], sizes)
    assert counts == {"pairs": 1, "empty": 1, "unreadable": 3, "share": pytest.approx(AREA.mean())}
    reasons = ("a mask of 64 x 48 pixels; save it in the size", "image that can be decoded", "not found")
    for (path, text), reason in zip(masks.problems.items(), reasons, strict=True):
        assert text.startswith(str(root / path)) and reason in text and text.endswith(".")
    assert mask_counts(masks, [masked(None)], sizes) is None
    assert mask_counts(masks, [masked("empty.png")], sizes) == {"pairs": 0, "empty": 1, "unreadable": 0}
    frames = dict.fromkeys(("b.png", "a.png"), SMALL_FRAME)
    outlines = outline_thumbnails(masks, [masked(name) for name in names], sizes, frames)
    assert list(outlines) == ["mask.png"]


def test_an_outline_is_around_the_area_and_closed_at_the_edge_of_the_image(root: Path) -> None:
    line = np.asarray(draw_outline(AREA, (64, 64))) > 0
    expected = np.zeros_like(AREA)
    for y in range(64):
        for x in range(64):
            near = AREA[max(0, y - 1) : y + 2, max(0, x - 1) : x + 2].any()
            expected[y, x] = near and (not AREA[y, x] or x == 63)
    assert (line == expected).all()
    double = np.asarray(draw_outline(AREA, (128, 128), 2)) > 0
    assert double.sum() == 4 * line.sum() and double[38:40, 90].all() and not double[40:60, 80:126].any()
    for frame, size in ((SMALL_FRAME, (64, 64)), (LARGE_FRAME, (300, 300))):
        frames = {"b.png": frame, "a.png": frame}
        image = decoded(outline_thumbnails(Masks(root), [masked("mask.png")], {"b.png": size}, frames)["mask.png"])
        assert image.mode == "RGBA" and image.size == (size if frame == SMALL_FRAME else (240, 240))
        pixels = np.asarray(image)
        line = np.asarray(draw_outline(AREA, image.size, 1 if frame == SMALL_FRAME else 2)) > 0
        assert ((pixels[..., 3] == 255) == line).all() and (pixels[line, :3] == REGION_COLOR).all()


def test_both_images_show_the_outline_and_a_pair_without_a_usable_mask_its_boxes(root: Path) -> None:
    boxes = {"before": [10, 10, 20, 20], "after": None}

    def drawn(name: str | None) -> list[int]:
        one = masked(name, boxes=boxes)
        images = draw_region(one, read_images(one, root), Masks(root))
        return [int((np.asarray(image) == REGION_COLOR).all(-1).sum()) for image in images]

    length = int((np.asarray(draw_outline(AREA, fit_image(Image.new("L", (64, 64))).size)) > 0).sum())
    assert drawn("mask.png") == [length, length] and drawn("empty.png") == [0, 0]
    framed = drawn(None)
    assert framed[0] > 0 and framed[1] == 0 and drawn("none.png") == drawn("wide.png") == framed
    sheets = [draw_pairs([masked(name)], {}, Masks(root)) for name in ("mask.png", None)]
    assert sheets[0].height > sheets[1].height  # a line explains the outline


def one_hot(row: int, column: int) -> np.ndarray:
    cells = np.zeros((4, 6))
    cells[row, column] = 1
    return cells


def test_attention_colours_its_place_and_leaves_the_rest_of_the_image() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (80, 120, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    colors, painted = overlay(image.size, one_hot(1, 4)), np.asarray(blend(image, one_hot(1, 4)))
    row, column = np.unravel_index(colors[..., 3].argmax(), (80, 120))
    assert 20 <= row < 40 and 80 <= column < 100  # cell (1, 4) of 20 x 20 pixels
    assert painted[30, 90, 0] > 200 and painted[30, 90, 2] < 150  # the hot end of the scale
    transparent = colors[..., 3] == 0
    assert transparent[70:].all() and transparent[:, :50].all() and (painted[transparent] == noise[transparent]).all()
    assert (np.asarray(blend(image, np.zeros((4, 6)))) == noise).all()
    table = color_table()
    assert (np.diff(table[:, :3] @ [0.299, 0.587, 0.114]) > 0).all()  # lighter with the strength
    for strength in (0, 1, 100, 200, 255):
        assert (overlay((2, 2), np.full((2, 2), strength / 255)).round() == table[strength]).all()
    assert table[0, 3] == 0 and table[255].tolist() == [255, 235, 90, 217]


def test_strengths_are_of_both_images_and_uniform_attention_has_none() -> None:
    even = np.full((4, 6), 1 / 24)
    assert not np.any(scale_attention(even, even))
    first, second = scale_attention((one_hot(0, 0) + one_hot(3, 5)) / 2, one_hot(2, 2))
    assert second[2, 2] == 1 and first[0, 0] == pytest.approx((1 / 2 - 1 / 24) / (1 - 1 / 24)) and first[1, 1] == 0
    mild = even + (one_hot(0, 0) - one_hot(1, 0)) / 24  # twice the uniform weight: pale
    assert scale_attention(mild, even)[0].max() == pytest.approx(1 / 3)


def test_matches_are_the_highest_weights_and_other_shifts_are_marked() -> None:
    alignment = np.full((12, 12), 1 / 12)
    for start, end, weight in ((0, 1, 1.0), (4, 5, 0.9), (5, 6, 0.8), (6, 8, 0.7), (9, 10, 0.4)):
        alignment[start] = (1 - weight) / 11
        alignment[start, end] = weight
    found = strongest_matches(alignment, (3, 4))
    assert [match.weight for match in found] == [1.0, 0.9, 0.8, 0.7]  # 0.4 is less than half the highest
    assert [match.has_common_shift for match in found] == [True, True, True, False]  # the last goes to the next row
    assert found[0].start == (0.125, pytest.approx(1 / 6)) and found[0].end == (0.375, pytest.approx(1 / 6))
    assert found[3].start == (0.625, 0.5) and found[3].end == (0.125, pytest.approx(5 / 6))
    assert len(strongest_matches(alignment, (3, 4), count=2)) == 2
    assert strongest_matches(np.full((12, 12), 1 / 12), (3, 4)) == []


def test_a_sheet_has_a_tile_for_each_word_and_lines_where_there_is_an_alignment(tmp_path: Path) -> None:
    Image.new("RGB", (128, 96), GRAY).save(tmp_path / "1.png")
    one, masks = ChangePair("1", "1.png", "1.png", ["a reference"], "test"), Masks(tmp_path)
    words = [f"w{number}" for number in range(NUM_COLUMNS + 1)]
    before, after = (np.stack([one_hot(*cell)] * len(words)) for cell in ((0, 0), (3, 5)))
    alignment = np.eye(24)
    alignment[9] = np.eye(24)[18]
    captions = {"a": {"1": "w0 w1"}}
    sheet = draw_attention({"a": [(one, AttentionMaps(words, before, after, alignment))]}, captions, masks)
    assert sheet.width == SHEET_WIDTH and count(sheet, BLUE) > 22 * 20 and count(sheet, ORANGE) > 20
    pixels = np.asarray(sheet).astype(int)
    top = int(np.argwhere((pixels == GRAY).all(-1))[0][0]) + SHEET_FRAME[1] + 2 * GAP
    for number in (0, NUM_COLUMNS - 1):
        left = MARGIN + number * (WORD_FRAME[0] + GAP)
        tile = pixels[top : top + 2 * WORD_FRAME[1] + 2, left : left + WORD_FRAME[0]]
        rows, columns = np.nonzero(tile[..., 0] - tile[..., 2] > 90)
        above = rows < WORD_FRAME[1]
        assert above.any() and rows[above].max() < 44 and columns[above].max() < 40  # before: its first corner
        assert rows[~above].min() > WORD_FRAME[1] + 44 and columns[~above].min() > 78  # after: its last corner
    plain = draw_attention({"a": [(one, AttentionMaps(words[:1], before[:1], after[:1], None))]}, captions, masks)
    assert not count(plain, BLUE) and plain.height < sheet.height - 200
