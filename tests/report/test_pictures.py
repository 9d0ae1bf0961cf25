"""The sheet of pairs."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from diffcap.records import ChangePair
from diffcap.report.drawing import GAP, MARGIN, PICTURE, WIDTH, write_png
from diffcap.report.pictures import choose_pairs, draw_pairs, is_correct
from diffcap.utils.errors import DiffcapError

CHANGED = {"size": "large", "color": "gray", "material": "metal", "shape": "cube", "to": None}


def pair(id: str, kind: str | None = None, **extra: object) -> ChangePair:
    return ChangePair(id, f"{id}.png", f"{id}.png", ["the reference"], "test", kind, kind is None, extra)


def test_the_choice_covers_every_kind_and_depends_on_the_seed() -> None:
    pairs = [pair(f"{kind}{n}", kind) for n in range(9) for kind in ("move", "color", "zoom", None)] + [
        pair("add", "add")
    ]
    chosen = choose_pairs(pairs, 8, seed=1)
    kinds = ["distractor" if pair.is_distractor else pair.change_type for pair in chosen]
    assert kinds == ["color", "color", "add", "move", "move", "zoom", "zoom", "distractor"]
    assert chosen == choose_pairs(pairs, 8, seed=1) != choose_pairs(pairs, 8, seed=2)
    assert Counter(pair.id for pair in choose_pairs(pairs, 99)) == Counter(pair.id for pair in pairs)
    plain = [ChangePair(str(n), "b", "a", [], "test") for n in range(5)]
    assert len(set(pair.id for pair in choose_pairs(plain, 3))) == 3


def test_pairs_without_change_come_last_in_datasets_with_a_flag() -> None:
    pairs = [pair(str(n), changeflag=n % 2) for n in range(8)]
    pairs = [replace(pair, is_distractor=not pair.extra["changeflag"]) for pair in pairs]
    assert [pair.is_distractor for pair in choose_pairs(pairs, 4)] == [False, False, True, True]


@pytest.mark.parametrize(
    ("caption", "right"),
    [
        ("the large gray metal cube was moved", True),
        ("the gray cube was moved", True),  # less, but nothing false
        ("the small gray cube was moved", False),
        ("the gray cube vanished", False),
        ("something was moved", False),
    ],
)
def test_right_is_type_and_object(caption: str, right: bool) -> None:
    assert is_correct(caption, pair("1", "move", changed=CHANGED)) is right


def test_right_wants_the_new_value_and_silence_about_distractors() -> None:
    turned = pair("1", "color", changed={**CHANGED, "to": "red"})
    assert is_correct("the gray cube turned red", turned) and not is_correct("the gray cube turned blue", turned)
    assert is_correct("no change was made", pair("2")) and not is_correct("the gray cube vanished", pair("2"))
    assert is_correct("the gray cube vanished", pair("3", "drop")) is None


def colors(sheet: Image.Image, left: int = 0) -> set[tuple[int, int, int]]:
    return {tuple(color) for color in np.unique(np.asarray(sheet)[:, left:].reshape(-1, 3), axis=0).tolist()}


def test_a_sheet_shows_images_boxes_and_coloured_captions(tmp_path: Path) -> None:
    Image.new("RGB", (128, 96), (10, 20, 200)).save(tmp_path / "1.png")
    boxes = {"before": [40, 30, 60, 50], "after": None}
    pairs = [pair("1", "drop", boxes=boxes, changed=CHANGED)]
    sheet = draw_pairs(pairs, tmp_path, {"a": {"1": "the gray cube vanished"}, "b": {"1": "no change"}})
    assert sheet.width == WIDTH and sheet.height < 300
    pixels = np.asarray(sheet)
    before = pixels[:, MARGIN : MARGIN + PICTURE[0]]
    after = pixels[:, MARGIN + PICTURE[0] + GAP : MARGIN + 2 * PICTURE[0] + GAP]
    blue, box = np.array([10, 20, 200]), np.array([255, 0, 200])
    assert (after == blue).all(-1).sum() == PICTURE[0] * PICTURE[1]
    framed = np.argwhere((before == box).all(-1))
    top = np.argwhere((after == blue).all(-1)).min(0)
    # twice the box's corners, two pixels further out
    np.testing.assert_array_equal(framed.min(0) - top, [2 * 30 - 2, 2 * 40 - 2])
    np.testing.assert_array_equal(framed.max(0) - top, [2 * 50 + 1, 2 * 60 + 1])
    words = colors(sheet, MARGIN + 2 * PICTURE[0] + 2 * GAP)
    assert {(20, 125, 55), (190, 40, 40), (30, 30, 30)} <= words


@pytest.mark.slow
def test_other_datasets_get_a_plain_sheet(tmp_path: Path) -> None:
    Image.new("L", (300, 600), 90).save(tmp_path / "1.png")
    plain = ChangePair("1", "1.png", "1.png", [], "test")
    long = " ".join(["word"] * 200)
    sheet = draw_pairs([plain, plain], tmp_path, {"a": {"1": long}, "b": {"1": ""}})
    assert sheet.height > 2 * PICTURE[1] + 200  # rows grow with their words
    assert not {(20, 125, 55), (190, 40, 40), (255, 0, 200)} & colors(sheet)
    shown = (np.asarray(sheet)[:, : MARGIN + PICTURE[0]] == 90).all(-1).sum()
    assert shown == 2 * 96 * 192  # scaled to fit, not stretched
    write_png(tmp_path / "out" / "pairs.png", sheet)
    assert Image.open(tmp_path / "out" / "pairs.png").size == sheet.size
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["pairs.png"]
    with pytest.raises(DiffcapError, match=r"2\.png: file not found"):
        draw_pairs([pair("2", "move")], tmp_path, {})
